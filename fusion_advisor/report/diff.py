"""Diff of two reports of one model: the effect of a change on traffic and verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import AdviceRow, GroupRow, Report


def compare(old: Report, new: Report) -> Iterator[str]:
    """Yield lines for people: totals that changed, then verdicts by fingerprint."""
    if old.device.name != new.device.name or not same_tool_and_rules(old, new):
        yield (
            f"not the same judge: {old.device.name} by {made_by(old)}, "
            f"{new.device.name} by {made_by(new)}"
        )
    before, after = dict(wording.totals(old)), dict(wording.totals(new))
    changed = [name for name in after if after[name] != before.get(name)]
    yield from (f"{name}: {before.get(name, '')}  =>  {after[name]}" for name in changed)
    rows = list(_verdicts(old, new))
    yield from rows
    if not changed and not rows:
        yield "no difference in traffic or verdicts"


def same_tool_and_rules(old: Report, new: Report) -> bool:
    """Whether one version of this tool with the same rules made both reports."""
    return (old.tool.version, old.rules.hash) == (new.tool.version, new.rules.hash)


def made_by(report: Report) -> str:
    """Tool and rules that made a report, in words."""
    return f"fusion-advisor {report.tool.version} with rules {report.rules.hash[:8]}"


def scenario_difference(old: Report, new: Report) -> str:
    """Reason why two reports cannot be compared, a device or a scenario; empty if they can."""
    if old.device.name != new.device.name:
        return f"it is of {old.device.name}, and this report of {new.device.name}"
    left_out = {"shapes", "defaults"}
    before, after = (
        old.scenario.model_dump(exclude=left_out),
        new.scenario.model_dump(exclude=left_out),
    )
    field = next((name for name in after if before.get(name) != after[name]), None)
    if field is not None:
        return f"its {field} is {before.get(field)}, and that of this report {after[field]}"
    return ""


def new_subjects(old: Report, new: Report) -> set[str]:
    """Ids of the new report's groups that the old report accepts nowhere, and of the advice that it
    does not give."""
    was, now = _paired(old, new)
    known = {mark for mark, row in was.items() if row.verdict == "fuse"}
    groups = {row.id for mark, row in now.items() if row.verdict == "fuse" and mark not in known}
    return groups | {row.id for row in _advice_beyond(old, new)}


def _advice_beyond(old: Report, new: Report) -> list[AdviceRow]:
    """Advice of the new report that the old one gives neither for the same reason nor for the same
    lines."""
    marks = {row.fingerprint for row in old.advice if row.fingerprint}
    places = {_advised(row) for row in old.advice}
    return [r for r in new.advice if r.fingerprint not in marks and _advised(r) not in places]


def _advised(row: AdviceRow) -> object:
    return row.code, tuple((source.file, source.line) for source in row.sources)


def cost_us(old: Report, new: Report, row: GroupRow | AdviceRow) -> float:
    """Increase of eager's time for a row of the new report, us: in the modules of a group; in the
    whole step for advice, and where the old report has no such modules."""
    places = row.instances if isinstance(row, GroupRow) else []
    inside = {name for place in places for name in place}
    modules = {node.module for node in new.nodes if node.name in inside}
    if not modules or not modules <= {node.module for node in old.nodes}:
        return new.totals.time_us - old.totals.time_us
    before, after = (
        sum(node.time_us for node in report.nodes if node.module in modules)
        for report in (old, new)
    )
    return after - before


def growth(old: Report, new: Report) -> dict[str, float]:
    """Growth of eager's HBM bytes and of its launches, as shares: facts of the model."""
    was, now = old.totals, new.totals
    pairs = {
        "HBM bytes": (was.hbm_bytes_unfused, now.hbm_bytes_unfused),
        "launches": (was.kernels_unfused, now.kernels_unfused),
    }
    return {name: after / before - 1 for name, (before, after) in pairs.items() if before}


def time_growth(old: Report, new: Report) -> dict[str, float]:
    """Growth of eager's predicted time, as a share; empty where another version or other rules
    predicted it."""
    was, now = old.totals.time_us, new.totals.time_us
    return {"time": now / was - 1} if was and same_tool_and_rules(old, new) else {}


def _verdicts(old: Report, new: Report) -> Iterator[str]:
    was, now = _paired(old, new)
    gone = [row for mark, row in was.items() if mark not in now]
    fresh = [row for mark, row in now.items() if mark not in was]
    for mark, row in now.items():
        known = was.get(mark)
        if known is None:
            if not _renamed(row, gone):
                yield f"new      {_described(row)}"
        elif known.verdict != row.verdict:
            yield f"changed  {known.verdict} => {_described(row)}"
        elif len(known.instances) != len(row.instances):
            yield f"changed  {len(known.instances)} instances => {_described(row)}"
    for row in gone:
        if not _renamed(row, fresh):
            yield f"gone     {_described(row)}"
    yield from (f"new      {row.code}: {row.message}" for row in _advice_beyond(old, new))
    yield from (f"gone     {row.code}: {row.message}" for row in _advice_beyond(new, old))


def _renamed(row: GroupRow, others: Iterable[GroupRow]) -> bool:
    """Whether a region is rejected as one of others was, of the same lines in part: it has one
    launch more or less, which changes no verdict."""
    lines = _lines(row)
    return row.verdict != "fuse" and any(
        other.verdict != "fuse" and other.code == row.code and not lines.isdisjoint(_lines(other))
        for other in others
    )


def _lines(row: GroupRow) -> set[tuple[str, str]]:
    """Lines of a region by their text, which survives that lines are moved."""
    return {(source.file, source.text or str(source.line)) for source in row.sources}


def _paired(old: Report, new: Report) -> tuple[dict[str, GroupRow], dict[str, GroupRow]]:
    """Rows of both reports, the same computation by the same key."""
    was, now = _by_fingerprint(old), _by_fingerprint(new)
    _pair_by_place(was, now)
    return was, now


def _by_fingerprint(report: Report) -> dict[str, GroupRow]:
    """Rows by fingerprint; accepted groups win over candidates of the same computation."""
    return {row.fingerprint: row for row in (*report.candidates, *report.groups)}


def _pair_by_place(was: dict[str, GroupRow], now: dict[str, GroupRow]) -> None:
    """Pair rows that only one side knows by fingerprint (another dtype or batch) by pattern and
    lines, where one row of each side has these."""
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
        f"{row.verdict} {wording.named(row)}, {len(row.instances)} instances:"
        f" {wording.gate(row.deciding)}"
    )
