"""Blocked layout: how Triton spreads a tile over the threads of a program.

Each thread has as many places that lie together as a vector holds. Lanes, then warps, go along the
dimension that memory follows as far as it reaches, and what is left of them along the other one;
what is left of the tile comes round again. Source: Triton's coalescing, `BlockedEncodingAttr`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Lanes, warps, and places of a thread, along the dimension that memory follows and along the
    other; `vector` places lie together."""

    vector: int
    lanes: int
    lanes_across: int
    warps: int
    warps_across: int
    held: int
    held_across: int

    @property
    def places(self) -> int:
        """Places of the tile that a thread has."""
        return self.held * self.held_across


def spread(along: int, across: int, vector: int, warps: int, warp: int) -> Spread:
    """Spread a tile of `along` places where memory follows, by `across`, over warps of
    `warp` lanes."""
    vector = max(1, min(vector, along * across // (warps * warp)))
    threads = max(1, min(warps * warp, along // vector))
    lanes = min(threads, warp)
    further = max(1, min(threads // lanes, warps))
    lanes_across, warps_across = warp // lanes, warps // further
    return Spread(
        vector,
        lanes,
        lanes_across,
        further,
        warps_across,
        max(vector, along // (lanes * further)),
        max(1, across // (lanes_across * warps_across)),
    )
