"""How a kernel is launched at any sizes: its programs, and the constants of its tile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

Rule = Literal[
    "",
    "power_of_two",
    "first_piece",
    "second_piece",
    "divisor",
    "settled",
    "in_runs",
    "far",
    "step",
]
"""How a constant follows from the places along some axes; "" where it is the same at every size.
`divisor` is the largest power of two up to 16 that divides them, `settled` how many they are, or 0
where many other numbers of them came before, `in_runs` whether random bits are
drawn for runs of them, `far` whether an offset is beyond 32 bits, `step` which phase of a kernel in
several launches it is."""


@dataclass(frozen=True, slots=True)
class Constant:
    """Constant of a tile, of which each value is compiled anew, and its value for the graph."""

    name: str
    value: int
    rule: Rule = ""
    axes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Extent:
    """Places along some axes in units of `per`, rounded up; `most` at the most, where that is
    not 0. `by`: name of the constant of the tile that has these units."""

    axes: tuple[int, ...]
    per: int = 1
    most: int = 0
    by: str = ""

    def at(self, sizes: Mapping[int, int]) -> int:
        """How many there are at some sizes of the axes."""
        found = -(-prod(sizes[axis] for axis in self.axes) // self.per)
        return min(found, self.most or found)


Grid = tuple[tuple[Extent, ...], ...]
"""Programs along each dimension: a product of extents."""
