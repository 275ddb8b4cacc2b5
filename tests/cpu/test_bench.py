"""What is measured is right, and what cannot be measured says so: on the CPU, by rehearsal."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusion_advisor.frontend.child import capture_module
from fusion_advisor.frontend.replay import replayed
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case, Kernel
from fusion_advisor.measure.child import Absent, group, model, way_of
from fusion_advisor.measure.clocks import HostClock, refuse_too_fast
from fusion_advisor.measure.driver import BenchSubject, timing_rules, ways
from fusion_advisor.measure.protocol import (
    EAGER,
    KERNEL,
    KERNEL_COMPILED,
    Ceilings,
    GroupJob,
    Measurement,
    ModelJob,
    Replacement,
    Timing,
    Way,
)
from fusion_advisor.support.kernel_fault import KernelFault
from fusion_advisor.verify.stepping import as_tuple
from fusion_advisor.verify.tolerance import Truth, compare
from fusion_advisor.workflows.recommend import bench_row, way_row

from . import spawned
from .checks import CRITERION
from .regions import H200, RULES, decided, flow_of, kernel_of

ROOT = Path(__file__).resolve().parents[2]
TIMING = timing_rules(RULES, H200)
SHAPE = (64, 32)


def _reference(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def _job(way: Way = KERNEL) -> GroupJob:
    case = Case("small", (Tensor(SHAPE, (32, 1), "float32"),))
    kernel = Kernel("softmax", "entry", "", cases=(case,))
    return GroupJob("g1", way, kernel, 2 * 4 * 64 * 32, TIMING)


def _module(entry: Any) -> Any:
    return SimpleNamespace(reference=_reference, entry=entry)


def test_a_right_way_has_a_time_and_its_error() -> None:
    found = group(_job(), _module(lambda x: torch.exp(torch.log_softmax(x, -1))), HostClock())
    assert found.timing is not None
    assert found.timing.us > 0
    assert found.error is not None
    assert found.error < 1e-6


def test_zeros_are_found_out() -> None:
    with pytest.raises(KernelFault, match="error"):
        group(_job(), _module(torch.zeros_like), HostClock())


def test_an_unwritten_result_is_found_out() -> None:
    with pytest.raises(KernelFault, match="NaN or infinity"):
        group(_job(), _module(lambda x: torch.empty_like(x)), HostClock())


def test_a_result_of_an_earlier_call_is_found_out() -> None:
    kept: dict[int, torch.Tensor] = {}

    def remembering(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in kept:
            kept[x.data_ptr()] = torch.softmax(x, -1)
        return kept[x.data_ptr()]

    with pytest.raises(KernelFault, match="error"):
        group(_job(), _module(remembering), HostClock())


def test_a_way_that_goes_wrong_while_it_is_timed_is_found_out() -> None:
    calls: list[int] = []

    def tiring(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.softmax(x, -1) * (1.0 if len(calls) < 3 else 0.5)

    with pytest.raises(KernelFault, match="error"):
        group(_job(), _module(tiring), HostClock())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: x.double(), "float64"),
        (lambda x: x[:2], "shape"),
        (lambda x: (x, x), "2 outputs"),
    ],
)
def test_other_results_are_found_out(wrong: Any, said: str) -> None:
    x = torch.randn(3, 4)
    with pytest.raises(KernelFault, match=said):
        compare(as_tuple(wrong(x)), Truth((x,), (x.double(),)), CRITERION)


def test_floats_of_eight_bits_are_compared_as_numbers() -> None:
    x = torch.randn(3, 4)
    eager = x.to(torch.float8_e4m3fn)
    known = Truth((eager,), (x.double(),))
    assert compare((eager,), known, CRITERION).ours > 0
    with pytest.raises(KernelFault, match="eager's"):
        compare((x.mul(-8).to(torch.float8_e4m3fn),), known, CRITERION)


def test_faster_than_the_memory_is_no_time() -> None:
    """A warm L2, or work on a stream that nobody waits for."""
    fastest = 1e6 * 48_000_000 / H200.datasheet_bandwidth
    refuse_too_fast(fastest, 48_000_000, TIMING)
    with pytest.raises(KernelFault, match="not timed"):
        refuse_too_fast(0.9 * fastest, 48_000_000, TIMING)


def test_a_line_takes_inputs_by_their_names() -> None:
    line = Way("framework", "line", line="torch.sub(x, weight)", names=(("x", 1), ("weight", 0)))
    one, two = torch.ones(2), torch.full((2,), 2.0)
    assert torch.equal(way_of(line, _reference, None)(one, two), two - one)


def test_a_package_that_is_missing_is_told() -> None:
    line = Way("Other", "line", line="x", names=(("x", 0),), needs=("no_such_package",))
    with pytest.raises(Absent, match="no_such_package is not installed"):
        way_of(line, _reference, None)


def test_an_idiom_is_measured_beside_its_own_ops() -> None:
    flow = flow_of(
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w,
        torch.randn(8, 64), torch.randn(64),
    )  # fmt: skip
    decision = decided(flow)
    subject = BenchSubject("g1", "rms-norm", decision, kernel_of(lambda x: x.sin().cos(), x()), ())
    found = {way.name: way for way in ways(subject)}
    assert list(found) == [
        "eager", "kernel", "framework", "Liger", "compile", "max-autotune", "reduce-overhead",
    ]  # fmt: skip
    a, w = torch.randn(8, 64), torch.randn(64)
    expected = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-5) * w
    assert torch.allclose(way_of(found["framework"], _reference, None)(a, w), expected, atol=1e-5)


def x() -> torch.Tensor:
    return torch.randn(4, 32)


class Block(torch.nn.Module):
    """Views, a write in place, two results, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 8)
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.table(tokens))
        a, b = h.chunk(2, -1)
        y = (a * b).relu_()
        return y + 1, h.max(-1)[0]


def test_a_replayed_graph_computes_what_the_model_does() -> None:
    model = Block()
    tokens = torch.randint(0, 11, (3, 5))
    with torch.no_grad():
        graph = capture_module(model, (tokens,))
        names = dict(model.named_parameters())
        given = [n for n in graph.nodes if n.kind != "call"]
        inputs = tuple(
            tokens if n.kind == "input" else next(
                t for name, t in names.items() if name.replace(".", "_") == n.name
            )
            for n in given
        )  # fmt: skip
        replay, _ = replayed(graph, (), "cpu", inputs)
        for ours, theirs in zip(replay(*inputs), model(tokens), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-6)


def test_what_is_made_on_the_gpu_is_made_where_the_replay_runs() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[-1], device=x.device)

    module = torch.nn.Module()
    module.forward = model
    x = torch.randn(4, 7)
    with torch.no_grad():
        graph = capture_module(module, (x,))
        assert "cuda" in str([node.kwargs for node in graph.nodes])
        replay, _ = replayed(graph, (), "cpu", (x,))
        assert torch.equal(replay(x)[0], model(x))


# -- what is made of it ----------------------------------------------------------------------------

TOP = Ceilings(4e12, (("bfloat16", 7e14),), 2.0, 5.0, (("gpu", "some"),))


def _timed(way: str, us: float) -> Measurement:
    return Measurement("model", way, Timing(us, us, us, 12, us, True))


def test_the_fastest_step_is_recommended_and_the_simpler_one_when_equal() -> None:
    def recommended(**steps: float) -> str:
        rows = [way_row(_timed(way, us), 0, TOP.copy) for way, us in steps.items()]
        return bench_row(TOP, rows, True, tie=1.02, own_ops=["g1", "g4"]).recommended

    assert recommended(eager=10.0, kernel=8.0, compile=9.0).startswith("put the emitted kernels")
    assert recommended(eager=10.0, kernel=9.9) == "leave it as it is"
    assert recommended(eager=9.0, framework=8.0, kernel=7.9).endswith("in place of g1, g4")
    both = {"compile": 7.0, "kernel+compile": 6.0}
    assert recommended(eager=9.0, kernel=8.0, **both).endswith("torch.compile the rest")
    graphed = {"kernel+reduce-overhead": 5.0, "backend+reduce-overhead": 5.05}
    assert "backend" in recommended(eager=9.0, kernel=8.0, **graphed), "the simpler one"
    assert recommended().startswith("not known")


def test_a_row_has_the_share_of_the_copy() -> None:
    row = way_row(_timed("compile", 10.0), 20_000_000, TOP.copy)
    assert row.share == pytest.approx(0.5)


@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor's CPU code needs g++")
def test_emitted_kernels_stand_inside_a_compiled_model(tmp_path: Path) -> None:
    """torch.compile does not look into them, and sees what shape they make."""
    text = "import torch\n\n\ndef fused(x):\n    return torch.softmax(x.sin(), -1)\n"
    with torch.no_grad():
        graph = flow_of(
            lambda x: torch.softmax(x.sin(), -1).sum(0), torch.randn(3, 5)
        ).annotated.graph
        inside = [node for node in graph.nodes if node.name in ("sin", "softmax")]
        taken = next(iter(inside[0].refs()))
        replaced = Replacement(
            text, "fused", ((taken.node, taken.output),), (("softmax", 0),), ("sin", "softmax")
        )
        rest = tuple(node for node in graph.nodes if node not in inside)
        job = ModelJob(
            KERNEL_COMPILED, graph, (replaced,), TIMING,
            replace(graph, nodes=rest), (graph.nodes.index(inside[0]),),
        )  # fmt: skip
        found = model(job, tmp_path, HostClock())
    assert found.error is not None
    assert found.error < 1e-5


# -- as a user runs it -----------------------------------------------------------------------------


def _run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return spawned.command(*words, cwd=folder)


@pytest.fixture(scope="module")
def analysed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysed")
    (folder / "model.py").write_text(
        "import torch\n\n\nclass Model(torch.nn.Module):\n"
        "    def forward(self, x, y):\n"
        "        return torch.softmax(x.sin() * 2, -1), y.cos(), y.sin()\n\n\n"
        "def get_inputs():\n    return [torch.randn(64, 256), torch.randn(64, 256)]\n"
    )
    done = _run(
        "analyze", "model.py", "--device", "h200", "--no-verify", "--no-compile", "--out", "out",
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so(analysed: Path) -> None:
    done = _run("bench", "out/report.json", folder=analysed)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "none here" in done.stderr


def test_a_rehearsal_runs_every_way_and_writes_nothing(analysed: Path) -> None:
    before = (analysed / "out" / "report.json").read_text()
    done = _run(
        "bench", "out/report.json", "--rehearse", "--no-torch-compile", folder=analysed
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "nothing was measured" in done.stderr
    assert (analysed / "out" / "report.json").read_text() == before


def test_a_rejected_candidate_is_emitted_and_checked(analysed: Path) -> None:
    """Its two launches read the same tensor: right, and not worth it."""
    report = json.loads((analysed / "out" / "report.json").read_text())
    (row,) = (row for row in report["candidates"] if row["kernel"]["schedule"])
    asked = ("--rehearse", "--no-torch-compile", "--only", row["id"])
    done = _run("bench", "out/report.json", *asked, folder=analysed)
    assert done.returncode == 0, done.stderr
    assert f"{row['id']} kernel" in done.stderr


def test_a_wrong_emitted_file_is_found_in_a_rehearsal(analysed: Path) -> None:
    report = json.loads((analysed / "out" / "report.json").read_text())
    file = analysed / "out" / report["groups"][0]["kernel"]["file"]
    right = file.read_text()
    file.write_text(right.replace("* 2.0", "* 2.5"))
    try:
        assert file.read_text() != right
        done = _run("bench", "out/report.json", "--rehearse", "--no-torch-compile", folder=analysed)
        assert done.returncode == 1
        assert "kernel: wrong:" in done.stderr
    finally:
        file.write_text(right)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("out/report.json", "--rehearse", "--only", "g9"), "--only g9"),
        (("out/none.json", "--rehearse"), "none.json"),
    ],
)
def test_wrong_input_is_one_line(words: tuple[str, ...], said: str, analysed: Path) -> None:
    done = _run("bench", *words, folder=analysed)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_without_its_graph_is_one_line(analysed: Path, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text((analysed / "out" / "report.json").read_text())
    done = _run("bench", "report.json", "--rehearse", folder=tmp_path)
    assert done.returncode == 2
    assert "no graph.json beside it" in done.stderr


def test_eager_is_a_way() -> None:
    assert group(_job(EAGER), _module(_reference), HostClock()).way == "eager"
