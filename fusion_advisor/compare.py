"""Two reports of one model: what a change did to traffic and verdicts."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.report import GroupRow, Report
from fusion_advisor.reports import wording


def compare(old: Report, new: Report) -> Iterator[str]:
    """Lines for people: totals that changed, then verdicts by fingerprint."""
    if (old.device.name, old.rules.hash) != (new.device.name, new.rules.hash):
        yield (
            f"not the same judge: {old.device.name} with rules {old.rules.hash[:8]},"
            f" {new.device.name} with rules {new.rules.hash[:8]}"
        )
    before, after = dict(wording.totals(old)), dict(wording.totals(new))
    changed = [name for name in after if after[name] != before.get(name)]
    yield from (f"{name}: {before.get(name, '')}  =>  {after[name]}" for name in changed)
    rows = list(_verdicts(old, new))
    yield from rows
    if not changed and not rows:
        yield "no difference in traffic or verdicts"


def _verdicts(old: Report, new: Report) -> Iterator[str]:
    was, now = _by_fingerprint(old), _by_fingerprint(new)
    _pair_by_place(was, now)
    for mark, row in now.items():
        known = was.get(mark)
        if known is None:
            yield f"new      {_described(row)}"
        elif known.verdict != row.verdict:
            yield f"changed  {known.verdict} => {_described(row)}"
        elif len(known.instances) != len(row.instances):
            yield f"changed  {len(known.instances)} instances => {_described(row)}"
    for mark, row in was.items():
        if mark not in now:
            yield f"gone     {_described(row)}"


def _by_fingerprint(report: Report) -> dict[str, GroupRow]:
    """Accepted groups win over candidates of the same computation."""
    return {row.fingerprint: row for row in (*report.candidates, *report.groups)}


def _pair_by_place(was: dict[str, GroupRow], now: dict[str, GroupRow]) -> None:
    """What only one side knows by its fingerprint, another dtype or batch say, is known by its
    pattern and lines where these are one's alone."""
    left = _places({mark: row for mark, row in was.items() if mark not in now})
    right = _places({mark: row for mark, row in now.items() if mark not in was})
    for place, marks in left.items():
        if len(marks) == 1 and len(right.get(place, ())) == 1:
            was[right[place][0]] = was.pop(marks[0])


def _places(rows: dict[str, GroupRow]) -> dict[object, list[str]]:
    found: dict[object, list[str]] = {}
    for mark, row in rows.items():
        lines = tuple((source.file, source.line) for source in row.sources)
        found.setdefault((row.pattern, lines), []).append(mark)
    return found


def _described(row: GroupRow) -> str:
    return (
        f"{row.verdict} {row.pattern} at {wording.place(row)}, {len(row.instances)} instances:"
        f" {wording.gate(row.deciding)}"
    )
