"""A region laid out in rows, as programs take it: which axes number the rows, and which lie along
one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import SECTOR_BYTES, VECTOR_BYTES
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import (
    DIVISOR,
    Refused,
    Step,
    emission_order,
    kept_bytes,
    peak_bytes,
)
from fusion_advisor.schedules.layout import (
    Access,
    Group,
    accesses,
    collapse,
    leading,
    ordered,
    spanned,
)


@dataclass(frozen=True)
class Rows:
    """`across` are the axes that number the rows, outermost first; `along` the groups of a row.

    Each lane walks the `serial` axes by itself.
    """

    region: Region
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    across: tuple[int, ...]
    along: tuple[Group, ...]
    order: tuple[int, ...]
    serial: frozenset[int]

    @property
    def everything(self) -> tuple[Access, ...]:
        return (*self.loads, *self.stores)

    @property
    def axes(self) -> frozenset[int]:
        """The axes of a row."""
        return frozenset(axis for group in self.along for axis in group.axes)

    @property
    def length(self) -> int:
        return prod(group.size for group in self.along)

    @property
    def count(self) -> int:
        return prod(self.region.sizes[axis] for axis in self.across)

    def outer(self, across: tuple[int, ...] | None = None) -> tuple[Group, ...]:
        """The groups that number the rows, in another order on request."""
        axes = self.across if across is None else across
        return collapse(axes, self.everything, self.region, "row")

    @property
    def in_pieces(self) -> bool:
        """May a program hold its row in pieces, whose reductions are combined?"""
        return in_pieces(self.region, self.loads, self.axes, self.serial)

    def held(self, rows: int, block: int) -> int:
        """Bytes alive at once in a tile of rows × block."""
        extent = extents(self.region, self.order, self.axes, rows, block)
        return peak_bytes(self.region, self.order, extent)

    def kept(self, rows: int, block: int) -> int:
        """Bytes that a tile of rows × block keeps while its rows are combined."""
        extent = extents(self.region, self.order, self.axes, rows, block)
        return kept_bytes(self.region, self.order, extent)

    @property
    def own(self) -> tuple[Access, ...]:
        """The tensors of which each row reads elements of its own."""
        rows = self.axes, frozenset(self.across)
        return tuple(load for load in self.loads if all(load.walks & axes for axes in rows))

    @property
    def widest(self) -> int:
        """Bytes of an element of what is loaded along the rows, at most."""
        sizes = (load.tensor.itemsize for load in self.loads if load.walks & self.axes)
        return max(sizes, default=1)

    @property
    def only_combines(self) -> bool:
        """Whether nothing is stored along the rows, and those of one tensor are read."""
        return not self.stores_rows and len(self.own) == 1

    def coalesced(self, nbytes: int, *, stored: bool = True) -> int:
        """Neighbouring rows that fill so many bytes, a sector or a line of memory, where rows lie
        across contiguous memory; in what is loaded alone, unless also in what is `stored`."""
        accesses = self.everything if stored else self.loads
        sizes = [access.tensor.itemsize for access in accesses if self._turned(access) > 0]
        return max([1, *(nbytes // size for size in sizes)])

    @property
    def mixed(self) -> bool:
        """Whether rows lie across contiguous memory in a tensor, and along it in as many bytes."""
        turned = [self._turned(each) * each.tensor.bytes for each in self.everything]
        return max(turned) > 0 >= sum(turned)

    @property
    def crossed(self) -> bool:
        """Whether rows lie across contiguous memory in large tensors, and along it in others."""
        turned = [self._turned(each) * each.tensor.bytes for each in self.everything]
        most = max(map(abs, turned))
        return 4 * max(turned) >= most and -4 * min(turned) >= most > 0

    def torn(self, device: Device, rows: int) -> int:
        """Bytes of sectors that tiles of some rows take and do not use: where rows lie across
        contiguous memory in a tensor that the L2 does not hold, whose lines begin between sectors,
        a tile takes one sector more of each line."""
        return sum(
            each.tensor.bytes * SECTOR_BYTES // (rows * each.tensor.itemsize)
            for each in self.everything
            if self._turned(each) > 0
            and each.tensor.bytes > device.memory.l2.count
            and any(
                each.step(group.axes[-1]) * each.tensor.itemsize % SECTOR_BYTES
                for group in self.along
            )
        )

    def strewn(self, device: Device) -> int:
        """Bytes of sectors that are taken and not used where neighbours along a row are neighbours
        in memory in none of a tensor's elements, though it has rows on end, and where the L2 does
        not hold the tensor until others take the rest."""
        last = {axis for group in self.along[-1:] for axis in group.axes}
        return sum(
            each.tensor.bytes * (SECTOR_BYTES // each.tensor.itemsize - 1)
            for each in self.loads
            if each.tensor.bytes > device.memory.l2.count
            and any(abs(step) == 1 and axis in self.axes for axis, step in each.strides.items())
            and not any(abs(each.step(axis)) == 1 for axis in last)
        )

    def _turned(self, access: Access) -> int:
        """1 where rows lie across contiguous memory, -1 where they lie along it, 0 where the tensor
        has one of the two alone."""
        along = [abs(step) for axis, step in access.strides.items() if axis in self.axes]
        across = [abs(step) for axis, step in access.strides.items() if axis in self.across]
        if not along or not across or min(along) == min(across):
            return 0
        return 1 if min(along) > min(across) else -1

    @property
    def at_once(self) -> int:
        """Bytes that a lane may load at once, of the tensor of which those are the fewest."""
        groups = (*self.along, *self.outer())

        def vector(load: Access) -> int:
            near = [g.size for g in groups if load.step(g.axes[-1]) == 1]
            return load.tensor.itemsize * gcd(DIVISOR, *near[:1] or (1,))

        return min((vector(load) for load in self.loads if load.walks & self.axes), default=0)

    @property
    def stores_rows(self) -> bool:
        """Whether a result has elements along the rows."""
        return any(store.walks & self.axes for store in self.stores)

    def passing(self, device: Device, rulebook: Rulebook) -> bool:
        """Whether a walk leaves its lines of memory to be given up first: nothing is stored along
        the rows, so that the L2 keeps what kernels before wrote, unless it is much that is read."""
        read = sum({load.name: load.tensor.bytes for load in self.loads}.values())
        most = rulebook.schedules.row.passing_caches.value * device.memory.l2.count
        return read <= most and not (self.stores_rows or self.serial)

    @property
    def vector(self) -> int:
        """Elements that a lane loads at once, of the tensor of which those are the fewest bytes."""
        sizes = [load.tensor.itemsize for load in self.loads if load.walks & self.axes]
        return max(min(self.at_once, VECTOR_BYTES) // min(sizes, default=VECTOR_BYTES), 1)

    def step(
        self,
        schedule: str,
        device: Device,
        *,
        rows: int,
        block: int,
        warps: int,
        stages: int = 1,
        smallest: tuple[int, int] | None = None,
        across: tuple[int, ...] | None = None,
    ) -> Step:
        """The kernel whose programs take tiles of rows × block; `smallest` is the rows and the
        elements of each that it could not do without."""
        least = smallest or (rows, block)
        return Step(
            schedule=schedule,
            region=self.region,
            loads=self.loads,
            stores=self.stores,
            outer=self.outer(across),
            inner=self.along,
            order=self.order,
            rows=rows,
            block=block,
            warps=warps,
            stages=stages,
            smallest_tile=prod(least),
            on_chip_bytes=self.kept(*least),
            registers=-(-self.kept(rows, block) // (4 * warps * device.warp_size)),
            serial=self.serial,
        )


def rows_of(region: Region, inner: frozenset[int], serial: frozenset[int]) -> Rows:
    """A region in rows along the axes `inner`.

    Refused unless every reduction is along the row or within a lane, and every result lies along
    all rows, and along whole rows or none of them.
    """
    outer = region.space - inner - serial
    for number in (*region.all("reduce"), *region.all("scan")):
        axes = frozenset(region.exprs[number].axes)
        if axes != inner and not axes <= serial:
            raise Refused("parallel-pattern", "the reductions run along different axes")
    for output in region.outputs:
        axes = output.axes
        if not outer <= axes:
            raise Refused("parallel-pattern", "a result does not depend on every row")
        if axes & inner and not inner <= axes:
            raise Refused("no-schedule", "a result spans a part of a row")
    return laid_out(region, inner, outer, serial)


def laid_out(
    region: Region, inner: frozenset[int], outer: frozenset[int], serial: frozenset[int]
) -> Rows:
    """Rows along `inner`, numbered by `outer`, wherever the results lie."""
    loads, stores = accesses(region)
    everything = (*loads, *stores)
    lead = leading(everything)
    return Rows(
        region=region,
        loads=loads,
        stores=stores,
        across=ordered(sorted(outer), lead),
        along=collapse(ordered(sorted(inner), lead), everything, region, "col"),
        order=emission_order(region),
        serial=serial,
    )


def rows_of_step(step: Step) -> Rows:
    """Rows as a kernel takes them."""
    return laid_out(step.region, step.along, frozenset(spanned(step.outer)), step.serial)


def in_pieces(
    region: Region, loads: Sequence[Access], axes: frozenset[int], serial: frozenset[int]
) -> bool:
    """May a program hold its row along some axes in pieces? Not where anything hangs on the order
    of the lanes, and not where a row has one value for all of it, which no mask makes a row of."""
    monoids = {region.exprs[number].monoid for number in region.all("reduce")}
    ordered = region.random_state or any(region.all("scan")) or any(region.all("taken"))
    if ordered or serial or monoids & {"argmax", "argmin"}:
        return False
    constant = (load.walks & axes and not axes & set(load.strides) for load in loads)
    alone = (not region.depends[region.exprs[n].args[0]] & axes for n in region.all("reduce"))
    return not any(constant) and not any(alone)


def extents(
    region: Region, order: tuple[int, ...], inner: frozenset[int], rows: int, block: int
) -> dict[int, int]:
    """Elements that each value holds in a tile of rows × block. A row's scalars (its maximum, its
    sum) are a register each and not counted."""
    return {
        n: (rows if region.depends[n] - inner else 1) * block if region.depends[n] & inner else 0
        for n in order
    }
