"""Where the stages of `bench` meet: a report and its graph in, the report with measurements out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fusion_advisor.annotate import annotate
from fusion_advisor.assemble import check_row
from fusion_advisor.dataflow import Dataflow, dataflow
from fusion_advisor.decide import decide
from fusion_advisor.emit import emit
from fusion_advisor.errors import UsageError
from fusion_advisor.kernels import Check
from fusion_advisor.measure import (
    Subject,
    ceilings,
    measure_group,
    measure_model,
    timing_rules,
    ways,
)
from fusion_advisor.measurements import COMPILED, EAGER, KERNEL, Measurement
from fusion_advisor.recommend import bench_row, measured, settle, way_row
from fusion_advisor.records import Graph
from fusion_advisor.report import GroupRow, Report, WayRow
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.verify import Where, checker, collect_check, submit_check
from fusion_advisor.workers import Worker, WorkerError


class Progress(Protocol):
    """Told what is measured next, and how many of how many are done."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass
class Run:
    """What a run of `bench` is asked for. `texts` are the emitted files by group, in place of what
    would be emitted now; `only` the groups wanted, all when empty; `rehearse` runs each way once on
    the CPU, at small sizes, to see that it works."""

    report: Report
    graph: Graph
    rulebook: Rulebook
    texts: Mapping[str, str]
    only: Sequence[str] = ()
    compiled: bool = True
    whole: bool = True
    rehearse: bool = False
    told: Progress = lambda what, done, total: None
    row: Callable[[Measurement], None] = lambda found: None
    ways: dict[str, list[WayRow]] = field(default_factory=dict[str, list[WayRow]])

    def failures(self) -> Iterator[tuple[str, WayRow]]:
        """What went wrong, with whose it is."""
        for subject, rows in self.ways.items():
            yield from ((subject, row) for row in rows if row.failure)


def bench(run: Run) -> Report:
    """Check and time every way of each group and of the model; the report with what was found.

    An interrupt (Ctrl-C) ends the run and keeps what is finished. Raises UsageError where a group
    is not in the graph, or where the GPU does not answer.
    """
    device = run.rulebook.device(run.report.device.name)
    flow = dataflow(annotate(run.graph, device))
    subjects = [_subject(run, flow, group) for group in _chosen(run)]
    rules, timeout_s = timing_rules(run.rulebook.measure, device), run.rulebook.measure.timeout.base
    plan = [(s, way) for s in subjects for way in ways(s, compiled=run.compiled)]
    models = (EAGER, KERNEL, *((COMPILED[0], COMPILED[2]) if run.compiled else ()))
    models = models if run.whole else ()
    total = 1 + len(subjects) + len(plan) + len(models)
    complete = True
    where = "rehearse" if run.rehearse else "gpu"
    with Worker("fusion_advisor.measuring", where) as worker:
        run.told("ceilings", 0, total)
        try:
            top = ceilings(worker, rules, timeout_s)
        except WorkerError as error:
            raise UsageError(f"the GPU cannot be measured: {error}") from error
        try:
            checks = _checked(run, subjects, total)
            for number, (subject, way) in enumerate(plan, 1 + len(subjects)):
                run.told(f"{subject.id} {way.name}", number, total)
                check = checks[subject.id]
                if way.kind == "kernel" and not check.passed:
                    found = Measurement(subject.id, way.name, failure=f"wrong: {check.failure}")
                else:
                    found = measure_group(subject, way, worker, rules, timeout_s)
                _keep(run, found, subject.decision.fused_bytes, top.copy)
            for number, way in enumerate(models, 1 + len(subjects) + len(plan)):
                run.told(f"the whole model, {way.name}", number, total)
                found = measure_model(flow, subjects, way, worker, rules, run.rulebook)
                _keep(run, found, 0, top.copy)
        except KeyboardInterrupt:
            complete = False
            worker.abandon()
    for group in run.report.groups:
        if group.id in run.ways:
            settle(group, measured(group, run.ways[group.id]))
    run.report.bench = bench_row(top, run.ways.get("model", []), complete)
    return run.report


def _chosen(run: Run) -> list[GroupRow]:
    known = {group.id: group for group in run.report.groups}
    unknown = [name for name in run.only if name not in known]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: the report's groups are {', '.join(known)}")
    return [known[name] for name in run.only or known]


def _subject(run: Run, flow: Dataflow, group: GroupRow) -> Subject:
    """A group of the report with its kernel at the graph's sizes."""
    lost = [name for name in group.nodes if name not in flow.position]
    if lost:
        raise UsageError(f"{group.id}: its node {lost[0]} is not in the graph; analyze again")
    places = [tuple(flow.position[name] for name in names) for names in group.instances]
    launches = [tuple(i for i in place if flow.launches(i)) for place in places]
    decision = decide(flow, launches[0], run.rulebook)
    if decision.subject.plan is None:
        raise UsageError(f"{group.id}: these rules have no plan for it; analyze again")
    name = group.kernel.entry or group.id
    kernel = emit(flow, decision, name, run.rulebook, full_size=not run.rehearse)
    if group.id in run.texts:
        kernel = replace(kernel, text=run.texts[group.id])
    if run.rehearse:
        kernel = replace(kernel, cases=kernel.cases[-1:])
    return Subject(group.id, group.pattern, decision, kernel, tuple(launches))


def _checked(run: Run, subjects: Sequence[Subject], total: int) -> dict[str, Check]:
    """Every kernel on the GPU, against float64, with the cases that the interpreter checks."""
    found: dict[str, Check] = {}
    where: Where = "interpreter" if run.rehearse else "gpu"
    seeds = run.rulebook.verify.seeds.count
    with checker(where, run.rulebook.verify) as worker:
        for number, subject in enumerate(subjects, 1):
            run.told(f"{subject.id} check", number, total)
            answer = submit_check(worker, subject.kernel, seeds=seeds, rules=run.rulebook.verify)
            check = found[subject.id] = collect_check(subject.kernel, answer, seeds=seeds)
            row = next(group for group in run.report.groups if group.id == subject.id)
            row.kernel.check = check_row(check)
            if check.passed and not run.rehearse:
                row.kernel.status, row.kernel.why = "gpu-checked", None
    return found


def _keep(run: Run, found: Measurement, least_bytes: int, copy: float) -> None:
    run.ways.setdefault(found.subject, []).append(way_row(found, least_bytes, copy))
    run.row(found)
