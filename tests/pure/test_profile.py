"""Profiles: traces read as a stream, cut into steps, linked to a graph and put into the report."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.fusion.findings import fuse, with_measured
from fusion_advisor.ir.graph import Arg, Graph, Node, Ref, Source, Tensor
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.profile import kineto, link
from fusion_advisor.profile.kineto import read_kineto
from fusion_advisor.profile.profile import (
    Profiled,
    choose_traced_device,
    profiled,
    read_trace,
)
from fusion_advisor.report.assemble import assemble
from fusion_advisor.report.formats import FORMATS, render
from fusion_advisor.report.redact import redacted
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.errors import UsageError

from ..sample_traces import DEVICE, KERNELS, LAYER, SIZE, US, Recording


@cache
def flow_of(layers: int, size: int = SIZE) -> Dataflow:
    def tensor(number: int) -> Tensor:
        return Tensor((size, size), (size, 1), "float32", storage=number)

    nodes = [Node(n, "input", "input", outputs=(tensor(i),)) for i, n in enumerate("xw")]
    for number in range(layers * len(LAYER)):
        op = LAYER[number % len(LAYER)]
        args: tuple[Arg, ...] = (Ref(nodes[-1].name if number else "x"),)
        args += (Ref("w"),) if op == "mm" else ()
        nodes.append(
            Node(
                f"{op}_{number // len(LAYER)}", f"aten.{op}.default", args=args,
                outputs=(tensor(number + 2),), source=Source("/home/me/model.py", number + 1),
            )
        )  # fmt: skip
    graph = Graph(tuple(nodes), (Ref(nodes[-1].name),), source="model.py")
    return dataflow(graph, load_rulebook().device("h200"))


def measured(file: Path, layers: int = 2, size: int = SIZE) -> Profiled:
    return profiled(read_trace(file), flow_of(layers, size), 0.5)


def reported(file: Path, layers: int = 2) -> Report:
    flow, rulebook = flow_of(layers), load_rulebook()
    found, profile = fuse(flow, rulebook), measured(file, layers)
    times: dict[str, float] = {}
    for finding in (*found.groups, *found.candidates):
        names = [flow.nodes[i].name for i in finding.instances[0]]
        us = profile.unfused_us(names, lambda name: flow.annotated.costs[name].time_us)
        times |= {finding.id: us} if us is not None else {}
    found = with_measured(found, times)
    return assemble(flow, found, {}, Scenario(), ("device=h200",), rulebook, profile=profile)


def times_of(found: Profiled) -> Mapping[str, tuple[float | None, str]]:
    return {name: (time.us, time.by) for name, time in found.nodes.items()}


@pytest.fixture
def eager(tmp_path: Path) -> Path:
    """Three steps of two layers, the second one twice as slow."""
    recording = Recording()
    recording.steps(3, lambda number: recording.layers(2, 2.0 if number == 1 else 1.0))
    return recording.write(tmp_path / "eager.json")


# -- the reader ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 22])
def test_a_trace_is_read_alike_in_pieces_of_any_size(
    eager: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_kineto(eager)
    monkeypatch.setattr(kineto, "_CHUNK", size)
    assert read_kineto(eager) == whole
    assert (len(whole.events), len(whole.ops)) == (24, 27)
    assert whole.devices == {0: DEVICE}


def test_a_packed_trace_and_a_bare_list_are_read_too(eager: Path, tmp_path: Path) -> None:
    packed, bare = tmp_path / "t.json.gz", tmp_path / "bare.json"
    packed.write_bytes(gzip.compress(eager.read_bytes()))
    bare.write_text(json.dumps(json.loads(eager.read_text())["traceEvents"]))
    assert read_kineto(packed).events == read_kineto(bare).events == read_kineto(eager).events


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_trace_that_is_cut_off_is_one_line(
    eager: Path, tmp_path: Path, share: float, packed: bool
) -> None:
    content = gzip.compress(eager.read_bytes()) if packed else eager.read_bytes()
    file = tmp_path / "cut.json"
    file.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UsageError, match="is cut off") as error:
        read_trace(file)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# no JSON", "no trace"),
        ("[[1, 2]]", "no trace"),
        ('{"deviceProperties": 1}', "no trace"),
        ('[{"ph": "X", "cat": "kernel", "ts": "soon"}]', "no trace"),
        ('{"traceEvents": []}', "no GPU kernels"),
        ('{"traceEvents": [{"ph" "X", "cat": "kernel", "name": "k"}]}', "no JSON"),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_one_line(content: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text(content)
    with pytest.raises(UsageError, match=said):
        read_trace(file)
    with pytest.raises(UsageError, match="No such file"):
        read_trace(tmp_path / "missing.json")


# -- steps -----------------------------------------------------------------------------------------


def test_the_median_of_the_steps_is_taken(eager: Path) -> None:
    found = measured(eager)
    assert times_of(found) == {
        f"{op}_{layer}": (US[op], "id") for layer in range(2) for op in LAYER
    }
    profile = found.profile
    assert (profile.steps, profile.of, profile.kernels) == (3, 3, 8)
    assert profile.busy_us == pytest.approx(2 * sum(US.values()))
    assert profile.linked == {"id": pytest.approx(1), "alignment": 0, "sequence": 0}
    assert profile.forward_linked == pytest.approx(1)


def test_steps_that_launch_other_kernels_are_left_out(tmp_path: Path) -> None:
    recording = Recording()

    def step(number: int) -> None:
        if number == 0:
            recording.op("aten::randn", [("warm_up", 5000.0)])
        recording.layers(2)

    recording.steps(3, step)
    profile = measured(recording.write(tmp_path / "t.json")).profile
    assert (profile.steps, profile.of) == (2, 3)
    assert profile.notes == ["1 steps that launch other kernels"]


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_repeats_are_steps_and_layers_are_none(passes: int, tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(passes):
        recording.layers(3)
    profile = measured(recording.write(tmp_path / "t.json"), layers=3).profile
    assert (profile.steps, profile.of, profile.kernels) == (passes, passes, 12)


def test_idle_time_has_a_name(tmp_path: Path) -> None:
    """Kernels of 1 us whose launches are 5 us apart: the GPU waits for the host; after a wait of
    the host for the GPU, it says so; a begin that is late is neither."""
    recording = Recording()

    def step(number: int) -> None:
        del number
        recording.layers(1, 0.01)
        recording.op("aten::norm", [("norm_kernel", 0.5)])
        recording.kernel("long_kernel", 90.0)
        recording.wait()

    recording.steps(4, step)
    profile = measured(recording.write(tmp_path / "t.json"), layers=1).profile
    assert profile.idle_us == pytest.approx(profile.step_us - profile.busy_us)
    assert profile.host_us + profile.gaps_us == pytest.approx(profile.idle_us)
    assert profile.host_us > profile.waited_us > 0
    assert profile.step_us == pytest.approx(profile.busy_us + profile.idle_us)
    late = Recording()
    for _ in range(4):
        late.kernel(KERNELS["mm"], 10, after=50)
        late.layers(1, 0.01)
    profile = measured(late.write(tmp_path / "late.json"), layers=1).profile
    assert profile.gaps_us > 0


# -- links -----------------------------------------------------------------------------------------


def brute(masks: Sequence[int], count: int) -> int:
    """Length of the longest pairing, by trying all sets of items."""
    for size in range(len(masks), 0, -1):
        for chosen in combinations(masks, size):
            at = 0
            for mask in chosen:
                rest = mask >> at
                if not rest:
                    break
                at += (rest & -rest).bit_length()
            else:
                return size
    return 0


def test_the_longest_pairing_is_found() -> None:
    random = Random(0)
    for _ in range(300):
        count, items = random.randrange(8), random.randrange(8)
        masks = [
            random.getrandbits(8) & random.getrandbits(8) & (1 << count) - 1 for _ in range(items)
        ]
        found = sorted(link.longest_pairing(masks, count))
        assert len(found) == brute(masks, count)
        assert all(masks[item] >> node & 1 for node, item in found)
        assert [item for _, item in found] == sorted({item for _, item in found})


def assert_once(found: Profiled) -> None:
    """No kernel is linked to two nodes, and all measured time is of kernels."""
    profile = found.profile
    whole = sum(time.us or 0.0 for time in found.nodes.values())
    assert whole == pytest.approx(profile.forward_linked * profile.phases["forward"])
    assert sum(time.kernels for time in found.nodes.values()) <= profile.kernels
    for time in found.nodes.values():
        assert (time.us is None) == bool(time.within)
        assert not time.within or found.nodes[time.within].us is not None


def test_an_op_of_several_kernels_is_one_launch(tmp_path: Path) -> None:
    recording = Recording()
    recording.op("aten::mm", [("nvjet", 90.0), ("splitKreduce", 10.0)], [[SIZE, SIZE]] * 2,
                 outer="aten::matmul")  # fmt: skip
    for op in LAYER[1:]:
        recording.op(f"aten::{op}", [(KERNELS[op], US[op])])
    found = measured(recording.write(tmp_path / "t.json"), layers=1)
    assert found.nodes["mm_0"].us == 100
    assert found.nodes["mm_0"].kernels == 2
    assert_once(found)


def test_what_the_graph_lacks_is_named_and_not_linked(tmp_path: Path) -> None:
    recording = Recording()
    recording.op("aten::cos", [(KERNELS["cos"], 1.0)], [[4]])  # of other sizes, before the model
    recording.layers(1)
    recording.op("mine::loss", [("void mine::loss<float>(float*)", 50.0)])
    recording.layers(1)
    found = measured(recording.write(tmp_path / "t.json"))
    assert len(found.nodes) == 8
    rows = [(row.kernel, row.phase, row.count, row.us, row.under) for row in found.profile.unlinked]
    assert rows == [
        ("mine::loss", "forward", 1, 50.0, "mine::loss"),
        ("at::native::vectorized_elementwise_kernel", "forward", 1, 1.0, "aten::cos"),
    ]
    assert found.profile.unlinked_share == {"forward": pytest.approx(51 / 431)}
    assert_once(found)


def test_a_cuda_graph_is_linked_by_class_and_order(tmp_path: Path) -> None:
    recording = Recording()
    kernels = [(KERNELS[op], US[op] + layer) for layer in range(3) for op in LAYER]
    kernels.insert(1, ("void cublasLt::splitKreduce_kernel<32>()", 7.0))
    for _ in range(3):
        recording.graph(kernels)
    found = measured(recording.write(tmp_path / "t.json"), layers=3)
    assert times_of(found) == {
        f"{op}_{layer}": (US[op] + layer + (7 if op == "mm" and not layer else 0), "alignment")
        for layer in range(3)
        for op in LAYER
    }
    assert found.profile.steps == 3
    assert "no launch has an op of its own" in found.profile.notes[-1]
    assert set(found.idle.values()) == {0}
    assert_once(found)


def test_kernels_alone_are_linked_too(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(2):
        recording.kernel("Memset (Device)", 1.0, kind="gpu_memset")
        for op in LAYER:
            recording.kernel(KERNELS[op], US[op])
    recording.events = [row for row in recording.events if row["cat"] != "cuda_runtime"]
    found = measured(recording.write(tmp_path / "t.json"))
    assert times_of(found) == {
        f"{op}_{layer}": (US[op] + (op == "mm"), "alignment") for layer in range(2) for op in LAYER
    }
    assert "none are recorded" in found.profile.notes[1]
    assert "no runtime calls recorded" in found.profile.notes[2]


def test_a_kernel_of_inductor_is_one_launch_of_several(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(2):
        recording.op("aten::mm", [(KERNELS["mm"], 100.0)], [[SIZE, SIZE]] * 3)
        name = "triton_poi_fused_cos_exp_sin_view_3"
        recording.op(name, [(name, 25.0)])
    found = measured(recording.write(tmp_path / "t.json"))
    assert found.nodes["mm_1"].us == 100
    assert found.nodes["mm_1"].by == "id"
    assert [found.nodes[f"{op}_1"].within for op in LAYER[1:]] == ["sin_1", "sin_1", ""]
    assert found.nodes["sin_1"].us == 25
    assert found.shared == {f"sin_{n}": (f"cos_{n}", f"exp_{n}", f"sin_{n}") for n in range(2)}
    assert found.unfused_us(["cos_0", "exp_0", "sin_0"], lambda name: 1.0) == 25
    assert found.unfused_us(["cos_0", "exp_0"], lambda name: 1.0) == pytest.approx(50 / 3)
    assert found.unfused_us(["cos_0", "missing"], lambda name: 1.0) is None
    assert_once(found)
    fused = next(row for row in found.profile.classes if row.name == "fused by a compiler")
    assert (fused.launches, fused.error) == (2, None)
    assert found.profile.notes == [
        "2 kernels of a compiler compute several launches: gains are over those"
    ]


def test_a_kernel_of_inductor_takes_no_product_with_it(tmp_path: Path) -> None:
    """Whatever else it names on either side, and though nothing else is in the trace."""
    recording = Recording()
    recording.op("triton_poi_fused_cos_sin_0", [("triton_poi_fused_cos_sin_0", 25.0)])
    with pytest.raises(UsageError, match=r"another model: \d+% of the graph's predicted time"):
        measured(recording.write(tmp_path / "t.json"))


def test_a_kernel_of_inductor_may_leave_ops_out_of_its_name(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(2):
        recording.op("aten::mm", [(KERNELS["mm"], 100.0)], [[SIZE, SIZE]] * 3)
        recording.op("triton_poi_fused_cos_sin_3", [("triton_poi_fused_cos_sin_3", 25.0)])
    found = measured(recording.write(tmp_path / "t.json"))
    assert found.shared == {f"sin_{n}": (f"cos_{n}", f"exp_{n}", f"sin_{n}") for n in range(2)}


def test_a_product_with_an_epilogue_is_one_launch_of_several(tmp_path: Path) -> None:
    recording = Recording()
    for _ in range(2):
        name = "triton_tem_fused_cos_mm_0"
        recording.op(name, [(name, 110.0)])
        name = "triton_poi_fused_exp_sin_1"
        recording.op(name, [(name, 25.0)])
    found = measured(recording.write(tmp_path / "t.json"))
    assert found.shared == {
        name: names
        for n in range(2)
        for name, names in ((f"cos_{n}", (f"mm_{n}", f"cos_{n}")),
                            (f"sin_{n}", (f"exp_{n}", f"sin_{n}")))
    }  # fmt: skip
    assert_once(found)


def training(recording: Recording, optimizer: str = "aten::_foreach_add_") -> None:
    for number, op in enumerate(LAYER * 2):
        sizes = [[SIZE, SIZE]] * (2 if op == "mm" else 1)
        recording.op(f"aten::{op}", [(KERNELS[op], US[op])], sizes, sequence=number)
    recording.op("mine::loss", [("loss", 5.0)])
    for number, op in reversed([*enumerate(LAYER * 2)]):
        name = f"autograd::engine::evaluate_function: {op.capitalize()}Backward0"
        recording.op(
            "aten::mul", [(f"{op}_backward", 2 * US[op])], tid=8, outer=name, sequence=number
        )
    if optimizer:
        recording.span(
            "user_annotation", "Optimizer.step#SGD.step",
            lambda: recording.op(optimizer, [("multi_tensor_apply_kernel", 60.0)]),
        )  # fmt: skip


def test_a_training_step_is_split_into_its_phases(tmp_path: Path) -> None:
    recording = Recording()
    recording.steps(2, lambda number: training(recording))
    found = measured(recording.write(tmp_path / "t.json"))
    forward = 2 * sum(US.values())
    assert found.profile.phases == {
        "forward": forward + 5, "backward": 2 * forward, "optimizer": 60,
    }  # fmt: skip
    assert {name: time.backward_us for name, time in found.nodes.items()} == {
        f"{op}_{layer}": 2 * US[op] for layer in range(2) for op in LAYER
    }
    assert found.profile.linked["sequence"] == pytest.approx(2 * forward / (3 * forward + 65))
    assert [(row.kernel, row.phase) for row in found.profile.unlinked] == [
        ("multi_tensor_apply_kernel", "optimizer"), ("loss", "forward"),
    ]  # fmt: skip
    assert_once(found)


@cache
def step_flow() -> Dataflow:
    """Two layers, and of each launch a product in backward; an optimizer's launch over all."""
    forward = flow_of(2).annotated.graph
    nodes, last = [*forward.nodes], forward.nodes[-1].name
    for number, node in enumerate(reversed(forward.nodes[2:])):
        made = Tensor((SIZE, SIZE), (SIZE, 1), "float32", storage=100 + number)
        nodes.append(
            Node(
                f"{node.name}_backward", "aten.mul.Tensor", args=(Ref(last), Ref("w")),
                outputs=(made,), phase="backward",
            )
        )  # fmt: skip
        last = nodes[-1].name
    nodes.append(
        Node("sgd", "aten._foreach_add_.List", args=((Ref("w"),), (Ref(last),)), mutates=(1,),
             phase="optimizer")
    )  # fmt: skip
    graph = Graph(tuple(nodes), (Ref(last),), source="model.py")
    return dataflow(graph, load_rulebook().device("h200"))


def test_each_phase_of_a_step_is_linked_to_its_own(tmp_path: Path) -> None:
    recording = Recording()
    recording.steps(2, lambda number: training(recording))
    found = profiled(read_trace(recording.write(tmp_path / "t.json")), step_flow(), 0.5)
    times = {name: time.us for name, time in found.nodes.items()}
    assert times == {
        f"{op}_{layer}{phase}": factor * US[op]
        for layer in range(2)
        for op in LAYER
        for phase, factor in (("", 1), ("_backward", 2))
    } | {"sgd": 60}
    forward = 2 * sum(US.values())
    assert found.profile.linked_by_phase == {
        "forward": forward / (forward + 5), "backward": 1, "optimizer": 1,
    }  # fmt: skip
    assert [row.kernel for row in found.profile.unlinked] == ["loss"]
    assert found.nodes["mm_0"].names == (KERNELS["mm"],)
    assert found.nodes["mm_0"].backward_us is None


def test_a_whole_step_needs_a_trace_of_one(eager: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="step's backward pass is told in it; give --mode eval, or"
    ):
        profiled(read_trace(eager), step_flow(), 0.5)
    recording = Recording()
    training(recording, optimizer="")
    trace = read_trace(recording.write(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="optimizer pass is told in it; give --optimizer none, or"):
        profiled(trace, step_flow(), 0.5)
    recording = Recording()
    training(recording, optimizer="aten::_fused_adamw_")
    trace = read_trace(recording.write(tmp_path / "other.json"))
    said = (
        r"another optimizer \(Optimizer.step#SGD.step\): 0% of its time is in the graph; only there"
        " 1 aten::_fused_adamw_; give --optimizer"
    )
    with pytest.raises(UsageError, match=said):
        profiled(trace, step_flow(), 0.5)


def test_a_step_that_runs_the_model_several_times_says_so(tmp_path: Path) -> None:
    recording = Recording()

    def accumulated(number: int) -> None:
        training(recording, optimizer="")
        training(recording)

    recording.steps(2, accumulated)
    found = profiled(read_trace(recording.write(tmp_path / "t.json")), step_flow(), 0.1)
    assert "the model runs 2 times a step: what is linked is one of them" in found.profile.notes


def test_kernels_that_follow_each_other_in_a_compiled_backward_pass_stay_apart(
    tmp_path: Path,
) -> None:
    recording = Recording()
    outer = "autograd::engine::evaluate_function: CompiledFunctionBackward"
    recording.layers(2)
    names = [f"triton_poi_fused_mul_{number}" for number in range(2)]
    recording.span(
        "cpu_op", outer, lambda: [recording.kernel(name, 40.0) for name in names] and None
    )
    recording.span(
        "user_annotation", "Optimizer.step#SGD.step",
        lambda: recording.op("aten::_foreach_add_", [("multi_tensor_apply_kernel", 60.0)]),
    )  # fmt: skip
    found = profiled(read_trace(recording.write(tmp_path / "t.json")), step_flow(), 0.1)
    linked = [name for time in found.nodes.values() for name in time.names]
    assert [name for name in linked if name in names] == names


def test_a_kernel_whose_operator_is_another_is_not_linked_by_its_class(tmp_path: Path) -> None:
    recording = Recording()
    for op in ("cos", "exp"):
        recording.op(f"aten::{op}", [(KERNELS[op], US[op])], [[SIZE]])
    recording.op("aten::fill_", [("vectorized_elementwise_kernel<FillFunctor>", 3.0)], [[SIZE]])
    flow = small_flow(("cos", "x"), ("exp", "cos"), ("sin", "exp"))
    found = profiled(read_trace(recording.write(tmp_path / "t.json")), flow, 0.1)
    assert {*found.nodes} == {"cos", "exp"}
    assert [row.under for row in found.profile.unlinked] == ["aten::fill_"]


def small_flow(*launches: tuple[str, str]) -> Dataflow:
    """Launches of one operand each, by name and operand; `x` is given."""
    nodes = [Node("x", "input", "input", outputs=(Tensor((SIZE,), (1,), "float32", storage=0),))]
    for number, (op, of) in enumerate(launches, 1):
        made = Tensor((SIZE,), (1,), "float32", storage=number)
        nodes.append(Node(op, f"aten.{op}.default", args=(Ref(of),), outputs=(made,)))
    graph = Graph(tuple(nodes), (Ref(nodes[-1].name),), source="model.py")
    return dataflow(graph, load_rulebook().device("h200"))


@pytest.mark.parametrize(("of", "linked"), [("x", {"cos", "exp", "sin"}), ("exp", {"cos", "exp"})])
def test_a_compiler_may_move_a_launch_past_others(
    of: str, linked: set[str], tmp_path: Path
) -> None:
    """It is known by its name and sizes, where it reads nothing that comes later."""
    recording = Recording()
    for op in ("sin", "cos", "exp"):
        recording.op(f"aten::{op}", [(KERNELS[op], US[op])], [[SIZE]])
    flow = small_flow(("cos", "x"), ("exp", "cos"), ("sin", of))
    found = profiled(read_trace(recording.write(tmp_path / "t.json")), flow, 0.1)
    assert {*found.nodes} == linked


def test_launches_are_given_to_kernels_between_what_they_depend_on(tmp_path: Path) -> None:
    """Two layers whose kernels have the same words: each takes its own layer's launches."""
    recording = Recording()
    for layer in range(2):
        recording.op("aten::mm", [(KERNELS["mm"], 100.0)], [[SIZE, SIZE]] * 2)
        name = f"triton_per_fused_cos_exp_sin_{layer}"
        recording.op(name, [(name, 30.0 + layer)])
    found = measured(recording.write(tmp_path / "t.json"))
    assert found.shared == {f"sin_{n}": (f"cos_{n}", f"exp_{n}", f"sin_{n}") for n in range(2)}
    assert [found.nodes[f"sin_{n}"].us for n in range(2)] == [30, 31]


def test_python_s_functions_name_what_is_not_linked(tmp_path: Path) -> None:
    recording = Recording()
    recording.layers(2)
    recording.span(
        "python_function", "/home/me/train.py(54): log",
        lambda: recording.op("aten::norm", [("norm_kernel", 9.0)]),
    )  # fmt: skip
    (row,) = measured(recording.write(tmp_path / "t.json")).profile.unlinked
    assert (row.under, row.function) == ("aten::norm", "/home/me/train.py(54): log")


# -- refusals --------------------------------------------------------------------------------------


def test_a_trace_of_another_model_is_refused(tmp_path: Path) -> None:
    recording = Recording()
    recording.op("aten::conv2d", [("conv", 500.0)])
    recording.op("aten::cos", [(KERNELS["cos"], 1.0)])
    with pytest.raises(
        UsageError, match=r"another model: .* only here 2 aten::mm.* 1 aten::conv2d"
    ):
        measured(recording.write(tmp_path / "t.json"))


def test_a_large_trace_that_has_all_names_is_refused(tmp_path: Path) -> None:
    recording = Recording(sized=False)
    recording.layers(1)
    recording.op("aten::conv2d", [("conv", 5000.0)])
    recording.layers(1)
    with pytest.raises(UsageError, match="another model"):
        measured(recording.write(tmp_path / "t.json"))


def test_a_trace_of_other_sizes_is_refused(eager: Path) -> None:
    said = r"other sizes: aten::mm at model.py:\d+ takes 1024x1024, 1024x1024 here and 2048x2048"
    with pytest.raises(UsageError, match=said):
        measured(eager, size=1024)


def test_the_device_is_the_trace_s(eager: Path, tmp_path: Path) -> None:
    rulebook, trace = load_rulebook(), read_trace(eager)
    chosen = choose_traced_device(trace, None, rulebook)
    assert chosen is not None
    assert (chosen[0].name, chosen[1]) == ("h200", "device=h200 (the trace's)")
    assert choose_traced_device(trace, "h200", rulebook) is not None
    with pytest.raises(
        UsageError, match="recorded on NVIDIA H200, and --device a100-80gb is anoth"
    ):
        choose_traced_device(trace, "a100-80gb", rulebook)
    recording = Recording()
    recording.layers(2)
    other = read_trace(recording.write(tmp_path / "o.json", "Tesla K80"))
    with pytest.raises(UsageError, match="recorded on Tesla K80, a device without rules"):
        choose_traced_device(other, None, rulebook)
    silent = read_trace(recording.write(tmp_path / "s.json", ""))
    assert choose_traced_device(silent, "h200", rulebook) is None


# -- the report ------------------------------------------------------------------------------------


def test_measured_times_rank_and_sum_up(eager: Path) -> None:
    report = reported(eager)
    row = next(node for node in report.nodes if node.name == "exp_0")
    assert row.measured is not None
    assert (row.measured.us, row.measured.by) == (30.0, "id")
    assert row.time_us != 30.0
    (group,) = report.groups
    assert group.impact.basis == "profile"
    assert group.profile is not None
    assert group.profile.unfused_us == sum(US[op] for op in LAYER[1:])
    low, high = group.predicted.interval
    assert group.profile.differs == (not low <= group.profile.speedup <= high)
    saved = group.profile.unfused_us - group.predicted.fused_us
    call = load_rulebook().device("h200").times.call.value
    assert group.impact.saved_us == pytest.approx(saved + call)
    assert report.totals.time_us == pytest.approx(sum(report.totals.time_by_bound.values()))
    assert report.profile is not None
    assert report.totals.time_us == pytest.approx(report.profile.step_us)
    assert group.impact.share == pytest.approx(group.impact.saved_us_total / report.totals.time_us)


def test_a_gain_outside_of_the_interval_is_marked(tmp_path: Path) -> None:
    recording = Recording()
    recording.layers(2, 50.0)
    report = reported(recording.write(tmp_path / "t.json"))
    (group,) = report.groups
    assert group.profile is not None
    assert group.profile.differs
    assert "The profile has 4.5 ms where" in render(report, "md")
    assert "by the profile, " in render(report, "text")


def test_what_the_trace_has_as_fast_is_nothing_to_do(tmp_path: Path) -> None:
    recording = Recording()
    recording.layers(2, 0.05)
    report = reported(recording.write(tmp_path / "t.json"))
    assert report.groups[0].impact.saved_us < 0
    assert "g1" not in render(report, "text")


def test_idle_time_is_the_advice_of_a_trace(tmp_path: Path) -> None:
    recording = Recording()
    recording.steps(3, lambda number: recording.layers(2, 0.05))
    report = reported(recording.write(tmp_path / "t.json"))
    (advice,) = [row for row in report.advice if row.code == "launch-bound"]
    assert report.profile is not None
    assert advice.saved_us is not None
    assert 0 < advice.saved_us <= report.profile.host_us
    assert "the GPU idle for" in " ".join(advice.evidence)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_report_with_a_profile(name: str, tmp_path: Path) -> None:
    recording = Recording()
    recording.steps(2, lambda number: training(recording))
    report = reported(recording.write(tmp_path / "trace.json"))
    text = render(report, name)
    if name in ("text", "md", "html"):
        for part in ("trace.json, 2 steps of", "the host had not launched", "by sequence number"):
            assert part in text
    again = Report.model_validate(json.loads(render(report, "json")))
    assert again.profile == report.profile
    assert again.nodes == report.nodes


def test_a_redacted_report_says_nothing_of_the_program(tmp_path: Path) -> None:
    recording = Recording()
    recording.layers(2)
    recording.op("secret::op", [("secret_kernel", 9.0)])
    report = reported(recording.write(tmp_path / "secret.json"))
    assert "secret" in render(report, "json")
    assert "secret" not in render(redacted(report), "json")


def test_the_summary_stays_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    recording = Recording()
    recording.steps(2, lambda number: training(recording))
    text = render(reported(recording.write(tmp_path / "t.json")), "text")
    assert len(text.splitlines()) <= 40


def test_equal_traces_give_equal_reports(eager: Path) -> None:
    assert render(reported(eager), "json") == render(reported(eager), "json")
