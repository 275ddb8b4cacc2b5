"""Workflow of `bench`: a report and its graph in, the report with measurements out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import loads
from pathlib import Path
from typing import Protocol

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.fusion.decide import Decision, decide
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.measure.driver import (
    BenchSubject,
    ceilings,
    in_place,
    measure_group,
    measure_model,
    own_ops,
    timing_rules,
    ways,
)
from fusion_advisor.measure.protocol import (
    BACKEND,
    BACKEND_GRAPHED,
    COMPILED,
    EAGER,
    KERNEL,
    KERNEL_COMPILED,
    KERNEL_GRAPHED,
    KERNEL_TUNED,
    OWN_OPS,
    Ceilings,
    Measurement,
    Replacement,
    TimingRules,
    Way,
)
from fusion_advisor.measure.search import Proven, SearchResult, searcher, tuning_file
from fusion_advisor.report.schema import CheckRow, GroupRow, Report, WayRow, load_report
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_data
from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.kernel_fault import OUT_OF_MEMORY
from fusion_advisor.support.worker import Worker, WorkerError
from fusion_advisor.verify.driver import (
    Where,
    checker,
    submit_check,
)
from fusion_advisor.workflows.recommend import (
    bench_row,
    measured,
    own_op_serves,
    settle,
    way_row,
)


class Progress(Protocol):
    """Listener that is told the next measurement, and how many of how many are done."""

    def __call__(self, what: str, done: int, total: int) -> None: ...


@dataclass
class BenchRun:
    """Request for a run of `bench`.

    `texts` are the emitted files by group, in place of files emitted now; `only` the groups wanted,
    all when empty; `candidates` adds the rejected candidates that have a plan, without
    torch.compile; `tune` looks for faster numbers of the kernels' launches, and `searches` has
    what was found, by group; `rehearse` runs each way once on the CPU, at small sizes, to see that
    it works.
    """

    report: Report
    graph: Graph
    rulebook: Rulebook
    texts: Mapping[str, str]
    only: Sequence[str] = ()
    candidates: bool = False
    compiled: bool = True
    whole: bool = True
    rehearse: bool = False
    tune: bool = True
    progress: Progress = lambda what, done, total: None
    ways: dict[str, list[WayRow]] = field(default_factory=dict[str, list[WayRow]])
    searches: dict[str, SearchResult] = field(default_factory=dict[str, SearchResult])

    def failures(self) -> Iterator[tuple[str, WayRow]]:
        """Yield the failed rows, each with the name of its group or of the model."""
        for subject, rows in self.ways.items():
            yield from ((subject, row) for row in rows if row.failure)

    def faults(self) -> Iterator[tuple[str, WayRow]]:
        """Yield the failures of kernels: failures of rivals and of full memories are left out."""
        ours = {way.name for way in (*_WITH_KERNELS, KERNEL_TUNED)}
        for subject, row in self.failures():
            if row.way in ours and not str(row.failure).endswith(OUT_OF_MEMORY):
                yield subject, row


def read(file: Path) -> tuple[Report, Graph, dict[str, str]]:
    """Read a report as `--out` leaves it: with the graph in it or beside it, and its kernels' files
    by group. Raises UsageError where one is missing or was not written by this tool."""
    report, graph_file = load_report(file), file.parent / "graph.json"
    if report.graph is None and not graph_file.is_file():
        raise UsageError(
            f"{file}: no graph in it and no graph.json beside it; run analyze with --out again"
        )
    try:
        graph = from_data(Graph, report.graph or loads(graph_file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{graph_file}: not a graph of fusion-advisor; analyze again") from error
    files = {g.id: file.parent / g.kernel.file for g in report.groups if g.kernel.file}
    texts = {k: each.read_text(encoding="utf-8") for k, each in files.items() if each.is_file()}
    return report, graph, texts


def bench(run: BenchRun) -> Report:
    """Check and time every way of each group and of the model; returns the report with the
    measurements. An interrupt (Ctrl-C) ends the run and keeps the finished rows. Raises UsageError
    where a group is not in the graph, or where the GPU does not answer."""
    device = run.rulebook.device(run.report.device.name)
    flow = dataflow(run.graph, device)
    chosen = _chosen(run)
    subjects = list(_subjects(run, flow, chosen))
    rules, timeout_s = timing_rules(run.rulebook, device), run.rulebook.measure.timeout.base
    complete = True
    where = "rehearse" if run.rehearse else "gpu"
    with Worker("fusion_advisor.measure.child", where) as worker:
        run.progress("ceilings", 0, 1)
        try:
            top = ceilings(worker, rules, timeout_s)
        except WorkerError as error:
            raise UsageError(f"the GPU cannot be measured: {error}") from error
        try:
            _Session(run, flow, subjects, worker, rules, timeout_s, top, device).measure()
        except KeyboardInterrupt:
            complete = False
            worker.abandon()
    for group in chosen:
        if group.id in run.ways:
            settle(group, measured(group, run.ways[group.id]))
    tie = run.rulebook.measure.tie.value
    own = [subject.id for subject in _with_own_op(run, subjects)]
    model = run.ways.get("model", [])
    run.report.bench = bench_row(top, model, complete, tie=tie, own_ops=own)
    return run.report


def tuning_of(run: BenchRun, folder: Path) -> dict[Path, str]:
    """File with the numbers of launches that a run found, by its path, beside the kernels of the
    report in `folder`; none where it found none. Raises UsageError for a file there that cannot be
    read."""
    files = (row.kernel.file for row in run.report.groups if row.kernel.file)
    return tuning_file(folder / Path(next(files, "")).parent, run.searches, run.texts)


# -- what is measured ------------------------------------------------------------------------------


def _chosen(run: BenchRun) -> list[GroupRow]:
    """Groups, and rejected candidates that have a plan, as asked for or named."""
    groups = {group.id: group for group in run.report.groups}
    planned = [row for row in run.report.candidates if row.kernel.schedule and row.launches > 1]
    known = groups | {row.id: row for row in planned}
    unknown = [name for name in run.only if name not in known]
    if unknown:
        raise UsageError(f"--only {unknown[0]}: the report's groups are {', '.join(known)}")
    return [known[name] for name in run.only or (known if run.candidates else groups)]


def _subjects(run: BenchRun, flow: Dataflow, chosen: Sequence[GroupRow]) -> Iterator[BenchSubject]:
    """Yield each group with its kernel at the graph's sizes; a candidate without a kernel becomes a
    failed row."""
    for group in chosen:
        subject = _subject(run, flow, group)
        if isinstance(subject, BenchSubject):
            yield subject
        elif group.verdict == "fuse":
            raise UsageError(f"{group.id}: {subject}; analyze again")
        else:
            run.ways[group.id] = [WayRow(way=KERNEL.name, failure=subject)]


def _subject(run: BenchRun, flow: Dataflow, group: GroupRow) -> BenchSubject | str:
    """Group of the report with its kernel, or why it has none."""
    lost = [name for name in group.nodes if name not in flow.position]
    if lost:
        raise UsageError(f"{group.id}: its node {lost[0]} is not in the graph; analyze again")
    places = [tuple(flow.position[name] for name in names) for names in group.instances]
    launches = [tuple(i for i in place if flow.launches(i)) for place in places]
    decision = decide(flow, launches[0], run.rulebook)
    if decision.subject.plan is None:
        return "these rules have no plan for it"
    name = group.kernel.entry or group.id
    kernel = attempt(flow, decision, name, run.rulebook, full_size=not run.rehearse)
    if isinstance(kernel, str):
        return kernel
    if group.id in run.texts:
        kernel = replace(kernel, text=run.texts[group.id])
    if run.rehearse:
        kernel = replace(kernel, cases=kernel.cases[-1:])
    accepted = group.verdict == "fuse"
    return BenchSubject(group.id, group.pattern, decision, kernel, tuple(launches), accepted)


def _with_own_op(run: BenchRun, subjects: Sequence[BenchSubject]) -> list[BenchSubject]:
    """Groups for which the framework's own op was measured as good as the kernel."""
    tie = run.rulebook.measure.tie.value
    return [
        subject
        for subject in subjects
        if subject.accepted and own_op_serves(run.ways.get(subject.id, []), tie)
    ]


# -- measuring -------------------------------------------------------------------------------------


_BACKENDS = (BACKEND, BACKEND_GRAPHED)
_WITH_KERNELS = (KERNEL, KERNEL_COMPILED, KERNEL_GRAPHED, *_BACKENDS)
"""Ways that equal eager, or torch.compile, where no group has a kernel."""


@dataclass
class _Session:
    """Session of one child process on the GPU, with all of its jobs."""

    run: BenchRun
    flow: Dataflow
    subjects: Sequence[BenchSubject]
    worker: Worker
    rules: TimingRules
    timeout_s: float
    top: Ceilings
    device: Device
    done: int = 1

    def measure(self) -> None:
        """Check the kernels, time every way of each, then the model's."""
        run = self.run
        plan = [
            (one, way)
            for one in self.subjects
            for way in ways(one, compiled=run.compiled and one.accepted)
        ]
        models = self._model_ways() if run.whole else ()
        tunes = run.tune and not run.rehearse
        total = 1 + len(self.subjects) + tunes + len(plan) + len(models)
        checks, tuned = self._checked(total), dict[str, BenchSubject]()
        if tunes:
            self._tell("faster numbers of the kernels' launches", total)
            tuned = self._tuned(checks)
        for subject, way in plan:
            self._tell(f"{subject.id} {way.name}", total)
            self._group(subject, way, checks[subject.id])
            if way == KERNEL and subject.id in tuned:
                self._group(tuned[subject.id], KERNEL_TUNED, checks[subject.id])
        self.subjects = [tuned.get(one.id, one) for one in self.subjects]
        for way, replaced in self._models() if run.whole else ():
            self._tell(f"the whole model, {way.name}", total)
            self._model(way, replaced)

    def _tell(self, what: str, total: int) -> None:
        self.run.progress(what, self.done, total)
        self.done += 1

    def _checked(self, total: int) -> dict[str, Check]:
        """Check every kernel on the GPU, against float64, with the cases that the
        interpreter checks."""
        run = self.run
        found: dict[str, Check] = {}
        where: Where = "interpreter" if run.rehearse else "gpu"
        seeds, rules = run.rulebook.verify.seeds.count, run.rulebook.verify
        rows = {row.id: row for row in (*run.report.groups, *run.report.candidates)}
        with checker(where, rules) as worker:
            for subject in self.subjects:
                self._tell(f"{subject.id} check", total)
                check = submit_check(worker, subject.kernel, seeds=seeds, rules=rules)()
                found[subject.id] = check
                row = rows[subject.id].kernel
                row.check = CheckRow.of(check)
                if check.passed and not run.rehearse:
                    row.status, row.why = "gpu-checked", None
        return found

    def _tuned(self, checks: Mapping[str, Check]) -> dict[str, BenchSubject]:
        """Groups whose kernels are faster with other numbers of their launches, with these: of the
        most valuable group first, as long as `[tuning] spent` allows."""
        run, found = self.run, dict[str, BenchSubject]()
        tuning, verify = run.rulebook.tuning, run.rulebook.verify
        until = time.monotonic() + tuning.spent.base
        worth = {group.id: group.impact.saved_us_total for group in run.report.groups}
        searched = searcher(self.worker, self.device, run.rulebook, tuning.offered.count)
        with checker("gpu", verify) as worker:

            def proven(kernel: Kernel) -> Proven:
                check = submit_check(worker, kernel, seeds=verify.seeds.count, rules=verify)
                return check(), None

            able = [one for one in self.subjects if one.accepted and checks[one.id].passed]
            for one in sorted(able, key=lambda one: -worth[one.id]):
                if time.monotonic() > until:
                    break

                def written(decision: Decision, name: str = one.kernel.name) -> Kernel | str:
                    return attempt(self.flow, decision, name, run.rulebook, full_size=True)

                result = searched(one.decision, one.kernel, written, proven)
                run.searches[one.id] = result
                if result.numbers:
                    found[one.id] = replace(one, kernel=result.kernel)
        return found

    def _group(self, subject: BenchSubject, way: Way, check: Check) -> None:
        if way.kind == "kernel" and not check.passed:
            found = Measurement(subject.id, way.name, failure=_unfit(check))
        else:
            found = measure_group(subject, way, self.worker, self.rules, self.timeout_s)
        self._keep(found, subject.decision.fused_bytes)

    def _models(self) -> Iterator[tuple[Way, tuple[Replacement, ...]]]:
        """Yield the ways of running the model, each with the replacements of its launches."""
        flow, rules = self.flow, self.run.rulebook
        accepted = [subject for subject in self.subjects if subject.accepted]
        kernels = tuple(in_place(flow, accepted, rules))
        own = tuple(own_ops(flow, _with_own_op(self.run, accepted), rules))
        needed = {OWN_OPS: own} | dict.fromkeys(_WITH_KERNELS, kernels)
        for way in self._model_ways():
            if needed.get(way, True):
                yield way, needed[way] if way in needed and way not in _BACKENDS else ()

    def _model_ways(self) -> tuple[Way, ...]:
        """Ways of running the model that may be worth a measurement."""
        compiled = (COMPILED[0], COMPILED[2], KERNEL_COMPILED, KERNEL_GRAPHED, *_BACKENDS)
        return (EAGER, OWN_OPS, KERNEL, *(compiled if self.run.compiled else ()))

    def _model(self, way: Way, replaced: Sequence[Replacement]) -> None:
        found = measure_model(self.flow, replaced, way, self.worker, self.rules, self.timeout_s)
        self._keep(found, 0)

    def _keep(self, found: Measurement, least_bytes: int) -> None:
        row = way_row(found, least_bytes, self.top.copy)
        self.run.ways.setdefault(found.subject, []).append(row)


def _unfit(check: Check) -> str:
    """Reason why a kernel is not timed."""
    failure = check.failure or ""
    if failure.endswith(OUT_OF_MEMORY):
        return f"{OUT_OF_MEMORY} in its check"
    return f"wrong: {failure}"
