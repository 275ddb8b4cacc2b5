"""The report for a terminal: what matters first, one line a verdict with its deciding number."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusion_advisor.report import AdviceRow, GroupRow, Report
from fusion_advisor.reports import wording

Say = Callable[[GroupRow], Iterator[RenderableType]]
TOP = 10
MIN_WIDTH = 60


def render(report: Report) -> str:
    """Plain text as wide as the terminal, 60 columns at least."""
    width = max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(document(report))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def document(report: Report, top: int = TOP, *, gates: bool = False) -> RenderableType:
    """What rich prints; `top` rows of each list, every gate of a group on request."""
    return Group(*_parts(report, top, gates))


def _parts(report: Report, top: int, gates: bool) -> Iterator[RenderableType]:
    def told(say: Say) -> Say:
        return partial(_with_gates, say) if gates else say

    yield Text(f"{report.model.source} on {report.device.title}", style="bold")
    yield _line("scenario: " + wording.scenario(report), "dim")
    yield _line("assumed: " + "; ".join(report.scenario.defaults), "dim")
    yield _line("device: " + wording.device(report), "dim")
    for what, said in wording.notes(report):
        yield _line(f"{what}: {said}", "yellow")
    for broken in report.model.graph_breaks:
        yield _line(f"graph break: {broken}", "yellow")
    yield from _section("Totals", [_pairs(wording.totals(report))])
    yield from _section("Time by bottleneck", [_pairs(_shares(report))])
    yield from _ranked("Fuse", report.groups, top, told(partial(_accepted, report)))
    if report.bench:
        yield from _section("Measured", _measured(report))
    yield from _ranked("Rejected", wording.apart(report), top, told(_rejected))
    reasons = [(str(count), reason) for reason, count in wording.reasons(report, top)]
    if reasons:
        yield from _section("Not in a group, by reason", [_pairs(reasons)])
    causes = [(wording.time(row.time_us), row.cause) for row in report.unmodelled[:top]]
    if causes:
        yield from _section("Not modelled", [_pairs(causes)])
    if report.advice:
        advice = [line for row in report.advice[:top] for line in _advised(row)]
        yield from _section("Advice", advice)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style)


def _section(title: str, content: Iterable[RenderableType]) -> Iterator[RenderableType]:
    yield Text()
    yield Text(title, style="bold")
    for part in content:
        yield Padding(part, (0, 0, 0, 2), expand=False)


def _pairs(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _shares(report: Report) -> list[tuple[str, str]]:
    return [
        (name, f"{wording.time(us):>9}  {wording.percent(share):>5}  {'█' * round(20 * share)}")
        for name, us, share in wording.bottlenecks(report)
    ]


def _ranked(
    title: str,
    rows: list[GroupRow],
    top: int,
    say: Say,
) -> Iterator[RenderableType]:
    count = f"{title}: {len(rows)}" if rows else f"{title}: none"
    shown = [line for row in rows[:top] for line in say(row)]
    if len(rows) > top:
        shown.append(_line(f"… and {len(rows) - top} more in the report", "dim"))
    yield from _section(count, shown)


def _accepted(report: Report, group: GroupRow) -> Iterator[RenderableType]:
    low, high = group.predicted.interval
    yield Text.assemble(
        (f"{group.id} ", "bold"),
        (wording.named(group), "green"),
        f" saves {wording.gain(group)}, {wording.percent(group.impact.share)} of the step:"
        f" {wording.launches(group)},"
        f" {group.predicted.speedup:.2f}x predicted ({low:.2f} to {high:.2f})",
    )
    yield from _details(
        wording.gate(group.deciding),
        *filter(None, [wording.disagreement(group), wording.noted(report, group)]),
        wording.place(group),
        f"{group.route}: {group.action.code}" if group.action.code else group.route,
        f"kernel {group.kernel.file or group.kernel.entry or ''} {wording.kernel(group)}",
    )


def _with_gates(say: Say, group: GroupRow) -> Iterator[RenderableType]:
    yield from say(group)
    yield from _details(*(f"{row.outcome}: {wording.gate(row)}" for row in group.gates))


def _measured(report: Report) -> Iterator[RenderableType]:
    bench = report.bench
    assert bench is not None
    machine = ", ".join(f"{name} {value}" for name, value in bench.machine.items())
    yield _line(f"on {machine}; copy {bench.copy_bandwidth / 1e9:.0f} GB/s", "dim")
    for group in wording.timed(report):
        yield Text(f"{wording.marked(group)}: {wording.measured(group)}")
        yield _columns(wording.ways(group))
        yield from _details(*wording.inductor(group))
    yield from map(Text, wording.judged(report))
    yield Text(f"the model: {bench.recommended}; {bench.why}")
    if not bench.complete:
        yield Text("interrupted: what is finished is here", style="yellow")


def _columns(rows: Iterable[tuple[str, ...]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*map(Text, row))
    return Padding(table, (0, 0, 0, 2), expand=False)


def _rejected(group: GroupRow) -> Iterator[RenderableType]:
    yield Text.assemble(
        (f"{group.id} ", "bold"),
        (wording.named(group), "red"),
        f", {group.launches} kernels: {wording.gate(group.deciding)}",
    )
    if said := wording.disagreement(group):
        yield from _details(said)
    if group.fixable:
        yield from _details(f"fixable: {group.fixable.change}")


def _advised(row: AdviceRow) -> Iterator[RenderableType]:
    yield Text.assemble((row.code, "yellow"), f" {wording.advice(row)}")
    yield from _details(*([wording.place(row)] if row.sources else []), *row.evidence)


def _details(*lines: str) -> Iterator[RenderableType]:
    for line in lines:
        yield Padding(_line(line, "dim"), (0, 0, 0, 3), expand=False)
