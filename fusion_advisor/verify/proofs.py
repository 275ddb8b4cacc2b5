"""Cache of interpreter checks and compiles, keyed by everything that they were made from: a
kernel's text, its cases, the criterion and the versions. Only passed checks are kept: a failure may
have come from too little time or memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from fusion_advisor.ir.kernel import Check, Compiled
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.kept import entry, put, read

_T = TypeVar("_T", Check, Compiled)


@dataclass(frozen=True)
class Proofs:
    """Folder of proofs that keeps at most so many."""

    folder: Path
    most: int

    def find(self, kind: type[_T], job: str) -> _T | None:
        """Proof of a job; None where it is unknown or cannot be read."""
        try:
            return from_json(kind, read(self._entry(kind, job)))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, job: str, proof: Check | Compiled) -> None:
        """Store the proof of a job if it passed. A check is stored only if it ran on the
        interpreter: a GPU may answer otherwise another time."""
        if isinstance(proof, Check):
            sure = proof.passed and proof.where == "interpreter"
        else:
            sure = not proof.failure
        if sure:
            put(self._entry(type(proof), job), to_json(proof), self.most)

    def _entry(self, kind: type[Check | Compiled], job: str) -> Path:
        return entry(self.folder, {"kind": kind.__name__, "job": job})
