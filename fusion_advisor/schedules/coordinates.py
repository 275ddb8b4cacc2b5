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


@dataclass
class Scope:
    """A block of lines: where places are worked out first, then the values that it knows."""

    texts: dict[int, str] = field(default_factory=dict[int, str])
    places: dict[str, str] = field(default_factory=dict[str, str])
    head: list[str] = field(default_factory=list[str])
    lines: list[str] = field(default_factory=list[str])

    def block(self) -> list[str]:
        return [*self.head, *self.lines]

    def indented(self) -> list[str]:
        """The lines as those of a loop or a branch."""
        return [f"    {line}" for line in self.block()]


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
    helpers: dict[str, None] = field(default_factory=dict[str, None])
    whole: bool = False
    """Its masks hold in every lane where all parts of a row are whole."""
    near: bool = False
    """Its lanes lie at few places of the outer group of a row; see `places`."""
    scopes: list[Scope] = field(default_factory=lambda: [Scope()])
    lane: ClassVar[str] = "col"
    """The place along the row that a lane has."""
    lanes: ClassVar[str] = "COLS"
    start: ClassVar[str] = "part * COLS"
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

    def _program(self) -> list[str]:
        """Which elements this program has."""
        step = self.step
        if step.schedule == "flat":
            within = f"index < {self.size(step.outer, 'count')}"
            return [
                f"index = {self._first_lane} + tl.arange(0, BLOCK)",
                f"mask = ({within}) | WHOLE" if step.unmasked else f"mask = {within}",
            ]
        lines = self._numbered() if step.beside else []
        tile = "tile" if step.beside else self._number
        if step.outer or self.several or step.vector or step.part or step.beside:  # else one row
            lines += self._planes() if step.in_planes else self._row(tile)
        if step.part and not step.beside:
            lines.append(f"part = {self.wide('tl.program_id(1)')}")
        always = " | WHOLE" if self.whole else ""
        lines += self._columns("part * COLS + " if step.part else "", always)
        if self.several:
            within = self._within_rows()
            lines.insert(-1, f"row_mask = ({within}){always}" if always else f"row_mask = {within}")
            lines.append("mask = row_mask & col_mask")
        return lines

    def _numbered(self) -> list[str]:
        """Which tile of the rows, and which part of them, a program has that only has a number."""
        step = self.step
        fixed = {axis for group in step.inner for axis in group.axes} <= self.fixed
        if fixed and step.length <= step.block:
            return [f"tile, part = {self._number}, 0"]
        parts = f"parts = tl.cdiv({self.size(step.inner, self.length)}, COLS)"
        return [parts, f"tile, part = {self._number} // parts, program % parts"]

    @property
    def _number(self) -> str:
        """Which program this is, of those along the first dimension of the grid."""
        return self.wide("program" if self.step.beside else "tl.program_id(0)")

    def wide(self, place: str) -> str:
        """A place that offsets are made from, in 64 bits where some of them need that. What it is
        multiplied with may have 32."""
        return f"wide({place}, FAR)"

    def _within_rows(self) -> str:
        """Are there such rows?"""
        *_, last = self.step.outer
        if self.step.in_planes:
            return f"{last.name} < {self.extent_of(last)}"
        return f"row < {self.size(self.step.outer, 'rows')}"

    def _planes(self) -> list[str]:
        """The rows of a program that has one place along the first group and a tile of the second;
        both places are known then."""
        first, second = self.step.outer
        self.scopes[0].places |= {group.name: group.name for group in (first, second)}
        rows, size = f"{first.name}, {second.name}", self.extent_of(second)
        helper, given = "rows_of_plane", f"{size}, ROWS, PLANES, FAR"
        if self.step.beside:
            helper, given = "rows_of_tile", f"tile, {size}, ROWS"
        self.helpers[helper] = None
        return [f"{rows} = {helper}({given})"]

    def _row(self, number: str) -> list[str]:
        """The row, or the rows, that the program of this number has."""
        self._first_row = f"({number} * ROWS)"
        if self.several:
            return [f"row = {number} * ROWS + tl.arange(0, ROWS)[:, None]"]
        return [f"row = {number}"]

    def _columns(self, start: str, always: str = "") -> list[str]:
        """The places along the row that the lanes have, from `start` on; `always` where the row
        has them all. They have one dimension, and so has what all rows of a program share: Triton
        lays out loads as the tensor is, so one row of the tile would be laid out otherwise than
        the tile, and Triton may pick that layout for all. A LayerNorm of padded windows, 16 rows
        of 96 and 4 warps, took 1550 instructions so, and takes 598. Rows that a plane shares are
        loaded as often as it has rows: a rotary embedding took 5.8 us so, and 6.2 otherwise; but
        not by an index where lanes load elements that lie apart, so that Triton has two layouts
        anyway: 28 us, and 39 otherwise, where all lie side by side 11.8, and 11.1."""
        lanes = self.wide(f"tl.arange(0, {self.lanes})")
        if self.step.vector:
            return [f"lane = {lanes}", *self._in_vectors(start)]
        within = f"{self.lane} < {self.size(self.step.inner, self.length)}"
        return [
            f"{self.lane} = {start}{lanes}",
            f"{self.lane}_mask = ({within}){always}" if always else f"{self.lane}_mask = {within}",
        ]

    def _in_vectors(self, start: str) -> list[str]:
        """The places of lanes that take whole vectors of a row, and what lies around those."""
        self.helpers["in_vectors"] = None
        start = start.removesuffix(" + ") or "0"
        cols = self.size(self.step.inner, self.length)
        given = f"row * {cols}, {cols}, lane, {start}, {self.step.vector}"
        return [
            f"col, vectors, in_whole, in_end = in_vectors({given})",
            "col_mask = in_whole | in_end",
        ]

    def _around_vectors(self, start: str, ends: str = "end, end_mask") -> list[str]:
        """The places of lanes that take whole vectors of a row from `start` on, and of those that
        take its ends; in what all rows share, too."""
        self.helpers["around_vectors"] = None
        cols = self.size(self.step.inner, self.length)
        given = f"row * {cols}, {cols}, {start}, {self.lanes}, ENDS"
        places = f"{self.lane}, {self.vectors}, {self.lane}_mask, {ends}"
        lines = [f"{places} = around_vectors({given}, FAR)"]
        if self.step.copied:
            self.helpers["in_copy"] = self.helpers["copies_kernel"] = None
            lines.append(f"{self.copy} = in_copy({given})")
        return lines

    @property
    def _first_of_part(self) -> str:
        """The place of the first lane of a program that has a part of a row."""
        if not self.step.part:
            return "0"
        lanes = "(COLS + REST)" if self.step.rest else "COLS"
        return f"part * {lanes}"

    # -- extents -------------------------------------------------------------------------------

    def size(self, groups: Sequence[Group], name: str) -> str:
        """The run-time argument that holds the extent of some groups."""
        return self._argument(tuple(axis for group in groups for axis in group.axes), name)

    def _argument(self, axes: tuple[int, ...], name: str) -> str:
        for known, spanned in self.sizes.items():
            if spanned == axes:
                return known
        taken = sum(known.startswith(name) for known in self.sizes)
        name = f"{name}_{taken}" if name in self.sizes else name
        self.sizes[name] = axes
        return name

    def total(self, groups: Sequence[Group]) -> str:
        """The extent of all outer or all inner groups."""
        if self.step.schedule == "flat":
            return self.size(groups, "count")
        return self.size(groups, self.length if groups == self.step.inner else "rows")

    def extent_of(self, group: Group) -> str:
        if set(group.axes) <= self.fixed:
            return str(group.size)
        for groups in (self.step.outer, self.step.inner):
            if groups == (group,):
                return self.total(groups)
        return self.size((group,), "parts" if group is self.step.parts else f"{group.name}_size")

    def _size_of(self, axis: int) -> str:
        """The extent of one axis: a number where the kernel serves no other."""
        if axis in self.fixed:
            return str(self.region.sizes[axis])
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

    def _linear(self, name: str) -> str:
        """A linear index over several groups; the row that a plane's are of all is worked out where
        it is first asked for."""
        scope = self.scopes[0]
        if self.step.in_planes and name == self._outer_name and name not in scope.places:
            first, second = self.step.outer
            scope.places[name] = name
            size = self.extent_of(second)
            scope.head.append(f"{name} = {first.name} * {size} + {second.name}")
        return name

    def coordinate(self, group: Group, groups: Sequence[Group], linear: str) -> str:
        """The index within one group, taken from the linear index over all of them."""
        if len(groups) == 1:
            return linear
        if linear == self._lane and self._few_places(groups):
            return self._place_in(group, groups)
        known = next((s.places[group.name] for s in self.scopes if group.name in s.places), None)
        if known is None:
            known = self._place_name_of(group)
            scope = self._knowing(linear)
            scope.places[group.name] = known
            scope.head.append(f"{known} = {self._within(linear, group, groups)}")
        return known

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

    def _place_in(self, group: Group, groups: Sequence[Group]) -> str:
        """The place along one of some groups, of which the last has runs of lanes."""
        *outer, last = groups
        place = self._run(groups)
        if group is last:
            name, scope = last.name, self._knowing(self._lane)
            if name not in scope.places:
                scope.places[name] = name
                scope.head.append(f"{name} = {self._lane} - {place} * {self.extent_of(last)}")
            return name
        return self._within(place, group, outer)

    def _within(self, linear: str, group: Group, groups: Sequence[Group]) -> str:
        """The index within one group, by division of the linear index over all of them."""
        for later in reversed(groups[groups.index(group) + 1 :]):
            linear = f"{linear} // {self.extent_of(later)}"
        return linear if group is groups[0] else f"{linear} % {self.extent_of(group)}"

    def _run(self, groups: Sequence[Group]) -> str:
        """The run of the last of some groups that a lane is in: that of the first lane, or the next
        one."""
        *outer, last = groups
        scope, extent = self._knowing(self._lane), self.extent_of(last)
        each, *ends = PLACES
        if ends[0] not in scope.places:
            self.near = True
            runs = self.extent_of(outer[0]) if len(outer) == 1 else self.size(outer, "runs")
            scope.places |= {end: end for end in ends}
            scope.head += [
                f"first = {self._first_lane} // {extent}",
                f"following = tl.minimum(first + 1, {runs} - 1)",
            ]
        if self._place_name == each and each not in scope.places:
            self.helpers["place_of"] = None
            scope.places[each] = each
            scope.head.append(
                f"place = place_of({self._lane}, first, following, {extent}, NEAR)",
            )
        return self._place_name

    @property
    def _first_lane(self) -> str:
        """The place of a program's first lane."""
        if self.step.schedule != "flat":
            return self.start
        return "start" if self.step.unmasked else self.block_start

    @property
    def block_start(self) -> str:
        """The first element of a program's block."""
        return f"{self._number} * BLOCK"

    def _knowing(self, linear: str) -> Scope:
        """The innermost scope that has a linear index of its own."""
        return next((s for s in reversed(self.scopes) if linear in s.places), self.scopes[0])

    def _first_place(self, group: Group) -> str:
        """The place along one of the rows' groups that the first row of a program has."""
        groups = self.step.outer
        if not self.several:
            return self.coordinate(group, groups, self._outer_name)
        name = f"first_{group.name}"
        scope = self._knowing(self._outer_name)
        if name not in scope.places:
            scope.places[name] = name
            scope.head.append(f"{name} = {self._within(self._first_row, group, groups)}")
        return name

    def _place(self, axes: tuple[int, ...]) -> str:
        """The position along some axes, outermost first."""
        text = ""
        while axes:
            count, place, extent = self._place_along(axes)
            text = f"({text} * {extent} + {place})" if text else place
            axes = axes[count:]
        return text

    def _place_along(self, axes: tuple[int, ...]) -> tuple[int, str, str]:
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
        self, axes: tuple[int, ...], group: Group, place: str
    ) -> tuple[int, str, str]:
        """The same for axes that are some of a group's, of which this is the place."""
        start = group.axes.index(axes[0])
        here = [a for a, b in zip(axes, group.axes[start:], strict=False) if a == b]
        extent = " * ".join(map(self._size_of, here))
        if later := [self._size_of(axis) for axis in group.axes[start + len(here) :]]:
            place = f"({place} // ({' * '.join(later)}))"
        return len(here), f"({place} % ({extent}))" if start else place, f"({extent})"

    def _serial_place(self, axis: int) -> str:
        for scope in reversed(self.scopes):
            if f"axis {axis}" in scope.places:
                return scope.places[f"axis {axis}"]
        raise KeyError(axis)

    def _first_of_run(self, axes: tuple[int, ...]) -> str:
        """Where a program's elements begin when it has a run of them; empty when it has none."""
        step = self.step
        if not axes:
            return ""
        if step.schedule == "flat":
            whole = axes == tuple(axis for group in step.outer for axis in group.axes)
            return self._first_lane if whole else ""
        inner = tuple(axis for group in step.inner for axis in group.axes)
        if step.block < max(SHARES.values()) or not inner or axes[-len(inner) :] != inner:
            return ""
        part = f"part * {self.lanes}" if step.part and step.schedule != "blocked" else ""
        start = "start" if step.schedule == "blocked" else part
        row = self._place(axes[: -len(inner)])
        row = f"{row} * {self.total(step.inner)}" if row else ""
        return " + ".join(filter(None, (row, start))) or "tl.full((), 0, tl.int32)"
