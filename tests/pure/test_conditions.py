"""What ends a run with exit code 1."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.ci.conditions import Condition, parse_condition, violation
from fusion_advisor.ci.findings import Policy, review
from fusion_advisor.report.schema import IgnoredRow, Report
from fusion_advisor.support.errors import UsageError

from .test_report import mixed, report_of


def reviewed(report: Report, baseline: Report | None = None) -> Report:
    given = ("base.json", baseline) if baseline else None
    report.review = review(report, Policy(), Path("/"), given)
    return report


def ignored(report: Report) -> Report:
    assert report.review
    for row in report.review.findings:
        row.ignored = IgnoredRow(code="FA401", reason="why not", source=None)
    return report


@pytest.mark.parametrize(
    "text",
    [
        "rain", "", "accepted=1", "new=", "coverage=much", "regression=", "coverage=2",
        "coverage=-0.1", "coverage=nan", "regression=-1",
    ],
)  # fmt: skip
def test_what_is_no_condition_names_the_known(text: str) -> None:
    with pytest.raises(UsageError, match="expected new, accepted, advice, unverified"):
        parse_condition(text)


def test_a_condition_may_have_a_share() -> None:
    assert parse_condition("coverage=0.95") == Condition("coverage", 0.95)
    assert parse_condition("regression") == Condition("regression", None)


def test_accepted_groups_that_nobody_ignores() -> None:
    condition = Condition("accepted")
    report = reviewed(mixed())
    assert violation(condition, report).startswith("worth fusing: g1 cos + add at model.py:1")
    assert violation(condition, ignored(report)) == ""
    assert violation(condition, reviewed(report_of("aten.cos.default"))) == ""


def test_advice_that_saves_time_and_nobody_ignores() -> None:
    condition = Condition("advice")
    report = reviewed(mixed())
    said = violation(condition, report)
    assert said == "time to save without a fusion: a1 hidden-copy at model.py:5"
    assert violation(condition, ignored(report)) == ""
    assert violation(condition, reviewed(report_of("aten.cos.default"))) == ""


def test_new_advice_fails_as_a_new_group_does() -> None:
    old = mixed()
    old.advice = []
    said = violation(Condition("new"), reviewed(mixed(), old), old)
    told = "a1 hidden-copy at model.py:5, costs no more than the baseline"
    assert said == f"not in the baseline: {told}"


def test_new_groups_that_nobody_ignores() -> None:
    condition, old = Condition("new"), report_of("aten.cos.default")
    assert violation(condition, reviewed(mixed(), old), old)
    assert violation(condition, ignored(reviewed(mixed(), old)), old) == ""
    assert violation(condition, reviewed(mixed(), mixed()), mixed()) == ""


@pytest.mark.parametrize("name", ["new", "regression", "regression-time"])
def test_what_compares_needs_a_baseline(name: str) -> None:
    with pytest.raises(UsageError, match=f"--fail-on {name}: compares with --baseline"):
        violation(Condition(name), reviewed(mixed()))


def test_bytes_and_launches_may_grow_by_a_share() -> None:
    old, new = mixed(), reviewed(mixed())
    assert violation(Condition("regression"), new, old) == ""
    old.totals.kernels_unfused = 10
    new.totals.kernels_unfused = 11
    new.totals.hbm_bytes_unfused *= 2
    said = violation(Condition("regression", 0.05), new, old)
    assert said == "HBM bytes grew by 100 %, launches grew by 10 %, allowed 5 %"
    assert "launches" not in violation(Condition("regression", 0.5), new, old)
    assert violation(Condition("regression", 1.0), new, old) == ""


def test_predicted_time_is_asked_for_by_name() -> None:
    old, new = mixed(), reviewed(mixed())
    new.totals.time_us *= 1.1
    assert violation(Condition("regression"), new, old) == ""
    condition = Condition("regression-time", 0.05)
    assert violation(condition, new, old) == "time grew by 10 %, allowed 5 %"
    old.rules.hash = "0" * 64
    assert violation(condition, new, old) == "", "other rules predicted the other time"


def test_less_coverage_than_needed() -> None:
    report = mixed()
    report.totals.coverage = 0.5
    assert violation(Condition("coverage"), report) == "coverage is 0.5, needs 1"
    assert violation(Condition("coverage", 0.5), report) == ""


def test_groups_without_a_check() -> None:
    assert violation(Condition("unverified"), mixed()) == "no check has passed for g1"
