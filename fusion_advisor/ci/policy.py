"""Settings of a repository applied to the report of each scenario: findings, baseline, and the
conditions that fail the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fusion_advisor.ci.baseline import Baseline, load_baseline, made_comparable
from fusion_advisor.ci.conditions import Condition, parse_condition, violation
from fusion_advisor.ci.configuration import Settings, Thresholds
from fusion_advisor.ci.findings import Policy, review, unused_in_all
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.explain import entry
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import UsageError


class Reviewing:
    """Applies settings to reports. Raises UsageError, before any work is done, for an unknown code,
    a missing baseline, and a condition without its baseline. `root` is the repository's, to which
    lines are relative."""

    def __init__(self, settings: Settings, rulebook: Rulebook, root: Path) -> None:
        values = settings.values
        self._root, self._rulebook = root, rulebook
        self._policy = Policy(
            select=tuple(values.select),
            ignore=tuple(values.ignore),
            ignore_in={module: tuple(codes) for module, codes in values.ignore_in.items()},
            least_us=values.thresholds.saved_us,
            least_share=values.thresholds.share or 0.0,
        )
        _check_codes(settings, rulebook)
        self._conditions = [_condition(text, values.thresholds) for text in values.fail_on]
        for condition in self._conditions:
            if condition.compares and values.baseline is None:
                raise UsageError(f"--fail-on {condition.name} compares: give --baseline FILE")
        several = len(settings.scenarios) > 1
        self._baselines = {
            name: _baseline(Path(values.baseline), name if several else "")
            for name in settings.scenarios
            if values.baseline is not None
        }

    def review(self, scenario: str, report: Report) -> str:
        """Put the findings into the report of a scenario; returns a line for people on its
        baseline, "" without one."""
        baseline = self._baselines.get(scenario)
        if baseline is not None:
            baseline = self._baselines[scenario] = made_comparable(baseline, report, self._rulebook)
        given = (baseline.name, baseline.report) if baseline else None
        report.review = review(report, self._policy, self._root, given)
        return baseline.note if baseline else ""

    def failures(self, reports: Mapping[str, Report]) -> Iterator[str]:
        """A line for each condition that a reviewed report fails."""
        for name, report in reports.items():
            baseline = self._baselines.get(name)
            for condition in self._conditions:
                if why := violation(condition, report, baseline.report if baseline else None):
                    of = f" in {name}" if len(reports) > 1 else ""
                    yield f"--fail-on {condition.name}{of}: {why}"


def unused_comments(reports: Mapping[str, Report]) -> Iterator[str]:
    """A line for each comment that holds for nothing in any scenario."""
    for row in unused_in_all([report.review for report in reports.values() if report.review]):
        yield f"{row.source.file}:{row.source.line}: ignore[{row.code}] {row.why}"


def _check_codes(settings: Settings, rulebook: Rulebook) -> None:
    for setting in settings.each():
        if setting.path[0] in ("select", "ignore", "ignore-in"):
            try:
                for code in setting.value:
                    entry(rulebook, code)
            except UsageError as error:
                raise UsageError(f"{setting.field}: {error}") from error


def _condition(text: str, thresholds: Thresholds) -> Condition:
    """A condition; its share is the threshold's, unless it has its own."""
    condition = parse_condition(text)
    if condition.share is not None:
        return condition
    shares = {
        "coverage": thresholds.coverage,
        "regression": thresholds.regression,
        "regression-time": thresholds.regression,
    }
    return replace(condition, share=shares.get(condition.name))


def _baseline(given: Path, scenario: str) -> Baseline:
    """An earlier report: a file, or the folder that `analyze --out` left."""
    file = given / scenario / "report.json" if scenario or given.is_dir() else given
    return load_baseline(file)
