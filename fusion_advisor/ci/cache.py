"""Cache of captures, keyed by the content of everything that they were made from.

An entry is one JSON file, named by what was asked: the model, the scenario, what is installed, this
package's own files. It holds while every file that the model was loaded from reads as it did. What
a model reads beside its modules, and its environment, are not seen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Request, file_or_module
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_data
from fusion_advisor.support.files import content_hash
from fusion_advisor.support.kept import entry, put, read


def find_graph(folder: Path, request: Request, rulebook: Rulebook) -> Graph | None:
    """The graph that a model was captured as in the same scenario, for whatever device, rules and
    output, if everything that it was made from is unchanged; else None. None, too, for an entry
    that cannot be read, and where the folder is another user's."""
    try:
        return from_data(Graph, _unchanged(_entry(folder, request, rulebook))["graph"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_graph(
    folder: Path,
    request: Request,
    rulebook: Rulebook,
    graph: Mapping[str, Any],
    files: Iterable[str],
    since: float,
) -> None:
    """Puts in a captured graph, made from these files beside MODEL's own; nothing where one of them
    was written after `since`, when the run began, or the folder cannot be written into."""
    named = os.path.abspath(file_or_module(request.model))
    marks = {name: content_hash(Path(name)) for name in sorted({*files, named})}
    if any(mark and Path(name).stat().st_mtime > since for name, mark in marks.items()):
        return
    content = {"files": {name: mark for name, mark in marks.items() if mark}, "graph": dict(graph)}
    put(_entry(folder, request, rulebook), content, rulebook.cache.entries.count)


def _unchanged(file: Path) -> dict[str, Any]:
    """Content of an entry. Raises ValueError where a file that it was made from has changed."""
    content = read(file)
    if any(content_hash(Path(name)) != mark for name, mark in content["files"].items()):
        raise ValueError(f"{file}: made from other files")
    return content


def _entry(folder: Path, request: Request, rulebook: Rulebook) -> Path:
    kinds = rulebook.rewrites.items()
    asked = {
        "model": request.model,
        "from": os.getcwd(),
        "scenario": asdict(request.scenario),
        "masks": rulebook.capture.mask_elements.count,
        "rewrites": {
            name: {key: n.value for key, n in kind.limits.items()} for name, kind in kinds
        },
    }
    return entry(folder / "graphs", asked)
