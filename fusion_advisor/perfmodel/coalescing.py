"""Requests of a kernel's warps to their L1, access by access: whole vectors or single elements,
neighbours close together or far apart.

Lanes hold as many neighbouring elements as a vector has. Where an access cannot be made in vectors,
because its stride is not one or it begins elsewhere than at a vector, each of its elements is a
request of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import SECTOR_BYTES, VECTOR_BYTES
from fusion_advisor.schedules.base import DIVISOR, Step
from fusion_advisor.schedules.layout import Access, Group, evaluates, gaps, index_of, stepped_over

LITERAL, SHIFTED = 0.3, 0.05
"""Costs of a division by a literal and by a power of two, as shares of a division by an argument:
ptxas makes some 20 instructions of the last, a product and a few of the first, a shift of the
second."""


@dataclass(frozen=True, slots=True)
class AccessPattern:
    """How a kernel's lanes make one access: neighbours are `apart` elements from each other, None
    where that hangs on data; `width` elements are contiguous and aligned in memory, of which
    `whole` may be taken at once."""

    access: Access
    apart: int | None
    width: int
    whole: int


def asked(step: Step) -> tuple[AccessPattern, ...]:
    """Access patterns of every load and store."""
    found: list[AccessPattern] = []
    for access in (*step.loads, *step.stores):
        lane = lane_of(step, access)
        width = _width(step, access, lane)
        whole = min(width, _unmasked(step, lane))
        found.append(AccessPattern(access, _apart(step, access, lane), width, whole))
    return tuple(found)


def scattered(step: Step, every: Sequence[AccessPattern]) -> int:
    """Sectors that are written one element at a time, because neighbouring lanes store apart."""
    stores = every[len(every) - len(step.stores) :] if step.stores else ()
    return sum(
        int(s.tensor.numel * min(1.0, one.apart * s.tensor.itemsize / SECTOR_BYTES))
        for s, one in zip(step.stores, stores, strict=True)
        if one.apart is not None and one.apart > 1
    )


def torn(step: Step, every: Sequence[AccessPattern]) -> int:
    """Over-fetched bytes of sectors: for tiles across contiguous memory whose rows begin anywhere,
    one sector for each row of the tile."""
    found = 0.0
    for one in every:
        lane, itemsize = lane_of(step, one.access), one.access.tensor.itemsize
        pitches = [one.access.step(group.axes[-1]) * itemsize for group in step.inner if group.axes]
        across = step.rows > 1 and lane in step.outer and one.apart == 1
        if across and any(pitch % SECTOR_BYTES for pitch in pitches):
            found += one.access.tensor.bytes * SECTOR_BYTES / (step.rows * itemsize)
    return int(found)


def divisions(step: Step, groups: Sequence[Group]) -> float:
    """Number of divisions that split a place over all groups into the groups that some access walks
    by itself: divisions by the kernel's arguments. A division by a literal counts as a part of one,
    a shift as less."""
    if len(groups) < 2:
        return 0.0
    region, wanted = step.region, set[int]()
    for access in _accesses(step):
        steps = gaps(access, step.groups)
        plain = stepped_over(steps, groups) is not None
        pulled = frozenset[int]().union(*(region.depends[i] for i in access.pulled.values()))
        for n, group in enumerate(groups):
            if (group.name in steps and not plain) or pulled & set(group.axes):
                wanted.add(n)
    by = [_division(step, group) for group in groups]
    return sum(by[min(wanted, default=len(by)) + 1 :]) + sum(by[n] for n in wanted if n)


def _division(step: Step, group: Group) -> float:
    """Cost of dividing by a group's extent, as a share of a division by an unknown number."""
    if not {*group.axes} <= step.region.pinned | step.serial:
        return 1.0
    return SHIFTED if group.size & (group.size - 1) == 0 else LITERAL


def _accesses(step: Step) -> tuple[Access, ...]:
    return (*step.loads, *step.stores)


def lane_of(step: Step, access: Access) -> Group:
    """Group along which neighbouring lanes lie: the group that memory follows."""
    tile = [*step.inner[-1:], *(step.outer[-1:] if step.rows > 1 or not step.inner else ())]
    tile = [group for group in tile if group.axes]
    close = [group for group in tile if access.step(group.axes[-1]) == 1]
    return (close or tile or [Group("", (), 1)])[0]


def hangs(step: Step, access: Access, axes: frozenset[int]) -> bool:
    """Whether an access depends on some axes."""
    if axes & (set(access.strides) | access.walks):
        return True
    return any(step.region.depends[index] & axes for index in access.pulled.values())


def _apart(step: Step, access: Access, lane: Group) -> int | None:
    """Elements between neighbouring lanes; None where the distance depends on data."""
    if not lane.axes:
        return 0
    axis, region = lane.axes[-1], step.region
    if axis in access.strides:
        return abs(access.step(axis))
    middle = max(0, min(region.sizes[axis] // 2, region.sizes[axis] - 2))
    found = 0
    for d, index in access.pulled.items():
        if region.depends[index] & {axis}:
            two = [_place(region, index, {axis: middle + i}) for i in (0, 1)]
            if two[0] is None or two[1] is None:
                return None
            found += abs(two[1] - two[0]) * access.tensor.stride[d]
    return found


def _width(step: Step, access: Access, lane: Group) -> int:
    """Elements that lie together, from a multiple of as many on."""
    most = max(1, VECTOR_BYTES // access.tensor.itemsize)
    if not lane.axes or access.step(lane.axes[-1]) != 1:
        return 1
    mine = [g for g in (step.inner if lane in step.inner else step.outer) if g.axes]
    dense = all(
        access.step(g.axes[-1]) == prod(later.size for later in mine[place + 1 :])
        for place, g in enumerate(mine)
    )
    others = [g for g in step.groups if g.axes and g is not lane and not (dense and g in mine)]
    numbers = [*(access.step(g.axes[-1]) for g in others), *(() if dense else (lane.size,))]
    known = [_known(step, lane, number) for number in numbers]
    known += [_known(step, None, access.step(axis)) for axis in step.serial]
    indices = ((_place(step.region, i, {}) or 0, d) for d, i in access.pulled.items())
    return gcd(most, *known, *(place * access.tensor.stride[d] for place, d in indices))


def _known(step: Step, lane: Group | None, number: int) -> int:
    """Largest divisor of `number` (elements) that Triton can prove; it limits the vector width.
    Triton knows whether 16 divides an argument; multiples of a row's length are spelled as
    products."""
    if number % DIVISOR == 0:
        return number
    if lane is None:
        return 1
    return gcd(number, step.length) if lane in step.inner and number % step.length == 0 else 1


def _place(region: Region, index: int, at: Mapping[int, int]) -> int | None:
    """Index at some place along some axes, the first place along the others; None where it depends
    on data."""
    if not evaluates(region, index):
        return None
    where = {**dict.fromkeys(region.depends[index], 0), **at}
    return index_of(region, index, region.sizes)(where)


def _unmasked(step: Step, lane: Group) -> int:
    """Elements of a vector that the end of the rows allows."""
    if lane in step.inner:
        return gcd(step.length, VECTOR_BYTES)
    whole = prod(g.size for g in step.outer) % DIVISOR == 0
    return VECTOR_BYTES if whole else 1
