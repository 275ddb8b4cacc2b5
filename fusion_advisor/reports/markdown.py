"""The report as Markdown, for a pull request or a wiki."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusion_advisor.report import BenchRow, GroupRow, Report
from fusion_advisor.reports import wording

TOP = 50


def render(report: Report) -> str:
    """Headings, tables, and the gates of every group."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# {report.model.source} on {report.device.title}"
    yield ""
    yield f"Scenario: {wording.scenario(report)}."
    yield f"Assumed: {'; '.join(report.scenario.defaults)}. Captured by {report.model.captured_by}."
    yield f"Device: {wording.device(report)}."
    yield ""
    yield from _table(("", ""), wording.totals(report))
    yield ""
    yield "## Time by bottleneck"
    yield ""
    yield from _table(
        ("bound", "time", "share"),
        [(n, wording.time(us), wording.percent(s)) for n, us, s in wording.bottlenecks(report)],
    )
    yield ""
    yield "## Fuse"
    yield ""
    yield from _table(
        ("id", "pattern", "saves", "kernels", "traffic", "predicted", "route", "kernel", "source"),
        [_row(group) for group in report.groups],
    )
    for group in report.groups[:TOP]:
        yield from _details(group)
    if report.bench:
        yield from _measured(report, report.bench)
    yield ""
    yield "## Rejected"
    yield ""
    yield from _table(
        ("id", "pattern", "kernels", "decided by", "fixable", "source"),
        [
            (
                group.id,
                group.pattern,
                str(group.launches),
                wording.decided(group),
                group.fixable.change if group.fixable else "",
                wording.place(group),
            )
            for group in wording.apart(report)[:TOP]
        ],
    )
    yield ""
    yield "## Not in a group, by reason"
    yield ""
    yield from _table(
        ("nodes", "reason"), [(str(n), reason) for reason, n in wording.reasons(report, TOP)]
    )
    if report.advice:
        yield ""
        yield "## Advice"
        yield ""
        yield from (f"- **{row.code}**: {row.message}" for row in report.advice)


def _measured(report: Report, bench: BenchRow) -> Iterator[str]:
    yield ""
    yield "## Measured"
    yield ""
    machine = ", ".join(f"{name} {value}" for name, value in bench.machine.items())
    yield f"On {machine}; copy {bench.copy_bandwidth / 1e9:.0f} GB/s, read and written. Cold L2,"
    yield "medians with quartiles."
    for group in wording.timed(report):
        yield ""
        yield f"**{wording.marked(group)}**: {wording.measured(group)}."
        yield ""
        yield from _table(("way", "time", "share of copy", ""), wording.ways(group))
        if made := wording.inductor(group):
            yield ""
            yield from (f"- {line}" for line in made)
    if verdicts := wording.judged(report):
        yield ""
        yield from (f"- {line}" for line in verdicts)
    yield ""
    yield f"**The model**: {bench.recommended}; {bench.why}."


def _row(group: GroupRow) -> tuple[str, ...]:
    return (
        group.id,
        group.pattern,
        wording.gain(group),
        f"{group.launches} → {group.launches - group.impact.launches_saved}",
        f"{group.traffic.ratio:.4g}x",
        f"{group.predicted.speedup:.2f}x",
        group.route,
        wording.kernel(group),
        wording.place(group),
    )


def _details(group: GroupRow) -> Iterator[str]:
    yield ""
    yield f"### {group.id}: {group.pattern}"
    yield ""
    yield group.action.text
    if said := wording.disagreement(group):
        yield ""
        yield f"{said[0].upper()}{said[1:]}."
    if group.action.code:
        yield ""
        yield f"    {group.action.code}"
    yield ""
    yield from _table(
        ("gate", "outcome", "measured", "limit", "why"),
        [
            (
                f"{gate.code} {gate.name}",
                gate.outcome,
                "" if gate.measured is None else f"{wording.number(gate.measured)} {gate.unit}",
                f"{gate.comparison} {wording.number(gate.limit)}",
                gate.why,
            )
            for gate in group.gates
        ],
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _cells(head)
    yield _cells("---" for _ in head)
    yield from map(_cells, rows)


def _cells(values: Iterable[str]) -> str:
    escaped = (value.replace("|", "\\|").replace("\n", " ") for value in values)
    return f"| {' | '.join(escaped)} |"
