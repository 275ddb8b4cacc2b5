"""Conditions of `--fail-on`, which end a run with exit code 1."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from fusion_advisor.report.diff import growth, time_growth
from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import FindingRow, Report
from fusion_advisor.support.errors import UsageError

NAMES = (
    "new", "accepted", "advice", "unverified", "fault", "regression", "regression-time", "coverage",
)  # fmt: skip
_MOST_LISTED = 5
_GROWN = {"regression": growth, "regression-time": time_growth}
_SHARES = (*_GROWN, "coverage")
_EXPECTED = (
    f"{', '.join(NAMES[:-1])} or coverage; regression=SHARE (0.05), regression-time=SHARE "
    "and coverage=SHARE (0.95, at most 1)"
)


@dataclass(frozen=True, slots=True)
class Condition:
    """`new`: a finding that the baseline lacks; `accepted`: any that is a group; `advice`: any that
    is none; `unverified`: a group whose kernel no check has passed; `fault`: a region that was not
    analysed for a fault of ours; `regression`: the step's bytes or launches grew by more than
    `share` since the baseline; `regression-time`: its predicted time did; `coverage`: less than
    `share` of the time is in modelled ops.
    """

    name: str
    share: float | None = None

    @property
    def compares(self) -> bool:
        """Whether the condition needs a baseline."""
        return self.name == "new" or self.name in _GROWN


def parse_condition(text: str) -> Condition:
    """A condition from its text, `accepted`, `coverage=0.95`. Raises UsageError for any
    other text."""
    name, given, share = text.partition("=")
    if name in NAMES and not given:
        return Condition(name)
    if name in _SHARES:
        try:
            number = float(share)
        except ValueError:
            number = -1.0
        if 0.0 <= number <= (1.0 if name == "coverage" else inf):
            return Condition(name, number)
    raise UsageError(f"{text!r}; expected {_EXPECTED}")


def violation(condition: Condition, report: Report, baseline: Report | None = None) -> str:
    """The reason that a reviewed report fails a condition; "" where it does not. Raises UsageError
    without the baseline that the condition needs."""
    if condition.compares and baseline is None:
        raise UsageError(f"--fail-on {condition.name}: compares with --baseline REPORT.json")
    if condition.name in _GROWN:
        assert baseline is not None
        return _regression(condition, report, baseline)
    if condition.name == "coverage":
        least = 1.0 if condition.share is None else condition.share
        coverage = report.totals.coverage
        return f"coverage is {coverage:.4g}, needs {least:g}" if coverage < least else ""
    if condition.name == "fault":
        return wording.faults(report)
    if condition.name == "unverified":
        unproven = [group.id for group in report.groups if not wording.verified(group)]
        return f"no check has passed for {', '.join(unproven)}" if unproven else ""
    if condition.name == "new":
        found = [row for row in _open(report) if row.state == "new"]
        return f"not in the baseline: {_listed(report, found)}" if found else ""
    advice = condition.name == "advice"
    found = [row for row in _open(report) if bool(row.advice) == advice]
    what = "time to save without a fusion" if advice else "worth fusing"
    return f"{what}: {_listed(report, found)}" if found else ""


def _open(report: Report) -> list[FindingRow]:
    """The findings that no comment or setting ignores."""
    assert report.review is not None, "review the report first"
    return [row for row in report.review.findings if row.ignored is None]


def _listed(report: Report, found: list[FindingRow]) -> str:
    """Findings by their place, as many as fit into a line."""
    places = [_told(report, row) for row in found]
    more = f" and {len(places) - _MOST_LISTED} others" if len(places) > _MOST_LISTED else ""
    return f"{', '.join(places[:_MOST_LISTED])}{more}"


def _told(report: Report, row: FindingRow) -> str:
    """A finding's id, name, place and cost."""
    told = f"{row.group or row.advice} {wording.named(report.subject(row))}"
    return f"{told}, {cost}" if (cost := wording.cost(row)) else told


def _regression(condition: Condition, report: Report, baseline: Report) -> str:
    most = condition.share or 0.0
    grown = {name: by for name, by in _GROWN[condition.name](baseline, report).items() if by > most}
    said = ", ".join(f"{name} grew by {100 * by:.3g} %" for name, by in grown.items())
    return f"{said}, allowed {100 * most:g} %" if grown else ""
