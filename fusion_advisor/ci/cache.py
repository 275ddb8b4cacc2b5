"""Cache of captures and analyses, keyed by the content of everything that they were made from.

An entry is one JSON file, named by what was asked: the model, the scenario, of an analysis the
device and the rules' hash, too, what is installed, this package's own files. It holds while every
file that the model was loaded from reads as it did. What a model reads beside its modules, and its
environment, are not seen.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Request, file_or_module
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_data
from fusion_advisor.support.files import content_hash
from fusion_advisor.support.kept import entry, put, read


@dataclass(frozen=True)
class AnalysisOutcome:
    """A report, the kernels' texts by their names, and the captured graph as JSON."""

    report: Report
    kernels: Mapping[str, str]
    graph: Mapping[str, Any]


def find_analysis(folder: Path, request: Request, rulebook: Rulebook) -> AnalysisOutcome | None:
    """Outcome of the same request, if everything that it was made from is unchanged; else None.
    None, too, for an entry that cannot be read, and where the folder is another user's."""
    try:
        content = _unchanged(_outcome(folder, request, rulebook))
        report = Report.model_validate(content["report"])
        kernels = dict(content["kernels"])
        for group in report.groups:
            group.kernel.text = kernels.get(group.kernel.entry)
        return AnalysisOutcome(report, kernels, dict(content["graph"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep_analysis(
    folder: Path,
    request: Request,
    rulebook: Rulebook,
    outcome: AnalysisOutcome,
    files: Iterable[str],
    since: float,
) -> None:
    """Puts in what a request came to, made from these files beside MODEL's own; nothing where one
    of them was written after `since`, when the run began, or the folder cannot be written into."""
    report = json.loads(outcome.report.model_dump_json())
    content = {"report": report, "kernels": dict(outcome.kernels), "graph": dict(outcome.graph)}
    _keep(_outcome(folder, request, rulebook), content, request, rulebook, files, since)


def find_graph(folder: Path, request: Request, rulebook: Rulebook) -> Graph | None:
    """The graph that a model was captured as in the same scenario, for whatever device, rules and
    output: as `find_analysis`."""
    try:
        return from_data(Graph, _unchanged(_capture(folder, request, rulebook))["graph"])
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
    """Puts in a captured graph, as `keep_analysis`."""
    content = {"graph": dict(graph)}
    _keep(_capture(folder, request, rulebook), content, request, rulebook, files, since)


def _unchanged(file: Path) -> dict[str, Any]:
    """Content of an entry. Raises ValueError where a file that it was made from has changed."""
    content = read(file)
    if any(content_hash(Path(name)) != mark for name, mark in content["files"].items()):
        raise ValueError(f"{file}: made from other files")
    return content


def _keep(
    file: Path,
    content: Mapping[str, Any],
    request: Request,
    rulebook: Rulebook,
    files: Iterable[str],
    since: float,
) -> None:
    named = os.path.abspath(file_or_module(request.model))
    marks = {name: content_hash(Path(name)) for name in sorted({*files, named})}
    if any(mark and Path(name).stat().st_mtime > since for name, mark in marks.items()):
        return
    marks = {name: mark for name, mark in marks.items() if mark}
    put(file, {"files": marks, **content}, rulebook.cache.entries.count)


def _captured(request: Request) -> dict[str, Any]:
    """Part of the key that decides a capture."""
    return {
        "model": request.model,
        "from": os.getcwd(),
        "scenario": asdict(request.scenario),
    }


def _capture(folder: Path, request: Request, rulebook: Rulebook) -> Path:
    masks = {"masks": rulebook.capture.mask_elements.count}
    kinds = rulebook.rewrites.items()
    limits = {name: {key: n.value for key, n in kind.limits.items()} for name, kind in kinds}
    return entry(folder / "graphs", _captured(request) | masks | {"rewrites": limits})


def _outcome(folder: Path, request: Request, rulebook: Rulebook) -> Path:
    asked = {
        "device": request.device,
        "gpus": request.gpus,
        "rules": rulebook.hash,
        "proof": [request.verify, request.compile],
        "kernels": [request.folder, request.command],
    }
    return entry(folder, _captured(request) | asked)
