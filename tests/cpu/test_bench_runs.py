"""A whole run of `bench`, on a GPU whose answers are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fusion_advisor.cli.app import app
from fusion_advisor.codegen.emit import emit
from fusion_advisor.codegen.header import fingerprint
from fusion_advisor.codegen.tuned_numbers import launched
from fusion_advisor.frontend.replay import ReplayedKernel, replayed
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.graph import Graph, Tensor
from fusion_advisor.ir.kernel import Case, Check, CheckJob, Kernel
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.measure import child as measuring
from fusion_advisor.measure.clocks import HostClock
from fusion_advisor.measure.driver import timing_rules
from fusion_advisor.measure.protocol import (
    EAGER,
    KERNEL,
    Ceilings,
    CeilingsJob,
    GroupJob,
    Measurement,
    ModelJob,
    Series,
    Timing,
    Turns,
    TurnsJob,
)
from fusion_advisor.report.assemble import assemble
from fusion_advisor.report.formats import markdown, render, text
from fusion_advisor.report.schema import Report
from fusion_advisor.shipped.load import load_module
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.kernel_fault import OUT_OF_MEMORY, cause, needs_restart
from fusion_advisor.support.worker import WorkerError, replied, request
from fusion_advisor.workflows import bench as running
from fusion_advisor.workflows.bench import BenchRun, bench

from .regions import H200, RULES, flow_of

MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "clocks.current.sm": "1980"}
TIMES = {"eager": 100.0, "kernel": 20.0, "framework": 20.1, "compile": 30.0}
TIMING = timing_rules(RULES, H200)


def model(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A softmax by hand, which is accepted, and two readers of one tensor, which are not."""
    z = torch.exp(x - x.max(-1, keepdim=True)[0])
    return z / z.sum(-1, keepdim=True), y.cos(), y.sin()


@pytest.fixture(scope="module")
def analysed() -> tuple[Report, Graph]:
    flow = flow_of(model, torch.randn(512, 1024), torch.randn(512, 1024))
    found = fuse(flow, RULES)
    report = assemble(flow, found, {}, Scenario(), (), RULES)
    assert [row.id for row in report.groups] == ["g1"]
    assert [row.id for row in report.candidates] == ["c1"]
    assert report.candidates[0].kernel.schedule
    return report, flow.annotated.graph


@dataclass
class Gpu:
    """Answers what is asked of the children; `broken` says what fails, by subject and way."""

    machine: dict[str, str] = field(default_factory=lambda: dict(MACHINE))
    times: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    broken: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    asked: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    jobs: list[ModelJob] = field(default_factory=list[ModelJob])
    stop_at: tuple[str, str] | None = None
    tuned_us: float = 30.0

    def answer(self, job: Any) -> Any:
        if isinstance(job, CheckJob):
            return self._check(job.kernel)
        if isinstance(job, CeilingsJob):
            return Ceilings(4e12, (), 2.0, 5.0, tuple(self.machine.items()))
        if isinstance(job, TurnsJob):
            return self._in_turn(job)
        subject = job.subject if isinstance(job, GroupJob) else "model"
        way = job.way.name
        self.asked.append((subject, way))
        if self.stop_at == (subject, way):
            raise KeyboardInterrupt
        if isinstance(job, ModelJob):
            self.jobs.append(job)
        failure = self.broken.get((subject, way))
        if failure == "crash":
            raise WorkerError("the child ended with status -9")
        if failure:
            return Measurement(subject, way, failure=failure)
        us = self.times.get((subject, way), TIMES.get(way, 50.0))
        return Measurement(subject, way, Timing(us, us, us, 12, us, True), 0.0, 0.0)

    def _in_turn(self, job: TurnsJob) -> Turns:
        """The rules' own kernel takes 20 us, every other one `tuned_us`."""
        self.asked.append((job.subject, "turns"))
        times = [20.0, *(self.tuned_us for _ in job.kernels[1:])]
        series = tuple(Series((us,) * job.rounds) for us in times)
        return Turns(series, tuple(self.machine.items()))

    def _check(self, kernel: Kernel) -> Check:
        self.asked.append((kernel.name, "check"))
        failure = self.broken.get((kernel.name, "check"))
        return Check(kernel.name, "cuda:H200", failure is None, failure=failure)

    def worker(self, *_: Any) -> Any:
        return _Child(self.answer)


@dataclass
class _Child:
    answers: Callable[[Any], Any]

    def submit(self, job: Any, kind: type[Any], timeout_s: float) -> Future[Any]:
        del kind, timeout_s
        answer: Future[Any] = Future()
        try:
            answer.set_result(self.answers(job))
        except WorkerError as error:
            answer.set_exception(error)
        return answer

    def abandon(self) -> None: ...

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(running, "Worker", made.worker)
    monkeypatch.setattr(running, "checker", made.worker)
    return made


def run_of(analysed: tuple[Report, Graph], **asked: Any) -> BenchRun:
    report, graph = analysed
    report = Report.model_validate_json(report.model_dump_json())
    return BenchRun(report, graph, RULES, {}, **asked)


# -- candidates ------------------------------------------------------------------------------------


def test_candidates_are_left_out_unless_asked_for(analysed: Any, gpu: Gpu) -> None:
    bench(run_of(analysed))
    assert {subject for subject, way in gpu.asked if way != "check"} == {"g1", "model"}


def test_rejected_candidates_are_timed_beside_eager_and_marked(analysed: Any, gpu: Gpu) -> None:
    gpu.times["c1", "kernel"] = 80.0
    report = bench(run_of(analysed, candidates=True))
    (row,) = report.candidates
    assert row.measured
    assert row.verdict == "reject"
    assert row.measured.speedup == pytest.approx(1.25)
    assert [way for subject, way in gpu.asked if subject == "c1"] == ["check", "eager", "kernel"]
    for shown in (text.render(report, verbose=True), markdown.render(report)):
        words = " ".join(shown.split())
        assert "c1 " in words
        assert "rejected" in words


def test_a_candidate_is_never_put_into_the_model(analysed: Any, gpu: Gpu) -> None:
    report = bench(run_of(analysed, candidates=True))
    kernels = next(job for job in gpu.jobs if job.way.name == "kernel").kernels
    assert len(kernels) == len(report.groups[0].instances) == 1


def test_a_candidate_can_be_named(analysed: Any, gpu: Gpu) -> None:
    bench(run_of(analysed, only=["c1"], whole=False))
    assert {subject for subject, _ in gpu.asked} == {"c1"}
    with pytest.raises(UsageError, match="--only c9: the report's groups are g1, c1"):
        bench(run_of(analysed, only=["c9"]))


# -- what goes wrong -------------------------------------------------------------------------------


def test_out_of_memory_is_a_row_and_the_run_goes_on(analysed: Any, gpu: Gpu) -> None:
    gpu.broken = {("c1", "kernel"): OUT_OF_MEMORY, ("g1", "max-autotune"): "crash"}
    run = run_of(analysed, candidates=True)
    report = bench(run)
    failures = {(who, row.way): row.failure for who, row in run.failures()}
    assert failures == {
        ("c1", "kernel"): OUT_OF_MEMORY,
        ("g1", "max-autotune"): "the child ended with status -9",
    }
    assert report.bench
    assert report.bench.complete
    assert gpu.asked[-1] == ("model", "backend+reduce-overhead")
    assert "out of memory" in render(report, "md")


def test_a_check_that_runs_out_of_memory_says_nothing_of_the_kernel(
    analysed: Any, gpu: Gpu
) -> None:
    gpu.broken = {("g1", "check"): f"the check itself failed: {OUT_OF_MEMORY}"}
    run = run_of(analysed, whole=False)
    bench(run)
    failures = {(who, row.way): row.failure for who, row in run.failures()}
    assert failures == {("g1", "kernel"): "out of memory in its check"}
    assert ("g1", "kernel") not in gpu.asked
    assert ("g1", "eager") in gpu.asked


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
    ],
)
def test_every_way_to_run_out_of_memory_is_called_that(error: Exception) -> None:
    wrapped = RuntimeError("backend failed")
    wrapped.__cause__ = error
    assert cause(error) == cause(wrapped) == OUT_OF_MEMORY
    assert needs_restart(OUT_OF_MEMORY)
    assert not needs_restart("wrong: error 3, eager's 1")


def test_the_child_names_it_and_begins_anew(tmp_path: Path) -> None:
    text = (
        "import torch\n\n\ndef entry(x):\n    raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "\n\ndef reference(x):\n    return x\n"
    )
    kernel = Kernel("k", "entry", text, cases=(Case("c", (Tensor((4,), (1,), "float32"),)),))
    jobs = [GroupJob("g1", way, kernel, 0, TIMING) for way in (EAGER, KERNEL)]
    answers = measuring.answers(tmp_path, lambda rules: HostClock())
    (eager, whole), (failed, why) = (replied(request(job), answers) for job in jobs)
    assert from_json(Measurement, eager).timing
    assert not whole
    assert json.loads(failed) == why == OUT_OF_MEMORY
    assert needs_restart(why)


def test_a_run_that_is_cut_short_keeps_what_is_done(analysed: Any, gpu: Gpu) -> None:
    gpu.stop_at = ("g1", "compile")
    cut = bench(run_of(analysed))
    assert cut.bench
    assert not cut.bench.complete
    assert cut.groups[0].measured
    assert cut.groups[0].measured.speedup == pytest.approx(5.0)


# -- numbers of launches ---------------------------------------------------------------------------


def test_a_kernel_is_timed_with_the_numbers_that_a_search_found(
    analysed: Any, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own row, the kernel that stands in the whole model, and a file beside the kernels."""
    report, graph = analysed
    flow = flow_of(model, torch.randn(512, 1024), torch.randn(512, 1024))
    (chosen,) = fuse(flow, RULES).groups
    kernel = emit(flow, chosen.decision, "softmax", RULES)
    named = report.groups[0].kernel.model_copy(
        update={"entry": "softmax", "file": "kernels/softmax.py"}
    )
    group = report.groups[0].model_copy(update={"kernel": named})
    file = tmp_path / "report.json"
    file.write_text(report.model_copy(update={"groups": [group]}).model_dump_json())
    (tmp_path / "graph.json").write_text(to_json(graph))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/softmax.py").write_text(kernel.text)
    monkeypatch.setattr("fusion_advisor.rulebook.local_gpu.gpu_names", lambda: ["NVIDIA H200"])
    gpu.tuned_us = 10.0
    gpu.times["g1", "kernel tuned"] = 10.0
    done = CliRunner().invoke(app, ["bench", str(file)])
    assert done.exit_code == 0, done.output
    found = Report.model_validate_json(file.read_text())
    measured = found.groups[0].measured
    assert measured
    assert {row.way: row.us for row in measured.ways}["kernel tuned"] == 10.0
    assert (measured.best, measured.verdict) == ("kernel tuned", "faster")
    assert measured.speedup == pytest.approx(5.0)  # of the rules' own numbers, as was predicted
    ((function, numbers),) = launched(kernel.text)[1].items()
    (row,) = json.loads((tmp_path / "kernels/tuning/NVIDIA_H200.json").read_text()).values()
    assert row["numbers"] != numbers
    assert row["text"] == fingerprint(kernel.text)
    placed = next(job for job in gpu.jobs if job.way.name == "kernel")
    assert launched(placed.kernels[0].text)[1] == {function: row["numbers"]}


@pytest.mark.parametrize(("asked", "turns"), [({"tune": False}, 0), ({}, 1)])
def test_a_search_without_a_find_leaves_no_row(
    analysed: Any, gpu: Gpu, asked: dict[str, bool], turns: int
) -> None:
    measured = bench(run_of(analysed, **asked)).groups[0].measured
    assert measured
    assert "kernel tuned" not in {row.way for row in measured.ways}
    assert [way for _, way in gpu.asked].count("turns") == turns


@pytest.mark.parametrize(("us", "verdict"), [(99.0, "faster"), (101.0, "slower")])
def test_the_stopwatch_has_a_verdict_of_its_own(
    analysed: Any, gpu: Gpu, us: float, verdict: str
) -> None:
    gpu.times["g1", "kernel"] = us
    report = bench(run_of(analysed))
    assert report.groups[0].verdict == "fuse"
    assert report.groups[0].measured
    assert report.groups[0].measured.verdict == verdict
    assert f"measured-{verdict}" in text.render(report, verbose=True)


# -- the whole model -------------------------------------------------------------------------------


def test_the_frameworks_own_op_takes_its_places_where_it_is_as_good(
    analysed: Any, gpu: Gpu, tmp_path: Path
) -> None:
    gpu.times["model", "framework"] = 10.0
    report = bench(run_of(analysed))
    assert report.bench
    assert report.bench.own_ops == ["g1"]
    assert report.bench.recommended == "write the framework's own op in place of g1"
    assert [row.way for row in report.bench.model] == [
        "eager", "framework", "kernel", "compile", "reduce-overhead", "kernel+compile",
        "kernel+reduce-overhead", "backend", "backend+reduce-overhead",
    ]  # fmt: skip
    job = next(job for job in gpu.jobs if job.way.name == "framework")
    assert "softmax" in job.kernels[0].text
    launchers = [
        ReplayedKernel(
            getattr(load_module(one.text, tmp_path), one.entry), one.inputs, one.outputs, after
        )
        for one, after in zip(job.kernels, job.after, strict=True)
    ]
    graph = job.rest
    assert graph
    x, y = torch.randn(512, 1024), torch.randn(512, 1024)
    replay, _ = replayed(graph, launchers, "cpu", (x, y))
    for ours, theirs in zip(replay(x, y), model(x, y), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_worse_own_op_is_no_way_of_running_the_model(analysed: Any, gpu: Gpu) -> None:
    gpu.times["g1", "framework"] = 30.0
    report = bench(run_of(analysed))
    assert report.bench
    assert report.bench.own_ops == []
    assert "framework" not in {row.way for row in report.bench.model}


def test_a_wrong_model_is_its_row_and_the_exit_code(
    analysed: Any, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, graph = analysed
    file = tmp_path / "report.json"
    file.write_text(report.model_dump_json())
    (tmp_path / "graph.json").write_text(to_json(graph))
    monkeypatch.setattr("fusion_advisor.rulebook.local_gpu.gpu_names", lambda: ["NVIDIA H200"])
    words = ["bench", str(file)]
    rival = "RuntimeError: no"
    gpu.broken["model", "compile"] = rival
    done = CliRunner().invoke(app, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 0
    wrong = "not what eager gives: output 0[3]: ours 1.0, expected 2.0"
    gpu.broken["model", "kernel"] = wrong
    done = CliRunner().invoke(app, words, standalone_mode=False, catch_exceptions=False)
    assert done.return_value == 1
    assert f"model: kernel: {wrong}" in done.stderr
    rows = {row["way"]: row for row in json.loads(file.read_text())["bench"]["model"]}
    assert rows["kernel"]["failure"] == wrong
    assert rows["compile"]["failure"] == rival
    assert rows["eager"]["us"]
    assert rows["kernel+compile"]["us"]
