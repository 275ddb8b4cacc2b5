"""Where a program and its lanes are: which elements of the results they have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fusion_advisor.region.random import SHARES
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.layout import Group
from fusion_advisor.schedules.places import PLACES, in_runs
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
    least,
    product,
    quotient,
    summed,
    tile,
)

WHOLE, ROWS, COLS, REST, FAR = map(Name, ("WHOLE", "ROWS", "COLS", "REST", "FAR"))
"""Constants of a tile."""


@dataclass
class Scope:
    """A block of statements: where places are worked out first, then the values that it knows."""

    values: dict[int, Tile] = field(default_factory=dict[int, Tile])
    places: dict[str, str] = field(default_factory=dict[str, str])
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
    whole: bool = False
    """Its masks hold in every lane where all parts of a row are whole."""
    near: bool = False
    """Its lanes lie at few places of the outer group of a row; see `places`."""
    scopes: list[Scope] = field(default_factory=lambda: [Scope()])
    lane: ClassVar[str] = "col"
    """The place along the row that a lane has."""
    lanes: ClassVar[str] = "COLS"
    start: ClassVar[Tile] = Name("part") * COLS
    """The place along the row that a program's first lane has."""
    length: ClassVar[str] = "cols"
    vectors: ClassVar[str] = "vectors"
    """Where a lane's element lies in a row that begins anywhere."""
    copy: ClassVar[str] = "shared"
    """Where it has what all rows share, in one of the copies of that."""
    _place_name: str = field(default=PLACES[0], init=False)
    """Which of the places that there can be along runs of lanes is asked for."""

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
        step = self.step
        if step.schedule == "flat":
            within = Name("index") < self.size(step.outer, "count")
            return [
                Let(("index",), self._first_lane + Lanes(Name("BLOCK"))),
                Let(("mask",), within | WHOLE if step.unmasked else within),
            ]
        found = self._numbered() if step.beside else []
        number = Name("tile") if step.beside else self._number
        if step.outer or self.several or step.vector or step.part or step.beside:  # else one row
            found += self._planes() if step.in_planes else self._row(number)
        if step.part and not step.beside:
            found.append(Let(("part",), self.wide(ProgramId(1))))
        found += self._columns(Name("part") * COLS if step.part else None, always=self.whole)
        if self.several:
            within = self._within_rows()
            found.insert(-1, Let(("row_mask",), within | WHOLE if self.whole else within))
            found.append(Let(("mask",), Name("row_mask") & Name("col_mask")))
        return found

    def _numbered(self) -> list[Statement]:
        """Which tile of the rows, and which part of them, a program has that only has a number."""
        step = self.step
        fixed = {axis for group in step.inner for axis in group.axes} <= self.fixed
        if fixed and step.length <= step.block:
            return [Let(("tile",), self._number), Let(("part",), Literal("0"))]
        parts = Name("parts")
        return [
            Let(("parts",), quotient(self.size(step.inner, self.length), COLS)),
            Let(("tile",), self._number // parts),
            Let(("part",), Name("program") % parts),
        ]

    @property
    def _number(self) -> Tile:
        """Which program this is, of those along the first dimension of the grid."""
        return self.wide(Name("program") if self.step.beside else ProgramId(0))

    def wide(self, place: Tile) -> Tile:
        """A place that offsets are made from, in 64 bits where some of them need that. What it is
        multiplied with may have 32."""
        return DeviceCall("wide", (place, FAR))

    def _within_rows(self) -> Tile:
        """Are there such rows?"""
        *_, last = self.step.outer
        if self.step.in_planes:
            return Name(last.name) < self.extent_of(last)
        return Name("row") < self.size(self.step.outer, "rows")

    def _planes(self) -> list[Statement]:
        """The rows of a program that has one place along the first group and a tile of the second;
        both places are known then."""
        first, second = self.step.outer
        self.scopes[0].places |= {group.name: group.name for group in (first, second)}
        size = self.extent_of(second)
        call = DeviceCall("rows_of_plane", (size, ROWS, Name("PLANES"), FAR))
        if self.step.beside:
            call = DeviceCall("rows_of_tile", (Name("tile"), size, ROWS))
        return [Let((first.name, second.name), call)]

    def _row(self, number: Tile) -> list[Statement]:
        """The row, or the rows, that the program of this number has."""
        self._first_row = number * ROWS
        row = number * ROWS + Across(Lanes(ROWS), 1) if self.several else number
        return [Let(("row",), row)]

    def _columns(self, start: Tile | None, *, always: bool = False) -> list[Statement]:
        """The places along the row that the lanes have, from `start` on; `always` where the row
        has them all. They have one dimension, and so has what all rows of a program share: Triton
        lays out loads as the tensor is, so one row of the tile would be laid out otherwise than
        the tile, and Triton may pick that layout for all. A LayerNorm of padded windows, 16 rows
        of 96 and 4 warps, took 1550 instructions so, and takes 598. Rows that a plane shares are
        loaded as often as it has rows: a rotary embedding took 5.8 us so, and 6.2 otherwise; but
        not by an index where lanes load elements that lie apart, so that Triton has two layouts
        anyway: 28 us, and 39 otherwise, where all lie side by side 11.8, and 11.1."""
        lanes = self.wide(Lanes(Name(self.lanes)))
        if self.step.vector:
            return [Let(("lane",), lanes), *self._in_vectors(start)]
        within = Name(self.lane) < self.size(self.step.inner, self.length)
        return [
            Let((self.lane,), lanes if start is None else start + lanes),
            Let((f"{self.lane}_mask",), within | WHOLE if always else within),
        ]

    def _in_vectors(self, start: Tile | None) -> list[Statement]:
        """The places of lanes that take whole vectors of a row, and what lies around those."""
        cols = self.size(self.step.inner, self.length)
        first, begin = Name("row") * cols, Literal("0") if start is None else start
        given = (first, cols, Name("lane"), begin, tile(self.step.vector))
        names = ("col", "vectors", "in_whole", "in_end")
        return [
            Let(names, DeviceCall("in_vectors", given)),
            Let(("col_mask",), Name("in_whole") | Name("in_end")),
        ]

    def _around_vectors(
        self, start: Tile, ends: tuple[str, str] = ("end", "end_mask")
    ) -> list[Statement]:
        """The places of lanes that take whole vectors of a row from `start` on, and of those that
        take its ends; in what all rows share, too."""
        cols = self.size(self.step.inner, self.length)
        given = (Name("row") * cols, cols, start, Name(self.lanes), Name("ENDS"))
        places = (self.lane, self.vectors, f"{self.lane}_mask", *ends)
        found: list[Statement] = [Let(places, DeviceCall("around_vectors", (*given, FAR)))]
        if self.step.copied:
            found.append(Let((self.copy,), DeviceCall("in_copy", given)))
        return found

    @property
    def _first_of_part(self) -> Tile:
        """The place of the first lane of a program that has a part of a row."""
        if not self.step.part:
            return Literal("0")
        return Name("part") * (COLS + REST if self.step.rest else COLS)

    # -- extents -------------------------------------------------------------------------------

    def size(self, groups: Sequence[Group], name: str) -> Tile:
        """The run-time argument that holds the extent of some groups."""
        return self._argument(tuple(axis for group in groups for axis in group.axes), name)

    def _argument(self, axes: tuple[int, ...], name: str) -> Tile:
        for known, spanned in self.sizes.items():
            if spanned == axes:
                return Name(known)
        taken = sum(known.startswith(name) for known in self.sizes)
        name = f"{name}_{taken}" if name in self.sizes else name
        self.sizes[name] = axes
        return Name(name)

    def total(self, groups: Sequence[Group]) -> Tile:
        """The extent of all outer or all inner groups."""
        if self.step.schedule == "flat":
            return self.size(groups, "count")
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
        yield self.step.outer, self._outer_name
        if self.step.parts:
            yield (self.step.parts,), "part"
        yield self.step.inner, self.lane

    @property
    def _outer_name(self) -> str:
        return "index" if self.step.schedule == "flat" else "row"

    def _linear(self, name: str) -> Tile:
        """A linear index over several groups; the row that a plane's are of all is worked out where
        it is first asked for."""
        scope = self.scopes[0]
        if self.step.in_planes and name == self._outer_name and name not in scope.places:
            first, second = self.step.outer
            scope.places[name] = name
            size = self.extent_of(second)
            scope.place(name, Name(first.name) * size + Name(second.name))
        return Name(name)

    def coordinate(self, group: Group, groups: Sequence[Group], linear: str) -> Tile:
        """The index within one group, taken from the linear index over all of them."""
        if len(groups) == 1:
            return Name(linear)
        if linear == self._lane and self._few_places(groups):
            return self._place_in(group, groups)
        known = next((s.places[group.name] for s in self.scopes if group.name in s.places), None)
        if known is None:
            known = self._place_name_of(group)
            scope = self._knowing(linear)
            scope.places[group.name] = known
            scope.place(known, self._within(Name(linear), group, groups))
        return Name(known)

    def _place_name_of(self, group: Group) -> str:
        """What the index within a group is called."""
        return group.name

    @property
    def _lane(self) -> str:
        """What tells the lanes of a program apart."""
        return "index" if self.step.schedule == "flat" else self.lane

    def _few_places(self, groups: Sequence[Group]) -> bool:
        """Are the lanes of a program in one run of the last of some groups, or in two?"""
        step = self.step
        if step.schedule == "flat":
            return in_runs((*step.loads, *step.stores), groups, step.block)
        shared = bool(step.part) or step.schedule == "blocked"
        return shared and not step.vector and len(groups) == 2 and step.block <= groups[1].size

    def _place_in(self, group: Group, groups: Sequence[Group]) -> Tile:
        """The place along one of some groups, of which the last has runs of lanes."""
        *outer, last = groups
        place = self._run(groups)
        if group is last:
            name, scope = last.name, self._knowing(self._lane)
            if name not in scope.places:
                scope.places[name] = name
                scope.place(name, Name(self._lane) - place * self.extent_of(last))
            return Name(name)
        return self._within(place, group, outer)

    def _within(self, linear: Tile, group: Group, groups: Sequence[Group]) -> Tile:
        """The index within one group, by division of the linear index over all of them."""
        for later in reversed(groups[groups.index(group) + 1 :]):
            linear = linear // self.extent_of(later)
        return linear if group is groups[0] else linear % self.extent_of(group)

    def _run(self, groups: Sequence[Group]) -> Tile:
        """The run of the last of some groups that a lane is in: that of the first lane, or the next
        one."""
        *outer, last = groups
        scope, extent = self._knowing(self._lane), self.extent_of(last)
        each, *ends = PLACES
        if ends[0] not in scope.places:
            self.near = True
            runs = self.extent_of(outer[0]) if len(outer) == 1 else self.size(outer, "runs")
            scope.places |= {end: end for end in ends}
            scope.place("first", self._first_lane // extent)
            scope.place("following", least(Name("first") + 1, runs - 1))
        if self._place_name == each and each not in scope.places:
            scope.places[each] = each
            given = (Name(self._lane), *map(Name, ends), extent, Name("NEAR"))
            scope.place(each, DeviceCall("place_of", given))
        return Name(self._place_name)

    @property
    def _first_lane(self) -> Tile:
        """The place of a program's first lane."""
        if self.step.schedule != "flat":
            return self.start
        return Name("start") if self.step.unmasked else self.block_start

    @property
    def block_start(self) -> Tile:
        """The first element of a program's block."""
        return self._number * Name("BLOCK")

    def _knowing(self, linear: str) -> Scope:
        """The innermost scope that has a linear index of its own."""
        return next((s for s in reversed(self.scopes) if linear in s.places), self.scopes[0])

    def _first_place(self, group: Group) -> Tile:
        """The place along one of the rows' groups that the first row of a program has."""
        groups = self.step.outer
        if not self.several:
            return self.coordinate(group, groups, self._outer_name)
        name = f"first_{group.name}"
        scope = self._knowing(self._outer_name)
        if name not in scope.places:
            scope.places[name] = name
            scope.place(name, self._within(self._first_row, group, groups))
        return Name(name)

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
            spanned = tuple(axis for group in groups for axis in group.axes)
            if spanned and axes[: len(spanned)] == spanned and len(groups) > 1:
                return len(spanned), self._linear(linear), self.total(groups)
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
        if step.schedule == "flat":
            whole = axes == tuple(axis for group in step.outer for axis in group.axes)
            return self._first_lane if whole else None
        inner = tuple(axis for group in step.inner for axis in group.axes)
        if step.block < max(SHARES.values()) or not inner or axes[-len(inner) :] != inner:
            return None
        found: list[Tile] = []
        if (row := self._place(axes[: -len(inner)])) is not None:
            found.append(row * self.total(step.inner))
        if step.schedule == "blocked":
            found.append(Name("start"))
        elif step.part:
            found.append(Name("part") * Name(self.lanes))
        return summed(found) if found else Full((), Literal("0"), "int32")
