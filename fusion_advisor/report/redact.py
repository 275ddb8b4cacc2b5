"""Redact a report so that it can be shown to others: no lines of source, paths, names of modules,
parameters and inputs, comments or kernels.

Numbers, operators, patterns and verdicts stay, and so do line numbers. A name has the same alias
wherever it stands, so that repeated layers are still recognisable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, cast

from fusion_advisor.report.schema import Report

_AS_IT_IS = frozenset(
    {
        *("tool", "rules", "device", "op", "pattern", "dtype", "verdict", "bound", "outcome"),
        *("status", "route", "unit", "case"),
    }
)
"""Fields that say nothing of the model's own code, whatever words are in them."""
_GONE = frozenset({"text", "reason"})
"""Fields of a source line or a comment that are emptied."""

_BY_NAME = frozenset({"shapes"})
"""Fields whose keys are names of the model's code."""


def redacted(report: Report) -> Report:
    """Copy of the report under aliases: `file1.py:12`, `m1.0.m2`, `t3`."""
    content = report.model_dump(mode="json")
    content["graph"] = None
    for row in content["rewrites"]:
        row["line"] = None
    if report.not_rewritten:
        content["not_rewritten"] = "the reason is left out"
    if content["profile"] is not None:
        content["profile"]["file"] = "trace"
        hidden = {"kernel": "", "under": "", "function": ""}
        content["profile"]["unlinked"] = [row | hidden for row in content["profile"]["unlinked"]]
    modules, others = _Aliases(), _Aliases()
    named = report.model.source
    for number, file in enumerate(dict.fromkeys(_files(content)), 1):
        others.put(f"file{number}{PurePath(file).suffix}", [file, PurePath(file).name])
        others.put(f"file{number}", [PurePath(file).stem])
    parts = re.split(r"[:#]", named.removeprefix("hf:"))
    others.put("model", [named, *parts, PurePath(parts[0]).name, PurePath(parts[0]).stem])
    if report.review and report.review.baseline:
        others.put("baseline", [report.review.baseline])
    paths = [*(node.module for node in report.nodes), *report.not_run]
    parts = dict.fromkeys(part for path in paths for part in path.split(".") if part)
    words = [part for part in parts if not part.isdigit()]
    for number, word in enumerate(words, 1):
        modules.put(f"m{number}", [word])
    made = {node.name for node in report.nodes}
    given = dict.fromkeys(name for node in report.nodes for name in node.inputs)
    given |= dict.fromkeys(report.scenario.shapes)
    for number, name in enumerate((name for name in given if name not in made), 1):
        others.put(f"t{number}", [name])
    content["model"]["graph_breaks"] = [
        _place(text, others) for text in content["model"]["graph_breaks"]
    ]
    return Report.model_validate(_without(content, modules, others))


class _Aliases:
    """Aliases of the words of the model's code."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None

    def put(self, alias: str, words: Iterable[str]) -> None:
        """Give some words one alias; a word keeps its first alias. A single letter reveals nothing,
        and is part of too many other texts (`64 x 128`)."""
        for word in words:
            if len(word.strip("./")) > 1:
                self._known.setdefault(word, alias)

    def over(self, text: str) -> str:
        """Replace all words of a text that have an alias."""
        if not self._known:
            return text
        if self._pattern is None:
            longest = sorted(self._known, key=lambda word: (-len(word), word))
            every = "|".join(map(re.escape, longest))
            self._pattern = re.compile(rf"(?<!\w)(?:{every})(?!\w)")
        return self._pattern.sub(lambda found: self._known[found[0]], text)


def _without(value: Any, modules: _Aliases, others: _Aliases, key: str = "") -> Any:
    """Part of a report under aliases; the text of an `action` names no module, so aliases of
    modules are not put there."""
    if key in _AS_IT_IS:
        return value
    if isinstance(value, str):
        if key == "code" and re.fullmatch(r"[\w-]+", value):  # a rule's, not a line of Python
            return value
        return others.over(modules.over(value))
    if isinstance(value, list):
        return [_without(each, modules, others, key) for each in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    row = cast("dict[str, Any]", value)
    if key == "action":
        modules = _Aliases()
    if "line" in row or key == "ignored":
        row = {name: "" if name in _GONE else inner for name, inner in row.items()}
    named = others.over if key in _BY_NAME else str  # other keys are fields, called as they are
    return {named(name): _without(inner, modules, others, name) for name, inner in row.items()}


def _files(value: Any) -> Iterator[str]:
    """Yield every file that a report names a line of, in order."""
    if isinstance(value, Mapping):
        row = cast("Mapping[str, Any]", value)
        if isinstance(row.get("file"), str) and "line" in row:
            yield row["file"]
        for inner in row.values():
            yield from _files(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _files(inner)


def _place(text: str, others: _Aliases) -> str:
    """Place where a graph breaks; the reason is dropped, since it is in words of the code."""
    found = re.match(r"(.+?:\d+): ", text)
    return f"{others.over(found[1])}: the graph breaks there" if found else "the graph breaks"
