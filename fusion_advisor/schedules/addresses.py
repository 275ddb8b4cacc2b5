"""Where in memory a program's lanes find their elements: offsets, masks and pointers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from fusion_advisor.region.exprs import INDEX, Expr
from fusion_advisor.rulebook.devices import VECTOR_BYTES
from fusion_advisor.schedules.base import DIVISOR
from fusion_advisor.schedules.coordinates import Coordinates
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import (
    Access,
    Group,
    gaps,
    spanned,
    stepped_over,
)
from fusion_advisor.schedules.names import Names
from fusion_advisor.tile.program import (
    Address,
    Literal,
    Multiple,
    Name,
    Statement,
    Tile,
    product,
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
    numbers: dict[str, Expr] = field(default_factory=dict[str, Expr])
    """Numbers that it is given, by their names in the file, in the order of first use."""
    told: list[Constant] = field(default_factory=list[Constant])
    """Divisors of sizes that the compiler is told."""

    def value(self, number: int) -> Tile:
        """A value that is known here."""
        for scope in reversed(self.scopes):
            if number in scope.values:
                return scope.values[number]
        raise KeyError(number)

    # -- what is known of tensors --------------------------------------------------------------

    def _divided(self) -> list[Statement]:
        """Sizes along which neighbours in memory lie, as products, for the compiler to see that
        whole vectors hold them: of an argument it knows only whether 16 divides it."""
        step, found = self.step, list[Statement]()
        along = {"DIVISOR": spanned(step.inner or step.outer[-1:])}
        if not step.inner and prod(step.sizes[axis] for axis in along["DIVISOR"]) % 2:
            along["DIVISOR"] = spanned(step.outer)  # no vector ends where a last dimension does
        if self.several and self.region.reduced:  # lanes that combine lie along rows, too
            along["ROWS_DIVISOR"] = spanned(step.outer[-1:])
        for constant, axes in along.items():
            length = prod(step.sizes[axis] for axis in axes)
            name = next((name for name, those in self.sizes.items() if those == axes), "")
            near = [a for a in (*step.loads, *step.stores) if axes and a.step(axes[-1]) == 1]
            if not name or not near or length % DIVISOR == 0:
                continue
            least = 2
            if constant == "ROWS_DIVISOR":
                # Lanes with less than half a vector gain less than they cost the other tensors.
                least = VECTOR_BYTES // 2 // min(access.tensor.itemsize for access in near)
            if length % least == 0:
                self.told.append(Constant(constant, gcd(length, DIVISOR), "divisor", axes))
                found.append(Multiple(name, constant, "seen to hold whole vectors"))
                ending = {n for n, those in self.sizes.items() if those[-len(axes) :] == axes}
                ending -= {name}
                found += [Multiple(n, constant, "a multiple of that") for n in sorted(ending)]
        return found

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
            return (self._times(Name(linear), after),)
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
        within = self._within(outer, inner)
        if guard is None:
            return within
        chosen = self.value(guard)
        return chosen if within is None else within & chosen

    def _within(self, outer: bool, inner: bool) -> Tile | None:
        """The lanes that have a row, and a place within it, as far as those are asked for."""
        if not self.several:
            return self._within_row if inner else None
        if inner and outer:
            return Name("mask")
        return Name(f"{self.lane}_mask") if inner else Name("row_mask") if outer else None

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
        outer = any(axis in axes for group in self.step.outer for axis in group.axes)
        return outer, inner, guard

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
        return Address(self._base(access.name), self.offset(access))

    def _base(self, name: str) -> str:
        """The argument that is the address of a tensor's first element."""
        return f"{self.tensors[name]}_ptr"
