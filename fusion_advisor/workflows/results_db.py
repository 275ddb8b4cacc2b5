"""Database of the rows of all `bench` runs in one file, each with the machine and the computation
that it belongs to."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fusion_advisor.ir.kernel import Check
from fusion_advisor.measure.protocol import Measurement
from fusion_advisor.report.schema import Report
from fusion_advisor.support.codec import from_data, to_data
from fusion_advisor.support.errors import UsageError

_VERSIONS = ("gpu", "torch", "triton", "liger", "cuda", "driver_version")
"""Fields of a machine that must be equal for a stored row to hold; clocks are recorded, and
may differ."""

Row = dict[str, Any]


@dataclass(frozen=True)
class StoredMeasurement:
    """Measurement of an earlier run that still holds; `check` is the kernel's, where it was
    checked."""

    found: Measurement
    check: Check | None


class Ledger:
    """File of measurements, one JSON line each. With `resume`, rows of the same report, rules,
    device, GPU and versions are found again. `rules` is the hash of the rules that the measuring
    follows."""

    def __init__(self, file: Path, report: Report, rules: str, *, resume: bool = False) -> None:
        self._file = file
        self._about = {
            "report": report_hash(report),
            "model": report.model.source,
            "scenario": report.scenario.model_dump(mode="json"),
            "analysed_by": report.rules.hash,
            "rules": rules,
            "tool": report.tool.version,
            "device": report.device.name,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        self._resume = resume
        self._machine: dict[str, str] = {}
        self._standing: dict[tuple[str, ...], Row] = {}

    def begin(self, machine: Mapping[str, str]) -> None:
        """Set the machine of the following measurements, as `measure.child.machine` names it.
        Raises UsageError when the file cannot be read."""
        self._machine = dict(machine)
        if self._resume and self._file.is_file():
            self._standing = {_key(row): row for row in self._rows() if self._same(row)}

    def find(self, subject: str, way: str, kernels: Sequence[str]) -> StoredMeasurement | None:
        """Stored measurement of one way; `kernels` are the texts that the way runs or is checked
        against."""
        row = self._standing.get((subject, way, kernels_hash(kernels)))
        if row is None:
            return None
        check = row.get("check")
        return StoredMeasurement(
            from_data(Measurement, row), from_data(Check, check) if check else None
        )

    def append(
        self, found: Measurement, kernels: Sequence[str], verdict: str, check: Check | None = None
    ) -> None:
        """Append a row at once: a run that is cut short keeps its rows."""
        row = {
            **self._about,
            "machine": self._machine,
            "kernel": kernels_hash(kernels),
            "verdict": verdict,
            **to_data(found),
            "check": to_data(check),
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a+b") as file:
            if file.tell() and not self._whole():
                file.write(b"\n")  # an earlier run was killed in the middle of a line
            file.write(json.dumps(row).encode() + b"\n")

    def _whole(self) -> bool:
        with self._file.open("rb") as file:
            file.seek(-1, 2)
            return file.read() == b"\n"

    def _rows(self) -> Iterator[Row]:
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{self._file}: cannot be read: {error}") from error
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # cut short: it is measured again
            if isinstance(row, dict):
                yield cast("Row", row)

    def _same(self, row: Row) -> bool:
        about = ("report", "rules", "tool", "device")
        here = self._machine
        there = cast("dict[str, str]", row.get("machine") or {})
        return all(row.get(key) == self._about[key] for key in about) and all(
            here.get(name) == there.get(name) for name in _VERSIONS
        )


def _key(row: Row) -> tuple[str, ...]:
    return row["subject"], row["way"], row["kernel"]


def kernels_hash(texts: Sequence[str]) -> str:
    """Hash of emitted files, in their order; empty for none."""
    joined = "\0".join(texts)
    return hashlib.sha256(joined.encode()).hexdigest()[:16] if texts else ""


def report_hash(report: Report) -> str:
    """Hash of the analysis and its decisions; the measurements that `bench` writes into a report do
    not change it."""
    decided = report.model_dump(mode="json", include={"device", "scenario", "rules", "nodes"}) | {
        "groups": [
            (row.id, row.fingerprint, row.verdict, row.instances)
            for row in (*report.groups, *report.candidates)
        ]
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]
