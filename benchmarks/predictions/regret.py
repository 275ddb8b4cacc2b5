"""Quality of decisions, once both choices have been timed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TimedDecision:
    """One decision to fuse or not, with the times of eager and of the kernel."""

    fuse: bool
    eager_us: float
    kernel_us: float


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Decisions counted by their verdict and by whether the kernel is faster than eager. `lost` is
    the share by which the chosen ways take longer than the better of both, everywhere."""

    fused_faster: int
    fused_slower: int
    rejected_faster: int
    rejected_slower: int
    lost: float


def verdicts(decisions: Iterable[TimedDecision]) -> Verdicts:
    """Count every decision by itself, though sets may overlap."""
    cells = {(fuse, faster): 0 for fuse in (True, False) for faster in (True, False)}
    taken = best = 0.0
    for one in decisions:
        cells[one.fuse, one.kernel_us < one.eager_us] += 1
        taken += one.kernel_us if one.fuse else one.eager_us
        best += min(one.kernel_us, one.eager_us)
    return Verdicts(
        cells[True, True],
        cells[True, False],
        cells[False, True],
        cells[False, False],
        taken / best - 1 if best else 0.0,
    )
