"""The body of a generated kernel: a plan's values as lines of Triton."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any, ClassVar, TypeVar

from fusion_advisor.contracted import WITH_ONE, one_more
from fusion_advisor.device import VECTOR_BYTES
from fusion_advisor.exprs import Expr
from fusion_advisor.philox import SHARES, kernel_helpers
from fusion_advisor.primitives import HELPERS, MONOIDS, PRIMITIVES
from fusion_advisor.region import Region
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.beyond import FILLS, Beyond, beyond, filled_beyond
from fusion_advisor.schedules.joined import Joined, in_one_part, searched
from fusion_advisor.schedules.layout import (
    Access,
    Group,
    affine,
    evaluates,
    gaps,
    index_of,
    reach,
    stepped_over,
    traced,
)
from fusion_advisor.schedules.online import at_least_one, only_summed
from fusion_advisor.schedules.places import PLACES, in_runs
from fusion_advisor.schedules.spelling import (
    Names,
    as_operand,
    bare,
    filled,
    language_dtype,
    literal,
)
from fusion_advisor.schedules.vectors import copies_of

_LIMITS = {
    "int64": ("-9223372036854775808", "9223372036854775807"),
    "int32": ("-2147483648", "2147483647"),
    "int16": ("-32768", "32767"),
    "int8": ("-128", "127"),
    "uint8": ("0", "255"),
}
DIVISOR = 16
"""What Triton looks for in the arguments of a kernel: does it divide them?"""
_LONGEST_PART = 60
"""Columns; a longer part of an expression gets a line and a name of its own."""
_NUMBERS = ("const", "size", "taken", "extent")
"""Numbers, or arguments that may be one."""
_UNMADE = ("const", "size", "taken", "extent", "place")
"""What takes no line: numbers, sizes and places, written where they are used."""

_Kind = TypeVar("_Kind", bound="Body")


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


@dataclass
class Body:
    """The body of one kernel in the making.

    `sizes` and `strides` collect the run-time arguments it needs, in the order of first use:
    extents by the axes that they span, strides by the tensor and the group or dimension that they
    step along.
    """

    step: Step
    tensors: dict[str, str]
    """Each access's own name to the name in the file."""
    precise: bool
    wide: bool
    """Some offset is beyond 32 bits."""
    wide_rows: bool
    """Some offset within a row is."""
    unrolled: int
    """Elements that a warp may have on the way at once where a walk is written out."""
    fixed: frozenset[int]
    """Axes of which the kernel serves the graph's size alone."""
    names: Names = field(default_factory=Names)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    strides: dict[str, tuple[Access, Group | int]] = field(
        default_factory=dict[str, tuple[Access, Group | int]]
    )
    helpers: dict[str, None] = field(default_factory=dict[str, None])
    shares: bool = False
    """Its rows draw random bits, several elements from one block where rows are long enough."""
    divided: bool = False
    """Its rows are told to be a multiple of a number that does not leave whole vectors apart."""
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
    in_vectors: ClassVar[bool] = True
    """Do the lanes of such a row have whole vectors?"""
    fills: ClassVar[bool] = True
    """Are lanes behind a row's end filled with what spares reductions their masks?"""
    joins: ClassVar[bool] = True
    """Does a program make the part alone that its rows of a joined value lie in?"""

    # -- the program ---------------------------------------------------------------------------

    def render(self) -> list[str]:
        """Every line of the kernel."""
        lines = self.lines()
        return [*self._divided(), *self._apart(), *lines]

    def lines(self) -> list[str]:
        """Every line from the program's place to its last store."""
        self.prepare()
        start = self._program()
        self._results()
        lines = self.scopes[0].block()
        if self.step.in_planes and not any(re.search(r"\brow\b", line) for line in lines):
            start = [line for line in start if not line.startswith("row = ")]
        return [*start, *lines]

    def _divided(self) -> list[str]:
        """A row's length as a product, for the compiler to see that whole vectors hold it: of an
        argument it knows only whether 16 divides it."""
        step = self.step
        groups = step.inner or step.outer
        length = prod(group.size for group in groups)
        axes = tuple(axis for group in groups for axis in group.axes)
        name = next((name for name, spanned in self.sizes.items() if spanned == axes), "")
        near = any(axes and each.step(axes[-1]) == 1 for each in (*step.loads, *step.stores))
        if not name or not near or step.vector or length % 2 or length % DIVISOR == 0:
            return []
        self.divided = True
        return [f"{name} = {name} // DIVISOR * DIVISOR  # seen to hold whole vectors"]

    def _apart(self) -> list[str]:
        """Steps from row to row as products, likewise."""
        return [
            f"{name} = {name} // APART * APART  # seen as a multiple" for name, _, _ in self.apart
        ]

    @property
    def apart(self) -> list[tuple[str, Access, Group]]:
        """The run-time steps from row to row, of what lies along them, that keep some vectors whole
        though 16 does not divide them."""
        step = self.step
        if step.schedule != "tiled":
            return []
        last = step.inner[-1].axes[-1]
        return [
            (name, access, along)
            for name, (access, along) in self.strides.items()
            if isinstance(along, Group)
            and along in step.outer
            and access.step(last) == 1
            and along.step(access) % 2 == 0
            and along.step(access) % DIVISOR
        ]

    @property
    def begun(self) -> dict[str, tuple[Access, list[Group]]]:
        """The loads along rows of tensors that begin elsewhere than at 16 bytes in the storage they
        are views of, of which Triton would take nothing whole, and the groups of rows that each
        steps through: by the tensor's name."""
        step = self.step
        if step.schedule != "tiled" or not self.several:
            return {}
        found: dict[str, tuple[Access, list[Group]]] = {}
        for load in step.loads:
            stepped = [group for group in step.outer if group.step(load)]
            size = load.tensor.itemsize
            aligned = gcd(load.tensor.offset * size, VECTOR_BYTES)
            whole = size < aligned < VECTOR_BYTES
            if whole and stepped[-1:] == [step.outer[-1]] and self._near_along_row(load):
                found[self.tensors[load.name]] = load, stepped
        return found

    def _near_along_row(self, access: Access) -> bool:
        """Do neighbours along a row lie side by side, but for where an index begins anew?"""
        return access.tensor.stride[-1] == 1 and set(access.strides) >= {*self.step.outer[-1].axes}

    def beside(
        self, kind: type[_Kind], step: Step, names: Names, scopes: list[Scope], **more: Any
    ) -> _Kind:
        """Another body of the same kernel; `more` is what its kind has besides."""
        return kind(
            step, self.tensors, self.precise, self.wide, self.wide_rows, self.unrolled,
            self.fixed, names, self.sizes, self.strides, self.helpers, scopes=scopes, **more,
        )  # fmt: skip

    def prepare(self) -> None:
        """Look up what is asked of the region again and again."""
        self._uses = self.region.users()
        self._rank = {number: n for n, number in enumerate(self.step.order)}
        self._access = dict(zip(self.region.all("load"), self.step.loads, strict=True))
        sums = at_least_one(self.region, self._inner)
        self._terms = only_summed(self.region, sums)
        self._large = self._at_least_one(sums)
        self._joined = self._rows_of_parts()
        self._one_more = one_more(self.region)
        self._twins = self._read_together()
        self._beyond = self._filling()
        self._place_name = PLACES[0]
        self.whole = self.step.whole

    def _rows_of_parts(self) -> dict[int, Joined]:
        """Joined values of which all rows of a program lie in one part; see `joined`."""
        return in_one_part(self.step, self.fixed) if self.joins else {}

    def _read_together(self) -> dict[int, int]:
        """Loads of one tensor of which a lane has one or the other, by a place that is one number
        or another: the halves of a row that is rotated. One load reads both."""
        found: dict[int, int] = {}
        for number, access in self._access.items():
            for other in sorted(self._access.keys() - found.keys()):
                if other < number and self._either(access, self._access[other]):
                    found |= {number: other, other: number}
                    break
        return found

    def _either(self, one: Access, other: Access) -> bool:
        """Do two accesses read one tensor alike, where a place is one number and where it is
        another?"""
        if one.guard is None or other.guard is None or one.guard == other.guard:
            return False
        left, right = self.region.exprs[one.guard], self.region.exprs[other.guard]
        numbers = {self.region.exprs[expr.args[-1]].op for expr in (left, right)}
        told_apart = left.op == right.op == "eq" and left.args[0] == right.args[0]
        same = one.name == other.name and one.strides == other.strides
        moved = self._moved(one) and self._moved(other) and {*one.pulled} == {*other.pulled}
        return same and moved and told_apart and numbers == {"const"}

    def _moved(self, access: Access) -> bool:
        """Does an index say where a tensor is read?"""
        return any(access.tensor.stride[d] for d in access.pulled)

    def _filling(self) -> Beyond:
        """What lanes behind the row's end hold."""
        ordered = self.step.ends or not self.step.vector
        if not self.fills or not ordered:
            return Beyond()
        return beyond(self.region, self._access, self._inner)

    def _at_least_one(self, sums: Mapping[int, int]) -> Mapping[int, int]:
        """Values that may be divided by as well as multiplied with their reciprocal, and the terms
        that each is the sum of."""
        return sums

    def _results(self) -> None:
        """Every result, from the loads to the stores."""
        self._emit([output.value for output in self.region.outputs])
        for output, access in zip(self.region.outputs, self.step.stores, strict=True):
            self._store(access, self.text(output.value))

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

    def _program(self) -> list[str]:
        """Which elements this program has."""
        step = self.step
        if step.schedule == "flat":
            return [
                f"index = {self._number} * BLOCK + tl.arange(0, BLOCK)",
                f"mask = index < {self.size(step.outer, 'count')}",
            ]
        lines = self._numbered() if step.beside else []
        tile = "tile" if step.beside else self._number
        lines += self._planes() if step.in_planes else self._row(tile)
        if step.part and not step.beside:
            lines.append("part = tl.program_id(1)")
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
        number = "program" if self.step.beside else "tl.program_id(0)"
        return f"{number}.to(tl.int64)" if self.wide else number

    def _within_rows(self) -> str:
        """Are there such rows?"""
        *_, last = self.step.outer
        if self.step.in_planes:
            return f"{last.name} < {self.extent_of(last)}"
        return f"row < {self.size(self.step.outer, 'rows')}"

    def _planes(self) -> list[str]:
        """The rows of a program that has one place along the first group and a tile of the second;
        both places are known then, and which row it is of all."""
        first, second = self.step.outer
        self.scopes[0].places |= {group.name: group.name for group in (first, second)}
        rows, size = f"{first.name}, {second.name}", self.extent_of(second)
        helper, given = "rows_of_plane", f"{size}, ROWS, PLANES"
        if self.step.beside:
            helper, given = "rows_of_tile", f"tile, {size}, ROWS"
        self.helpers[helper] = None
        lines = [f"{rows} = {helper}({given})"]
        if self.wide:
            lines += [f"{group.name} = {group.name}.to(tl.int64)" for group in (first, second)]
        return [*lines, f"row = {first.name} * {size} + {second.name}"]

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
        far = ".to(tl.int64)" if self.wide_rows else ""
        if self.step.vector:
            return [f"lane = tl.arange(0, {self.lanes}){far}", *self._in_vectors(start)]
        within = f"{self.lane} < {self.size(self.step.inner, self.length)}"
        return [
            f"{self.lane} = {start}tl.arange(0, {self.lanes}){far}",
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
        lines = [f"{places} = around_vectors({given})"]
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
        return f"part.to(tl.int64) * {lanes}" if self.wide_rows else f"part * {lanes}"

    # -- where a tensor's elements are ---------------------------------------------------------

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

    def offset(self, access: Access) -> str:
        """Elements from the tensor's first to the one that a program's lane addresses."""
        parts = [
            part
            for groups, linear in self._levels()
            if (part := self._offset_within(access, groups, linear))
        ]
        for d, index in access.pulled.items():
            place = self.text(index)
            if place == "0":
                continue
            if access.tensor.stride[d] == 1:
                parts.append(place)
            elif access.tensor.stride[d]:
                name = f"{self.tensors[access.name]}_stride_{d}"
                self.strides.setdefault(name, (access, d))
                parts.append(f"{as_operand(place)} * {name}")
        return " + ".join([*parts, *self._walked(access)])

    def _walked(self, access: Access) -> list[str]:
        """How far the axes that a lane walks are gone along plain dimensions."""
        return [
            " * ".join([self._serial_place(axis), *self._serial_stride(access, axis)])
            for axis in sorted(self.step.serial & access.walks)
        ]

    def _serial_stride(self, access: Access, axis: int) -> list[str]:
        """The factors of the step along an axis that a lane walks, as it stands in the tensor."""
        d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
        within = [self._size_of(a) for a in dim[dim.index(axis) + 1 :]]
        if access.tensor.stride[d] == 1:
            return within
        name = f"{self.tensors[access.name]}_stride_{d}"
        self.strides.setdefault(name, (access, d))
        return [name, *within]

    def _size_of(self, axis: int) -> str:
        """The extent of one axis: a number where the kernel serves no other."""
        if axis in self.fixed:
            return str(self.region.sizes[axis])
        return self._argument((axis,), "elements")

    def _levels(self) -> Iterator[tuple[tuple[Group, ...], str]]:
        """The groups that share a linear index, with its name."""
        yield self.step.outer, self._outer_name
        if self.step.parts:
            yield (self.step.parts,), "part"
        yield self.step.inner, self.lane

    @property
    def _outer_name(self) -> str:
        return "index" if self.step.schedule == "flat" else "row"

    def _offset_within(self, access: Access, groups: Sequence[Group], linear: str) -> str:
        if access.pulled and self.several and groups == self.step.outer:
            access = self._read_plainly(access)
        steps = gaps(access, self.step.groups)
        if not any(group.name in steps for group in groups):
            return ""
        if (after := stepped_over(steps, groups)) is not None:
            return self._times(linear, after)
        terms: list[str] = []
        for group in groups:
            if group.name not in steps:
                continue
            place, later = self.coordinate(group, groups, linear), steps[group.name]
            within = self._within_dimension(access, group)
            if within is not None:
                terms.append(f"{place} * {within}")
            elif later is None:
                name = f"{self.tensors[access.name]}_stride_{group.name}"
                self.strides.setdefault(name, (access, group))
                terms.append(f"{place} * {name}")
            else:
                terms.append(self._times(place, later))
        return " + ".join(terms)

    def _read_plainly(self, access: Access) -> Access:
        """Another access of the same tensor, as far from row to row, of which more is known: that
        the rows lie one behind the other, say, which the launcher then asks of the tensor."""
        rows = {axis for group in self.step.outer for axis in group.axes}

        def along(one: Access) -> list[tuple[int, ...]]:
            return [tuple(axis for axis in dim if axis in rows) for dim in one.dims]

        for other in self.step.loads:
            alike = all(other.step(axis) == access.step(axis) for axis in rows)
            same = other.name == access.name and along(other) == along(access)
            if same and alike and not other.pulled:
                return other
        return access

    def _within_dimension(self, access: Access, group: Group) -> int | None:
        """The step along a group whose places have a fixed number of others between them, in a
        dimension of neighbouring elements: windows in a row of pixels, say."""
        axis = group.axes[-1]
        d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
        between = dim[dim.index(axis) + 1 :]
        if not between or access.tensor.stride[d] != 1 or not self.fixed.issuperset(between):
            return None
        return prod(self.region.sizes[a] for a in between)

    def _times(self, place: str, groups: Sequence[Group]) -> str:
        """A coordinate times the extents of the groups that it steps over."""
        if tuple(groups) == self.step.inner and groups:
            return f"{place} * {self.total(groups)}"
        return " * ".join([place, *(self.extent_of(group) for group in groups)])

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
        return f"{self._number} * BLOCK" if self.step.schedule == "flat" else self.start

    def _knowing(self, linear: str) -> Scope:
        """The innermost scope that has a linear index of its own."""
        return next((s for s in reversed(self.scopes) if linear in s.places), self.scopes[0])

    def _addressed(self, access: Access) -> tuple[bool, bool, int | None]:
        """Is an element addressed by the row, and by the place within it; and the guard of the
        mask, if one stands there."""
        axes, guard = frozenset(access.strides), access.guard
        for d, index in access.pulled.items():
            if access.tensor.stride[d]:
                axes |= self.region.depends[index]
        if guard is not None and not self._guards(access, guard, axes):
            guard = None
        if guard is not None:
            axes |= self.region.depends[guard]
        inner = bool(axes & self._inner)
        rows = self.step.outer
        if self.step.in_planes and not (inner and (not access.pulled or self._in_order)):
            rows = rows[1:]  # whose planes are all there; see `_columns` for what rows share
        return any(axis in axes for group in rows for axis in group.axes), inner, guard

    @cached_property
    def _in_order(self) -> bool:
        """Do neighbours along a row lie side by side in all that is loaded, but for where an index
        begins anew?"""
        last = self.step.inner[-1].axes[-1]
        return all(
            load.tensor.stride[d] == 1
            for load in self.step.loads
            for d, dim in enumerate(load.dims)
            if (last in self.region.depends[load.pulled[d]] if d in load.pulled else last in dim)
        )

    def mask(self, access: Access) -> str:
        """The lanes that address an element; empty when all do."""
        outer, inner, guard = self._addressed(access)
        if self.step.schedule == "flat":
            masks = ["mask"] if outer else []
        elif not self.several:
            masks = [self._within_row] if inner and self._within_row else []
        elif inner and outer:
            masks = ["mask"]
        else:
            masks = [f"{self.lane}_mask"] if inner else ["row_mask"] if outer else []
        if guard is not None:
            masks.append(self.text(guard))
        return " & ".join(masks)

    @property
    def _within_row(self) -> str:
        """The mask of the lanes that have an element of the row; empty when all have."""
        return f"{self.lane}_mask"

    def _guards(self, access: Access, guard: int, addressed: frozenset[int]) -> bool:
        """Must, or may, a guard stand in a mask? Where every address is good and fewer lanes load
        than decide, the value is chosen later alone; but not where whole programs need not load."""
        further = self.region.depends[guard] - addressed
        if self._moved(access) or not further:
            return True
        return bool(addressed) and self._program_decides(further)

    def _program_decides(self, axes: frozenset[int]) -> bool:
        """Is the place along some axes the same in all lanes of most programs?"""
        step, behind = self.step, 1
        if step.rows > 1:
            return False
        if step.inner:  # a program has one row
            axes -= {axis for group in step.outer for axis in group.axes}
        for group in reversed(step.inner or step.outer):
            if axes & frozenset(group.axes):
                return axes == frozenset(group.axes) and behind >= step.block
            behind *= group.size
        return not axes

    # -- what a value is -----------------------------------------------------------------------

    def text(self, number: int) -> str:
        """How a value that is known here is written."""
        for scope in reversed(self.scopes):
            if number in scope.texts:
                return scope.texts[number]
        raise KeyError(number)

    def known(self, number: int) -> bool:
        return any(number in scope.texts for scope in self.scopes)

    def _emit(self, wanted: Iterable[int]) -> None:
        """Lines for some values and what they are made from, in the order of the source."""
        for number in sorted(self._missing(wanted), key=self._rank.__getitem__):
            if not self.known(number):  # unless another one brought it
                self._make(number)

    def _make(self, number: int) -> None:
        """The line of one value, if it takes one."""
        expr = self.region.exprs[number]
        if expr.op == "load":
            self._load(number, self._access[number])
        elif number in self._joined:
            self._make_part(number, self._joined[number])
        elif expr.op == "reduce" and set(expr.axes) <= self.step.serial:
            self._serially(number)
        else:
            text = self._text(number)
            stored = any(output.value == number for output in self.region.outputs)
            if self._inline(number, text) and not stored:
                self.scope.texts[number] = text
            else:
                self._assign(number, text)

    def _missing(self, wanted: Iterable[int]) -> set[int]:
        """What must be written before some values are known here, themselves included."""

        def further(number: int) -> Iterable[int] | None:
            expr = self.region.exprs[number]
            if self.known(number):
                return None
            if expr.op == "reduce" and set(expr.axes) <= self.step.serial:
                return self._around(expr)
            if number in self._joined:
                return ()  # each part is made on its own
            return self._addressed_by(number) if expr.op == "load" else expr.args

        return traced(wanted, further).passed

    def _addressed_by(self, number: int) -> tuple[int, ...]:
        """What says where a load reads, and whether."""
        access = self._access[number]
        guard = access.guard
        if guard is None or self._told_by_twin(number, guard):
            return tuple(access.pulled.values())
        return (*access.pulled.values(), guard)

    def _told_by_twin(self, number: int, guard: int) -> bool:
        """Does the guard of the load that is made with this one tell which of both it is?"""
        twin = self._twins.get(number)
        before = twin is not None and self._rank[twin] < self._rank[number]
        return before and self._everywhere(guard)

    def _around(self, expr: Expr) -> set[int]:
        """What the loop of a serial reduction uses and need not make again at each place."""

        def further(number: int) -> Iterable[int] | None:
            made = self.region.exprs[number]
            if not self.region.depends[number] & set(expr.axes):
                return None
            if made.op == "reduce" and set(made.axes) <= self.step.serial:
                return self._around(made)  # a loop of its own
            return made.args

        return self._worked_out(traced(expr.args, further).ends)

    def _worked_out(self, numbers: set[int]) -> set[int]:
        """Those of some values that take a line."""
        return {number for number in numbers if self.region.exprs[number].op not in _UNMADE}

    def _inline(self, number: int, text: str) -> bool:
        """Is a value written where it is used, without a name of its own?"""
        expr = self.region.exprs[number]
        if expr.op in _UNMADE:
            return True
        if len(text) > _LONGEST_PART or expr.op in ("reduce", "scan"):
            return False
        if expr.dtype == "index":
            return True
        readers = self._uses.get(number, [])
        label = self.region.labels.get(number)
        alone = len(readers) == 1 and self.region.labels.get(readers[0]) == label
        return alone and number not in self.region.results

    def _assign(self, number: int, text: str) -> None:
        name = self.names.claim(self._wish(number))
        self.scope.lines.append(f"{name} = {bare(text)}")
        self.scope.texts[number] = name

    def _wish(self, number: int) -> str:
        """What a value that has a line would be called."""
        expr, label = self.region.exprs[number], self.region.labels.get(number, "value")
        part = expr.monoid or ("at" if expr.dtype == "index" else "part")
        part = "bits" if expr.op in SHARES else part
        return self.region.results.get(number) or f"{label}_{part}"

    def _load(self, number: int, access: Access) -> None:
        name = self.names.claim(self.tensors[access.name])
        held = self.region.exprs[number].dtype
        converted = f".to({language_dtype(held)})" if held != access.tensor.dtype else ""
        twin = self._twins.get(number)
        if self.in_vectors and access.name in self.step.copied:
            self._await_copies()
        if twin is None:
            text = self._read(access, held)
        else:
            guards = () if access.guard is None else (access.guard,)
            Body._emit(self, (*self._addressed_by(twin), *guards))  # of this piece alone
            self.scope.texts[twin] = name
            text = self._read_either(access, self._access[twin])
        self.scope.lines.append(f"{name} = {text}{converted}")
        self.scope.texts[number] = name

    def _await_copies(self) -> None:
        """Wait for the copies of what all rows share, once and where every load of them follows."""
        scope = self._knowing("row")
        if "copies" not in scope.places:
            self.helpers["copies_made"] = None
            scope.places["copies"] = "copies"
            scope.lines.append("copies_made(EARLY)")

    def _make_part(self, number: int, one: Joined) -> None:
        """The part of a joined value that the program's rows lie in."""
        group = next(group for group in self.step.outer if group.axes == one.axes)
        name, accesses, twins = self.names.claim(self._wish(number)), self._access, self._twins
        parts: list[tuple[int, list[str]]] = []
        self._access = {n: replace(access, guard=None) for n, access in accesses.items()}
        self._twins = {}  # no guard tells here which of two is read
        for start, value in one.parts:
            self.scopes.append(Scope())
            Body._emit(self, [value])  # of this piece alone
            made = bare(self.text(value))
            parts.append((start, [*self.scopes.pop().block(), f"{name} = {made}"]))
        self._access, self._twins = accesses, twins
        self.scope.lines += searched(self._first_place(group), parts)
        self.scope.texts[number] = name

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

    def _read_either(self, access: Access, other: Access) -> str:
        """The elements of a tensor at one of two places, by which of two guards holds."""
        assert access.guard is not None
        pointer, chosen = f"{self.tensors[access.name]}_ptr", self.text(access.guard)
        here, there = self.offset(access) or "0", self.offset(other) or "0"
        offset = f"tl.where({bare(chosen)}, {here}, {there})"
        if len(offset) > _LONGEST_PART:
            place = self.names.claim(f"{self.tensors[access.name]}_at")
            self.scope.lines.append(f"{place} = {offset}")
            offset = place
        if self._everywhere(access.guard):
            mask = self.mask(replace(access, guard=None))
        else:
            mask = f"({self.mask(access)}) | ({self.mask(other)})"
        masked = f", mask={mask}, other=0" if mask else ""
        return f"tl.load({pointer} + {offset}{masked})"

    def _everywhere(self, guard: int) -> bool:
        """Does one of two guards hold at every place, by which of two places it is?"""
        place = self.region.exprs[self.region.exprs[guard].args[0]]
        two = prod(self.region.sizes[axis] for axis in place.axes) == 2
        return place.op == "place" and two and self.fixed.issuperset(place.axes)

    def _read(self, access: Access, held: str) -> str:
        """The elements of a tensor as they lie in memory, zero where there are none."""
        if self._vectorized(access) and not self.step.ends:
            self.helpers["load_row"] = None
            return f"load_row({self._by_vectors(access)})"
        mask = self.mask(access)
        if self._by_place(access):
            self.helpers["load_by_place"] = None
            each, first, following = (self._pointer_at(access, at) for at in PLACES)
            return f"load_by_place({each}, {first}, {following}, place == first, {mask}, NEAR)"
        neutral = {"bool": "False"}.get(held, "0")
        if held in ("float32", "float64"):
            neutral = FILLS[self._beyond.fill if filled_beyond(access, self._inner) else 0.0]
        masked = f", mask={mask}, other={neutral}" if mask else ""
        keeping = ', eviction_policy="evict_last"' if access.name in self.step.lasting else ""
        keeping = ', eviction_policy="evict_first"' if access.name in self.step.passing else keeping
        pointer = self._pointer(access)
        if access.guard is not None and self._is_one(access):
            outer, inner, _ = self._addressed(access)  # a guard says which lanes load it
            if (shape := self._shape(outer, inner)) != "()":
                pointer = f"tl.broadcast_to({pointer}, {shape})"
        return f"tl.load({pointer}{masked}{keeping})"

    def _is_one(self, access: Access) -> bool:
        """Do all lanes of a program address one element?"""
        walked = frozenset(access.strides)
        spans = [(bool(walked - self._inner), bool(walked & self._inner))]
        spans += [self._spans(i) for d, i in access.pulled.items() if access.tensor.stride[d]]
        several = self.several or self.step.schedule == "flat"
        return not any(inner or (outer and several) for outer, inner in spans)

    def _by_place(self, access: Access) -> bool:
        """Has a tensor one element for all lanes in the same run of the last group?"""
        groups = self.step.inner or self.step.outer
        if (
            not self._few_places(groups)
            or self.several
            or access.pulled
            or access.guard is not None
        ):
            return False
        runs = {axis for group in groups[:-1] for axis in group.axes}
        return bool(runs & set(access.strides)) and not set(groups[-1].axes) & set(access.strides)

    def _pointer_at(self, access: Access, place: str) -> str:
        """Where a tensor has its element for one of the places that lanes may have."""
        self._place_name = place
        pointer = self._pointer(access)
        self._place_name = PLACES[0]
        return pointer

    def _vectorized(self, access: Access) -> bool:
        """Does a tensor lie in rows, one behind the other, of which lanes take whole vectors?"""
        if not self.step.vector or not self.in_vectors or access.guard is not None:
            return False
        cols = self.size(self.step.inner, self.length)
        return self.offset(access) == f"row * {cols} + {self.lane}"

    def _by_vectors(self, access: Access) -> str:
        """Where a tensor's whole vectors are and what lies around them, with the masks of both."""
        pointer = f"{self.tensors[access.name]}_ptr"
        return f"{pointer}, vectors, in_whole, {self.offset(access)}, in_end"

    def _pointer(self, access: Access) -> str:
        if self.step.ends and self._vectorized(access):
            return f"{self.tensors[access.name]}_ptr + {self.vectors}"
        if self.in_vectors and access.name in self.step.copied:
            return f"{self.tensors[copies_of(access.name, self.step.vector)]}_ptr + {self.copy}"
        if self.step.aloft > 1 and (walked := self._walked_from(access)):
            return walked
        offset, pointer = self.offset(access), f"{self.tensors[access.name]}_ptr"
        if self.tensors[access.name] in self.begun:
            rows = self._offset_within(access, self.step.outer, self._outer_name)
            start = f"tl.multiple_of({pointer} + {rows}, [1, BEGUN])"
            return " + ".join([start, *filter(None, [offset.removeprefix(rows).lstrip("+ ")])])
        return f"{pointer} + {offset}" if offset else pointer

    def _walked_from(self, access: Access) -> str:
        """Where an element lies that a lane walks to: what no walk changes stands before the loops,
        so that the compiler has all loads on their way at once. Empty where places are no sums of
        steps."""
        start, steps = [f"{self.tensors[access.name]}_ptr"], list[str]()
        for d, index in access.pulled.items():
            along = self._steps_along(index)
            if along is None:
                return ""
            stride = access.tensor.stride[d]
            for walked, texts in ((False, start), (True, steps)):
                terms = [
                    place if step == 1 else f"{place} * {step}"
                    for axis, step in along.items()
                    if (axis in self.step.serial) == walked
                    for place in [self._place((axis,))]
                ]
                if terms and stride:
                    texts.append(self._strided(" + ".join(terms), access, d))
        if access.walks & self.step.serial:
            steps += self._walked(access)
        start += filter(None, (self._offset_within(access, *level) for level in self._levels()))
        if not steps:
            return ""
        name = self.names.claim(f"{self.tensors[access.name]}_first")
        self.scopes[0].lines.append(f"{name} = {' + '.join(start)}")
        return f"{name} + ({' + '.join(steps)})"

    def _steps_along(self, index: int) -> dict[int, int] | None:
        """How far a place is from the first, along each axis; None unless that is the same at every
        size that the kernel serves, and each axis has a place of its own."""
        places = [self.region.exprs[n] for n in reach(self.region, index)]
        apart = {group.axes for group in self.step.groups}
        apart |= {(axis,) for axis in self.step.serial}
        for expr in places:
            if expr.op == "place" and not self.fixed.issuperset(expr.axes[1:]):
                return None
            if expr.op == "place" and any((axis,) not in apart for axis in expr.axes):
                return None
        sizes = self.region.sizes
        from_zero = evaluates(self.region, index) and not index_of(self.region, index, sizes)(
            dict.fromkeys(self.region.depends[index], 0)
        )
        return affine(self.region, index) if from_zero else None

    def _strided(self, place: str, access: Access, d: int) -> str:
        """A place along a dimension in elements."""
        if access.tensor.stride[d] == 1:
            return place
        name = f"{self.tensors[access.name]}_stride_{d}"
        self.strides.setdefault(name, (access, d))
        return f"({place}) * {name}" if " " in place else f"{place} * {name}"

    def _store(self, access: Access, text: str) -> None:
        mask = self.mask(access)
        masked = f", mask={mask}" if mask else ""
        if access.tensor.dtype.startswith("float8"):
            text = self._rounded(text, access.tensor.dtype)
        if self._vectorized(access) and not self.step.ends:
            self.helpers["store_row"] = None
            self.scope.lines.append(f"store_row({self._by_vectors(access)}, {bare(text)})")
            return
        self.scope.lines.append(f"tl.store({self._pointer(access)}, {bare(text)}{masked})")

    def _rounded(self, text: str, dtype: str) -> str:
        """A float32 in a narrower type; what is too large becomes what it does in torch."""
        if f"as_{dtype}" not in HELPERS:
            return f"{as_operand(text)}.to({language_dtype(dtype)})"
        self.helpers[f"as_{dtype}"] = None
        text = bare(text)
        number = re.fullmatch(r"-?[\d.e+-]+|float\(.*\)", text)
        return f"as_{dtype}({f'tl.full((), {text}, tl.float32)' if number else text})"

    def _text(self, number: int) -> str:
        expr = self.region.exprs[number]
        if expr.op == "const":
            return literal(expr.literal)
        if expr.op in ("size", "taken", "extent"):
            return self._extent(expr)
        if expr.op == "place":
            return self._place(expr.axes)
        if expr.op in SHARES:
            return self._random(expr)
        operands = [self.text(arg) for arg in expr.args]
        if expr.op == "round":
            return f"{self._rounded(operands[0], expr.to)}.to(tl.float32)"
        if expr.op == "cast":
            if self.region.exprs[expr.args[0]].op in _NUMBERS:
                return f"tl.full((), {bare(operands[0])}, {language_dtype(expr.to)})"
            return f"{as_operand(operands[0])}.to({language_dtype(expr.to)})"
        if expr.op == "reduce":
            return self._reduce(expr, self._operand(number))
        if expr.op == "scan":
            return self._scan(expr, self._masked(expr, operands[0]))
        return self._applied(number, expr, operands)

    def _applied(self, number: int, expr: Expr, operands: list[str]) -> str:
        """A primitive of its operands."""
        if sums := [self.text(arg) for arg in expr.args if arg in self._one_more]:
            return sums[0]
        primitive = PRIMITIVES[expr.op]
        if not primitive.text.startswith("("):
            operands = [self._typed(arg) for arg in expr.args]
        held = self.region.exprs[expr.args[-1]].dtype
        template = primitive.text
        if number in self._one_more:
            template = f"{WITH_ONE[expr.op]}({{0}})"
        elif held == "float64" and primitive.double:
            template = primitive.double
        elif held not in ("float32", "float64") and primitive.integer:
            template = primitive.integer
        elif held == "float32" and self.precise and self._is_share(expr):
            template = "share_of({0}, {1})"
        elif held == "float32" and self.step.rows > 1 and self._is_mean(expr):
            count = self.region.exprs[expr.args[-1]]
            exactly = self.precise and not set(count.axes) <= self.fixed  # a literal is made so
            one = "tl.div_rn(1.0, {1})" if exactly else "(1.0 / {1})"
            template = f"({{0}} * {one})"  # once for all rows; eager multiplies, too
        elif held == "float32" and self._is_shift(expr):
            template = primitive.text
        elif held == "float32" and number in self._terms:
            template = primitive.text  # of a sum of at least 1, which loses no more than rounding
        elif held == "float32" and self.precise and primitive.precise:
            template = primitive.precise
            if expr.op == "sigmoid" and self._across:  # memory binds it: see `_across`
                template = primitive.double
        elif held == "float32" and self.precise and primitive.scalar and self._of_row(number):
            template = primitive.scalar
        elif held == "float32" and expr.op == "div" and expr.args[1] in self._large:
            template = "({0} * (1.0 / {1}))"
        helper = template.partition("(")[0]
        if helper in HELPERS:
            self.helpers[helper] = None
        return filled(template, operands)

    @property
    def _across(self) -> bool:
        """Do rows lie across contiguous memory? Stores of what begins between sectors are then best
        left together: a softmax over 128 channels of 129 x 129 pixels with a logistic of fewer
        instructions, between which they were spread, took 848 us on an H200, and 687 without."""
        steps = [store.step(axis) for store in self.step.stores for axis in self._inner]
        return self.several and bool(any(steps)) and 1 not in steps

    def _is_mean(self, expr: Expr) -> bool:
        """Something over a number of elements."""
        size = self.region.exprs[expr.args[-1]]
        return expr.op == "div" and size.op == "size"

    def _is_shift(self, expr: Expr) -> bool:
        """The mean of a part of a row: deviations from about there are as good."""
        return expr.op == "div" and self.region.exprs[expr.args[-1]].op == "taken"

    def _is_share(self, expr: Expr) -> bool:
        """A term of a sum that is not less than 1, over the sum."""
        share = expr.op == "div" and self._large.get(expr.args[1]) == expr.args[0]
        return share and self.step.reciprocal

    def _of_row(self, number: int) -> bool:
        """One number for all lanes, where a slow instruction costs nothing."""
        whole = bool(self._inner) and self.step.rows == 1
        return whole and not self._inner & self.region.depends[number]

    @property
    def _inner(self) -> frozenset[int]:
        return self.step.along

    def _typed(self, number: int) -> str:
        """An operand of a function, to which Triton hands bare numbers as float32 or int32."""
        expr, text = self.region.exprs[number], self.text(number)
        untyped = ("float32", "int32", "int64", "bool", "index")
        if expr.op != "const" or expr.dtype in untyped:
            return text
        return f"tl.full((), {text}, {language_dtype(expr.dtype)})"

    def _extent(self, expr: Expr) -> str:
        """How many elements there are along some axes: a float, or an integer of an index."""
        if expr.op == "taken":
            share = "PART" if self.step.schedule == "blocked" else "COLS"
            share = "(COLS + REST)" if self.step.rest else share
            rest = f"{self.total(self.step.inner)} - part * {share}"
            return f"(tl.minimum({rest}, {share}) * 1.0)"
        if set(expr.axes) <= self.fixed:
            count = prod(self.region.sizes[axis] for axis in expr.axes)
            return str(count) if expr.op == "extent" else repr(float(count))
        text = ""
        for groups in (self.step.inner, self.step.outer):
            if groups and {a for g in groups for a in g.axes} == set(expr.axes):
                text = self.total(groups)
        text = text or self._argument(tuple(expr.axes), "elements")
        return text if expr.op == "extent" else f"({text} * 1.0)"

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
                return len(spanned), linear, self.total(groups)
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

    def _random(self, expr: Expr) -> str:
        """Random bits of the elements that a program has: a run of them where they lie one after
        the other, else each for itself."""
        seed, offset, element = expr.args
        state = f"{self.text(seed)}, {self.text(offset)}, {expr.literal}"
        first = self._first_of_run(self.region.exprs[element].axes)
        name = f"{expr.op}_run" if first else expr.op
        self.helpers |= dict.fromkeys(kernel_helpers([name]))
        if not first:
            place = self.text(element)
            place = f"tl.full((), {place}, tl.int32)" if place.isdigit() else place
            return f"{name}({state}, {bare(place)})"
        if self.step.schedule == "flat":
            return f"{name}({state}, {first}, BLOCK, True)"
        self.shares = True
        return f"{name}({state}, {first}, {self.lanes}, SHARED)"

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

    # -- reductions ----------------------------------------------------------------------------

    def _neutral(self, expr: Expr) -> str:
        monoid, dtype = MONOIDS[expr.monoid], self.region.exprs[expr.args[0]].dtype
        if dtype in ("float32", "float64"):
            return monoid.neutral
        low, high = _LIMITS[dtype]
        return {"lowest": low, "highest": high}.get(monoid.integer_neutral, monoid.integer_neutral)

    def _masked(self, expr: Expr, operand: str) -> str:
        """The operand with what changes nothing in the lanes behind the row's end."""
        if not self._within_row:
            return operand
        return f"tl.where({self._within_row}, {bare(operand)}, {self._neutral(expr)})"

    def _operand(self, number: int) -> str:
        """What a reduction along the row combines, neutral behind the row's end."""
        expr = self.region.exprs[number]
        text = self.text(expr.args[0])
        return text if number in self._beyond.neutral else self._masked(expr, text)

    def _reduce(self, expr: Expr, operand: str) -> str:
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
        template = monoid.text
        outer, inner = self._spans(expr.args[0])
        rows = self.several and outer
        if not rows:
            template = template.replace(", keep_dims=True", "").replace("axis=1", "axis=0")
            template = template.replace("{0}, 1,", "{0}, 0,").replace("{1}), 1,", "{1}), 0,")
        place, shape = self.lane, f"[{self.lanes}]"
        if rows:
            place, shape = f"{self.lane}[None, :]", f"[ROWS, {self.lanes}]"
        if "{1}" in template and (rows or not inner):
            operand = f"tl.broadcast_to({bare(operand)}, {shape})"
        return template.format(operand, f"tl.broadcast_to({place}, {shape})")

    def _scan(self, expr: Expr, operand: str) -> str:
        axis = 1 if self.several and self._spans(expr.args[0])[0] else 0
        turned = ", reverse=True" if expr.reverse else ""
        monoid = MONOIDS[expr.monoid]
        if expr.monoid == "sum":
            return f"tl.cumsum({operand}, axis={axis}{turned})"
        self.helpers[monoid.helper] = None
        return f"tl.associative_scan({operand}, {axis}, {monoid.helper}{turned})"

    def _shape(self, outer: bool, inner: bool) -> str:
        """The shape of a tile of values: one column, or the columns alone, where it does not
        vary."""
        if self.step.schedule == "flat":
            return "[BLOCK]" if outer else "()"
        if self.several and outer:
            return f"[ROWS, {self.lanes if inner else '1'}]"
        return f"[{self.lanes}]" if inner else "()"

    def _shape_of(self, number: int) -> str:
        return self._shape(*self._spans(number))

    def _spans(self, number: int) -> tuple[bool, bool]:
        """Has a value a number of its own for each row of the tile, and for each place within?"""
        outer = inner = False
        rows = {axis for group in self.step.outer for axis in group.axes}

        def further(at: int) -> Iterable[int] | None:
            return () if at in self._access else self.region.exprs[at].args

        for at in traced([number], further).passed:
            expr = self.region.exprs[at]
            if at in self._access:
                across, along, _ = self._addressed(self._access[at])
            else:
                places = set(expr.axes) if expr.op == "place" else set[int]()
                across, along = bool(places & rows), bool(places & self._inner)
            outer, inner = outer or across, inner or along
        depends = self.region.depends[number]  # less than what was combined since
        return outer and bool(rows & depends), inner and bool(self._inner & depends)

    def _combined(self, expr: Expr, left: str, right: str) -> str:
        """Two partial results of a reduction as one."""
        monoid = MONOIDS[expr.monoid]
        if monoid.helper:
            self.helpers[monoid.helper] = None
            return f"{monoid.helper}({left}, {bare(right)})"
        return f"{left} + {right}"

    def _begin(self, number: int, wish: str = "", shape: str = "") -> str:
        """What a reduction or a scan has so far, neutral to begin with: for each lane, unless
        another shape is asked for."""
        expr = self.region.exprs[number]
        wish = wish or f"{self.region.labels.get(number, 'value')}_{expr.monoid}s"
        name, kind = self.names.claim(wish), language_dtype(expr.dtype)
        shape = shape or self._shape_of(expr.args[0])
        self.scope.lines.append(f"{name} = tl.full({shape}, {self._neutral(expr)}, {kind})")
        return name

    def _serial_place(self, axis: int) -> str:
        for scope in reversed(self.scopes):
            if f"axis {axis}" in scope.places:
                return scope.places[f"axis {axis}"]
        raise KeyError(axis)

    def _serially(self, number: int) -> None:
        """Loops in which each lane combines place after place, those that are close together in
        memory one behind the other; as many of the last as may be are written out."""
        expr = self.region.exprs[number]
        operand = expr.args[0]
        name = self._begin(number, self.region.results.get(number) or expr.monoid)
        axes = self._by_distance(expr)
        apart = self._walked_in_a_loop(operand, axes)
        loops: list[tuple[str, Scope]] = []
        for some, walk in ((axes[:apart], "range"), (axes[apart:], "tl.static_range")):
            if some:
                loops.append(self._loop(some, walk))
                self.scopes.append(loops[-1][1])
        self._emit([operand])
        self.scope.lines.append(f"{name} = {self._combined(expr, name, self.text(operand))}")
        for head, inside in reversed(loops):
            self.scopes.pop()
            self.scope.lines += [head, *inside.indented()]
        self.scope.texts[number] = name

    def _loop(self, axes: Sequence[int], walk: str) -> tuple[str, Scope]:
        """The head of a loop over the places along some axes, the last one fastest, and the scope
        that knows the place along each."""
        sizes = [self.region.sizes[axis] for axis in axes]
        tap, inside = self.names.claim("tap"), Scope()
        behind = 1
        for position, (axis, size) in reversed(list(enumerate(zip(axes, sizes, strict=True)))):
            text = tap if behind == 1 else f"{tap} // {behind}"
            place = tap
            if position:
                text = f"{text} % {size}"
            if len(axes) > 1:
                place = self.names.claim(f"{tap}_{position}")
                inside.head.insert(0, f"{place} = {text}")
            inside.places[f"axis {axis}"] = place
            behind *= size
        return f"for {tap} in {walk}({prod(sizes)}):", inside

    def _by_distance(self, expr: Expr) -> list[int]:
        """The axes of a walk, from those that step furthest in memory to the nearest."""
        behind = reach(self.region, expr.args[0])
        loads = [access for number, access in self._access.items() if number in behind]

        def furthest(axis: int) -> int:
            return max((abs(load.step(axis)) for load in loads), default=0)

        return sorted(expr.axes, key=lambda axis: (-furthest(axis), axis))

    def _walked_in_a_loop(self, operand: int, axes: Sequence[int]) -> int:
        """How many of the first axes are walked in a loop. The places along the others are written
        out, so that their loads are all on the way at once."""
        behind = reach(self.region, operand)
        if any(self.region.exprs[n].op in ("reduce", "scan") for n in behind):
            return len(axes)
        held, apart = max(1, self.step.rows * self.step.block // self.step.warps), len(axes)
        while apart and held * self.region.sizes[axes[apart - 1]] <= self.unrolled:
            apart -= 1
            held *= self.region.sizes[axes[apart]]
        return apart
