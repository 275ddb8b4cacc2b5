"""A recording: the file that `fusion_advisor.record` leaves, and a MODEL for the command line.

One JSON object:

    recording_version  1; a reader refuses others
    tool               {name, version, torch, triton} that wrote it
    model              the class that was recorded
    calls[]            each distinct call, in the order of their first: {name, count, signatures,
                       mode, grad, autocast, signature, graph, failure}; `signatures` is how many
                       it stands for, which differ in sizes and numbers alone; `graph` is what
                       `analyze` judges, as `codec` writes it, or null where `failure` says why
                       there is none
    left_out           {signatures, calls} that were noted and not captured
    files              the user's source files that the graphs name, each with the hash it had

Of tensors it has layouts alone. Numbers and strings are in it: those among the arguments in
`signature`, those that the model computes with in `graph`.

As MODEL it is `FILE.json`, whose captured calls are scenarios weighted by their counts, or
`FILE.json:NAME`, one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from fusion_advisor.ir.graph import Graph
from fusion_advisor.support.codec import from_data, to_data
from fusion_advisor.support.errors import CaptureError, UsageError
from fusion_advisor.support.files import content_hash, write

VERSION = 1


@dataclass(frozen=True)
class RecordedCall:
    """Calls that were made alike: their number, their settings, and the graph as data or why there
    is none."""

    name: str
    count: int
    signatures: int
    mode: Literal["eval", "train"]
    grad: bool
    autocast: str | None
    signature: Mapping[str, Any]
    graph: Mapping[str, Any] | None
    failure: str = ""


@dataclass(frozen=True)
class LeftOut:
    """Counts of the signatures that were noted and not captured, and of their calls."""

    signatures: int = 0
    calls: int = 0


@dataclass(frozen=True)
class Recording:
    """Calls that a running program made of its model; `tool` and the versions tell what
    wrote them."""

    tool: Mapping[str, str | None]
    model: str
    calls: tuple[RecordedCall, ...]
    left_out: LeftOut
    files: Mapping[str, str]
    file: Path
    only: str = ""
    """Name of the one call that was asked for."""

    @property
    def captured(self) -> dict[str, RecordedCall]:
        """Calls that have a graph and are asked for, by name."""
        return {
            call.name: call
            for call in self.calls
            if call.graph is not None and self.only in ("", call.name)
        }

    @property
    def total(self) -> int:
        """Number of calls that the program made."""
        return sum(call.count for call in self.calls) + self.left_out.calls


def write_recording(recording: Recording) -> None:
    """Replace the recording's file. Raises UsageError when the file cannot be written."""
    content = {
        "recording_version": VERSION,
        "tool": dict(recording.tool),
        "model": recording.model,
        "calls": to_data(recording.calls),
        "left_out": to_data(recording.left_out),
        "files": dict(recording.files),
    }
    write(recording.file, json.dumps(content) + "\n")


def recording_of(model: str) -> Recording | None:
    """Load the recording that MODEL names, with one call alone if MODEL names one; None where MODEL
    is something else. Raises UsageError for a recording that cannot be read or lacks the call, and
    CaptureError for one in which no call could be captured."""
    file, name = _parts(model)
    content = _content(file) if file is not None else None
    if file is None or content is None or "recording_version" not in content:
        return None
    found = _read(file, content)
    if not found.captured:
        raise CaptureError(
            f"{file}: no call could be captured: {_failures(found)}; correct that and record again"
        )
    if name and name not in found.captured:
        raise UsageError(f"{model}: no such call; known: {', '.join(found.captured)}")
    return replace(found, only=name)


def recorded_graph(model: str) -> Graph:
    """Graph of the call that MODEL names. Raises UsageError where MODEL names none of several
    calls, and where MODEL is no recording: the message says what the file is."""
    found = recording_of(model)
    if found is None:
        raise UsageError(_other(model))
    if len(found.captured) > 1:
        raise UsageError(f"{model}: has several calls; name one of {', '.join(found.captured)}")
    (call,) = found.captured.values()
    assert call.graph is not None  # it is captured
    try:
        graph = from_data(Graph, call.graph)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{model}: a damaged graph; record again") from error
    return replace(
        graph, source=model, assumed=tuple(_facts(found, call)), files=tuple(found.files)
    )


def names_json(model: str) -> bool:
    """Whether MODEL has the form of a recording."""
    return _parts(model)[0] is not None


def call_of(model: str, name: str) -> str:
    """Spell MODEL for one call of a recording."""
    return f"{_parts(model)[0]}:{name}"


def _read(file: Path, content: Mapping[str, Any]) -> Recording:
    if content["recording_version"] != VERSION:
        raise UsageError(
            f"{file}: is of version {content['recording_version']} and this tool reads {VERSION}; "
            "record again"
        )
    try:
        return Recording(
            tool=dict(content["tool"]),
            model=content["model"],
            calls=tuple(from_data(RecordedCall, call) for call in content["calls"]),
            left_out=from_data(LeftOut, content["left_out"]),
            files=dict(content["files"]),
            file=file,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{file}: a damaged recording; record again") from error


def _parts(model: str) -> tuple[Path | None, str]:
    """Split MODEL into a file and the name of a call. A package may have a module called
    `json`, too."""
    form = re.fullmatch(r"(?!hf:)([^:]+\.json)(?::([\w-]+))?", model)
    if form is None or (form[2] and not Path(form[1]).is_file()):
        return None, ""
    return Path(form[1]), form[2] or ""


def _content(file: Path) -> Mapping[str, Any]:
    """Load the object that a JSON file holds; empty for anything else, and where there is
    no file."""
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {}


def _other(model: str) -> str:
    """Describe a JSON file that is no recording, and what to do with it."""
    file, _ = _parts(model)
    content = (file and _content(file)) or {}
    if "schema_version" in content:
        return f"{file}: is a report, not a model; fusion-advisor report {file} shows it"
    if "model_type" in content or "architectures" in content:
        return f"{file}: is a configuration of transformers; give hf:{file}"
    return f"{file}: is no recording; give a file that fusion_advisor.record wrote"


def _facts(found: Recording, call: RecordedCall) -> list[str]:
    """Notes for the reader on a recorded call."""
    calls = f"{call.count} of {found.total} recorded calls of {found.model}"
    if call.signatures > 1:
        calls += f", of {call.signatures} sizes, captured at the median"
    facts = [calls, f"mode={call.mode}"]
    facts.append(f"gradients {'on' if call.grad else 'off'}")
    if call.autocast:
        facts.append(f"autocast={call.autocast}")
    if found.left_out.calls:
        facts.append(f"{found.left_out.calls} calls were not captured")
    if failures := _failures(found):
        facts.append(f"could not be captured: {failures}")
    changed = [Path(file).name for file, mark in found.files.items() if _changed(file, mark)]
    if changed:
        facts.append(f"{', '.join(changed)} changed since: its lines may be others; record again")
    return facts


def _failures(found: Recording) -> str:
    return "; ".join(f"{call.name}: {call.failure}" for call in found.calls if call.graph is None)


def _changed(file: str, mark: str) -> bool:
    """Whether a file that still exists differs from its recorded hash."""
    return content_hash(Path(file)) not in ("", mark)
