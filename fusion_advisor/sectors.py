"""What memory reads beside the elements that are asked for: whole sectors. Shared knowledge."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from fusion_advisor.device import SECTOR_BYTES


def read_with(places: Collection[int], size: int, itemsize: int) -> int:
    """Elements that are read of a row of `size` where some places of it are asked for, and of the
    rows behind it the same ones. Of what lies between two of them, or between the last and the
    next row's first, less than a sector is in the sectors of both.

    Source: `dram__bytes_read` of pools whose windows leave an edge out: 19 of every 16 elements
    asked for are read where rows have 19 (ncu, H200, 2026-11-23)."""
    if not places:
        return 0
    least = max(1, SECTOR_BYTES // itemsize) - 1
    ordered = sorted(places)
    around = [*ordered, ordered[0] + size]
    return len(ordered) + sum(min(after - before - 1, least) for before, after in pairwise(around))
