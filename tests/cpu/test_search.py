"""A search over configurations: what is tried, who wins, and what the written file says of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fusion_advisor.cli.app import app
from fusion_advisor.cli.commands import analyze as analyze_command
from fusion_advisor.codegen.emit import attempt, emit
from fusion_advisor.codegen.header import does, fingerprint
from fusion_advisor.codegen.kernel_package import stale
from fusion_advisor.codegen.tuned_numbers import launched, tuning_path, tuning_text
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import Finding, fuse
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case, Check, Kernel
from fusion_advisor.ir.scenario import Request
from fusion_advisor.measure import search as searches
from fusion_advisor.measure.child import turns
from fusion_advisor.measure.clocks import HostClock
from fusion_advisor.measure.config_space import configuration, neighbours
from fusion_advisor.measure.driver import timing_rules
from fusion_advisor.measure.protocol import Series, Turns, TurnsJob
from fusion_advisor.measure.search import (
    Contender,
    Proven,
    SearchResult,
    contenders,
    faster,
    local_searcher,
    of_launches,
    search,
    searcher,
    tuning_file,
)
from fusion_advisor.report.assemble import Proof
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped import fused_runtime
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import Provers
from fusion_advisor.workflows import analyze as pipeline
from fusion_advisor.workflows.analyze import Analysis, analyze
from fusion_advisor.workflows.patch import Patched, patch_model

from .checks import checked
from .in_process import captured
from .regions import H200, PACKED, RULES, SHARING, decided, flow_of

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = ROOT / "examples" / "softmax.py"
UNPROVEN = Provers(None, None, 90, RULES.verify)
MACHINE = (("torch", "2.11.0"), ("triton", "3.6.0"), ("gpu", "NVIDIA H200"))


def with_tuning(rules: Rulebook, **numbers: float) -> Rulebook:
    """Rules under which a search tries and times another number."""
    changed = {
        name: getattr(rules.tuning, name).model_copy(update={"value": value})
        for name, value in numbers.items()
    }
    return rules.model_copy(update={"tuning": rules.tuning.model_copy(update=changed)})


# -- what is tried ---------------------------------------------------------------------------------


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


def softmax(x: torch.Tensor) -> torch.Tensor:
    z = torch.exp(x - x.max(-1, keepdim=True)[0])
    return z / z.sum(-1, keepdim=True)


def norm_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    normal = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (g * w - normal * (g * w * normal).mean(-1, keepdim=True)), (g * normal).sum(0)


def rotated(x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * c + torch.cat((-x[..., half:], x[..., :half]), -1)


def log_sum(x: torch.Tensor) -> torch.Tensor:
    return x.exp().sum(-1).log()


GROUPS: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...], Rulebook]] = {
    "flat": (gelu, ((33, 257),), RULES),
    "row": (softmax, ((64, 300),), PACKED),
    "cooperative": (softmax, ((5, 1100),), SHARING),
    "carried": (norm_backward, ((40000, 96), (40000, 96), (96,)), RULES),
    "tiled": (rotated, ((2, 3, 20, 66), (2, 1, 20, 66)), RULES),
    "split": (log_sum, ((3, 40000),), RULES),
}


@pytest.fixture(params=GROUPS)
def one(request: pytest.FixtureRequest) -> tuple[Decision, Rulebook]:
    function, shapes, rules = GROUPS[request.param]
    decision = decided(flow_of(function, *(torch.randn(shape) for shape in shapes)), rules)
    assert decision.subject.plan is not None
    assert decision.subject.plan.schedule == request.param
    return decision, rules


def test_neighbours_differ_in_the_numbers_that_the_rules_name(
    one: tuple[Decision, Rulebook],
) -> None:
    decision, rules = one
    own = decision.subject.plan
    assert own is not None
    found = [each.subject.plan for each in neighbours(decision, rules)]
    said = [configuration(plan) for plan in found if plan]
    assert 2 <= len(said) <= rules.tuning.tried.count
    assert len({*said, configuration(own)}) == len(said) + 1, "each is tried once"
    for plan in found:
        assert plan is not None
        assert (plan.schedule, plan.region) == (own.schedule, own.region)


@pytest.mark.sampled(3)
def test_every_neighbour_is_a_kernel_that_passes(
    one: tuple[Decision, Rulebook], worker: Worker
) -> None:
    decision, rules = one
    few = neighbours(decision, with_tuning(rules, tried=4.0))
    checks = checked(worker, *(emit(each.subject.flow, each, "k", rules) for each in few), seeds=1)
    assert [check.failure for check in checks if not check.passed] == []


@pytest.mark.sampled(3)
def test_how_many_are_tried_is_a_rule(one: tuple[Decision, Rulebook]) -> None:
    decision, rules = one
    assert len(neighbours(decision, with_tuning(rules, tried=1.0))) == 1
    assert len(neighbours(decision, with_tuning(rules, reach=1.0))) <= len(
        neighbours(decision, rules)
    )


# -- who wins --------------------------------------------------------------------------------------


def contender(name: str) -> Contender:
    text = f'"""A kernel.\n"""\nNAME = "{name}"\n'
    return Contender(f"as {name}", Kernel(name, "k", text))


OWN, A, B, C, D = map(contender, ("own", "a", "b", "c", "d"))


@dataclass
class Bench:
    """A GPU on which kernels take what `us` says, by their names, give or take `noise`; `alone`
    is what they take beside the rules' own."""

    us: dict[str, float | str]
    alone: dict[str, float] = field(default_factory=dict[str, float])
    noise: float = 0.0
    wrong: tuple[str, ...] = ()
    asked: list[tuple[list[str], int]] = field(default_factory=list[tuple[list[str], int]])
    checked: list[str] = field(default_factory=list[str])

    def timed(self, kernels: Sequence[Kernel], rounds: int) -> Turns:
        names = [kernel.name for kernel in kernels]
        self.asked.append((names, rounds))
        known = {**self.us, **(self.alone if len(names) == 2 else {})}
        return Turns(tuple(self._series(known[name], rounds) for name in names), MACHINE)

    def _series(self, us: float | str, rounds: int) -> Series:
        if isinstance(us, str):
            return Series(failure=us)
        return Series(tuple(us + self.noise * (n % 3 - 1) for n in range(rounds)))

    def proven(self, kernel: Kernel) -> Proven:
        self.checked.append(kernel.name)
        return Check(kernel.name, "cuda:NVIDIA H200", kernel.name not in self.wrong), None


def found(bench: Bench) -> SearchResult:
    others = [each for each in (A, B, C, D) if each.kernel.name in bench.us]
    return search(OWN, others, bench.timed, bench.proven, RULES)


def test_the_fastest_wins_and_says_what_it_was_beside() -> None:
    bench = Bench({"own": 20.0, "a": 19.0, "b": 15.0, "c": 21.0})
    winner = found(bench)
    assert winner.kernel is B.kernel
    assert winner.summary == (
        "on NVIDIA H200, torch 2.11.0, triton 3.6.0, of 4 configurations: as b, 15.00 us; "
        "the rules' own, as own, 20.00 us"
    )
    assert (winner.us, winner.own_us, winner.gpu) == (15.0, 20.0, "NVIDIA H200")
    assert bench.asked == [
        (["own", "a", "b", "c"], RULES.tuning.screened.count),
        (["own", "b"], RULES.tuning.rounds.count),
    ]


def test_a_gain_within_the_noise_is_none() -> None:
    winner = found(Bench({"own": 20.0, "a": 19.0}, noise=2.0))
    assert winner.kernel is OWN.kernel
    assert "the rules' own, as own, 20.00 us; no other that is right is faster" in winner.summary
    assert winner.us == winner.own_us


def test_a_gain_within_what_runs_differ_by_is_none() -> None:
    bench = Bench({"own": 20.0, "a": 20.0 / RULES.measure.tie.value + 0.01})
    assert found(bench).kernel is OWN.kernel
    assert bench.checked == [], "nobody to be checked"


def test_luck_among_many_does_not_last() -> None:
    """The quickest of all rounds is timed anew, alone beside the rules' own."""
    bench = Bench({"own": 20.0, "a": 15.0, "b": 18.0}, alone={"a": 20.0})
    assert found(bench).kernel is B.kernel
    assert bench.checked == ["b"]


def test_a_wrong_kernel_does_not_win() -> None:
    bench = Bench({"own": 20.0, "a": 10.0, "b": 18.0}, wrong=("a",))
    assert found(bench).kernel is B.kernel
    assert bench.checked == ["a", "b"]


def test_what_does_not_run_is_left_out() -> None:
    assert found(Bench({"own": 20.0, "a": "out of resource", "b": 18.0})).kernel is B.kernel


def test_after_some_finalists_the_search_ends() -> None:
    us: dict[str, float | str] = {"own": 20.0, "a": 10.0, "b": 11.0, "c": 12.0, "d": 13.0}
    bench = Bench(us, wrong=("a", "b", "c"))
    assert found(bench).kernel is OWN.kernel
    assert len(bench.checked) == RULES.tuning.finalists.count


def test_where_the_rules_own_cannot_be_timed_it_stays() -> None:
    winner = found(Bench({"own": "out of memory", "a": 1.0}))
    assert (winner.kernel, winner.failure, winner.summary) == (OWN.kernel, "out of memory", "")


def test_spread_is_between_the_quartiles() -> None:
    steady, shaky = Series((10.0,) * 9), Series((8.0, 10.0, 12.0) * 3)
    assert faster(Series((9.0,) * 9), steady, 1.02)
    assert not faster(Series((9.0,) * 9), shaky, 1.02)
    assert not faster(shaky, Series((11.0,) * 9), 1.02)


# -- kernels in turn -------------------------------------------------------------------------------

KERNEL = """
import torch

def reference(x):
    return torch.softmax(x, -1)

def k(x):
    {body}
"""


def test_each_of_those_in_turn_is_held_to_float64(tmp_path: Path) -> None:
    case = Case("small", (Tensor((64, 32), (32, 1), "float32"),))
    bodies = ("return torch.softmax(x, -1)", "return torch.zeros_like(x)", "raise OSError('no')",
              "return torch.exp(torch.log_softmax(x, -1))")  # fmt: skip
    kernels = tuple(
        Kernel(f"k{n}", "k", KERNEL.format(body=body), cases=() if n else (case,))
        for n, body in enumerate(bodies)
    )
    job = TurnsJob("g1", kernels, 0, timing_rules(RULES, H200), rounds=3)
    right, zeros, raising, other = turns(job, tmp_path, HostClock()).series
    assert len(right.us) == len(other.us) == 3
    assert (right.failure, other.failure) == (None, None)
    assert zeros.failure is not None
    assert zeros.failure.startswith("output 0[")
    assert raising == Series(failure="OSError: no")


def test_a_whole_search_in_a_child() -> None:
    """As on a GPU, but for the clock: through the interpreter, on the host's."""
    decision = decided(flow_of(softmax, torch.randn(4, 64)), RULES)
    rules = with_tuning(RULES, tried=2.0, screened=1.0, rounds=2.0)
    kernel = emit(decision.subject.flow, decision, "k", rules)
    asked: list[str] = []

    def emitted(each: Decision) -> Kernel | str:
        asked.append(configuration(each.subject.plan) if each.subject.plan else "")
        return attempt(each.subject.flow, each, "k", rules)

    with Worker("fusion_advisor.measure.child", "rehearse") as worker:
        made = searcher(worker, H200, rules)(decision, kernel, emitted, lambda _: (None, None))
    assert made.failure == ""
    assert made.summary.startswith(f"on none, torch {torch.__version__}")
    assert f"of {len(asked) + 1} configurations" in made.summary


# -- what is written -------------------------------------------------------------------------------


def second(
    decision: Decision,
    kernel: Kernel,
    emitted: Callable[[Decision], Kernel | str],
    proven: Callable[[Kernel], Proven],
) -> SearchResult:
    """A GPU on which the first neighbour is the fastest."""

    def timed(kernels: Sequence[Kernel], rounds: int) -> Turns:
        times = [20.0, 10.0, *(30.0 for _ in kernels)][: len(kernels)]
        return Turns(tuple(Series((us,) * rounds) for us in times), MACHINE)

    found = contenders(decision, kernel, emitted, neighbours(decision, RULES))
    return of_launches(found, timed, proven, RULES)


def test_numbers_of_launches_are_told_from_what_a_kernel_computes(
    one: tuple[Decision, Rulebook],
) -> None:
    """A neighbour that can be had by other numbers alone has the same text but for these."""
    decision, rules = one
    flow = decision.subject.flow
    own = emit(flow, decision, "k", rules)
    computes, numbers = launched(own.text)
    plan = decision.subject.plan
    assert plan is not None
    assert [each["num_warps"] for each in numbers.values()] == [s.warps for s in plan.steps]
    texts = [attempt(flow, each, "k", rules) for each in neighbours(decision, rules)]
    found = [launched(each.text) for each in texts if isinstance(each, Kernel)]
    alike = [other for text, other in found if text == computes]
    assert all(other.keys() == numbers.keys() for other in alike)
    others = {"row": "a row of 300 is in other pieces", "cooperative": "other parts of a row"}
    assert bool(alike) == (plan.schedule not in others)


@pytest.fixture(scope="module")
def analyses() -> tuple[Analysis, Analysis]:
    """The softmax example as the rules have it, and searched."""
    request = Request(
        str(SOFTMAX), device="h200", folder="kernels", compile=False, command="fusion-advisor emit"
    )
    plain = analyze(
        replace(request, verify=False), lambda: captured(str(SOFTMAX), request.scenario)
    )
    return plain, analyze(
        request, lambda: captured(str(SOFTMAX), request.scenario), searcher=second
    )


def test_a_search_changes_no_text(analyses: tuple[Analysis, Analysis]) -> None:
    """What it found stands beside the kernels, for the text that was measured."""
    plain, searched = analyses
    assert does(searched.kernels[0].text) == does(plain.kernels[0].text)
    assert (plain.searches, len(searched.searches)) == ({}, 1)
    texts = dict.fromkeys(searched.searches, searched.kernels[0].text)
    ((path, text),) = tuning_file(Path("kernels"), searched.searches, texts).items()
    assert path == Path("kernels/tuning/NVIDIA_H200.json")
    ((kernel, row),) = json.loads(text).items()
    (numbers,) = launched(searched.kernels[0].text)[1].values()
    assert kernel == "softmax_kernel"
    assert row["numbers"].keys() == numbers.keys()
    assert row["numbers"] != numbers
    assert row["text"] == fingerprint(searched.kernels[0].text)
    assert "10.00 us; the rules' own, row: 1 x" in row["found"]
    assert tuning_file(Path("kernels"), searched.searches, {}) == {}, "it is not written"


def test_what_was_found_for_other_kernels_stays(
    analyses: tuple[Analysis, Analysis], tmp_path: Path
) -> None:
    found = analyses[1].searches
    texts = dict.fromkeys(found, analyses[1].kernels[0].text)
    ((path, text),) = tuning_file(tmp_path, found, texts).items()
    path.parent.mkdir()
    path.write_text('{"other_kernel": {}}')
    (again,) = tuning_file(tmp_path, found, texts).values()
    assert json.loads(again) == {"other_kernel": {}, **json.loads(text)}
    for wrong in ("mine", "[]"):
        path.write_text(wrong)
        with pytest.raises(UsageError, match="delete it, and search again"):
            tuning_file(tmp_path, found, texts)


@pytest.fixture
def tuned_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel of a folder beside which numbers are found, on a GPU that is not here."""
    (tmp_path / "kernel.py").write_text("def k():\n    pass\n")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU/2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "kernel", raising=False)
    fused_runtime.tuned.cache_clear()
    (tmp_path / "tuning").mkdir()
    return importlib.import_module("kernel").k


def test_the_runtime_takes_the_numbers_of_this_text_on_this_gpu(
    tuned_kernel: Any, tmp_path: Path
) -> None:
    text = (tmp_path / "kernel.py").read_text()
    path = tmp_path / tuning_path("A GPU/2")
    assert fused_runtime.tuned(tuned_kernel, 0) == {}, "no file"
    path.write_text(tuning_text({text: ({"k": {"BLOCK": 8, "num_warps": 2}}, "by hand")}))
    assert fused_runtime.tuned(tuned_kernel, 1) == {"BLOCK": 8, "num_warps": 2}
    path.write_text(tuning_text({text: ({"other": {"BLOCK": 8}}, "by hand")}))
    assert fused_runtime.tuned(tuned_kernel, 2) == {}
    path.write_text(tuning_text({text + "#": ({"k": {"BLOCK": 8}}, "by hand")}))
    with pytest.warns(UserWarning, match="k has another text than the one that was measured"):
        assert fused_runtime.tuned(tuned_kernel, 3) == {}
    path.write_text("{")
    with pytest.warns(UserWarning, match="JSONDecodeError: .*; search again, or delete it"):
        assert fused_runtime.tuned(tuned_kernel, 4) == {}


def test_a_launch_has_the_numbers_that_were_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid follows them."""
    calls: list[Any] = []

    class Jit:
        fn = None
        arg_names = ("BLOCK",)

        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **constants: calls.append((grid, constants))

    class OnAGpu:
        def get_device(self) -> int:
            return 0

        def data_ptr(self) -> int:
            return 16

    monkeypatch.setattr(fused_runtime, "tuned", lambda function, device: {"BLOCK": 32})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    grid = lambda at: (fused_runtime.cdiv(100, at["BLOCK"]),)  # noqa: E731 as kernels have it
    fused_runtime.launch(Jit(), grid, (OnAGpu(),), (), BLOCK=8, num_warps=1)
    assert calls == [((4,), {"enable_fp_fusion": True, "BLOCK": 32, "num_warps": 1})]


def test_a_kernel_that_has_not_passed_is_not_searched() -> None:
    request = Request(str(SOFTMAX), device="h200")
    (finding,) = found_in(request)
    kernel = emit(finding.decision.subject.flow, finding.decision, "softmax", RULES)
    failed = Proof(kernel, check=Check("softmax", "interpreter", False, failure="off"))
    made = pipeline.search_kernel(finding, failed, second, UNPROVEN, RULES)
    assert made.kernel is kernel
    assert made.searched == SearchResult(kernel, failure="the kernel has not passed")


def found_in(request: Request) -> tuple[Finding, ...]:
    flow = dataflow(captured(request.model, request.scenario), H200)
    return fuse(flow, RULES).groups


# -- in the model's source -------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn


class Model(nn.Module):
    def forward(self, x):
        z = torch.exp(x - x.max(-1, keepdim=True)[0])
        return z / z.sum(-1, keepdim=True)


def get_inputs():
    return [torch.empty(512, 1024)]
"""


def again(folder: Path, **more: Any) -> Patched:
    request = Request(str(folder / "model.py"), device="h200", verify=False, compile=False)
    return patch_model(request, folder.resolve(), captured=captured, **more)


@pytest.mark.deep
def test_a_searched_kernel_is_not_stale_and_serves_again(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    made = again(tmp_path, searcher=second)
    assert made.wrong == {}
    subprocess.run(["git", "apply", "-"], input=made.diff.encode(), cwd=tmp_path, check=True)
    package = tmp_path / "fused_model"
    found = json.loads((package / "tuning" / "NVIDIA_H200.json").read_text())
    assert found["softmax_kernel"]["text"] == fingerprint((package / "softmax.py").read_text())
    assert [*stale(package)] == []
    assert again(tmp_path).diff == "", "nothing is left to do"
    (tmp_path / "model.py").write_text(MODEL)
    assert {*again(tmp_path).patch.after} == {tmp_path / "model.py"}, "the kernel is there"
    kept = again(tmp_path, searcher=second)
    assert kept.searches == {}, "nor is it searched for anew"


# -- the command -----------------------------------------------------------------------------------


def test_without_a_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "gpu_names", tuple)
    with pytest.raises(UsageError, match="--search times kernels on a GPU and there is none"):
        local_searcher(None, RULES).__enter__()


def test_for_another_gpu_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searches, "gpu_names", lambda: ("NVIDIA H200",))
    with pytest.raises(UsageError, match="on the NVIDIA H200 here, and these are for a100"):
        local_searcher("a100", RULES).__enter__()


def test_an_interrupt_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextmanager
    def interrupted(*_: Any, **__: Any) -> Generator[Any]:
        def stop(*_: Any) -> SearchResult:
            raise KeyboardInterrupt

        yield stop

    monkeypatch.setattr(analyze_command, "searcher_of", interrupted)
    file = tmp_path / "softmax.py"
    file.write_text("mine\n")
    options = ["--out", str(tmp_path), "--search", "--no-verify", "--no-compile"]
    done = CliRunner().invoke(app, ["emit", str(SOFTMAX), "--device", "h200", *options])
    assert done.exit_code != 0
    assert [*tmp_path.iterdir()] == [file]
    assert file.read_text() == "mine\n"


def test_what_gives_no_times_cannot_search() -> None:
    done = CliRunner().invoke(
        app, ["patch", str(SOFTMAX), "--level", "framework", "--out", "x.patch", "--search"]
    )
    assert isinstance(done.exception, UsageError)
    assert "--level framework: writes no kernels" in str(done.exception)
