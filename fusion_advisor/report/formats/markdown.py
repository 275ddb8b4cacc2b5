"""Report as Markdown, for a comment on a pull request: the answer first, the detail folded."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import AdviceRow, BenchRow, GroupRow, Profile, Report

LIMIT = 65_536
"""Limit on the text's bytes: GitHub takes comments of so many characters."""

_TOP = (50, 25, 12, 6, 3, 1, 0)
"""Rows of each list that are tried, the largest number first, until the text stays within
the limit."""

_LONGEST = 400
"""Limit on the characters of the report's text in one cell or line."""


def render(report: Report) -> str:
    """Render headings, tables and folded details, below LIMIT; rows that a list leaves out
    are counted."""
    texts = ("\n".join(_lines(report, top)) + "\n" for top in _TOP)
    return next(text for text in texts if len(text.encode()) <= LIMIT)


def _lines(report: Report, top: int) -> Iterator[str]:
    yield f"# {_code(report.model.source)} on {_text(report.device.title)}"
    yield ""
    for what, said in wording.notes(report):
        yield f"**{what.capitalize()}**: {_text(said)}."
        yield ""
    yield from _table(("", ""), [(name, _text(said)) for name, said in wording.totals(report)])
    yield ""
    yield from _fuse(report, top)
    for group in report.groups[:top]:
        yield from _folded(f"{group.id} {wording.named(group)}: gates and kernel", _details(group))
    if rows := wording.saved(report, top):
        cells = [tuple(map(_text, row)) for row in rows]
        head = ("bytes", "made by", "source", "read by the backward of", "leaner")
        saved = [*_table(head, cells), *_more(len(report.saved), top)]
        yield from _folded("Saved for backward", saved)
    if report.profile:
        yield from _folded("Profile", _profile(report, report.profile, top))
    if report.bench:
        yield from _folded("Measured", _measured(report, report.bench, top))
    if candidates := wording.independent_candidates(report):
        yield from _folded("Rejected", _rejected(candidates, top))
    if reasons := wording.reasons(report, top):
        rows = [(str(count), _text(reason)) for reason, count in reasons]
        yield from _folded("Not in a group, by reason", _table(("nodes", "reason"), rows))
    if found := wording.advised(report):
        lines = [line for row in found[:top] for line in _advised(row)]
        yield from _folded("Advice", [*lines, *_more(len(found), top)])
    yield from _folded("Time by bottleneck, and what was assumed", _assumed(report))


def _fuse(report: Report, top: int) -> Iterator[str]:
    if not report.groups:
        yield "**Nothing to fuse.**"
        return
    yield f"**Fuse: {len(report.groups)}**"
    yield ""
    notes = {group.id: wording.reviewers_note(report, group) for group in report.groups}
    yield from _table(
        ("id", "what", "saves", "kernels", "traffic", "predicted", "route", "kernel", "source"),
        [_row(group, notes[group.id]) for group in report.groups[:top]],
    )
    yield from _more(len(report.groups), top)


def _row(group: GroupRow, note: str) -> tuple[str, ...]:
    return (
        f"{group.id} **{_text(note)}**" if note else group.id,
        _text(wording.named(group)),
        wording.gain(group),
        f"{group.launches} → {group.launches - group.impact.launches_saved}",
        f"{group.traffic.ratio:.4g}x",
        f"{group.predicted.speedup:.2f}x{wording.surprise(group)}",
        _text(group.route),
        _text(wording.kernel(group)),
        _code(wording.place(group)),
    )


def _details(group: GroupRow) -> Iterator[str]:
    yield _text(group.action.text)
    if said := wording.disagreement(group):
        yield ""
        yield f"{said[0].upper()}{said[1:]}."
    if group.action.code:
        yield ""
        yield _code(group.action.code)
    yield ""
    yield from _table(
        ("gate", "outcome", "measured", "limit", "why"),
        [
            (
                f"{gate.code} {gate.name}",
                _text(gate.outcome),
                measured,
                _text(needs),
                _text(gate.why),
            )
            for gate in group.gates
            for measured, needs in [wording.reading_and_limit(gate)]
        ],
    )


def _measured(report: Report, bench: BenchRow, top: int) -> Iterator[str]:
    machine = ", ".join(f"{name} {value}" for name, value in bench.machine.items())
    yield f"On {_text(machine)}; copy {bench.copy_bandwidth / 1e9:.0f} GB/s, read and written."
    yield "Cold L2, medians with quartiles."
    timed = wording.measured_rows(report)
    for group in timed[:top]:
        yield ""
        yield f"**{_text(wording.id_and_name(group))}**: {_text(wording.measured(group))}."
        yield ""
        ways = [tuple(map(_text, way)) for way in wording.ways(group)]
        yield from _table(("way", "time", "share of copy", ""), ways)
    yield from _more(len(timed), top)
    yield ""
    yield f"**The model**: {_text(bench.recommended)}; {_text(bench.why)}."


def _profile(report: Report, profile: Profile, top: int) -> Iterator[str]:
    yield from _table(
        ("class", "launches", "predicted", "measured", "median error"),
        [
            (
                _text(row.name),
                str(row.launches),
                wording.time(row.predicted_us),
                wording.time(row.measured_us),
                "" if row.error is None else wording.percent(row.error),
            )
            for row in profile.classes
        ],
    )
    yield ""
    rows = [tuple(map(_text, row)) for row in wording.launch_times(report, top)]
    yield from _table(("launch", "op", "predicted", "measured", "linked"), rows)
    if rest := wording.unlinked_times(report, top):
        yield ""
        head = ("not linked", "phase", "kernel", "launched by")
        yield from _table(head, [tuple(map(_text, row)) for row in rest])


def _rejected(candidates: list[GroupRow], top: int) -> Iterator[str]:
    yield from _table(
        ("id", "what", "kernels", "decided by", "fixable", "source"),
        [
            (
                group.id,
                _text(wording.named(group)),
                str(group.launches),
                _text(wording.decided(group)),
                _text(group.fixable.change) if group.fixable else "",
                _code(wording.place(group)),
            )
            for group in candidates[:top]
        ],
    )
    yield from _more(len(candidates), top)


def _advised(row: AdviceRow) -> Iterator[str]:
    place = f" {_code(wording.place(row))}" if row.sources else ""
    yield f"- **{_text(row.code)}** {_text(wording.advice(row))}{place}"
    yield from (f"  - {_text(line)}" for line in row.evidence)


def _assumed(report: Report) -> Iterator[str]:
    rows = wording.bottlenecks(report)
    yield from _table(
        ("bound", "time", "share", "HBM bytes"),
        [
            (_text(name), wording.time(us), wording.percent(share), wording.size(moved))
            for name, us, share, moved in rows
        ],
    )
    yield ""
    yield f"- Scenario: {_text(wording.scenario(report))}."
    yield f"- Assumed: {_text('; '.join(report.scenario.defaults))}."
    yield f"- Captured by {_text(report.model.captured_by)}."
    yield f"- Device: {_text(wording.device(report))}."


# -- Markdown --------------------------------------------------------------------------------------


def _folded(title: str, content: Iterable[str]) -> Iterator[str]:
    yield ""
    yield f"<details><summary>{html.escape(_shown(title))}</summary>"
    yield ""
    yield from content
    yield ""
    yield "</details>"


def _more(count: int, top: int) -> Iterator[str]:
    if count > top:
        yield ""
        yield f"… and {count - top} more in the JSON report."


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield _cells(head)
    yield _cells("---" for _ in head)
    yield from map(_cells, rows)


def _cells(values: Iterable[str]) -> str:
    """Join a table row; GitHub splits a table at bars before anything else, in code too, so bars
    are escaped."""
    barred = (value.replace("|", "\\|") for value in values)
    return f"| {' | '.join(barred)} |"


def _shown(text: str) -> str:
    """Escape a text into one line that shows every character: a character without a glyph
    by its number."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    visible = (c if c.isprintable() else f"U+{ord(c):04X}" for c in " ".join(text.split()))
    return "".join(visible)


_MEANS_SOMETHING = re.compile(r"[\\`*_\[\]<>&~$]|:(?=//)|(?<=www)\.")


def _text(text: str) -> str:
    """Escape a text so that it has no markup, no link, and mentions nobody."""
    return _MEANS_SOMETHING.sub(r"\\\g<0>", _shown(text)).replace("@", "@&#8203;")


def _code(text: str) -> str:
    """Format a text as code, in which nothing has a meaning but the fence."""
    shown = _shown(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}" if shown else ""
