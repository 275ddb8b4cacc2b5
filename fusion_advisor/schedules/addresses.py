"""Where in memory a program's lanes find their elements: offsets, masks and pointers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd, prod
from typing import ClassVar

from fusion_advisor.region.exprs import INDEX
from fusion_advisor.rulebook.devices import VECTOR_BYTES
from fusion_advisor.schedules.base import DIVISOR
from fusion_advisor.schedules.coordinates import Coordinates
from fusion_advisor.schedules.layout import (
    Access,
    Group,
    affine,
    evaluates,
    gaps,
    index_of,
    reach,
    stepped_over,
)
from fusion_advisor.schedules.names import Names
from fusion_advisor.schedules.places import PLACES
from fusion_advisor.schedules.vectors import copies_of
from fusion_advisor.tile.program import (
    Address,
    Literal,
    Multiple,
    Name,
    Statement,
    Tile,
    product,
    summed,
)

Terms = tuple[Tile, ...]
"""What is added up to a place in a tensor."""


@dataclass(kw_only=True)
class Addresses(Coordinates):
    """The address of each lane's element in any tensor that one kernel reads or writes.

    `strides` collects those that it needs as run-time arguments, in the order of first use, by the
    tensor and the group or dimension that they step along.
    """

    tensors: dict[str, str]
    """Each access's own name to the name in the file."""
    names: Names = field(default_factory=Names)
    strides: dict[str, tuple[Access, Group | int]] = field(
        default_factory=dict[str, tuple[Access, Group | int]]
    )
    divided: bool = False
    """Its rows are told to be a multiple of a number that does not leave whole vectors apart."""
    in_vectors: ClassVar[bool] = True
    """Do the lanes of a row that begins anywhere have whole vectors?"""

    def value(self, number: int) -> Tile:
        """A value that is known here."""
        for scope in reversed(self.scopes):
            if number in scope.values:
                return scope.values[number]
        raise KeyError(number)

    # -- what is known of tensors --------------------------------------------------------------

    def _divided(self) -> list[Statement]:
        """A row's length as a product, for the compiler to see that whole vectors hold it: of an
        argument it knows only whether 16 divides it."""
        step = self.step
        groups = step.inner or step.outer
        length = prod(group.size for group in groups)
        axes = tuple(axis for group in groups for axis in group.axes)
        name = next((name for name, spanned in self.sizes.items() if spanned == axes), "")
        near = any(axes and each.step(axes[-1]) == 1 for each in (*step.loads, *step.stores))
        whole = step.vector or step.unmasked or length % DIVISOR == 0
        if not name or not near or whole or length % 2:
            return []
        self.divided = True
        return [Multiple(name, "DIVISOR", "seen to hold whole vectors")]

    def _apart(self) -> list[Statement]:
        """Steps from row to row as products, likewise."""
        return [Multiple(name, "APART", "seen as a multiple") for name, _, _ in self.apart]

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

    # -- offsets -------------------------------------------------------------------------------

    def offset(self, access: Access) -> Terms:
        """Elements from the tensor's first to the one that a program's lane addresses, as a sum;
        () where that is the first."""
        found: list[Tile] = []
        for groups, linear in self._levels():
            found += self._offset_within(access, groups, linear)
        for d, index in access.pulled.items():
            place = self.value(index)
            if place == Literal("0"):
                continue
            if access.tensor.stride[d] == 1:
                found.append(place)
            elif access.tensor.stride[d]:
                place = place if self._is_wide(index) else self.wide(place)
                found.append(place * self._stride(access, d))
        return (*found, *self._walked(access))

    def _stride(self, access: Access, d: int) -> Tile:
        """The run-time argument that is the stride of a dimension."""
        name = f"{self.tensors[access.name]}_stride_{d}"
        self.strides.setdefault(name, (access, d))
        return Name(name)

    def _is_wide(self, number: int) -> bool:
        """Is an index made from places, or from numbers that have 64 bits in memory? Constants have
        32, and so may numbers in memory."""
        expr = self.region.exprs[number]
        if expr.op == "place":
            return True
        if expr.dtype != INDEX or expr.op == "const":
            return expr.dtype in ("int64", "uint64") and expr.op != "const"
        chosen = expr.args[1:] if expr.op == "where" else expr.args
        return any(self._is_wide(arg) for arg in chosen)

    def _walked(self, access: Access) -> Terms:
        """How far the axes that a lane walks are gone along plain dimensions."""
        return tuple(
            product([self._serial_place(axis), *self._serial_stride(access, axis)])
            for axis in sorted(self.step.serial & access.walks)
        )

    def _serial_stride(self, access: Access, axis: int) -> list[Tile]:
        """The factors of the step along an axis that a lane walks, as it stands in the tensor."""
        d, dim = next((d, dim) for d, dim in enumerate(access.dims) if axis in dim)
        within = [self._size_of(a) for a in dim[dim.index(axis) + 1 :]]
        return within if access.tensor.stride[d] == 1 else [self._stride(access, d), *within]

    def _offset_within(self, access: Access, groups: Sequence[Group], linear: str) -> Terms:
        if access.pulled and self.several and groups == self.step.outer:
            access = self._read_plainly(access)
        steps = gaps(access, self.step.groups)
        if not any(group.name in steps for group in groups):
            return ()
        if (after := stepped_over(steps, groups)) is not None:
            return (self._times(self._linear(linear), after),)
        terms: list[Tile] = []
        for group in groups:
            if group.name not in steps:
                continue
            place, later = self.coordinate(group, groups, linear), steps[group.name]
            within = self._within_dimension(access, group)
            if within is not None:
                terms.append(place * within)
            elif later is None:
                name = f"{self.tensors[access.name]}_stride_{group.name}"
                self.strides.setdefault(name, (access, group))
                terms.append(place * Name(name))
            else:
                terms.append(self._times(place, later))
        return tuple(terms)

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

    def _times(self, place: Tile, groups: Sequence[Group]) -> Tile:
        """A coordinate times the extents of the groups that it steps over."""
        if tuple(groups) == self.step.inner and groups:
            return place * self.total(groups)
        return product([place, *(self.extent_of(group) for group in groups)])

    # -- masks ---------------------------------------------------------------------------------

    def mask(self, access: Access) -> Tile | None:
        """The lanes that address an element; None when all do."""
        outer, inner, guard = self._addressed(access)
        if self.step.schedule == "flat":
            within = Name("mask") if outer else None
        elif not self.several:
            within = self._within_row if inner else None
        elif inner and outer:
            within = Name("mask")
        else:
            within = Name(f"{self.lane}_mask") if inner else Name("row_mask") if outer else None
        if guard is None:
            return within
        chosen = self.value(guard)
        return chosen if within is None else within & chosen

    @property
    def _within_row(self) -> Tile | None:
        """The mask of the lanes that have an element of the row; None when all have."""
        return Name(f"{self.lane}_mask")

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

    def _guards(self, access: Access, guard: int, addressed: frozenset[int]) -> bool:
        """Must, or may, a guard stand in a mask? Where every address is good and fewer lanes load
        than decide, the value is chosen later alone; but not where whole programs need not load."""
        further = self.region.depends[guard] - addressed
        if self._moved(access) or not further:
            return True
        return bool(addressed) and self._program_decides(further)

    def _moved(self, access: Access) -> bool:
        """Does an index say where a tensor is read?"""
        return any(access.tensor.stride[d] for d in access.pulled)

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

    # -- pointers ------------------------------------------------------------------------------

    def _pointer(self, access: Access) -> Address:
        if self.step.ends and self._vectorized(access):
            return Address(self._base(access.name), (Name(self.vectors),))
        if self.in_vectors and access.name in self.step.copied:
            copies = copies_of(access.name, self.step.vector)
            return Address(self._base(copies), (Name(self.copy),))
        if self.step.aloft > 1 and (walked := self._walked_from(access)):
            return walked
        base, offset = self._base(access.name), self.offset(access)
        if self.tensors[access.name] in self.begun:
            rows = self._offset_within(access, self.step.outer, self._outer_name)
            return Address(base, offset[len(rows) :], begun=rows)
        return Address(base, offset)

    def _base(self, name: str) -> str:
        """The argument that is the address of a tensor's first element."""
        return f"{self.tensors[name]}_ptr"

    def _pointer_at(self, access: Access, place: str) -> Address:
        """Where a tensor has its element for one of the places that lanes may have."""
        self._place_name = place
        pointer = self._pointer(access)
        self._place_name = PLACES[0]
        return pointer

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

    def _vectorized(self, access: Access) -> bool:
        """Does a tensor lie in rows, one behind the other, of which lanes take whole vectors?"""
        if not self.step.vector or not self.in_vectors or access.guard is not None:
            return False
        cols = self.size(self.step.inner, self.length)
        return self.offset(access) == (Name("row") * cols, Name(self.lane))

    def _by_vectors(self, access: Access) -> Terms:
        """Where a tensor's whole vectors are and what lies around them, with the masks of both."""
        base = Name(self._base(access.name))
        around = summed(self.offset(access))
        return base, Name("vectors"), Name("in_whole"), around, Name("in_end")

    def _walked_from(self, access: Access) -> Address | None:
        """Where an element lies that a lane walks to: what no walk changes stands before the loops,
        so that the compiler has all loads on their way at once. None where places are no sums of
        steps."""
        start, steps = list[Tile](), list[Tile]()
        for d, index in access.pulled.items():
            along = self._steps_along(index)
            if along is None:
                return None
            stride = access.tensor.stride[d]
            for walked, found in ((False, start), (True, steps)):
                terms = [
                    place if step == 1 else place * step
                    for axis, step in along.items()
                    if (axis in self.step.serial) == walked
                    for place in [self._place((axis,))]
                    if place is not None
                ]
                if terms and stride == 1:
                    found += terms
                elif terms and stride:
                    found.append(summed(terms) * self._stride(access, d))
        if access.walks & self.step.serial:
            steps += self._walked(access)
        for level in self._levels():
            start += self._offset_within(access, *level)
        if not steps:
            return None
        name = self.names.claim(f"{self.tensors[access.name]}_first")
        self.scopes[0].let(name, Address(self._base(access.name), tuple(start)))
        return Address(name, (summed(steps),))

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
