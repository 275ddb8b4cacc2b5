"""`fusion_advisor.record`: what a running program calls its model with, and nothing of its data."""

from __future__ import annotations

import json
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fusion_advisor
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.recording_file import Recording, recorded_graph, recording_of
from fusion_advisor.support.errors import CaptureError, UsageError

SECRET = 1234.56789


class Small(nn.Module):
    """A linear layer and a softmax, with state that a training call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return torch.softmax(self.drop(self.norm(self.linear(x))) * scale, -1)


def read(file: Path) -> Recording:
    found = recording_of(str(file))
    assert found is not None
    return found


def graph_of(file: Path, name: str = "call-1") -> Graph:
    return recorded_graph(f"{file}:{name}")


def ops(graph: Graph) -> list[str]:
    return [node.op.split(".")[1] for node in graph.nodes if node.kind == "call"]


@contextmanager
def quietly(model: nn.Module, file: Path) -> Generator[None]:
    """A recording of which nothing is missing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with fusion_advisor.record(model, file):
            yield


def one_call(tmp_path: Path, model: nn.Module, *args: Any, **kwargs: Any) -> Graph:
    with quietly(model, tmp_path / "r.json"):
        model(*args, **kwargs)
    return graph_of(tmp_path / "r.json")


# -- what is counted -------------------------------------------------------------------------------


def test_equal_calls_are_counted_together_in_the_order_of_their_first(tmp_path: Path) -> None:
    model = Small().eval()
    with quietly(model, tmp_path / "r.json"):
        for rows in (4, 8, 4, 4):
            model(torch.randn(rows, 16))
    calls = read(tmp_path / "r.json").calls
    assert [(call.name, call.count) for call in calls] == [("call-1", 3), ("call-2", 1)]
    assert calls[0].signature["args"] == ["float32[4, 16] on cpu"]


@pytest.mark.parametrize(
    "other",
    [
        lambda model, x: model(x.double().float().t().contiguous().t()),  # strides
        lambda model, x: model(x, 2.0),
        lambda model, x: model(x, scale=1.0),
        lambda model, x: model(x, scale=True),
        lambda model, x: model(x.clone().requires_grad_()),
        lambda model, x: model.train()(x),
        lambda model, x: (model.norm.train(), model(x)),
        lambda model, x: torch.no_grad()(model)(x),
        lambda model, x: torch.autocast("cpu", torch.bfloat16)(model)(x),
    ],
)
def test_what_changes_the_graph_is_a_signature_of_its_own(
    tmp_path: Path, other: Callable[[nn.Module, torch.Tensor], Any]
) -> None:
    model, x = Small().eval(), torch.randn(16, 16)
    with quietly(model, tmp_path / "r.json"):
        model(x)
        other(model, x)
    assert [call.count for call in read(tmp_path / "r.json").calls] == [1, 1]


def test_the_mode_gradients_and_autocast_of_the_call_are_those_of_its_graph(tmp_path: Path) -> None:
    model, x = Small(), torch.randn(4, 16)
    file = tmp_path / "r.json"
    with quietly(model, file):
        model(x)
        model.eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            model(x)
        model.train()
        model.drop.eval()
        model(x)
    first, second, third = read(file).calls
    assert (first.mode, first.grad, first.autocast) == ("train", True, None)
    assert (second.mode, second.grad, second.autocast) == ("eval", False, "bfloat16")
    assert third.signature["modules_in_other_mode"] == ["drop"]
    assert "native_dropout" in ops(graph_of(file, "call-1"))
    assert not {"native_dropout", "add_"} & {*ops(graph_of(file, "call-2"))}
    assert {
        node.outputs[0].dtype for node in graph_of(file, "call-2").nodes if "mm" in node.op
    } == {"bfloat16"}
    assert "native_dropout" not in ops(graph_of(file, "call-3"))
    assert "native_batch_norm" in str(ops(graph_of(file, "call-3")))


@pytest.fixture
def two_at_most(tmp_path: Path) -> tuple[Path]:
    rules = tmp_path / "rules.toml"
    rules.write_text('[record]\ncaptured = { value = 2, unit = "count", source = "test" }\n')
    return (rules,)


def test_many_sizes_are_captured_once_at_their_median(
    tmp_path: Path, two_at_most: tuple[Path]
) -> None:
    """What a program does that generates: a long first call, then one longer than the other."""
    model, file = Taking(lambda given: [given.ids]), tmp_path / "r.json"

    def run() -> None:
        with fusion_advisor.record(model, file, rules=two_at_most):
            model(Frozen(torch.randn(40, 4), note="first"))
            for rows in (1, 2, 3, 4, 4, 4, 9):
                model(Frozen(torch.randn(rows, 4)))

    with pytest.warns(UserWarning, match=r"call-2 \(7 calls\) stands for 5 signatures"):
        run()
    found = read(file)
    assert [(call.count, call.signatures) for call in found.calls] == [(1, 1), (7, 5)]
    assert (found.left_out.calls, found.total) == (0, 8)
    assert "'float32[4, 4] on cpu'" in str(found.calls[1].signature)
    said = "7 of 8 recorded calls of Taking, of 5 sizes, captured at the median"
    assert said in graph_of(file, "call-2").assumed


class Growing(nn.Module):
    """A step of decode by hand: what is cached, with what is new behind it."""

    def forward(self, new: torch.Tensor, cache: torch.Tensor, at: int, scale: float) -> Any:
        whole = torch.cat([cache, new], 1)
        return torch.softmax(whole * scale + at, -1), whole


def test_lengths_that_differ_little_are_one_scenario(tmp_path: Path) -> None:
    model, file = Growing().eval(), tmp_path / "r.json"
    with quietly(model, file):  # and nothing is missing that one is told of
        for length in (64, 65, 66, 67, 68, 69, 66):
            model(torch.randn(2, 1, 8), torch.randn(2, length, 8), length, 0.5)
        model(torch.randn(2, 1, 8), torch.randn(2, 90, 8), 90, 0.5)
    found = read(file)
    assert [(call.count, call.signatures) for call in found.calls] == [(7, 6), (1, 1)]
    assert found.calls[0].signature["args"][1:3] == ["float32[2, 66, 8] on cpu", 66]
    said = "7 of 8 recorded calls of Growing, of 6 sizes, captured at the median"
    assert said in graph_of(file).assumed


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.randn(2, 1, 8), torch.randn(2, 64, 8), 64, 0.51),  # no size
        lambda: (torch.randn(2, 1, 8), torch.randn(2, 8, 64).mT, 64, 0.5),  # strides
        lambda: (torch.randn(1, 1, 8), torch.randn(1, 64, 8), 64, 0.5),  # half the batch
        lambda: (torch.randn(2, 1, 8), torch.randn(2, 64, 8).half(), 64, 0.5),
        lambda: (torch.randn(2, 1, 8), torch.randn(2, 64, 8), True, 0.5),
    ],
)
def test_what_differs_otherwise_is_a_scenario_of_its_own(
    tmp_path: Path, other: Callable[[], Any]
) -> None:
    model, file = Growing().eval(), tmp_path / "r.json"
    with quietly(model, file):
        model(*other())
        model(torch.randn(2, 1, 8), torch.randn(2, 64, 8), 64, 0.5)
        model(torch.randn(2, 1, 8), torch.randn(2, 65, 8), 65, 0.5)
    assert [call.count for call in read(file).calls] == [1, 2]


def test_the_most_frequent_are_captured_and_the_rest_is_told(
    tmp_path: Path, two_at_most: tuple[Path]
) -> None:
    model, file = Taking(lambda given: [given.ids]), tmp_path / "r.json"

    def run() -> None:
        with fusion_advisor.record(model, file, rules=two_at_most):
            for note in "abbccd":
                model(Frozen(torch.randn(2, 4), note))

    with pytest.warns(UserWarning, match="2 calls of 2 signatures are left out, for the 2 most"):
        run()
    found = read(file)
    assert [call.count for call in found.calls] == [2, 2]
    assert (found.left_out.signatures, found.left_out.calls, found.total) == (2, 2, 6)
    assert "2 calls were not captured" in graph_of(file).assumed


def test_a_call_within_a_call_is_part_of_it(tmp_path: Path) -> None:
    class Halving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if len(x) == 1 else torch.cat([self(x[:1]), self(x[1:])])

    model = Halving()
    with quietly(model, tmp_path / "r.json"):
        model(torch.randn(3, 4))
        model(torch.randn(3, 4))
    (call,) = read(tmp_path / "r.json").calls
    assert (call.count, call.signature["args"]) == (2, ["float32[3, 4] on cpu"])


# -- no data ---------------------------------------------------------------------------------------


class Holding(nn.Module):
    """Tensors wherever a model may have them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), SECRET))
        self.register_buffer("scale", torch.tensor(SECRET))
        self.plain, self.listed = torch.tensor(SECRET), [torch.tensor(SECRET)]

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        return x * self.weight * self.scale * self.plain * self.listed[0] * _GLOBAL + more["y"]


class Reading(Holding):
    """Tensors that the host reads."""

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> torch.Tensor:
        for each in (self.scale, self.plain, _GLOBAL, x[0], more["y"]):
            x = x * each.item()
        return x


_GLOBAL = torch.tensor(SECRET)


@pytest.mark.parametrize("kind", [Holding, Reading])
@pytest.mark.filterwarnings("ignore:fusion_advisor")
def test_no_tensor_leaves_its_data_in_the_file(tmp_path: Path, kind: type[nn.Module]) -> None:
    model = kind()
    with fusion_advisor.record(model, tmp_path / "r.json"):
        model(torch.full((4,), SECRET), {"y": torch.tensor(SECRET)})
    text = (tmp_path / "r.json").read_text()
    assert "float32[4] on cpu" in text
    assert "1234.5" not in text


# -- the program is left as it is ------------------------------------------------------------------


def test_results_state_and_random_numbers_are_the_same(tmp_path: Path) -> None:
    def run(record: bool) -> tuple[Any, ...]:
        for seeded in (torch.manual_seed, random.seed, numpy.random.seed):
            seeded(0)
        model = Small()
        model.drop.eval()
        hooks = (len(model._forward_hooks), len(model._forward_pre_hooks))
        with quietly(model, tmp_path / "r.json") if record else torch.enable_grad():
            results = [model(torch.randn(4, 16)) for _ in range(2)]
        assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
        assert (model.training, model.drop.training, model.calls) == (True, False, 2)
        assert all(type(each) is nn.Parameter for each in model.parameters())
        drawn = (torch.rand(2), random.random(), numpy.random.rand())
        return (*results, *model.state_dict().values(), *drawn)

    for with_it, without in zip(run(True), run(False), strict=True):
        assert torch.equal(torch.as_tensor(with_it), torch.as_tensor(without))


def test_weights_are_shared_by_no_copy(tmp_path: Path) -> None:
    """A capture makes tensors without memory."""
    model = nn.Linear(4096, 4096)
    before = _resident()
    with quietly(model, tmp_path / "r.json"):
        for rows in (1, 2, 3):
            model(torch.zeros(rows, 4096))
    assert _resident() - before < 3 * 4096 * 4096 * 4


def _resident() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_an_exception_of_the_model_is_the_users_and_leaves_no_file(tmp_path: Path) -> None:
    model = Small().eval()
    with (
        pytest.raises(RuntimeError, match="mat1 and mat2"),
        fusion_advisor.record(model, tmp_path / "r.json"),
    ):
        model(torch.randn(4, 5))
    assert not list(tmp_path.iterdir())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_exception_that_is_caught_ends_its_call_alone(tmp_path: Path) -> None:
    model = Small().eval()

    def run() -> None:
        with fusion_advisor.record(model, tmp_path / "r.json"):
            with pytest.raises(RuntimeError):
                model(torch.randn(4, 5))
            model(torch.randn(4, 16))

    said = r"call-1 \(1 calls\) could not be captured: .*test_record.py:\d+: forward raised"
    with pytest.warns(UserWarning, match=said):
        run()
    failed, captured = read(tmp_path / "r.json").calls
    assert failed.graph is None
    assert ops(graph_of(tmp_path / "r.json", captured.name))


def test_a_block_without_a_call_is_told(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="is not written, for the block did not call the Small"),
        fusion_advisor.record(Small(), tmp_path / "r.json"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_told_before_the_block(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UsageError, match="is a file; give a folder"),
        fusion_advisor.record(Small(), tmp_path / "file" / "r.json"),
    ):
        pytest.fail("the block ran")


def test_what_the_program_has_turned_on_does_not_change_the_capture(tmp_path: Path) -> None:
    """Each call has its own autocast and gradients; at the end of the block others may hold."""
    model, x, file = Small().eval(), torch.randn(4, 16), tmp_path / "r.json"
    counted = FlopCounterMode(display=False)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), counted:
        with quietly(model, file), torch.autocast("cpu", enabled=False):
            model(x)
        assert torch.is_autocast_enabled("cpu")
        assert torch.is_inference_mode_enabled()
    assert counted.get_total_flops() == 2 * 4 * 16 * 16
    assert read(file).calls[0].autocast is None
    assert "_to_copy" not in ops(graph_of(file))


def test_recordings_of_a_model_and_of_a_part_may_be_open_at_once(tmp_path: Path) -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    outer, twice, part = (tmp_path / f"{name}.json" for name in ("outer", "twice", "part"))
    with quietly(model, outer):
        model(x)
        with quietly(model, twice), quietly(model.linear, part):
            model(x)
        model(x)
    assert [read(file).total for file in (outer, twice, part)] == [3, 1, 1]
    assert ops(graph_of(part)) == ["t", "addmm"]


def test_tensors_on_cuda_stay_there_for_the_models_own_questions(tmp_path: Path) -> None:
    """As far as that goes without a GPU: the model itself is of fake tensors."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8, 8, device="cuda"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.is_cuda
            return torch.softmax(x @ self.weight + torch.arange(8, device=x.device), -1)

    with FakeTensorMode(), torch.no_grad():  # autograd would look for the device
        model, x = Asking(), torch.empty(4, 8, device="cuda")
        graph = one_call(tmp_path, model, x)
    (call,) = read(tmp_path / "r.json").calls
    assert call.signature["args"] == ["float32[4, 8] on cuda:0"]
    assert ops(graph) == ["mm", "arange", "add", "_softmax"]


# -- wrappers and compiled models ------------------------------------------------------------------


def _same_but(notes: str, tmp_path: Path, wrapped: nn.Module, plain: nn.Module) -> None:
    graph = one_call(tmp_path, wrapped, torch.randn(4, 16))
    assert ops(graph) == ops(one_call(tmp_path, plain, torch.randn(4, 16)))
    assert notes in " ".join(graph.differs_from_eager)


def test_data_parallel_is_taken_off(tmp_path: Path) -> None:
    model = Small().eval()
    _same_but("wrapped in DataParallel", tmp_path, nn.DataParallel(model), model)


def test_a_compiled_model_is_captured_as_eager_runs_it(tmp_path: Path) -> None:
    model = Small().eval()
    compiled: Any = torch.compile(model, backend="eager")
    _same_but("compiled by torch.compile", tmp_path, compiled, model)


def test_a_model_that_is_compiled_in_place_is_not_compiled_anew(tmp_path: Path) -> None:
    compiled: list[Any] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(module)
        return module

    model, x = Taking(lambda given: [given]), torch.randn(4, 16)
    model.compile(backend=backend)
    model(x)
    before = len(compiled)
    with quietly(model, tmp_path / "r.json"):
        model(x)
    model(x)
    assert len(compiled) == before > 0
    assert read(tmp_path / "r.json").total == 1


def test_calls_that_compiled_code_makes_are_not_seen_and_not_broken(tmp_path: Path) -> None:
    model, x = Small().eval(), torch.randn(4, 16)
    outer = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=True)
    with (
        pytest.warns(UserWarning, match="did not call"),
        fusion_advisor.record(model, tmp_path / "r.json"),
    ):
        assert torch.equal(outer(x), model.forward(x) + 1)


def test_where_export_refuses_what_the_process_has_compiled_is_kept(tmp_path: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return SimpleNamespace(result=torch.softmax(x, -1))  # export knows no such result

    model, times = Branching(), []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        times.append(1)
        return module

    other = torch.compile(torch.sin, backend=backend)
    other(torch.randn(3))
    graph = one_call(tmp_path, model, torch.randn(4, 16))
    other(torch.randn(3))
    assert (graph.captured_by, ops(graph), times) == ("make_fx", ["_softmax"], [1])
    assert "graph breaks are not known: Dynamo was not asked" in graph.differs_from_eager


# -- arguments -------------------------------------------------------------------------------------


@dataclass
class Frozen:
    ids: torch.Tensor
    note: str = "none"


@dataclass(frozen=True, slots=True)
class Slotted:
    ids: torch.Tensor
    more: dict[str, torch.Tensor]


Pair = namedtuple("Pair", "left right")


class Layer:
    def __init__(self) -> None:
        self.keys, self.seen, self.dtype = torch.randn(2, 8), 3, torch.float32


class Cache:
    """Objects with state, as transformers' caches are."""

    def __init__(self) -> None:
        self.layers = [Layer()]


class Taking(nn.Module):
    def __init__(self, tensors: Callable[[Any], list[torch.Tensor]]) -> None:
        super().__init__()
        self.tensors = tensors

    def forward(self, given: Any) -> torch.Tensor:
        first, *others = self.tensors(given)
        for other in others:
            first = first + other
        return first.sin()


@pytest.mark.parametrize(
    ("given", "tensors"),
    [
        (Frozen(torch.randn(2, 8)), lambda g: [g.ids]),
        (Slotted(torch.randn(8), {"x": torch.randn(8)}), lambda g: [g.ids, g.more["x"]]),
        (Pair(torch.randn(8), (torch.randn(8), None)), lambda g: [g.left, g.right[0]]),
        (Cache(), lambda g: [g.layers[0].keys]),
        ({3: torch.randn(8), "y": [torch.randn(8)]}, lambda g: [g[3], g["y"][0]]),
    ],
    ids=["dataclass", "slots", "namedtuple", "object", "dict"],
)
def test_arguments_are_inputs_wherever_they_are_held(
    tmp_path: Path, given: Any, tensors: Callable[[Any], list[torch.Tensor]]
) -> None:
    graph = one_call(tmp_path, Taking(tensors), given)
    assert [node.kind for node in graph.nodes if node.kind != "call"] == ["input"] * len(
        tensors(given)
    )
    assert ops(graph) == ["add"] * (len(tensors(given)) - 1) + ["sin"]


def test_a_model_on_the_meta_device_is_recorded(tmp_path: Path) -> None:
    graph = one_call(tmp_path, nn.Linear(4, 4, device="meta"), torch.empty(2, 4, device="meta"))
    assert ops(graph) == ["t", "addmm"]


def test_the_same_tensor_twice_is_not_two_tensors(tmp_path: Path) -> None:
    class Pairing(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sin() if x is y else x + y

    model, x = Pairing(), torch.randn(4)
    with quietly(model, tmp_path / "r.json"):
        model(x, x)
        model(x, x.clone())
    assert ops(graph_of(tmp_path / "r.json", "call-1")) == ["sin"]
    assert ops(graph_of(tmp_path / "r.json", "call-2")) == ["add"]


def test_what_was_computed_may_be_written_in_place(tmp_path: Path) -> None:
    class Adding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.add_(1)

    computed = torch.randn(4, requires_grad=True) * 2
    assert ops(one_call(tmp_path, Adding(), computed)) == ["add_"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (numpy.zeros(2), "a numpy.ndarray"),
        (torch.zeros(2).to_sparse(), "a tensor that is sparse"),
        (nn.Linear(2, 2), "a torch.nn.modules.linear.Linear"),
        ({1, 2}, "a set"),
    ],
)
def test_what_is_not_described_is_told_in_one_line(tmp_path: Path, given: Any, said: str) -> None:
    class Ignoring(nn.Module):
        def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
            return x.sin()

    model, file = Ignoring(), tmp_path / "r.json"
    with (
        pytest.warns(UserWarning, match=f"could not be captured: an argument is {said}") as told,
        fusion_advisor.record(model, file),
    ):
        model(torch.randn(4), given)
    assert len(told) == 1
    assert told[0].filename == __file__
    with pytest.raises(CaptureError, match="no call could be captured: call-1: an argument is"):
        recording_of(str(file))


def test_a_model_that_cannot_be_copied_is_told(tmp_path: Path) -> None:
    import threading

    model = Small().eval()
    model.lock = threading.Lock()
    with (
        pytest.warns(UserWarning, match=r"the Small cannot be copied: TypeError: .*lock"),
        fusion_advisor.record(model, tmp_path / "r.json"),
    ):
        model(torch.randn(4, 16))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_script_is_refused_before_the_block(tmp_path: Path) -> None:
    script = torch.jit.script(nn.Linear(4, 4))
    with (
        pytest.raises(CaptureError, match=r"before torch\.jit makes it a script"),
        fusion_advisor.record(script, tmp_path / "r.json"),
    ):
        pytest.fail("the block ran")


def test_the_steps_of_a_generation_are_one_scenario_beside_the_prompt(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=64,
    )  # fmt: skip
    model, file = transformers.LlamaForCausalLM(config).eval(), tmp_path / "r.json"

    with quietly(model, file):
        model.generate(torch.arange(8)[None], min_new_tokens=20, max_new_tokens=20)
    assert [call.count for call in read(file).calls] == [1, 19]
    inputs = {n.name: n.out.shape for n in graph_of(file, "call-2").nodes if n.kind == "input"}
    assert inputs["input_ids"] == (1, 1)
    assert inputs["past_key_values_layers_1_keys"] == (1, 1, 17, 16)


def test_the_file_says_what_changed_since(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    assert "changed since" not in " ".join(one_call(tmp_path, Small(), torch.randn(4, 16)).assumed)
    content = json.loads(file.read_text())
    assert [*content["files"]] == [__file__]
    content["files"][__file__] = "other"
    file.write_text(json.dumps(content))
    assert "test_record.py changed since" in " ".join(graph_of(file).assumed)


def test_what_cannot_be_recorded_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder"), fusion_advisor.record(nn.ReLU(), tmp_path):
        pass
    with pytest.raises(UsageError, match=r"takes a torch\.nn\.Module, not"):
        fusion_advisor.record(torch.relu, tmp_path / "r.json").__enter__()  # type: ignore[arg-type]
