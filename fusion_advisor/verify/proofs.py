"""What checks on the interpreter and compiles came to, by all that they were made from: a kernel's
text, its cases, the criterion and the versions. Only those that passed are kept: what failed may
have been short of time or memory."""

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
    """A folder of them, in which at most so many are kept."""

    folder: Path
    most: int

    def find(self, kind: type[_T], job: str) -> _T | None:
        """What a job came to, if that is known; None, too, for what cannot be read."""
        try:
            return from_json(kind, read(self._entry(kind, job)))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, job: str, proof: Check | Compiled) -> None:
        """Puts in what a job came to, if it passed, and on the interpreter where it is a check: a
        GPU may answer otherwise another time."""
        if isinstance(proof, Check):
            sure = proof.passed and proof.where == "interpreter"
        else:
            sure = not proof.failure
        if sure:
            put(self._entry(type(proof), job), to_json(proof), self.most)

    def _entry(self, kind: type[Check | Compiled], job: str) -> Path:
        return entry(self.folder, {"kind": kind.__name__, "job": job})
