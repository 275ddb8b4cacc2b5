"""What capture gets wrong silently unless it is careful: one small model for each."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from fusion_advisor.frontend.child import InputSpec, Scenario, capture_here, capture_module
from fusion_advisor.ir.graph import Graph, Node, Ref
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.errors import CaptureError

EXAMPLES = Path(__file__).parents[2] / "examples"


def ops(graph: Graph) -> list[str]:
    """The short names of what is launched, in order."""
    return [node.op.split(".")[1] for node in graph.nodes if node.kind == "call"]


def node(graph: Graph, name: str) -> Node:
    return next(node for node in graph.nodes if node.name == name)


class Function(nn.Module):
    """A module around a plain function."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)  # type: ignore[operator]


def captured(function: object, *args: Tensor, scenario: Scenario | None = None) -> Graph:
    return capture_module(Function(function), args, scenario=scenario)


# Launch level.


def test_softmax_by_hand_is_five_kernels_and_two_views() -> None:
    graph = capture_here(str(EXAMPLES / "softmax.py"))
    assert ops(graph) == ["max", "unsqueeze", "sub", "exp", "sum", "unsqueeze", "div"]
    maximum = next(n for n in graph.nodes if n.op == "aten.max.dim")
    assert [t.dtype for t in maximum.outputs if t] == ["float32", "int64"]
    assert maximum.source is not None
    assert maximum.source.file.endswith("softmax.py")
    assert maximum.source.line == 11 or maximum.source.line > 0
    assert graph.captured_by == "export"


def test_composites_are_expanded_as_cuda_launches_them() -> None:
    def forward(x: Tensor, labels: Tensor, weight: Tensor) -> object:
        return (
            functional.cross_entropy(x, labels),
            functional.layer_norm(x, (8,)),
            functional.dropout(x, 0.5, training=True),
            functional.rms_norm(x, (8,), weight),
        )

    graph = captured(forward, torch.randn(4, 8), torch.zeros(4, dtype=torch.long), torch.ones(8))
    assert ops(graph) == [
        "_log_softmax", "nll_loss_forward", "native_layer_norm", "native_dropout",
        "_fused_rms_norm",
    ]  # fmt: skip


def test_an_operator_without_a_meaning_is_what_it_calls() -> None:
    """As on every device; one whose parts are not all known stays whole."""

    def forward(x: Tensor, target: Tensor) -> object:
        return (
            functional.binary_cross_entropy_with_logits(x, target),
            torch.dist(x, target),
            torch.rot90(x),
        )

    graph = captured(forward, torch.randn(4, 8), torch.rand(4, 8))
    assert ops(graph) == [
        "log_sigmoid_forward", "full_like", "sub_", "mul_", "sub_", "mean", "sub",
        "norm", "rot90",
    ]  # fmt: skip


def test_a_loss_of_transposed_scores_is_what_it_calls() -> None:
    """Though a build for CPUs has no answer for its softmax on CUDA."""
    scores = torch.randn(8, 4).t()
    graph = captured(functional.cross_entropy, scores, torch.zeros(4, dtype=torch.long))
    assert ops(graph) == ["_log_softmax", "nll_loss_forward"]


def test_a_fused_norm_by_its_own_name_stays_whole() -> None:
    """As the references of emitted files call it."""

    def forward(x: Tensor, weight: Tensor) -> object:
        normal, scale = torch.ops.aten._fused_rms_norm.default(x, (8,), weight, 1e-6)
        return normal * 2, scale

    graph = captured(forward, torch.randn(4, 8).half(), torch.ones(8).half())
    assert ops(graph) == ["_fused_rms_norm", "mul"]
    norm = next(node for node in graph.nodes if "rms_norm" in node.op)
    assert [tensor.dtype for tensor in norm.outputs if tensor] == ["float16", "float32"]


def test_attention_stays_whole_and_lays_its_output_out_as_flash_does() -> None:
    def forward(x: Tensor) -> Tensor:
        q = x.view(2, 16, 4, 8).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        return out.transpose(1, 2).reshape(2, 16, 32)

    graph = captured(forward, torch.randn(2, 16, 32, dtype=torch.bfloat16))
    assert "scaled_dot_product_attention" in ops(graph)
    assert "clone" not in ops(graph)
    attention = node(graph, "scaled_dot_product_attention").out
    assert attention.shape == (2, 4, 16, 8)
    assert attention.stride == (512, 8, 32, 1)


def test_recurrent_cells_stay_whole() -> None:
    graph = capture_module(nn.GRU(8, 8, batch_first=True), (torch.randn(2, 4, 8),))
    assert "aten.gru.input" in [n.op for n in graph.nodes]
    assert node(graph, "gru").outputs[0] is not None


def test_linear_of_three_dimensions_is_one_kernel_named_after_its_fx_node() -> None:
    graph = capture_module(nn.Linear(8, 8), (torch.randn(2, 4, 8),))
    assert node(graph, "linear").op == "aten.addmm.default"
    assert node(graph, "linear_view").out.storage == node(graph, "input").out.storage
    assert graph.outputs[0].node.startswith("linear_view")


def test_a_parameter_used_twice_is_one_node() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(functional.linear(x, self.weight), self.weight)

    graph = capture_module(Tied(), (torch.randn(4, 8),))
    assert [n.name for n in graph.nodes if n.kind == "parameter"] == ["weight"]


def test_names_are_unique_identifiers_and_references_point_backwards() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Softmax(-1))
    graph = capture_module(model, (torch.randn(4, 8),))
    seen: set[str] = set()
    for each in graph.nodes:
        assert each.name.isidentifier()
        assert each.name not in seen
        assert all(ref.node in seen for ref in each.refs())
        seen.add(each.name)
    assert {n.module for n in graph.nodes if n.kind == "call"} == {"0", "1", "2", "3"}


# In place and aliases.


def test_in_place_ops_share_their_storage_and_say_what_they_write() -> None:
    def forward(x: Tensor) -> Tensor:
        y = x + 1
        functional.relu(y, inplace=True)
        y[:, 2] = x[:, 0]
        return y.mul_(2)

    graph = captured(forward, torch.randn(4, 8))
    storage = node(graph, "add").out.storage
    relu, copy, mul = (node(graph, name) for name in ("relu_", "copy_", "mul_"))
    assert relu.mutates == copy.mutates == mul.mutates == (storage,)
    assert copy.out.offset == 2
    assert copy.out.shape == (4,)
    assert copy.out.stride == (8,)


def test_halves_of_one_storage_keep_their_offsets() -> None:
    def forward(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return functional.silu(a) * b

    graph = captured(forward, torch.randn(4, 8))
    first, second = (
        node(graph, "split").outputs
        if "split" in [n.name for n in graph.nodes]
        else (node(graph, "chunk").outputs)
    )
    assert first is not None
    assert second is not None
    assert first.storage == second.storage == node(graph, "args_0").out.storage
    assert (first.offset, second.offset) == (0, 4)


def test_batch_norm_in_training_writes_its_statistics() -> None:
    model = nn.BatchNorm2d(4)
    args = (torch.randn(2, 4, 8, 8),)
    eager = capture_module(model, args)
    training = capture_module(model, args, scenario=Scenario(mode="train"))
    assert node(eager, "batch_norm").mutates == ()
    written = {node(training, name).out.storage for name in ("running_mean", "running_var")}
    assert set(node(training, "batch_norm").mutates) == written
    assert "add_" in ops(training)


# Modes and regions.


def test_eval_and_train_are_different_graphs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    args = (torch.randn(4, 8),)
    assert "native_dropout" not in ops(capture_module(model, args))
    assert "native_dropout" in ops(capture_module(model, args, scenario=Scenario(mode="train")))
    assert model.training


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_autocast_blocks_are_inlined_with_their_casts(device: str) -> None:
    linear = nn.Linear(8, 8)

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            y = linear(x)
        return y.float()

    module = Function(forward)
    module.linear = linear
    graph = capture_module(module, (torch.randn(4, 8),))
    assert not [n.op for n in graph.nodes if "wrap" in n.op]
    assert next(n for n in graph.nodes if n.op == "aten.addmm.default").out.dtype == "bfloat16"
    assert ops(graph).count("_to_copy") == 4


def test_no_grad_blocks_are_inlined() -> None:
    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x.exp()
        return y + x

    graph = captured(forward, torch.randn(4), scenario=Scenario(mode="train"))
    assert ops(graph) == ["exp", "add"]


def test_scenario_autocast_casts_every_matmul() -> None:
    scenario = Scenario(autocast="float16")
    graph = capture_module(nn.Linear(8, 8), (torch.randn(4, 8),), scenario=scenario)
    assert node(graph, graph.outputs[0].node).out.dtype == "float16"


@pytest.mark.parametrize("block", [True, False])
def test_a_model_sees_the_dtypes_that_autocast_gives(block: bool) -> None:
    """A copy in float32 is a copy then, and what is cast as another tensor has that one's dtype."""
    linear = nn.Linear(8, 8)

    def seen(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = linear(x)
        assert torch.is_autocast_enabled()
        assert scores.dtype == torch.get_autocast_dtype("cuda") == torch.bfloat16
        assert (scores.float().pow(2).dtype, torch.cat((x, scores)).dtype) == (torch.float32,) * 2
        wide = scores.float() + 1
        return wide.softmax(-1).to(scores.dtype), scores

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16) if block else nullcontext():
            return seen(x)

    module = Function(forward)
    module.linear = linear
    asked = Scenario(autocast=None if block else "bfloat16")
    graph = capture_module(module, (torch.randn(4, 8),), scenario=asked)
    outputs = [next(n for n in graph.nodes if n.name == ref.node) for ref in graph.outputs]
    assert [(n.op, n.out.dtype) for n in outputs] == [
        ("aten._to_copy.default", "bfloat16"), ("aten.addmm.default", "bfloat16"),
    ]  # fmt: skip
    assert next(n for n in graph.nodes if n.op == "aten._softmax.default").out.dtype == "float32"
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.randn(2, 2).bfloat16().softmax(-1).dtype == torch.bfloat16, "as a CPU's again"


# Things that tracing looks straight through.


def test_an_inner_compile_is_unwrapped_and_stated() -> None:
    model = nn.Sequential(torch.compile(nn.Linear(8, 8)), nn.ReLU())  # type: ignore[arg-type]
    graph = capture_module(model, (torch.randn(4, 8),))
    assert ops(graph) == ["t", "addmm", "relu"]
    assert any("torch.compile" in line for line in graph.differs_from_eager)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_a_part_of_the_forward_pass(reentrant: bool) -> None:
    def forward(x: Tensor) -> Tensor:
        return checkpoint(torch.exp, x, use_reentrant=reentrant)

    graph = captured(forward, torch.randn(4))
    assert [op for op in ops(graph) if op != "empty"] == ["exp"]  # torch 2.11 makes empty tensors
    assert node(graph, "exp").checkpoint == 0
    assert not graph.differs_from_eager


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0]


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_autograd_function_does_not_stop_capture(mode: str) -> None:
    def forward(x: Tensor) -> Tensor:
        return Doubled.apply(x.exp()) + 1

    graph = captured(forward, torch.randn(4, requires_grad=True), scenario=Scenario(mode=mode))
    assert ops(graph) == ["exp", "mul", "add"]


class Reversed(torch.autograd.Function):
    """Changes the gradient alone: its forward launches nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grads[0], None


class Projected(torch.autograd.Function):
    """A matmul, an op in place and something kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x, weight)
        return x, x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_an_autograd_function_is_traced_into_the_kernels_that_it_launches(mode: str) -> None:
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        x, y = Projected.apply(x.exp(), weight)
        return x + Reversed.apply(y, 0.5)

    args = torch.randn(4, 4), torch.randn(4, 4)
    graph = captured(forward, *args, scenario=Scenario(mode=mode))
    kernels = [n for n in graph.nodes if n.kind == "call" and "view" not in n.op]
    assert [n.op for n in kernels] == [
        "aten.exp.default", "aten.mul_.Tensor", "aten.mm.default", "aten.add.Tensor",
    ]  # fmt: skip
    assert kernels[1].mutates == (kernels[0].out.storage,)
    line = Projected.forward.__code__.co_firstlineno
    assert [n.source.line - line for n in kernels[1:3] if n.source] == [2, 5]


def test_a_triton_launch_in_an_autograd_function_is_one_node() -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def doubled_kernel(x, y, n):
        pass

    class Launched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = torch.empty_like(x)
            doubled_kernel[(1,)](x, y, x.numel())
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0]

    graph = captured(lambda x: Launched.apply(x.exp()) + 1, torch.randn(4))
    assert ops(graph) == ["exp", "empty_like", "doubled_kernel", "add"]


CASTING = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x):
        self.last = self.last.to(torch.bfloat16)
        return self.last(x)


def get_inputs():
    return [torch.randn(4, 8, dtype=torch.bfloat16)]
"""


def test_a_model_may_cast_a_part_of_itself(tmp_path: Path) -> None:
    (tmp_path / "casting.py").write_text(CASTING)
    graph = capture_here(str(tmp_path / "casting.py"))
    assert ops(graph) == ["_to_copy", "_to_copy", "t", "addmm"]


@torch.library.custom_op("capture_test::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x.clone()


@opaque.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_op_is_one_node_between_its_neighbours() -> None:
    graph = captured(lambda x: opaque(x.exp()) + 1, torch.randn(4))
    assert [n.op for n in graph.nodes if n.kind == "call"] == [
        "aten.exp.default", "capture_test.opaque.default", "aten.add.Tensor",
    ]  # fmt: skip


def test_a_raw_triton_launch_is_one_node_that_writes_its_tensors() -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x, y, n):
        pass

    def forward(x: Tensor) -> Tensor:
        x = x.exp()
        y = torch.empty_like(x)
        kernel[(1,)](x, y, 4)
        return y + 1

    graph = captured(forward, torch.randn(4))
    assert ops(graph) == ["exp", "empty_like", "kernel", "add"]
    launch = node(graph, "kernel")
    assert launch.op == "triton.kernel.default"
    assert set(launch.mutates) == {node(graph, n).out.storage for n in ("exp", "empty_like")}


def test_data_parallel_is_unwrapped() -> None:
    graph = capture_module(nn.DataParallel(nn.Linear(8, 8)), (torch.randn(4, 8),))
    assert ops(graph) == ["t", "addmm"]
    assert any("DataParallel" in line for line in graph.differs_from_eager)


@pytest.fixture
def process_group() -> Iterator[None]:
    """One process that is all of a group."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch is built without distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrapper", ["FullyShardedDataParallel", "fully_shard"])
@pytest.mark.parametrize("nested", [False, True])
def test_fsdp_is_refused_in_one_line(wrapper: str, nested: bool) -> None:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    model = nn.Linear(8, 8)
    if wrapper == "fully_shard":
        model = fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    else:
        model = fsdp.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    place = "submodule 0" if nested else "the model"
    with pytest.raises(CaptureError, match=f"{place} is .* give the module before it is wrapped"):
        capture_module(nn.Sequential(model) if nested else model, (torch.randn(4, 8),))


@pytest.mark.usefixtures("process_group")
def test_tensor_parallelism_is_refused_in_one_line() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    model, mesh = nn.Sequential(nn.Linear(8, 8), nn.GELU()), init_device_mesh("cpu", (1,))
    parallel.parallelize_module(model, mesh, {"0": parallel.ColwiseParallel()})
    with pytest.raises(CaptureError, match=r"0\.weight is a DTensor.* before it is parallelized"):
        capture_module(model, (torch.randn(4, 8),))


def test_a_name_alone_makes_no_wrapper() -> None:
    class FSDPBlock(nn.Linear):
        pass

    assert ops(capture_module(FSDPBlock(8, 8), (torch.randn(4, 8),))) == ["t", "addmm"]


# Odd inputs.


def test_integer_only_models() -> None:
    graph = captured(lambda x: (x + 1).cumsum(0), torch.zeros(4, dtype=torch.long))
    assert [n.out.dtype for n in graph.nodes] == ["int64"] * 3


def test_zero_size_tensors() -> None:
    graph = captured(lambda x: (x + 1).sum(), torch.empty(0, 4))
    assert node(graph, "add").out.bytes == 0


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(CaptureError, match="launches no kernel"):
        capture_module(nn.Identity(), (torch.randn(4),))


class Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sigmoid() * x


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_scripts_are_captured_within_a_model_alone() -> None:
    script = torch.jit.script(Gate())
    graph = capture_module(nn.Sequential(nn.Tanh(), script), (torch.randn(4),), trail=True)
    assert ops(graph) == ["tanh", "sigmoid", "mul"]
    with pytest.raises(CaptureError, match=r"the model is a script.* before torch\.jit\.script"):
        capture_module(script, (torch.randn(4),))


def test_a_size_that_depends_on_data_is_one_clear_line() -> None:
    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: .*depends on the values"):
        captured(lambda x: x[x > 0].exp(), torch.randn(4))


def test_a_branch_that_depends_on_data_is_one_clear_line() -> None:
    def forward(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x

    with pytest.raises(CaptureError, match=r"test_capture\.py:\d+: .*depends on the values"):
        captured(forward, torch.randn(4))


def test_a_mapped_function_is_the_operators_of_the_whole() -> None:
    graph = captured(lambda x: torch.vmap(lambda a: a.exp() @ a)(x), torch.randn(4, 8, 8))
    assert {"exp", "bmm"} < {*ops(graph)}
    assert graph.nodes[-1].out.shape == (4, 8, 8)


def test_attention_under_a_mask_of_blocks_is_one_node() -> None:
    """torch makes such a mask by mapping a function of four positions."""

    def masked(x: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 256, 256, device="cpu")
        return flex_attention(x.exp(), x, x, block_mask=mask)  # type: ignore[return-value]

    launched = [n.op for n in captured(masked, torch.randn(2, 2, 256, 16)).nodes]
    assert "higher_order.flex_attention" in launched
    assert "aten.exp.default" in launched


def test_an_output_that_export_refuses_falls_back() -> None:
    class Answer:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    graph = captured(lambda x: Answer(x.exp()), torch.randn(4))
    assert ops(graph) == ["exp"]
    assert graph.captured_by == "make_fx"
    assert any("export refused" in line for line in graph.differs_from_eager)
    assert graph.nodes[-1].source is not None
    assert graph.graph_breaks == ()


def test_the_fallback_says_where_dynamo_breaks_the_graph() -> None:
    class Answer:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    def forward(x: Tensor) -> Answer:
        y = x.exp()
        print(end="")
        return Answer(y + 1)

    line = forward.__code__.co_firstlineno + 2
    graph = captured(forward, torch.randn(4))
    assert ops(graph) == ["exp", "add"]
    assert graph.captured_by == "make_fx"
    (graph_break,) = graph.graph_breaks
    assert graph_break.startswith(f"{__file__}:{line}: Failed to trace builtin operator. ")
    assert "`print`" in graph_break
    assert "\n" not in graph_break


def test_what_dynamo_cannot_say_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    def explain(_: nn.Module) -> object:
        raise RuntimeError("no idea")

    class Answer:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    monkeypatch.setattr("torch._dynamo.explain", explain)
    graph = captured(lambda x: Answer(x.exp()), torch.randn(4))
    assert ops(graph) == ["exp"]
    assert graph.graph_breaks == ()
    assert "graph breaks are not known: Dynamo raised no idea" in graph.differs_from_eager


def test_dynamic_sizes_keep_their_expression() -> None:
    graph = captured(lambda x: x.exp().sum(-1), torch.randn(4, 8), scenario=Scenario(dynamic=True))
    exp = node(graph, "exp").out
    assert exp.shape == (4, 8)
    assert exp.dims != ()
    assert all(not dim.isdigit() for dim in exp.dims)


# Scenario on a file.

MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
    def forward(self, x, scale=None):
        y = self.linear(x)
        return y if scale is None else y * scale
def get_init_inputs():
    return [16]
def get_inputs():
    return [torch.randn(4, 16, device="cuda")]
"""


@pytest.fixture
def model_file(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return str(file)


def test_dtype_and_batch_of_a_file(model_file: str) -> None:
    graph = capture_here(model_file, Scenario(dtype="bfloat16", batch=32))
    assert node(graph, "x").out.shape == (32, 16)
    assert {n.out.dtype for n in graph.nodes} == {"bfloat16"}
    assert "mode=eval" in graph.assumed


CONVERTED = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(8, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.half().to(memory_format=torch.channels_last)
    def forward(self, x):
        return self.norm(self.conv(x))
def get_inputs():
    return [torch.randn(2, 8, 9, 9, dtype=torch.float16)]
model = torch.nn.Sequential(Model()).bfloat16().half()
"""


@pytest.mark.parametrize("name", ["Model", "model"])
def test_a_model_may_convert_itself_as_it_is_built(tmp_path: Path, name: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(CONVERTED)
    graph = capture_here(f"{file}:{name}")
    weight = next(n.out for n in graph.nodes if n.name.endswith("conv_weight"))
    assert (weight.dtype, weight.stride) == ("float16", (72, 1, 24, 8))


def test_a_model_may_keep_a_sparse_buffer(tmp_path: Path) -> None:
    """It has no storage, and the constant that it is made of is known while the model is built."""
    file = tmp_path / "sparse.py"
    file.write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.register_buffer('heads', torch.ones(4, 6).to_sparse(), persistent=False)\n"
        "    def forward(self, x):\n"
        "        return torch.exp(x)\n"
        "def get_inputs():\n"
        "    return [torch.randn(4, 6)]\n"
    )
    assert ops(capture_here(str(file))) == ["exp"]


def test_inputs_given_by_name(model_file: str) -> None:
    inputs = (InputSpec("x", (2, 3, 16)), InputSpec("scale", (16,), "float32"))
    graph = capture_here(model_file, Scenario(inputs=inputs))
    assert node(graph, "x").out.shape == (2, 3, 16)
    assert "mul" in ops(graph)


def test_an_unknown_input_names_the_parameters(model_file: str) -> None:
    with pytest.raises(CaptureError, match="forward takes x, scale"):
        capture_here(model_file, Scenario(inputs=(InputSpec("z", (2,)),)))


def test_an_exported_program(tmp_path: Path) -> None:
    file = str(tmp_path / "model.pt2")
    torch.export.save(torch.export.export(nn.Linear(8, 8), (torch.randn(4, 8),)), file)
    graph = capture_here(file)
    assert ops(graph) == ["t", "addmm"]


class Trap:
    """Unpickled, it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return open, (str(self.file), "w")


def _with_trap(program: Path, crafted: Path, trap: bytes, part: str) -> None:
    """The archive of a program with another file in place of one of its own."""
    with ZipFile(program) as old, ZipFile(crafted, "w") as new:
        assert any(part in name for name in old.namelist())
        for name in old.namelist():
            new.writestr(name, trap if part in name else old.read(name))


@pytest.mark.parametrize("pickled", ["saved", "bare"])
def test_a_program_runs_no_code_of_its_pickles(tmp_path: Path, pickled: str) -> None:
    program, crafted, made = (tmp_path / name for name in ("good.pt2", "bad.pt2", "made"))
    torch.export.save(torch.export.export(nn.Linear(8, 8), (torch.randn(4, 8),)), str(program))
    trap = BytesIO()
    if pickled == "saved":
        torch.save((Trap(made),), trap)
    else:
        trap.write(pickle.dumps(Trap(made)))
    _with_trap(program, crafted, trap.getvalue(), "data/sample_inputs/")
    with pytest.raises(CaptureError, match="could run code") as caught:
        capture_here(str(crafted))
    assert str(caught.value).startswith(f"{crafted}: ")
    assert "\n" not in str(caught.value)
    assert not made.exists()


def test_json_keeps_every_constant() -> None:
    def forward(x: Tensor) -> Tensor:
        return (x.clamp(-math.inf, 1.0) + 1).masked_fill(x > 0, math.inf).sum((0,), keepdim=True)

    graph = captured(forward, torch.randn(4))
    again = from_json(Graph, to_json(graph))
    assert again == graph
    types = [[type(arg) for arg in n.args] for n in again.nodes]
    assert types == [[type(arg) for arg in n.args] for n in graph.nodes]
    assert isinstance(again.outputs[0], Ref)


def test_tied_parameters_are_one_node() -> None:
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    graph = capture_module(nn.Sequential(first, second), (torch.randn(4, 8),))
    assert sum(n.kind == "parameter" for n in graph.nodes) == 1


def test_equal_layers_are_expanded_once_and_named_apart() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    graph = capture_module(model, (torch.randn(4, 8),))
    kernels = [n for n in graph.nodes if n.op == "aten.addmm.default"]
    assert [n.name for n in kernels] == ["linear", "linear_1", "linear_2"]
    assert len({n.out.storage for n in kernels}) == 3


def test_convolutions_have_cuda_strides() -> None:
    x = torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)
    graph = capture_module(nn.Conv2d(4, 8, 3), (x,))
    assert node(graph, "conv2d").out.stride == (288, 1, 48, 8)


def test_a_long_recurrent_layer_is_not_unrolled() -> None:
    model = nn.LSTM(8, 16, num_layers=2, batch_first=True, bidirectional=True)
    graph = capture_module(model, (torch.randn(2, 4096, 8),))
    lstm = next(n for n in graph.nodes if n.op == "aten.lstm.input")
    shapes = [t.shape for t in lstm.outputs if t]
    assert shapes == [(2, 4096, 32), (4, 2, 16), (4, 2, 16)]
