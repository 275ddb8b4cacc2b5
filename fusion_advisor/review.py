"""What of a report reviewers are told, by their own policy: groups, advice, which are new."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from fusion_advisor.compare import judged_alike, unknown_to
from fusion_advisor.errors import UsageError
from fusion_advisor.ignores import Ignore, ignores
from fusion_advisor.report import (
    FindingRow,
    GroupRow,
    IgnoredRow,
    Report,
    ReviewRow,
    SourceRow,
    UnusedRow,
)


@dataclass(frozen=True)
class Policy:
    """What a repository wants to hear of. Codes are a gate's code or name, or the name of
    an idiom or of a kind of advice.

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
class _Told:
    """A group, or advice, as this module sees both. `names` select and ignore it."""

    id: str
    code: str
    names: frozenset[str]
    saved_us: float
    share: float
    sources: list[SourceRow]
    nodes: Sequence[str] = ()
    is_advice: bool = False


def review(
    report: Report, policy: Policy, root: Path, baseline: tuple[str, Report] | None = None
) -> ReviewRow:
    """The findings of a report whose sources can be read from the working directory; `root` is the
    repository's, `baseline` an earlier report by its name. UsageError for a baseline that was
    judged otherwise.
    """
    new = _new(report, baseline)
    comments = [ignore for file in _files(report) for ignore in ignores(Path(file), file)]
    holding = [ignore for ignore in comments if not ignore.fault]
    told = [*map(_group, report.groups), *_advice(report)]
    selected = [row for row in told if not policy.select or _is(row, policy.select)]
    large = [
        row
        for row in selected
        if row.saved_us >= policy.least_us and row.share >= policy.least_share
    ]
    used = {ignore for row in large for ignore in holding if _holds(ignore, row)}
    modules = {node.name: node.module for node in report.nodes}
    return ReviewRow(
        baseline=baseline[0] if baseline else None,
        findings=[
            FindingRow(
                group="" if row.is_advice else row.id,
                advice=row.id if row.is_advice else "",
                code=row.code,
                state="" if new is None else "new" if row.id in new else "known",
                ignored=_ignored(row, policy, modules, holding, root),
                sources=[_rooted(source, root) for source in row.sources or _model_file(report)],
            )
            for row in large
        ],
        below=len(selected) - len(large),
        unselected=len(told) - len(selected),
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


def _group(row: GroupRow) -> _Told:
    code = row.deciding.code if row.deciding else ""
    names = {row.pattern, *((code, row.deciding.name) if row.deciding else ())}
    return _Told(
        id=row.id,
        code=code,
        names=frozenset(names),
        saved_us=row.impact.saved_us_total,
        share=row.impact.share,
        sources=[*row.sources],
        nodes=row.nodes,
    )


def _advice(report: Report) -> Iterator[_Told]:
    """The advice whose gain is predicted."""
    total = report.totals.time_us
    for row in report.advice:
        if row.saved_us:
            yield _Told(
                id=row.id,
                code=row.code,
                names=frozenset({row.code}),
                saved_us=row.saved_us,
                share=row.saved_us / total if total else 0.0,
                sources=[*row.sources],
                is_advice=True,
            )


def unused_in_all(reviews: Iterable[ReviewRow]) -> list[UnusedRow]:
    """The comments that no scenario of a model uses."""
    rows = [{(u.source.file, u.source.line, u.code): u for u in row.unused} for row in reviews]
    return [row for key, row in rows[0].items() if all(key in other for other in rows[1:])]


def _new(report: Report, baseline: tuple[str, Report] | None) -> set[str] | None:
    if baseline is None:
        return None
    name, old = baseline
    if differs := judged_alike(old, report):
        raise UsageError(f"baseline {name}: {differs}; make it again with analyze --out")
    return unknown_to(old, report)


def _files(report: Report) -> list[str]:
    """The sources of the nodes, and the model's own file."""
    nodes = [node.source for node in report.nodes if node.source]
    return list(dict.fromkeys(source.file for source in [*_model_file(report), *nodes]))


def _model_file(report: Report) -> list[SourceRow]:
    """The first line of the file that MODEL names; none where it names a module."""
    given = report.model.source.removeprefix("hf:").partition("#")[0].partition(":")[0]
    named = given.endswith((".py", ".json", ".pt2"))
    return [SourceRow(file=given, line=1)] if named else []


def _is(row: _Told, codes: Iterable[str]) -> bool:
    """Does a code name the gate that decides on a group, its idiom, or the kind of an advice?"""
    return not row.names.isdisjoint(codes)


def _holds(ignore: Ignore, row: _Told) -> bool:
    """Does a comment ask to leave what has a line in its reach alone?"""
    reached = (s.file == ignore.file and s.line in ignore.lines for s in row.sources)
    return _is(row, [ignore.code]) and any(reached)


def _ignored(
    row: _Told,
    policy: Policy,
    modules: Mapping[str, str],
    comments: Iterable[Ignore],
    root: Path,
) -> IgnoredRow | None:
    for ignore in comments:
        if _holds(ignore, row):
            source = _rooted(SourceRow(file=ignore.file, line=ignore.line), root)
            return IgnoredRow(code=ignore.code, reason=ignore.reason, source=source)
    if _is(row, policy.ignore):
        return IgnoredRow(code=row.code, reason="ignored by the configuration", source=None)
    for pattern in _patterns(row, policy):
        if row.nodes and all(_inside(modules.get(node, ""), pattern) for node in row.nodes):
            reason = f"ignored by the configuration in {pattern}"
            return IgnoredRow(code=row.code, reason=reason, source=None)
    return None


def _patterns(row: _Told, policy: Policy) -> Iterator[str]:
    return (pattern for pattern, codes in policy.ignore_in.items() if _is(row, codes))


def _inside(module: str, pattern: str) -> bool:
    """A module whose path matches, or one beneath it."""
    return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _rooted(source: SourceRow, root: Path) -> SourceRow:
    """A line whose file is seen from the repository's root."""
    whole = Path(os.path.abspath(source.file))
    inside = whole.is_relative_to(root)
    return SourceRow(
        file=whole.relative_to(root).as_posix() if inside else whole.as_posix(), line=source.line
    )
