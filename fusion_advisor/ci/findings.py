"""Findings of a report for reviewers, by the policy of their repository: groups, advice,
what is new."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from fusion_advisor.ci.ignores import Ignore, ignores
from fusion_advisor.ir.scenario import file_or_module
from fusion_advisor.report.diff import (
    cost_us,
    new_subjects,
    same_tool_and_rules,
    scenario_difference,
)
from fusion_advisor.report.schema import (
    AdviceRow,
    FindingRow,
    GroupRow,
    IgnoredRow,
    Report,
    ReviewRow,
    SourceRow,
    UnusedRow,
)
from fusion_advisor.support.errors import UsageError


@dataclass(frozen=True)
class Policy:
    """Policy of a repository: which findings it reports. Codes are a gate's code or name, or the
    name of an idiom or of a kind of advice.

    `select`: these codes alone, all if empty. `ignore` and `ignore_in`, the latter by patterns of
    modules' paths: found but set aside. What saves less than `least_us` microseconds, or less
    than `least_share` of the step, is no finding, nor is advice whose gain nothing predicts.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    ignore_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    least_us: float = 0.0
    least_share: float = 0.0


@dataclass(frozen=True)
class _Candidate:
    """A group, or advice, with its saving; `names` select and ignore it."""

    row: GroupRow | AdviceRow
    names: frozenset[str]
    saved_us: float
    share: float


def review(
    report: Report, policy: Policy, root: Path, baseline: tuple[str, Report] | None = None
) -> ReviewRow:
    """The findings of a report whose sources can be read from the working directory; `root` is the
    repository's, `baseline` an earlier report by its name: nothing is new beside one that another
    judge made. UsageError for a baseline of another device or scenario.
    """
    new = _new(report, baseline)
    comments = [ignore for file in _files(report) for ignore in ignores(Path(file), file)]
    holding = [ignore for ignore in comments if not ignore.fault]
    possible = [_candidate(row, report) for row in report.possible_findings]
    selected = [each for each in possible if not policy.select or _is(each, policy.select)]
    large = [
        each
        for each in selected
        if each.saved_us >= policy.least_us and each.share >= policy.least_share
    ]
    used = {ignore for each in large for ignore in holding if _holds(ignore, each)}
    modules = {node.name: node.module for node in report.nodes}
    return ReviewRow(
        baseline=baseline[0] if baseline else None,
        findings=[
            FindingRow.about(
                each.row,
                [_rooted(source, root) for source in each.row.sources or _model_file(report)],
                state="" if new is None else "new" if each.row.id in new else "known",
                ignored=_ignored(each, policy, modules, holding, root),
                cost_us=(
                    cost_us(baseline[1], report, each.row)
                    if baseline and new and each.row.id in new
                    else None
                ),
            )
            for each in large
        ],
        below=len(selected) - len(large),
        unselected=len(possible) - len(selected),
        unused=[
            UnusedRow(
                source=_rooted(SourceRow(file=ignore.file, line=ignore.line), root),
                code=ignore.code,
                why=ignore.fault or "holds for no finding",
            )
            for ignore in comments
            if ignore not in used
        ],
    )


def _candidate(row: GroupRow | AdviceRow, report: Report) -> _Candidate:
    if isinstance(row, GroupRow):
        names = {row.pattern, *((row.code, row.deciding.name) if row.deciding else ())}
        return _Candidate(row, frozenset(names), row.impact.saved_us_total, row.impact.share)
    saved, total = row.saved_us or 0.0, report.totals.time_us
    return _Candidate(row, frozenset({row.code}), saved, saved / total if total else 0.0)


def unused_in_all(reviews: Iterable[ReviewRow]) -> list[UnusedRow]:
    """The comments that match nothing in any scenario of a model."""
    rows = [{(u.source.file, u.source.line, u.code): u for u in row.unused} for row in reviews]
    return [row for key, row in rows[0].items() if all(key in other for other in rows[1:])]


def _new(report: Report, baseline: tuple[str, Report] | None) -> set[str] | None:
    if baseline is None:
        return None
    name, old = baseline
    if differs := scenario_difference(old, report):
        raise UsageError(f"baseline {name}: {differs}; make it again with analyze --out")
    return new_subjects(old, report) if same_tool_and_rules(old, report) else None


def _files(report: Report) -> list[str]:
    """The sources of the nodes, and the model's own file."""
    nodes = [node.source for node in report.nodes if node.source]
    return list(dict.fromkeys(source.file for source in [*_model_file(report), *nodes]))


def _model_file(report: Report) -> list[SourceRow]:
    """The first line of the file that MODEL names; none where it names a module."""
    given = file_or_module(report.model.source)
    named = given.endswith((".py", ".json", ".pt2"))
    return [SourceRow(file=given, line=1)] if named else []


def _is(candidate: _Candidate, codes: Iterable[str]) -> bool:
    """Whether a code names the gate that decides on a group, its idiom, or the kind of an
    advice."""
    return not candidate.names.isdisjoint(codes)


def _holds(ignore: Ignore, candidate: _Candidate) -> bool:
    """Whether a comment ignores a finding that has a line in its reach."""
    reached = (s.file == ignore.file and s.line in ignore.lines for s in candidate.row.sources)
    return _is(candidate, [ignore.code]) and any(reached)


def _ignored(
    candidate: _Candidate,
    policy: Policy,
    modules: Mapping[str, str],
    comments: Iterable[Ignore],
    root: Path,
) -> IgnoredRow | None:
    for ignore in comments:
        if _holds(ignore, candidate):
            source = _rooted(SourceRow(file=ignore.file, line=ignore.line), root)
            return IgnoredRow(code=ignore.code, reason=ignore.reason, source=source)
    code = candidate.row.code
    if _is(candidate, policy.ignore):
        return IgnoredRow(code=code, reason="ignored by the configuration", source=None)
    nodes = candidate.row.nodes if isinstance(candidate.row, GroupRow) else []
    for pattern in _patterns(candidate, policy):
        if nodes and all(_inside(modules.get(node, ""), pattern) for node in nodes):
            reason = f"ignored by the configuration in {pattern}"
            return IgnoredRow(code=code, reason=reason, source=None)
    return None


def _patterns(candidate: _Candidate, policy: Policy) -> Iterator[str]:
    return (pattern for pattern, codes in policy.ignore_in.items() if _is(candidate, codes))


def _inside(module: str, pattern: str) -> bool:
    """Whether a module's path matches a pattern, or lies beneath one that does."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _rooted(source: SourceRow, root: Path) -> SourceRow:
    """A line whose file is seen from the repository's root."""
    whole = Path(os.path.abspath(source.file))
    inside = whole.is_relative_to(root)
    return SourceRow(
        file=whole.relative_to(root).as_posix() if inside else whole.as_posix(), line=source.line
    )
