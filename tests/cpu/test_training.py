"""A whole training step: forward, loss, backward, optimizer; what it saves, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fusion_advisor.advice import Advice
from fusion_advisor.advice.run import advise
from fusion_advisor.codegen.emit import attempt
from fusion_advisor.cost.annotate import Annotated, annotate
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.cost.lifetimes import memory, saved_tensors
from fusion_advisor.cost.recomputed import again, checkpoints
from fusion_advisor.cost.times import time_model
from fusion_advisor.frontend.child import capture_loaded
from fusion_advisor.frontend.user_model import HostFakeMode, Loaded
from fusion_advisor.fusion.findings import FusedGraph, fuse
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.ir.scenario import Optimizer, Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError

from .regions import Tape

RULES = load_rulebook(())
H200 = RULES.device("h200")


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rms = nn.LayerNorm(32), nn.RMSNorm(32)
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.rms(self.layer(x * self.scale) + x).sum()


class LayerNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) + x).abs().sum()


class FirstNorm(nn.Module):
    """A norm of the input, which needs no gradient, whose result goes two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return (x + self.linear(x)).square().mean()


class NormByHand(nn.Module):
    """Saves float32 copies of a bfloat16 tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32, dtype=torch.bfloat16)
        self.weight = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x.bfloat16()).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * h.bfloat16()).float().sum()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (4, 8)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2)).pow(2).mean()


class Biased(nn.Module):
    """Attention with a bias of each head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(32, 96), nn.Parameter(torch.zeros(4, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (h.unflatten(-1, (4, 8)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).square().sum()


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x), inplace=True)
        return F.cross_entropy(self.head(h.mean((2, 3))), torch.zeros(x.shape[0], dtype=torch.long))


class Tied(nn.Module):
    """One weight twice, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 32), nn.Linear(32, 16, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(32, 32).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.frozen(self.embed(ids))))
        return F.cross_entropy(scores.flatten(0, 1), ids.flatten())


class Plain(nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x).relu()
        return h, h.sigmoid()


X = torch.randn(4, 16, 32)
IMAGES = torch.randn(4, 3, 16, 16)
IDS = torch.randint(0, 16, (4, 8))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (Mlp, X),
    "layer norms": (LayerNorms, X),
    "norms": (Norms, X),
    "first norm": (FirstNorm, X),
    "norm by hand": (NormByHand, X),
    "attention": (Attention, X),
    "biased": (Biased, X),
    "convolution": (Convolution, IMAGES),
    "tied": (Tied, IDS),
    "no loss": (Plain, X),
}
ON_CUDA_ALONE = {"norms", "biased"}
"""Whose kernels a CPU does not have: autograd saves what their parts save there."""
each_model = pytest.mark.parametrize("name", MODELS)


def faked(name: str, **more: Any) -> Loaded:
    build, x = MODELS[name]
    fake = HostFakeMode()
    with fake:
        model = build().train()
    return Loaded(model, (fake.from_tensor(x),), {}, fake, name, **more)


def step(name: str, kind: Optimizer = "adamw", **more: Any) -> Graph:
    asked = Scenario(mode="train", step=True, optimizer=kind)
    return capture_loaded(faked(name, **more), asked)


def saved_in_eager(loaded: Loaded) -> int:
    """Bytes that autograd keeps beside parameters and inputs, each storage once."""
    known = [*loaded.module.parameters(), *loaded.module.buffers(), *loaded.args]
    alive = {tensor.untyped_storage()._cdata for tensor in known}
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in alive:
            kept[storage._cdata] = storage.nbytes()
        held.append(tensor)
        return tensor

    with loaded.fake, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loaded.module(*loaded.args)
    return sum(kept.values())


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ON_CUDA_ALONE])
def test_what_is_saved_is_what_autograd_saves(name: str) -> None:
    saved = saved_tensors(annotate(step(name), H200))
    assert sum(each.bytes for each in saved) == saved_in_eager(faked(name))


def test_cuda_saves_less_for_rms_norm_than_a_cpu_does() -> None:
    saved = {each.name: each.bytes for each in saved_tensors(annotate(step("norms"), H200))}
    rows = 4 * 16 * 4
    assert saved == {
        "mul": X.nbytes, "native_layer_norm": rows, "add": X.nbytes, "rms_norm": rows,
    }  # fmt: skip


@each_model
def test_phases_follow_each_other_and_backward_has_its_lines(name: str) -> None:
    graph = step(name)
    calls = [node for node in graph.nodes if node.kind == "call"]
    order = ["forward", "loss", "backward", "optimizer"]
    assert [node.phase for node in calls] == sorted((n.phase for n in calls), key=order.index)
    assert {"forward", "backward", "optimizer"} <= {node.phase for node in calls}
    backward = [node for node in calls if node.phase == "backward"]
    assert all(node.source for node in backward)
    assert "whole training step" in graph.assumed[0]


def test_memory_is_what_lives_at_each_node() -> None:
    found = memory(annotate(step("mlp"), H200), RULES.workspaces)
    parameters = sum(p.nbytes for p in Mlp().parameters())
    curve = {each.node: each.bytes for each in found.curve}
    thread = 32 * 2**20  # the workspace of an H200's forward, and that of its backward
    assert curve["addmm"] == 3 * parameters + X.nbytes + 4 * 16 * 64 * 4 + 2 * thread
    assert found.peak_bytes == max(curve.values()) == sum(found.parts.values())
    assert found.parts["parameters"] == parameters
    assert found.parts["workspaces of cuBLAS"] == 2 * thread
    assert found.parts["optimizer state"] == 2 * parameters
    a100 = memory(annotate(step("mlp"), RULES.device("a100-80gb")), RULES.workspaces)
    assert a100.parts["workspaces of cuBLAS"] == 2 * 8.125 * 2**20


def test_parts_of_an_expression_of_autograd_live_until_it_is_whole() -> None:
    """Autograd's formula of a square multiplies the gradient with two times the power of one: the
    power is alive while the product is made (seen on an H200)."""

    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1024, 256))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).square().mean()

    graph = step_of(Square, torch.randn(1024, 256))
    curve = {
        each.node: each.bytes for each in memory(annotate(graph, H200), RULES.workspaces).curve
    }
    made = [n for n in graph.nodes if n.backward_of == "pow_1"]
    assert [n.op for n in made] == [
        "aten.pow.Tensor_Scalar", "aten.mul.Scalar", "aten.mul.Tensor",
    ]  # fmt: skip
    size = 1024 * 256 * 4
    assert curve[made[2].name] - curve[made[1].name] == size
    # x, scale, x * scale, the gradient of the mean, and the formula's three
    assert curve[made[2].name] == pytest.approx(7 * size, abs=64)


def test_memory_has_what_the_model_holds_and_does_not_read() -> None:
    class Partly(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(32, 640)
            self.tied = self.up
            self.register_buffer("table", torch.zeros(1000))

    unread = Partly().tower.weight.nbytes + Partly().tower.bias.nbytes + 4000
    fake = HostFakeMode()
    with fake:
        model = Partly().train()
    loaded = Loaded(model, (fake.from_tensor(X),), {}, fake, "partly")
    graph = capture_loaded(loaded, Scenario(mode="train", step=True))
    assert graph.unread == unread
    assert memory(annotate(graph, H200), RULES.workspaces).parts["unread parameters"] == unread
    assert step("mlp").unread == 0


@pytest.mark.parametrize(
    ("rows", "columns", "taken"),
    [
        (12608, 768, 77463552),
        (12608, 3072, 138412032),
        (8192, 4096, 138412032),
        (8192, 50368, 206307328),
        (64, 768, 0),
    ],
)
def test_a_sum_over_rows_takes_memory_for_its_blocks(rows: int, columns: int, taken: int) -> None:
    """As an H200's allocator saw it (torch 2.11) in the gradients of biases, in bfloat16: several
    times as much as the operand."""
    tape = Tape()
    x = tape.input(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"))
    tape.call(torch.ops.aten.sum.dim_IntList, x, [0], True)
    costs = annotate(Graph(tuple(tape.nodes), ()), H200).costs
    assert [time_model().scratch_bytes(cost.work) for cost in costs.values()] == [0, taken]


@pytest.mark.parametrize(
    ("optimizer", "count"), [("none", 0), ("sgd", 3), ("adamw", 8)]
)  # as torch 2.11 and 2.13 launch them
def test_an_optimizer_launches_over_all_parameters_at_once(
    optimizer: Optimizer, count: int
) -> None:
    graph = step("mlp", optimizer)
    updates = [n for n in graph.nodes if n.kind == "call" and n.phase == "optimizer"]
    assert len(updates) == count
    assert all(node.op.startswith("aten._foreach_") for node in updates)
    parameters = {n.out.storage for n in graph.nodes if n.kind == "parameter"}
    written = {storage for node in updates for storage in node.mutates}
    assert parameters <= written if count else not written


@pytest.mark.parametrize(
    ("function", "operator"), [(F.silu, "silu_backward"), (F.mish, "mish_backward")]
)
def test_a_gradient_with_a_kernel_of_its_own_is_one_launch(
    function: Callable[[Tensor], Tensor], operator: str
) -> None:
    """A build without CUDA has a definition by other operators alone for CUDA."""

    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 64)

        def forward(self, x: Tensor) -> Tensor:
            return function(self.up(x)).square().mean()

    graph = step_of(Activated, X)
    of = [n for n in graph.nodes if n.backward_of == operator.removesuffix("_backward")]
    assert [n.op for n in of] == [f"aten.{operator}.default"]
    assert of[0].out.shape == (4, 16, 64)


def test_large_parameters_take_several_launches() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8192, 8192)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).sum()

    fake = HostFakeMode()
    with fake:
        model, x = Large(), torch.randn(2, 8192)
    graph = capture_loaded(
        Loaded(model, (x,), {}, fake, "large"), Scenario(mode="train", step=True)
    )
    costs = annotate(graph, H200).costs
    # 1024 chunks of 65 536 elements and one of the bias, 320 blocks a launch
    assert costs["adamw_foreach_mul"].launches == 4


def test_an_optimizer_of_the_file_is_asked_for_by_its_name() -> None:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters)

    graph = step("mlp", "module", optimizer=optimizer)
    assert any(said.startswith("optimizer=RMSprop") for said in graph.assumed)
    with pytest.raises(UsageError, match="has no function optimizer"):
        step("mlp", "module")


def test_a_loss_of_the_file_follows_the_model() -> None:
    def loss(output: tuple[Tensor, Tensor]) -> Tensor:
        return (output[0] - output[1]).square().mean()

    graph = step("no loss", loss=loss)
    phases = {node.name: node.phase for node in graph.nodes if node.kind == "call"}
    assert [name for name in phases if phases[name] == "loss"] == ["sub", "pow_1", "mean"]
    assert not any(node.name.startswith("gradient_") for node in graph.nodes)


def test_without_a_loss_gradients_arrive_from_outside() -> None:
    graph = step("no loss")
    assert "gradient of 2 tensors that the model returns comes from outside" in graph.assumed[0]
    assert [n.name for n in graph.nodes if n.kind == "input"][1:] == ["gradient_0", "gradient_1"]


@pytest.fixture(scope="module", params=MODELS)
def fused(request: pytest.FixtureRequest) -> tuple[Dataflow, FusedGraph]:
    """The step of each model with its groups, which no test changes."""
    flow = dataflow(step(request.param), H200)
    return flow, fuse(flow, RULES)


@pytest.mark.sampled(2)
def test_no_group_is_of_two_passes(fused: tuple[Dataflow, FusedGraph]) -> None:
    flow, found = fused
    for finding in (*found.groups, *found.candidates):
        for place in finding.instances:
            phases = {flow.nodes[i].phase for i in place}
            assert len(phases - {"loss"}) <= 1 or phases == {"forward", "loss"}, finding.id


def test_every_group_has_a_kernel_or_a_reason(fused: tuple[Dataflow, FusedGraph]) -> None:
    flow, found = fused
    kernels = [attempt(flow, each.decision, each.name, RULES) for each in found.groups]
    assert all(isinstance(kernel, Kernel) or kernel for kernel in kernels)
    assert any(isinstance(kernel, Kernel) for kernel in kernels)


def test_of_several_scalars_the_first_is_the_loss() -> None:
    def loss(output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return output[0].mean(), output[1].sum()

    said = step("no loss", loss=loss).assumed[0]
    assert "loss=the first of 2 scalars that loss() of the model's file returns" in said


def test_a_learning_rate_in_a_tensor_takes_a_parameter_at_a_time() -> None:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(1e-3))

    graph = step("mlp", "module", optimizer=optimizer)
    assert any(said.startswith("optimizer=AdamW (a parameter at a time") for said in graph.assumed)


def test_where_there_is_no_joint_graph_the_first_line_says_why() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0].sum()

    fake = HostFakeMode()
    with fake:
        model, x = Recurrent(), torch.randn(4, 2, 32)
    asked = Scenario(mode="train", step=True)
    graph = capture_loaded(Loaded(model, (x,), {}, fake, "gru"), asked)
    assert graph.assumed[0].startswith("forward pass alone, no backward: the backward of aten.gru")
    assert {node.phase for node in graph.nodes} == {"forward"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "biased"])
def test_autocast_casts_in_a_step_as_in_a_forward_pass(name: str, dtype: str) -> None:
    """The forward pass alone is run on fake CUDA tensors under torch's own autocast."""

    def casts(graph: Graph) -> list[tuple[str, str]]:
        calls = (node for node in graph.nodes if node.kind == "call")
        own = (node for node in calls if node.phase in ("forward", "loss"))
        return sorted((node.op, node.out.dtype) for node in own if "detach" not in node.op)

    asked = Scenario(mode="train", step=True, optimizer="none", autocast=dtype)
    graph = capture_loaded(faked(name), asked)
    assert "whole training step" in graph.assumed[0]
    assert casts(graph) == casts(capture_loaded(faked(name), replace(asked, step=False)))
    gradients = [node.out.dtype for node in graph.nodes if Ref(node.name) in graph.outputs]
    assert "float32" in gradients


class Recurrent(nn.Module):
    """One weight in each of three steps, in a block of autocast; one that is outside of it."""

    def __init__(self, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        self.each, self.last = nn.Linear(32, 32), nn.Linear(32, 32, bias=False)

    def steps(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.each(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            x = self.steps(x) if self.kept else checkpoint(self.steps, x, use_reentrant=False)
            with torch.autocast("cuda", enabled=False):
                x = self.last(x.float())
            return F.cross_entropy(x.flatten(0, 1).bfloat16(), torch.zeros(64, dtype=torch.long))


@pytest.mark.parametrize("kept", [True, False])
def test_autocast_casts_a_parameter_once_and_again_for_a_checkpoint(kept: bool) -> None:
    graph = step_of(lambda: Recurrent(kept), X)
    assert "whole training step" in graph.assumed[0]
    casts = [node for node in graph.nodes if node.op == "aten._to_copy.default"]
    for name in ("each_weight", "each_bias"):
        of = [node for node in casts if Ref(name) in node.refs()]
        assert [(node.phase, node.out.dtype) for node in of] == [
            ("forward", "bfloat16"), *[("backward", "bfloat16")] * (not kept),
        ]  # fmt: skip
        shape = next(node.out.shape for node in graph.nodes if node.name == name)
        sums = [n for n in graph.nodes if n.op == "aten.add.Tensor" and n.out.shape == shape]
        assert {node.out.dtype for node in sums} == {"bfloat16"}, "before it is widened"
    products = [
        n.out.dtype for n in graph.nodes if n.op == "aten.mm.default" and n.phase != "backward"
    ]
    assert products == ["float32"], "the block without autocast"
    loss = {n.op.split(".")[1]: n.out.dtype for n in graph.nodes if n.phase == "loss"}
    assert loss["_log_softmax"] == "bfloat16", "it is told its dtype, which autocast leaves"
    assert loss["nll_loss_forward"] == "float32"


def test_train_mode_without_gradients_has_no_backward() -> None:
    graph = capture_loaded(faked("mlp"), Scenario(mode="train", step=True, grad=False))
    assert {node.phase for node in graph.nodes} == {"forward"}


def advice(graph: Graph) -> dict[str, Advice]:
    return {found.code: found for found in advise(dataflow(graph, H200), (), True, RULES)}


def test_an_optimizer_in_several_passes_is_advised_on() -> None:
    said = advice(step("mlp"))["unfused-optimizer"]
    assert "AdamW takes 8 passes" in said.message
    assert "torch.optim.AdamW(..., fused=True)" in said.message
    assert said.saved_us
    assert "unfused-optimizer" not in advice(step("mlp", "none"))


def test_a_copy_in_float32_may_be_made_again() -> None:
    graph = step("norm by hand")
    saved = {each.name: each for each in saved_tensors(annotate(graph, H200))}
    copy = saved["_to_copy_1"]
    assert copy.alternative is not None
    assert copy.alternative.action == "keep it in bfloat16, cast again in backward"
    assert copy.alternative.saved_bytes == copy.bytes // 2, "the product's result is kept instead"
    assert copy.alternative.extra_us > 0
    assert "1 float32 copy" in advice(graph)["float-copies"].message
    assert "float-copies" not in advice(step("layer norms"))


def test_results_of_what_is_kept_anyway_may_be_made_again() -> None:
    """Of silu(gate) * up autograd keeps four tensors, of which two follow from the others."""

    class Gates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(8, 64), nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = F.silu(self.gate(x)) * self.up(x)
            return F.dropout(self.down(hidden), 0.5, self.training).exp().sum()

    fake = HostFakeMode()
    with fake:
        loaded = Loaded(Gates(), (torch.randn(32, 8),), {}, fake, "gates")
    graph = capture_loaded(loaded, Scenario(mode="train", step=True, optimizer="none"))
    annotated = annotate(graph, H200)
    saved = {each.tensor.storage: each for each in saved_tensors(annotated)}
    ways = {each.name: each.alternative for each in saved.values() if each.alternative}
    assert {each.name for each in saved.values()} >= {"addmm", "addmm_1", "silu", "mul"}
    assert {name: way.saved_bytes for name, way in ways.items()} == {
        "silu": 32 * 64 * 4, "mul": 32 * 64 * 4, "native_dropout": 32 * 8,
    }  # fmt: skip
    assert ways["native_dropout"].action.startswith("draw it again")
    assert ways["mul"].extra_us == annotated.costs["mul"].time_us, "silu is there by then"
    said = advice(graph)["kept-results"]
    assert "of 3 results kept for backward (silu, mul, native_dropout)" in said.message
    assert "kept-results" not in advice(step("attention"))
    assert "kept-results" not in advice(step("no loss")), "the sigmoid is the result"


class Checkpointed(nn.Module):
    """Two blocks, each under a checkpoint of its own, or under none."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up = nn.ModuleList(nn.Linear(32, 64) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(64, 32) for _ in range(2))

    def block(self, x: Tensor, n: int) -> Tensor:
        return x + torch.tanh(F.dropout(self.down[n](F.gelu(self.up[n](x))), 0.1))

    def nested(self, x: Tensor, n: int) -> Tensor:
        return x + checkpoint(lambda y: self.block(y, n), x * 2, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        for n in range(2):
            if self.how == "none":
                x = self.block(x, n)
            elif self.how == "selective":
                x = checkpoint(self.block, x, n, use_reentrant=False, context_fn=kept_products)
            elif self.how == "nested":
                x = checkpoint(self.nested, x, n, use_reentrant=False)
            else:
                x = checkpoint(self.block, x, n, use_reentrant=self.how == "reentrant")
        return x.square().mean()


def kept_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def step_of(build: Callable[[], nn.Module], x: Tensor, **asked: Any) -> Graph:
    fake = HostFakeMode()
    with fake:
        loaded = Loaded(build().train(), (fake.from_tensor(x),), {}, fake, "model")
    scenario = Scenario(mode="train", step=True, optimizer="none")
    return capture_loaded(loaded, replace(scenario, **asked))


def again_in(graph: Graph) -> list[str]:
    """Operators of launches that backward computes again."""
    costs = annotate(graph, H200).costs
    return [n.op.split(".")[1] for n in graph.nodes if again(n) and costs[n.name].launches]


BLOCK = ["addmm", "gelu", "addmm", "native_dropout", "tanh"]
"""Launches of a block that backward reads; its last addition is not among them."""


@pytest.mark.parametrize(
    ("how", "launches"),
    [
        ("none", []),
        ("plain", BLOCK * 2),
        ("reentrant", [*BLOCK, "add"] * 2),
        ("selective", ["gelu", "native_dropout", "tanh"] * 2),
        ("nested", ["mul", *BLOCK] * 2),
    ],
)
def test_backward_computes_again_what_a_checkpoint_drops(how: str, launches: list[str]) -> None:
    """As torch's own checkpoint does it under autograd; a reentrant one runs its part to the
    end."""
    graph = step_of(lambda: Checkpointed(how), X)
    assert again_in(graph) == launches
    backward = [n for n in graph.nodes if n.kind == "call" and n.phase == "backward"]
    assert all(node.source for node in backward)
    assert {n.checkpoint for n in graph.nodes if again(n)} == ({0, 1} if launches else set())


def test_a_checkpoint_keeps_its_inputs_for_backward() -> None:
    def annotated(how: str) -> Annotated:
        return annotate(step_of(lambda: Checkpointed(how), X), H200)

    def kept(how: str) -> int:
        return sum(each.bytes for each in saved_tensors(annotated(how)))

    rows = 4 * 16
    of_both = 2 * rows * 32 * 4
    assert kept("plain") == of_both, "the second block's input, and what the loss squares"
    assert kept("selective") == of_both + 2 * rows * (64 + 32) * 4, "and results of products"
    freed = 2 * rows * (64 + 64 + 32) * 4 + 2 * rows * 32
    assert kept("none") == of_both + freed, "products, gelu and tanh of each, and dropouts' masks"
    found = checkpoints(annotated("plain"))
    assert sum(each.freed_bytes for each in found) == freed
    assert [each.kept_bytes for each in found] == [0, 0], "products read their operands anyway"
    selective = checkpoints(annotated("selective"))
    assert [each.kept_bytes for each in selective] == [rows * 32 * 4] * 2, "what dropout reads"


def test_a_checkpoint_is_advised_on_where_it_is_too_coarse_or_frees_nothing() -> None:
    def whole(rows: int) -> dict[str, Advice]:
        return advice(step_of(lambda: Checkpointed("plain"), torch.empty(rows, 32)))

    said = whole(65536)["checkpoint"]
    assert said.saved_us
    assert "2 checkpoints spare" in said.message
    assert "create_selective_checkpoint_contexts" in said.message
    assert "checkpoint" not in advice(step_of(lambda: Checkpointed("selective"), X))

    class Idle(nn.Module):
        """The checkpoint's part saves its input alone, which is there anyway."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).relu()
            return checkpoint(self.second, h, use_reentrant=True).square().mean()

    said = advice(step_of(Idle, X))["checkpoint"]
    assert "1 checkpoint frees no memory" in said.message
    assert said.saved_us


def test_biases_that_are_added_share_the_sum_of_their_gradient() -> None:
    class Added(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            return (self.first(x) + self.second(x * 2)).exp().mean()

    said = advice(step_of(lambda: Added(True), X))["same-sum"]
    assert "1 sum of backward" in said.message
    assert said.saved_us
    assert "same-sum" not in advice(step_of(lambda: Added(False), X))


def test_gradients_of_casts_are_sent_in_the_narrow_float() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            h = F.linear(x.bfloat16(), self.first.weight.bfloat16(), self.first.bias.bfloat16())
            return F.linear(h, self.second.weight.bfloat16()).float().square().mean()

    said = advice(step_of(Cast, X))["wide-gradients"]
    assert "gradients of 2 parameters" in said.message, "none of what is frozen"
    assert f"{(32 * 32 + 32) * 2 / 1e9:.3g} GB less each way" in said.message
    assert said.saved_us is None
    cast = advice(step_of(Mlp, X, autocast="bfloat16"))["wide-gradients"]
    assert "gradients of 4 parameters" in cast.message
    assert "wide-gradients" not in advice(step_of(Mlp, X))


def test_logits_for_a_loss_alone_are_advised_on() -> None:
    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 32_000, bias=False, dtype=torch.bfloat16)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            scores = self.head(x).float()
            return F.cross_entropy(scores.flatten(0, 1), ids.flatten())

    fake = HostFakeMode()
    with fake:
        model = Language()
        x, ids = torch.randn(4, 512, 64, dtype=torch.bfloat16), torch.zeros(4, 512).long()
    graph = capture_loaded(
        Loaded(model, (x, ids), {}, fake, "language"), Scenario(mode="train", step=True)
    )
    said = advice(graph)["materialised-logits"]
    assert "launches on logits of 2048x32000:bfloat16" in said.message
    assert said.saved_us
    assert "materialised-logits" not in advice(step("convolution"))


def test_the_gradient_of_a_trained_mask_is_summed_over_the_batch() -> None:
    graph = step("biased")
    nodes = {node.name: node for node in graph.nodes}
    bias = next(node for node in graph.nodes if node.name == "bias").out
    (backward,) = (node for node in graph.nodes if "efficient_attention_backward" in node.op)
    assert [t and t.shape for t in backward.outputs][3] == (4, 4, 16, 16)
    assert any(nodes[ref.node].out.shape == bias.shape for ref in graph.outputs)


def test_a_fused_optimizer_moves_each_tensor_once() -> None:
    def optimizer(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, fused=True)

    asked = Scenario(mode="train", step=True, optimizer="module")
    graph = capture_loaded(faked("mlp", optimizer=optimizer), asked)
    costs = annotate(graph, H200).costs
    (update,) = (node for node in graph.nodes if node.op == "aten._fused_adamw_.default")
    size = sum(p.nbytes for p in Mlp().parameters())
    steps = len(list(Mlp().parameters())) * 4
    assert costs[update.name].bytes_read == 4 * size + steps
    assert costs[update.name].bytes_written == 3 * size + steps


def test_symbolic_sizes_stay_in_a_step() -> None:
    graph = capture_loaded(faked("mlp"), Scenario(mode="train", step=True, dynamic=True))
    assert "whole training step" in graph.assumed[0]
    (linear,) = (node for node in graph.nodes if node.name == "addmm")
    assert linear.phase == "forward"
    assert any("s" in dim for dim in linear.out.dims)
