"""The body of a kernel whose programs have a block of consecutive elements of the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import Group, spanned
from fusion_advisor.tile.program import Lanes, Let, Literal, Name, Shape, Statement, Tile

BLOCK = Name("BLOCK")


class FlatBody(Body):
    """Elements without rows: one linear index."""

    lane: ClassVar[str] = "index"
    lanes: ClassVar[str] = "BLOCK"
    outer_name: ClassVar[str] = "index"

    @property
    def note(self) -> str:
        return "One program, one block of consecutive elements of the result."

    def _program(self) -> list[Statement]:
        within = Name("index") < self.size(self.step.outer, "count")
        index = self._number * BLOCK + Lanes(BLOCK)
        return [Let(("index",), index), Let(("mask",), within)]

    @property
    def tile_constants(self) -> tuple[Constant, ...]:
        return (Constant("BLOCK", self.step.block),)

    @property
    def _apart(self) -> bool:
        return True

    def total(self, groups: Sequence[Group]) -> Tile:
        return self.size(groups, "count")

    def _within(self, outer: bool, inner: bool) -> Tile | None:
        return Name("mask") if outer else None

    def _shape(self, outer: bool, inner: bool) -> Shape:
        return (BLOCK,) if outer else ()

    def _first_of_run(self, axes: tuple[int, ...]) -> Tile | None:
        return self._number * BLOCK if axes and axes == spanned(self.step.outer) else None

    @property
    def _in_runs(self) -> Tile:
        return Literal("True")
