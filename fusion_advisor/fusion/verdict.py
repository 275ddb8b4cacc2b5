"""Verdict of the gates on a set of launches, as a report has it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateResult:
    """Reading of one gate and its outcome: `outcome` is holds, fails or unknown. `measured` is None
    when it cannot be known."""

    code: str
    name: str
    measured: float | None
    limit: float
    unit: str
    outcome: str
    why: str
    comparison: str = ""


@dataclass(frozen=True, slots=True)
class Fix:
    """Smallest change that flips the one gate that fails."""

    gate: str
    needed: float
    change: str
