"""What analyses came to, kept by the content of all that they were made from.

An entry is one JSON file, named by what was asked: the model, the scenario, the device, the rules'
hash, what is installed, this package's own files. It holds while every file that the model was
loaded from reads as it did. What a model reads beside its modules, and its environment, are not
seen.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fusion_advisor.errors import UsageError
from fusion_advisor.files import content_hash, write
from fusion_advisor.report import Report
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.scenario import Request, named_by


@dataclass(frozen=True)
class Outcome:
    """A report, the kernels' texts by their names, and the captured graph as JSON."""

    report: Report
    kernels: Mapping[str, str]
    graph: Mapping[str, Any]


def cache_folder() -> Path:
    """Where entries lie: `FUSION_ADVISOR_CACHE`, else below the user's own cache."""
    given = os.environ.get("FUSION_ADVISOR_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fusion-advisor"


def find(folder: Path, request: Request, rulebook: Rulebook) -> Outcome | None:
    """What the same request came to, if all that it was made from is unchanged. None, too, for an
    entry that cannot be read, and where the folder is another user's."""
    file = _entry(folder, request, rulebook)
    try:
        if hasattr(os, "getuid") and folder.stat().st_uid != os.getuid():
            return None
        content = json.loads(file.read_text(encoding="utf-8"))
        if any(content_hash(Path(name)) != mark for name, mark in content["files"].items()):
            return None
        report = Report.model_validate(content["report"])
        kernels = dict(content["kernels"])
        for group in report.groups:
            group.kernel.text = kernels.get(group.kernel.entry)
        os.utime(file)
        return Outcome(report, kernels, dict(content["graph"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(
    folder: Path,
    request: Request,
    rulebook: Rulebook,
    outcome: Outcome,
    files: Iterable[str],
    since: float,
) -> None:
    """Puts in what a request came to, made from these files beside MODEL's own; nothing where one
    of them was written after `since`, when the run began, or the folder cannot be written into."""
    named = os.path.abspath(named_by(request.model))
    marks = {name: content_hash(Path(name)) for name in sorted({*files, named})}
    if any(mark and Path(name).stat().st_mtime > since for name, mark in marks.items()):
        return
    entry = {
        "files": {name: mark for name, mark in marks.items() if mark},
        "report": json.loads(outcome.report.model_dump_json()),
        "kernels": dict(outcome.kernels),
        "graph": dict(outcome.graph),
    }
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(_entry(folder, request, rulebook), json.dumps(entry))
    except (OSError, UsageError):
        return
    for old in sorted(folder.glob("*.json"), key=_used)[: -rulebook.cache.entries.count]:
        old.unlink(missing_ok=True)


def _entry(folder: Path, request: Request, rulebook: Rulebook) -> Path:
    asked = {
        "model": request.model,
        "from": os.getcwd(),
        "scenario": asdict(request.scenario),
        "device": request.device,
        "gpus": request.gpus,
        "rules": rulebook.hash,
        "proof": [request.verify, request.compile],
        "kernels": [request.folder, request.command],
        "versions": [platform.python_version(), *_installed()],
        "package": _package(),
    }
    text = json.dumps(asked, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _installed() -> list[str]:
    """Every installed package with its version, as the folders of their records are called."""
    folders = (Path(entry or ".") for entry in sys.path)
    names = (file.name for folder in folders if folder.is_dir() for file in folder.iterdir())
    return sorted({name for name in names if name.endswith((".dist-info", ".egg-info"))})


def _package() -> list[tuple[str, int, int]]:
    """This package's files, by their sizes and times: a checkout changes between versions."""
    here = Path(__file__).parent
    files = [(str(file.relative_to(here)), file.stat()) for file in sorted(here.rglob("*.py"))]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]


def _used(file: Path) -> float:
    return file.stat().st_mtime
