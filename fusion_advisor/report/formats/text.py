"""Report for a terminal: a summary of at most 40 lines, and on request all the rest."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import AdviceRow, GroupRow, Report

Say = Callable[[GroupRow], Iterator[RenderableType]]

LINES = 40
"""Limit on the lines of a summary, whatever the model and the width."""

TOP = 10
MIN_WIDTH = 60

_INTRODUCING = 2
"""Limit on the lines of a note or a total."""

_SCENARIOS = 8
"""Limit on the scenarios that have a line of their own."""


def render(report: Report, *, verbose: bool = False) -> str:
    """Render plain text as wide as the terminal, 60 columns at least."""
    width = max(MIN_WIDTH, shutil.get_terminal_size((100, 24)).columns)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(document(report, verbose=verbose))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def document(
    report: Report, top: int = TOP, *, verbose: bool = False, assumed: bool = True
) -> RenderableType:
    """Renderable of the report for rich: the summary, with the assumptions if `assumed`; with
    `verbose` also the evidence behind it, `top` rows of each list."""
    found = wording.todo(report)
    summary = _Summary(
        head=[*_head(report, assumed), *_totals(report)],
        todo=[
            _Item(todo.saved_us, todo.share, todo.row, wording.reviewers_note(report, todo.row))
            for todo in found[:top]
        ],
        count=len(found),
        tail=[] if verbose else [*_tail(report, top)],
    )
    return Group(summary, *_rest(report, top)) if verbose else summary


def several(
    weights: Mapping[str, float],
    reports: Mapping[str, Report],
    summaries: Sequence[str],
    top: int = TOP,
) -> RenderableType:
    """Summary of all scenarios, by their weight: the lines of `summaries` for each scenario and,
    last, for all; and the actions, where the same action of several scenarios is one."""
    first = next(iter(reports.values()))
    *each, whole = summaries
    more = len(each) - _SCENARIOS
    lines = [Text(line) for line in each[:_SCENARIOS]]
    lines += [_dim(f"… and {more} more scenarios")] if more > 0 else []
    items = [*_over_all(weights, reports)]
    return _Summary(
        head=[
            Text(f"{first.model.source} on {first.device.title}", style="bold"),
            _Cropped(Text(whole), _INTRODUCING),
            *_bottlenecks(_weighed(weights, reports)),
            *(_Cropped(line, _INTRODUCING) for line in [Text(), *lines]),
        ],
        todo=items[:top],
        count=len(items),
        tail=[_dim("each scenario by itself: --scenario NAME, or --verbose")],
    )


@dataclass(frozen=True)
class _Item:
    """One action with its total saving; `note` is the reviewers' note on it, `times` the number of
    scenarios that it is in."""

    saved_us: float | None
    share: float
    row: GroupRow | AdviceRow
    note: str = ""
    times: int = 1

    def lines(self) -> Iterator[RenderableType]:
        saved = "" if self.saved_us is None else wording.time(self.saved_us)
        share = "" if self.saved_us is None else wording.percent(self.share)
        advised = isinstance(self.row, AdviceRow)
        yield _Cropped(
            Text.assemble(
                f"{saved:>9} {share:>7}  ",
                (f"{self.row.id} " if self.row.id else "", "bold"),
                (wording.named(self.row), "yellow" if advised else "green"),
                f", in {self.times} scenarios" if self.times > 1 else "",
            ),
            1,
        )
        note = f"{self.note}; " if self.note else ""
        yield _Cropped(_dim(f"{note}{wording.action(self.row)}"), _INTRODUCING, 19)


def _weighed(
    weights: Mapping[str, float], reports: Mapping[str, Report]
) -> list[tuple[str, float, float, float]]:
    """Bottlenecks of all scenarios, each by its weight, as `wording.bottlenecks` has them."""
    sums: dict[str, tuple[float, float]] = {}
    for name, report in reports.items():
        for bound, us, _, moved in wording.bottlenecks(report):
            before, bytes_before = sums.get(bound, (0.0, 0.0))
            sums[bound] = before + weights[name] * us, bytes_before + weights[name] * moved
    whole = sum(us for us, _ in sums.values()) or 1.0
    ranked = sorted(sums.items(), key=lambda item: -item[1][0])
    return [(bound, us, us / whole, moved) for bound, (us, moved) in ranked]


def _over_all(weights: Mapping[str, float], reports: Mapping[str, Report]) -> list[_Item]:
    """Actions over all scenarios: rows of one name and place are one action."""
    total = sum(weights[name] * report.totals.time_us for name, report in reports.items()) or 1.0
    found: dict[str, _Item] = {}
    for name, report in reports.items():
        for todo in wording.todo(report):
            us = None if todo.saved_us is None else weights[name] * todo.saved_us
            key = wording.named(todo.row)
            known = found.get(key, _Item(None, 0.0, todo.row, times=0))
            sum_us = us if known.saved_us is None else known.saved_us + (us or 0.0)
            found[key] = replace(
                known, saved_us=sum_us, share=(sum_us or 0.0) / total, times=known.times + 1
            )
    return sorted(found.values(), key=lambda item: (item.saved_us is None, -(item.saved_us or 0.0)))


@dataclass(frozen=True)
class _Summary:
    """Summary within 40 lines: head and tail whole, and between them as many actions as fit, the
    first in any case."""

    head: Sequence[RenderableType]
    todo: Sequence[_Item]
    count: int
    tail: Sequence[RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Group]:
        def height(parts: Iterable[RenderableType]) -> int:
            return len(console.render_lines(Group(*parts), options, pad=False))

        title = f"What to do: {self.count}" if self.count else "What to do: nothing worth fusing"
        shown: list[RenderableType] = []
        fixed = height(self.head) + (1 + height(self.tail) if self.tail else 0)
        left = LINES - fixed - 3  # an empty line, the title, and what is left out
        items = 0
        for item in self.todo:
            lines = [*item.lines()]
            left -= height(lines)
            if left < 0 and items:
                break
            shown += lines
            items += 1
        if self.count > items:
            shown.append(_dim(f"… and {self.count - items} more that save less"))
        yield Group(*self.head, Text(), Text(title, style="bold"), *shown)
        if self.tail:
            yield Group(Text(), *self.tail)


@dataclass(frozen=True)
class _Cropped:
    """Text cut to at most some lines."""

    text: Text
    most: int
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        width = max(options.max_width - self.indent, 1)
        lines = list(self.text.wrap(console, width))
        for line in lines[: self.most]:
            line.rstrip()
        if len(lines) > self.most:
            last = lines[self.most - 1]
            last.truncate(width - 1)
            last.append("…")
        for line in lines[: self.most]:
            yield Text(" " * self.indent).append_text(line)


def _dim(text: str) -> Text:
    return Text(text, style="dim")


# -- the summary -----------------------------------------------------------------------------------


def _head(report: Report, assumed: bool) -> Iterator[RenderableType]:
    yield _Cropped(
        Text(f"{report.model.source} on {report.device.title}", style="bold"), _INTRODUCING
    )
    yield _Cropped(_dim(wording.setting(report)), _INTRODUCING)
    if assumed:
        yield _Cropped(_dim("assumed: " + "; ".join(report.scenario.defaults)), _INTRODUCING)
    for what, said in wording.notes(report):
        yield _Cropped(Text(f"{what}: {said}", style="yellow"), _INTRODUCING)
    if broken := report.model.graph_breaks:
        more = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        yield _Cropped(Text(f"graph break{more}: {broken[0]}", style="yellow"), _INTRODUCING)


_SAID_BELOW = ("FLOPs", "peak activations")


def _totals(report: Report) -> Iterator[RenderableType]:
    yield Text()
    for name, value in wording.totals(report):
        whole = name == "coverage" and report.totals.coverage == 1.0
        if name not in _SAID_BELOW and not whole:
            yield _Cropped(Text(f"{name:<11}{value}"), _INTRODUCING)
    yield from _bottlenecks(wording.bottlenecks(report))
    if found := wording.unfusable_launches(report):
        said = ", ".join(f"{name} {wording.time(us)}" for name, us in found)
        yield _Cropped(_dim(f"  beyond fusion: {said}"), 1)


def _bottlenecks(rows: Iterable[tuple[str, float, float, float]]) -> Iterator[RenderableType]:
    for name, us, share, moved in rows:
        if us:
            times = f"  {name:<9}{wording.time(us):>9} {wording.percent(share):>6}"
            yield _Cropped(Text(f"{times}  {wording.size(moved):>8}  {'█' * round(20 * share)}"), 1)


def _tail(report: Report, top: int) -> Iterator[RenderableType]:
    if report.bench:
        yield _Cropped(
            Text(f"Measured: {report.bench.recommended}; {report.bench.why}"), _INTRODUCING
        )
        if not report.bench.complete:
            yield Text("interrupted: what is finished is here", style="yellow")
    if causes := report.unmodelled:
        each = ", ".join(f"{wording.time(row.time_us)} {row.cause}" for row in causes)
        yield _Cropped(_dim(f"Not modelled: {each}"), 1)
    if said := wording.rejections(report):
        yield _Cropped(_dim(f"Rejected: {said}"), _INTRODUCING)
    if said := wording.short_products(report, top):
        yield _Cropped(_dim(f"Short products: {said}"), 1)
    yield _Cropped(_dim("gates, rejected candidates and what stands alone: --verbose"), 1)


# -- the rest --------------------------------------------------------------------------------------


def _rest(report: Report, top: int) -> Iterator[RenderableType]:
    facts = [row for row in wording.totals(report) if row[0] in (*_SAID_BELOW, "coverage")]
    facts += [("device", wording.device(report))]
    facts += [("graph break", broken) for broken in report.model.graph_breaks]
    yield from _section("What it stands on", [_pairs(facts)])
    yield from _ranked("Fuse", report.groups, top, lambda row: _accepted(report, row))
    if found := wording.advised(report):
        advice = [line for row in found[:top] for line in _advised(row)]
        yield from _section("Advice", advice)
    if rows := wording.saved(report, top):
        yield from _section("Saved for backward", [_columns(rows)])
    if report.profile:
        rows = wording.launch_times(report, top)
        yield from _section("Launches, predicted and measured", [_columns(rows)])
    if rows := wording.unlinked_times(report, top):
        yield from _section("Measured, and no launch of the graph", [_columns(rows)])
    if report.bench:
        yield from _section("Measured", _measured(report))
    yield from _ranked("Rejected", wording.independent_candidates(report), top, _rejected)
    reasons = [(str(count), reason) for reason, count in wording.reasons(report, top)]
    if reasons:
        yield from _section("Not in a group, by reason", [_pairs(reasons)])
    causes = [(wording.time(row.time_us), row.cause) for row in report.unmodelled[:top]]
    if causes:
        yield from _section("Not modelled", [_pairs(causes)])


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


def _ranked(title: str, rows: list[GroupRow], top: int, say: Say) -> Iterator[RenderableType]:
    count = f"{title}: {len(rows)}" if rows else f"{title}: none"
    shown = [line for row in rows[:top] for line in say(row)]
    if len(rows) > top:
        shown.append(_dim(f"… and {len(rows) - top} more in the report"))
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
        *filter(None, [wording.disagreement(group), wording.reviewers_note(report, group)]),
        wording.place(group),
        f"{group.route}: {wording.action(group)}",
        f"kernel {group.kernel.file or group.kernel.entry or ''} {wording.kernel(group)}",
        *_gates(group),
    )


def _gates(group: GroupRow) -> Iterator[str]:
    return (f"{row.outcome}: {wording.gate(row)}" for row in group.gates)


def _measured(report: Report) -> Iterator[RenderableType]:
    bench = report.bench
    assert bench is not None
    machine = ", ".join(f"{name} {value}" for name, value in bench.machine.items())
    yield _dim(f"on {machine}; copy {bench.copy_bandwidth / 1e9:.0f} GB/s")
    for group in wording.measured_rows(report):
        yield Text(f"{wording.id_and_name(group)}: {wording.measured(group)}")
        yield _columns(wording.ways(group))


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
    yield from _details(
        *filter(None, [wording.disagreement(group)]),
        *([f"fixable: {group.fixable.change}"] if group.fixable else []),
        *_gates(group),
    )


def _advised(row: AdviceRow) -> Iterator[RenderableType]:
    yield Text.assemble((row.code, "yellow"), f" {wording.advice(row)}")
    yield from _details(*([wording.place(row)] if row.sources else []), *row.evidence)


def _details(*lines: str) -> Iterator[RenderableType]:
    for line in lines:
        yield Padding(_dim(line), (0, 0, 0, 3), expand=False)
