"""The body of a kernel whose programs have a block of consecutive elements of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import Group, spanned
from fusion_advisor.tile.program import Lanes, Let, Literal, Name, Settled, Shape, Statement, Tile

BLOCK = Name("BLOCK")


@dataclass(kw_only=True)
class FlatBody(Body):
    """Elements without rows: one linear index. Each lane divides it by the extents of dimensions,
    which the kernel is compiled for: by numbers that come as it runs, divisions took a twentieth
    of a kernel's time, of one with few bytes a tenth."""

    settled: list[Constant] = field(default_factory=list[Constant])
    """Extents that the index is divided by."""
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
        return (Constant("BLOCK", self.step.block), *self.settled)

    def extent_of(self, group: Group) -> Tile:
        extent = super().extent_of(group)
        known = Constant(group.name.upper(), group.size, "settled", group.axes)
        argument = isinstance(extent, Name) and group is not self.step.outer[0]
        if argument and known not in self.settled:
            self.settled.append(known)
        return extent

    def _divided(self) -> list[Statement]:
        names = {axes: name for name, axes in self.sizes.items()}
        note = "compiled for the first sizes"
        told = [Settled(names[known.axes], known.name, note) for known in self.settled]
        return [*super()._divided(), *told]

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
