"""Analyses every problem of a KernelBench folder and audits the result; writes a table.

    python -m benchmarks.kernelbench.audit FOLDER [--levels 1,2,3,4] [--families]
        [--markdown F] [--json F] [--kernels F] [--no-verify] [--device h200] [--train]

For each problem: how much of the saveable traffic the accepted groups recover; whether every
accepted group's kernel passes the checker; whether the FLOPs of matmul-class nodes equal
`torch.utils.flop_counter`; and how the bytes compare with an independent count, made by a dispatch
mode while the model runs eagerly under fake tensors, every operand and every result once. Ops that
the two count differently on purpose are listed with the reason (`REASONS`); anything else counts
as unexplained. With `--train` a problem is its whole training step, which has no second count.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.annotate import Annotated
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.frontend.child import capture_here
from fusion_advisor.fusion.components import DecidedSet, Grouping
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.verify.driver import checker, submit_check

from . import capture, independent

RULES = load_rulebook()

REASONS: dict[str, str] = {
    "gather": "rows touched, not the whole table",
    "scatter": "places written, not the whole target",
    "window": "elements that some window touches",
    "attention": "one flash kernel on CUDA; the CPU build runs another variant",
    "recurrent": "one cuDNN call on CUDA; the CPU build unrolls it",
    "creation": "only the shape of the operand is used",
    "allocation": "an allocation launches no kernel",
    "overwrite": "a fill or copy does not read its target",
    "norm": "one fused kernel on CUDA; the CPU build composes it",
    "loss": "two passes on CUDA when the loss is reduced",
    "view": "a view is free",
    "device": "the CPU build lays attention's operands out and multiplies them differently",
}


@dataclass
class Audit:
    """What was found for one problem. Bytes and FLOPs are totals over its launches."""

    level: str
    problem: str
    error: str = ""
    kernels: int = 0
    groups: int = 0
    instances: int = 0
    saved: int = 0
    saveable: int = 0
    coverage: float = 0.0
    gap: float = 0.0
    flops: tuple[int, int] = (0, 0)
    bytes: tuple[int, int] = (0, 0)
    differences: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes by reason; `unexplained: OP` for what no reason covers."""
    causes: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes that rejected maximal regions would save, by the deciding gate."""
    emitted: list[str] = field(default_factory=list[str])
    failures: list[str] = field(default_factory=list[str])


def main() -> int:
    arguments = _arguments()
    audits = _run(arguments)
    _write(audits, arguments)
    wrong = [a for a in audits if a.error or a.failures or a.flops[0] != a.flops[1]]
    return int(bool(wrong))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--levels", default="1,2,3,4")
    parser.add_argument("--match", default="", help="only problems whose name contains this")
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--train", action="store_true", help="each problem's training step")
    parser.add_argument("--kernels", type=Path, help="write the distinct kernels for `check`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


# -- one problem, in a process of its own ----------------------------------------------------------


def _audit(job: capture.Job, device: str) -> tuple[Audit, list[str]]:
    audit = Audit(job.level, job.problem)
    kernels: list[str] = []
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(2 * capture.SECONDS)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 for the life of this process
    try:
        if job.pretrained:
            capture.build_from_geometry()
        flow, grouping = found_in(job.model, job.scenario, device)
        kernels += kernels_of(flow, grouping)
        _describe(audit, flow.annotated, grouping)
        if not job.scenario.step:
            _count_independently(audit, flow.annotated, job)
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        audit.error = f"{type(error).__name__}: {str(error)[:200]}"
    return audit, kernels


def found_in(model: str, scenario: Scenario, device: str) -> tuple[Dataflow, Grouping[DecidedSet]]:
    """Dataflow of a model that is captured in this process, and what to fuse in it."""
    flow = dataflow(capture_here(model, scenario), RULES.device(device))
    return flow, fuse(flow, RULES).grouping


def kernels_of(flow: Dataflow, grouping: Grouping[DecidedSet]) -> Iterator[str]:
    """Yield the kernel of each group as JSON, with a case of the graph's own sizes."""
    for found in grouping.groups:
        yield to_json(emit(flow, found.decision, "fused", RULES, full_size=True))


def _too_long(*_: Any) -> None:
    raise TimeoutError(f"longer than {2 * capture.SECONDS} s")


def _describe(audit: Audit, annotated: Annotated, grouping: Grouping[DecidedSet]) -> None:
    costs = annotated.costs.values()
    total = sum(cost.time_us for cost in costs)
    audit.kernels = sum(cost.launches for cost in costs)
    audit.groups = len(grouping.groups)
    audit.instances = sum(len(found.instances) for found in grouping.groups)
    audit.saved = sum(
        (found.decision.unfused_bytes - found.decision.fused_bytes) * len(found.instances)
        for found in grouping.groups
    )
    audit.saveable = grouping.saveable_bytes
    audit.gap = grouping.gap
    modelled = sum(cost.time_us for cost in costs if cost.modelled)
    audit.coverage = modelled / total if total else 1.0
    for found in grouping.candidates:
        decision = found.decision
        if found.parent is None and decision.deciding is not None:
            lost = (decision.unfused_bytes - decision.fused_bytes) * len(found.instances)
            name = f"{decision.deciding.name}: {_cause(decision.deciding.why)}"
            if decision.deciding.name != "compute-bound":
                audit.causes[name] = audit.causes.get(name, 0) + lost


_CAUSES = {
    "alive at once": "the row does not fit",
    "matrix products fed": "a reduction feeds a matrix product",
    "B unfused over": "less than the limit",
}


def _cause(why: str) -> str:
    """The reason without the numbers of one problem."""
    for part, said in _CAUSES.items():
        if part in why:
            return said
    return why.split("; ")[0][:90]


def _count_independently(audit: Audit, annotated: Annotated, job: capture.Job) -> None:
    """Run the model eagerly under fake tensors, counting FLOPs and bytes op by op."""
    seen = independent.count(job.model, job.scenario)
    patterns = frozenset(cost.pattern for cost in annotated.costs.values())
    ours: Counter[str] = Counter()
    flops = 0
    for node in annotated.graph.nodes:
        cost = annotated.costs[node.name]
        ours[node.op] += cost.bytes
        if cost.pattern in independent.COUNTED_PATTERNS:
            flops += cost.flops
    audit.flops = (flops, seen.flops)
    audit.bytes = (sum(ours.values()), sum(seen.bytes.values()))
    for op in ours.keys() | seen.bytes.keys():
        gap = ours[op] - seen.bytes[op]
        if gap:
            reason = independent.reason(op, patterns, frozenset(ours))
            name = reason if reason in REASONS else f"unexplained: {op}"
            audit.differences[name] = audit.differences.get(name, 0) + gap


# -- all problems ----------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> list[Audit]:
    jobs = [*capture.problems(arguments.folder, arguments.levels, arguments.match)]
    audits: list[Audit] = []
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.families:
            jobs += capture.families(Path(scratch))
        if arguments.train:
            trained = {"mode": "train", "step": True}
            jobs = [replace(job, scenario=replace(job.scenario, **trained)) for job in jobs]
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch.export._trace")
        importlib.import_module("torch").set_num_threads(1)
        with multiprocessing.get_context("fork").Pool(
            arguments.processes, maxtasksperchild=1
        ) as pool:
            pending = [(job, pool.apply_async(_audit, (job, arguments.device))) for job in jobs]
            results: list[tuple[Audit, list[str]]] = []
            for job, answer in pending:
                results.append(answer.get())
                print(
                    f"{job.level} {job.problem}: {results[-1][0].error or 'analysed'}",
                    file=sys.stderr,
                    flush=True,
                )
    audits = [audit for audit, _ in results]
    if arguments.kernels:
        _write_kernels(results, arguments.kernels)
    if not arguments.no_verify:
        _verify(results, arguments.processes)
    return audits


def _write_kernels(results: list[tuple[Audit, list[str]]], file: Path) -> None:
    """Each distinct kernel once, with a problem that it comes from."""
    write_kernels(((audit.problem, line) for audit, lines in results for line in lines), file)


def write_kernels(named: Iterable[tuple[str, str]], file: Path) -> None:
    """Write kernels with the problem that each comes from, for `check`; of equal ones the first."""
    first: dict[str, str] = {}
    for name, line in named:
        first.setdefault(line, name)
    rows = ({"problem": name, "kernel": json.loads(line)} for line, name in first.items())
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _verify(results: list[tuple[Audit, list[str]]], processes: int) -> None:
    """Check every distinct kernel once; equal texts with equal cases share the check."""
    workers = [checker("interpreter").start() for _ in range(processes)]
    known: dict[str, Callable[[], Check]] = {}
    seeds = RULES.verify.seeds.count
    for line in {line for _, lines in results for line in lines}:
        kernel = _small(from_json(Kernel, line))
        worker = workers[len(known) % processes]
        known[line] = submit_check(worker, kernel, seeds=seeds, timeout_s=300)
    for audit, lines in results:
        for line in lines:
            check = known[line]()
            audit.emitted.append(check.where)
            if not check.passed:
                audit.failures.append(check.failure or "failed")
                print(f"{audit.problem}: {check.failure}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.close()


def _small(kernel: Kernel) -> Kernel:
    """Without the case of the graph's own sizes, which only a GPU can run."""
    return replace(kernel, cases=tuple(c for c in kernel.cases if c.name != "the graph's sizes"))


def _write(audits: list[Audit], arguments: argparse.Namespace) -> None:
    text = _markdown(audits, arguments.device)
    Console().print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(audit) for audit in audits], indent=1))


def _markdown(audits: list[Audit], device: str) -> str:
    lines = [
        f"# Audit for {device}",
        "",
        "| level | problems | errors | groups | instances | kernels checked | failed | recovered |"
        " coverage | FLOPs equal | bytes equal or explained |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for level in dict.fromkeys(audit.level for audit in audits):
        of_level = [audit for audit in audits if audit.level == level]
        fine = [a for a in of_level if not a.error]
        saveable = sum(a.saveable for a in fine)
        explained = sum(not any(d.startswith("unexpl") for d in a.differences) for a in fine)
        lines.append(
            f"| {level} | {len(of_level)} | {len(of_level) - len(fine)}"
            f" | {sum(a.groups for a in fine)} | {sum(a.instances for a in fine)}"
            f" | {sum(len(a.emitted) for a in fine)} | {sum(len(a.failures) for a in fine)}"
            f" | {sum(a.saved for a in fine) / max(saveable, 1):.1%}"
            f" | {sum(a.coverage for a in fine) / max(len(fine), 1):.2%}"
            f" | {sum(a.flops[0] == a.flops[1] for a in fine)}/{len(fine)}"
            f" | {explained}/{len(fine)} |"
        )
    lines += [
        "",
        "## What is not fused, by cause",
        "",
        "| cause | bytes it would save |",
        "|---|---|",
    ]
    causes: Counter[str] = Counter()
    for audit in audits:
        causes.update(audit.causes)
    lines += [f"| {cause} | {size:,} |" for cause, size in causes.most_common()]
    lines += [
        "",
        "## Where the bytes differ from the independent count",
        "",
        "| reason | problems | bytes |",
        "|---|---|---|",
    ]
    reasons: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for audit in audits:
        for reason, gap in audit.differences.items():
            reasons[reason] += 1
            size[reason] += gap
    lines += [
        f"| {REASONS.get(reason, reason)} | {count} | {size[reason]:,} |"
        for reason, count in reasons.most_common()
    ]
    wrong = [a for a in audits if a.error or a.failures or a.flops[0] != a.flops[1] or a.gap]
    lines += ["", "## Problems to look at", "", "| problem | what |", "|---|---|"]
    for audit in wrong:
        said = [audit.error, *audit.failures]
        if audit.flops[0] != audit.flops[1]:
            said.append(f"FLOPs {audit.flops[0]} against {audit.flops[1]}")
        if audit.gap:
            said.append(f"partition within {audit.gap:.1%} of its bound")
        lines.append(f"| {audit.level} {audit.problem} | {'; '.join(filter(None, said))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
