"""Where a program and its lanes are: which elements of the results they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fusion_advisor.region.random import SHARES
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.layout import Group, spanned
from fusion_advisor.tile.program import (
    Across,
    Block,
    DeviceCall,
    Full,
    Lanes,
    Let,
    Literal,
    Name,
    ProgramId,
    Statement,
    Tile,
    product,
    quotient,
    summed,
    tile,
)

ROWS, COLS, REST, FAR = map(Name, ("ROWS", "COLS", "REST", "FAR"))
"""Constants of a tile."""


@dataclass
class Scope:
    """A block of statements: where places are worked out first, then the values that it knows."""

    values: dict[int, Tile] = field(default_factory=dict[int, Tile])
    places: dict[str, str] = field(default_factory=dict[str, str])
    loaded: dict[Tile, Tile] = field(default_factory=dict[Tile, Tile])
    """Names of what is loaded of inputs, by the load."""
    head: list[Statement] = field(default_factory=list[Statement])
    body: list[Statement] = field(default_factory=list[Statement])

    def block(self) -> Block:
        return (*self.head, *self.body)

    def let(self, name: str, value: Tile) -> Tile:
        """A value under a name, behind what is here."""
        self.body.append(Let((name,), value))
        return Name(name)

    def place(self, name: str, value: Tile) -> None:
        """A place under a name, with the other places."""
        self.head.append(Let((name,), value))


@dataclass(kw_only=True)
class Coordinates:
    """The place of each lane of one kernel, worked out where it is first asked for.

    `sizes` collects the extents that it needs as run-time arguments, in the order of first use, by
    the axes that they span.
    """

    step: Step
    far: bool
    """At the graph's sizes some offset is beyond 32 bits; at others the launcher asks."""
    fixed: frozenset[int]
    """Axes of which the kernel serves the graph's size alone."""
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    scopes: list[Scope] = field(default_factory=lambda: [Scope()])
    lane: ClassVar[str] = "col"
    """The place along the row that a lane has."""
    lanes: ClassVar[str] = "COLS"
    start: ClassVar[Tile] = Name("part") * COLS
    """The place along the row that a program's first lane has."""
    length: ClassVar[str] = "cols"
    outer_name: ClassVar[str] = "row"
    """The linear index over all rows, or all elements."""

    @property
    def region(self) -> Region:
        return self.step.region

    @property
    def scope(self) -> Scope:
        return self.scopes[-1]

    @property
    def several(self) -> bool:
        """Does a program hold several rows?"""
        return self.step.rows > 1

    @property
    def _inner(self) -> frozenset[int]:
        return self.step.along

    # -- the program ---------------------------------------------------------------------------

    def _program(self) -> list[Statement]:
        """Which elements this program has."""
        step, found = self.step, list[Statement]()
        if step.follows:
            program, parts = Name("program"), Name("parts")
            found.append(Let(("program",), self._number))
            found.append(Let(("parts",), quotient(self.size(step.inner, self.length), COLS)))
            found += [*self._row(program // parts), Let(("part",), program % parts)]
        elif step.outer or self.several or step.part:  # else one row
            found += self._row(self._number)
        if step.part and not step.follows:
            found.append(Let(("part",), self.wide(ProgramId(1))))
        found += self._columns(Name("part") * COLS if step.part else None)
        if self.several:
            within = Name("row") < self.size(step.outer, "rows")
            found.insert(-1, Let(("row_mask",), within))
            found.append(Let(("mask",), Name("row_mask") & Name("col_mask")))
        return found

    @property
    def _number(self) -> Tile:
        """Which program this is, of those along the first dimension of the grid."""
        return self.wide(ProgramId(0))

    def wide(self, place: Tile) -> Tile:
        """A place that offsets are made from, in 64 bits where some of them need that. What it is
        multiplied with may have 32."""
        return DeviceCall("wide", (place, FAR))

    def _row(self, number: Tile) -> list[Statement]:
        """The row, or the rows, that the program of this number has."""
        row = number * ROWS + Across(Lanes(ROWS), 1) if self.several else number
        return [Let(("row",), row)]

    def _columns(self, start: Tile | None) -> list[Statement]:
        """The places along the row that the lanes have, from `start` on. They have one dimension,
        and so has what all rows of a program share: Triton lays out loads as the tensor is, so one
        row of the tile would be laid out otherwise than the tile, and Triton may pick that layout
        for all. A LayerNorm of padded windows, 16 rows of 96 and 4 warps, took 1550 instructions
        so, and takes 598."""
        lanes = self.wide(Lanes(Name(self.lanes)))
        within = Name(self.lane) < self.size(self.step.inner, self.length)
        return [
            Let((self.lane,), lanes if start is None else start + lanes),
            Let((f"{self.lane}_mask",), within),
        ]

    # -- extents -------------------------------------------------------------------------------

    def size(self, groups: Sequence[Group], name: str) -> Tile:
        """The run-time argument that holds the extent of some groups."""
        return self._argument(spanned(groups), name)

    def _argument(self, axes: tuple[int, ...], name: str) -> Tile:
        for known, along in self.sizes.items():
            if along == axes:
                return Name(known)
        taken = sum(known.startswith(name) for known in self.sizes)
        name = f"{name}_{taken}" if name in self.sizes else name
        self.sizes[name] = axes
        return Name(name)

    def total(self, groups: Sequence[Group]) -> Tile:
        """The extent of all outer or all inner groups."""
        return self.size(groups, self.length if groups == self.step.inner else "rows")

    def extent_of(self, group: Group) -> Tile:
        if set(group.axes) <= self.fixed:
            return tile(group.size)
        for groups in (self.step.outer, self.step.inner):
            if groups == (group,):
                return self.total(groups)
        return self.size((group,), "parts" if group is self.step.parts else f"{group.name}_size")

    def _size_of(self, axis: int) -> Tile:
        """The extent of one axis: a number where the kernel serves no other."""
        if axis in self.fixed:
            return tile(self.region.sizes[axis])
        return self._argument((axis,), "elements")

    # -- places --------------------------------------------------------------------------------

    def _levels(self) -> Iterator[tuple[tuple[Group, ...], str]]:
        """The groups that share a linear index, with its name."""
        yield self.step.outer, self.outer_name
        if self.step.parts:
            yield (self.step.parts,), "part"
        yield self.step.inner, self.lane

    def coordinate(self, group: Group, groups: Sequence[Group], linear: str) -> Tile:
        """The index within one group, taken from the linear index over all of them."""
        if len(groups) == 1:
            return Name(linear)
        known = next((s.places[group.name] for s in self.scopes if group.name in s.places), None)
        if known is None:
            known = self._place_name_of(group)
            scope = self._knowing(linear)
            scope.places[group.name] = known
            scope.place(known, self._divided_by(Name(linear), group, groups))
        return Name(known)

    def _place_name_of(self, group: Group) -> str:
        """What the index within a group is called."""
        return group.name

    def _divided_by(self, linear: Tile, group: Group, groups: Sequence[Group]) -> Tile:
        """The index within one group, by division of the linear index over all of them."""
        for later in reversed(groups[groups.index(group) + 1 :]):
            linear = linear // self.extent_of(later)
        return linear if group is groups[0] else linear % self.extent_of(group)

    def _knowing(self, linear: str) -> Scope:
        """The innermost scope that has a linear index of its own."""
        return next((s for s in reversed(self.scopes) if linear in s.places), self.scopes[0])

    def _place(self, axes: tuple[int, ...]) -> Tile | None:
        """The position along some axes, outermost first; None without any."""
        found: Tile | None = None
        while axes:
            count, place, extent = self._place_along(axes)
            found = place if found is None else found * extent + place
            axes = axes[count:]
        return found

    def _place_along(self, axes: tuple[int, ...]) -> tuple[int, Tile, Tile]:
        """How many of some axes lie along a group, or along all that share a linear index; the
        place there, and its extent."""
        if axes[0] in self.step.serial:
            return 1, self._serial_place(axes[0]), self._size_of(axes[0])
        for groups, linear in self._levels():
            every = spanned(groups)
            if every and axes[: len(every)] == every and len(groups) > 1:
                return len(every), Name(linear), self.total(groups)
            for group in groups:
                if axes[: len(group.axes)] == group.axes:
                    extent = self._size_of(axes[0]) if len(group.axes) == 1 else None
                    place = self.coordinate(group, groups, linear)
                    return len(group.axes), place, extent or self.extent_of(group)
                if axes[0] in group.axes:
                    return self._place_inside(axes, group, self.coordinate(group, groups, linear))
        raise KeyError(axes[0])

    def _place_inside(
        self, axes: tuple[int, ...], group: Group, place: Tile
    ) -> tuple[int, Tile, Tile]:
        """The same for axes that are some of a group's, of which this is the place."""
        start = group.axes.index(axes[0])
        here = [a for a, b in zip(axes, group.axes[start:], strict=False) if a == b]
        extent = product(map(self._size_of, here))
        if later := [self._size_of(axis) for axis in group.axes[start + len(here) :]]:
            place = place // product(later)
        return len(here), place % extent if start else place, extent

    def _serial_place(self, axis: int) -> Tile:
        for scope in reversed(self.scopes):
            if f"axis {axis}" in scope.places:
                return Name(scope.places[f"axis {axis}"])
        raise KeyError(axis)

    def _first_of_run(self, axes: tuple[int, ...]) -> Tile | None:
        """Where a program's elements begin when it has a run of them; None when it has none."""
        step = self.step
        if not axes:
            return None
        inner = spanned(step.inner)
        if step.block < max(SHARES.values()) or not inner or axes[-len(inner) :] != inner:
            return None
        found: list[Tile] = []
        if (row := self._place(axes[: -len(inner)])) is not None:
            found.append(row * self.total(step.inner))
        if step.part or step.chunked:
            found.append(self.start)
        return summed(found) if found else Full((), Literal("0"), "int32")
