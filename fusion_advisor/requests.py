"""What the warps of a kernel ask their L1 for, access by access: whole vectors or single elements,
neighbours close together or far apart.

A warp's load or store is served line by line. Lanes hold as many neighbouring elements as a vector
has; where an access cannot be taken in vectors, because it steps or begins elsewhere than at one,
each of its elements is a request of its own, spread over as many lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from fusion_advisor.device import LINE_BYTES, SECTOR_BYTES, VECTOR_BYTES
from fusion_advisor.records import Tensor
from fusion_advisor.region import Region
from fusion_advisor.schedules.base import DIVISOR, Step
from fusion_advisor.schedules.layout import Access, Group, evaluates, gaps, index_of, stepped_over
from fusion_advisor.schedules.places import in_runs
from fusion_advisor.schedules.vectors import follows

_LARGE = 8
"""Accesses of tensors smaller than such a part of what a kernel moves do not slow it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """How a kernel's lanes make one access: neighbours are `apart` elements from each other, None
    where that hangs on data; `width` elements are contiguous and aligned in memory, of which
    `whole` may be taken at once. Programs make it at a `share` of their places."""

    access: Access
    apart: int | None
    width: int
    whole: int
    share: float = 1.0


def asked(step: Step, made: Mapping[int, float]) -> tuple[Asked, ...]:
    """Of every load and store; of some loads at a share of their places."""
    found: list[Asked] = []
    numbers = (*step.region.all("load"), *(None for _ in step.stores))
    for number, access in zip(numbers, (*step.loads, *step.stores), strict=True):
        lane = _lane(step, access)
        width = _width(step, access, lane)
        whole = min(width, _unmasked(step, lane))
        share = 1.0 if number is None else made.get(number, 1.0)
        found.append(Asked(access, _apart(step, access, lane), width, whole, share))
    return tuple(found)


def lines(step: Step, every: Sequence[Asked], lanes: int, serial: int, warp: int) -> int:
    """Lines that all warps ask for: of `lanes` places that a kernel walks, `serial` of them one
    after the other in a lane; warps have `warp` lanes."""
    held = max(1, step.rows * step.block // (step.warps * warp))
    layout = min(max((one.width for one in every), default=1), held)
    found = 0.0
    for one in every:
        walked = lanes if _hangs(step, one.access, step.serial) else lanes // max(serial, 1)
        found += one.share * _places(step, one.access, walked) * _each(step, one, layout, warp)
    return int(found)


def scattered(step: Step, every: Sequence[Asked]) -> int:
    """Sectors that are written one element at a time, because neighbouring lanes store apart."""
    stores = every[len(every) - len(step.stores) :] if step.stores else ()
    return sum(
        int(s.tensor.numel * min(1.0, one.apart * s.tensor.itemsize / SECTOR_BYTES))
        for s, one in zip(step.stores, stores, strict=True)
        if one.apart is not None and one.apart > 1
    )


def exchanged(step: Step, every: Sequence[Asked], count: int, warp: int) -> int:
    """Values that the warps of all `count` programs give each other through shared memory, for
    reductions across what is contiguous: one of each row that a thread has a part of."""
    largest = max(every, key=lambda one: one.access.tensor.bytes)
    if step.rows == 1 or largest.apart != 1 or _lane(step, largest.access) not in step.outer:
        return 0
    threads = step.warps * warp
    whole = min(largest.whole, max(1, step.rows * step.block // threads))
    beside = min(max(step.rows // whole, 1), threads)
    if beside == threads:
        return 0
    reductions = 0
    for part in step.phases or (step,):
        region = part.region
        for number in region.all("reduce"):
            operand = region.depends[region.exprs[number].args[0]]
            reductions += bool((operand - region.depends[number]) & step.along)
    return count * threads * reductions * max(step.rows // beside, 1)


def unaligned(step: Step, every: Sequence[Asked]) -> bool:
    """Are neighbouring places of some large tensor taken one by one, because rows begin or end
    elsewhere than at whole vectors?"""
    return any(
        one.apart == 1 and one.whole == 1 and _LARGE * one.access.tensor.bytes > step.moved
        for one in every
        if not _hangs(step, one.access, step.serial)
    )


def torn(step: Step, every: Sequence[Asked]) -> int:
    """Bytes of sectors that lie beside what a program takes of them: of tiles across contiguous
    memory whose rows begin anywhere, a sector's worth for each row of the tile."""
    found = 0.0
    for one in every:
        lane, itemsize = _lane(step, one.access), one.access.tensor.itemsize
        pitches = [one.access.step(group.axes[-1]) * itemsize for group in step.inner if group.axes]
        across = step.rows > 1 and lane in step.outer and one.apart == 1
        if across and any(pitch % SECTOR_BYTES for pitch in pitches):
            found += one.access.tensor.bytes * SECTOR_BYTES / (step.rows * itemsize)
    return int(found)


def divided(step: Step, every: Sequence[Asked], warp: int) -> int:
    """Divisions by extents that lanes make to find their places, each or its rest: of a tile's rows
    every thread its own, of its columns likewise."""
    held = max(1, step.rows * step.block // (step.warps * warp))
    vector = min(max((one.width for one in every), default=1), held)
    across = min(warp, max(step.block // vector, 1))
    down = min(step.warps, max(step.rows * across // warp, 1)) * warp // across
    rows = max(step.rows // down, 1)
    threads = step.programs * step.warps * warp
    if not step.inner:
        runs = in_runs((*step.loads, *step.stores), step.outer, step.block)
        return 0 if runs else threads * held * _divisions(step, step.outer)
    found = 0 if step.in_planes else rows * _divisions(step, step.outer)
    return threads * (found + max(held // rows, 1) * _divisions(step, step.inner))


def _divisions(step: Step, groups: Sequence[Group]) -> int:
    """Of a place over all groups into those that some access walks by itself."""
    if len(groups) < 2:
        return 0
    region, wanted = step.region, set[int]()
    for access in (*step.loads, *step.stores):
        steps = gaps(access, step.groups)
        plain = stepped_over(steps, groups) is not None
        pulled = frozenset[int]().union(*(region.depends[i] for i in access.pulled.values()))
        for n, group in enumerate(groups):
            if (group.name in steps and not plain) or pulled & set(group.axes):
                wanted.add(n)
    last = len(groups) - 1
    quotients, rests = last - min(wanted, default=last), len(wanted - {0})
    return quotients + rests


def seen_twice(loads: Sequence[Access]) -> int:
    """Bytes of tensors that lie within others that are read at the same time."""
    tensors = {access.name: access.tensor for access in loads}
    return sum(
        tensor.bytes
        for tensor in tensors.values()
        if any(_within(tensor, other) for other in tensors.values())
    )


def _within(part: Tensor, whole: Tensor) -> bool:
    """Does a tensor lie within another that is larger?"""
    if part.storage != whole.storage or part.storage < 0 or part.bytes >= whole.bytes:
        return False
    if part.stride != whole.stride or part.dtype != whole.dtype:
        return False
    left = part.offset - whole.offset
    dims = zip(part.shape, whole.shape, whole.stride, strict=True)
    for size, held, stride in sorted(dims, key=lambda dim: -dim[2]):
        start, left = divmod(left, stride) if stride else (0, left)
        if start < 0 or start + size > held:
            return False
    return not left


def _each(step: Step, one: Asked, layout: int, warp: int) -> float:
    """Lines for one place of a tile whose lanes hold `layout` neighbouring places each."""
    if one.apart is None:
        return 1.0
    if one.apart == 0:
        return 0.0 if _near(step) else 1.0 / warp
    spread = warp * layout * one.apart * one.access.tensor.itemsize / LINE_BYTES
    return min(max(1.0, spread), warp) / (warp * min(one.whole, layout))


def _lane(step: Step, access: Access) -> Group:
    """The group along which neighbouring lanes lie: the one that memory follows."""
    tile = [*step.inner[-1:], *(step.outer[-1:] if step.rows > 1 or not step.inner else ())]
    tile = [group for group in tile if group.axes]
    close = [group for group in tile if access.step(group.axes[-1]) == 1]
    return (close or tile or [Group("", (), 1)])[0]


def _hangs(step: Step, access: Access, axes: frozenset[int]) -> bool:
    """Does an access hang on some axes?"""
    if axes & (set(access.strides) | access.walks):
        return True
    return any(step.region.depends[index] & axes for index in access.pulled.values())


def _places(step: Step, access: Access, lanes: int) -> float:
    """Places of all tiles at which an access is made."""
    found = float(lanes)
    if step.inner:
        inner, outer = (
            frozenset(axis for group in groups for axis in group.axes)
            for groups in (step.inner, step.outer)
        )
        found /= 1 if _hangs(step, access, inner) else max(step.length, 1)
        found /= step.rows if step.rows > 1 and not _hangs(step, access, outer) else 1
    return found


def _apart(step: Step, access: Access, lane: Group) -> int | None:
    """Elements between neighbouring lanes; None where it hangs on data."""
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
    if step.vector:
        axes = tuple(axis for group in (*step.outer, *step.inner) for axis in group.axes)
        whole = access.name in step.copied or follows(access, axes, step.region.sizes)
        return min(most, step.vector) if whole else 1
    mine = [g for g in (step.inner if lane in step.inner else step.outer) if g.axes]
    dense = all(
        access.step(g.axes[-1]) == prod(later.size for later in mine[place + 1 :])
        for place, g in enumerate(mine)
    )
    others = [g for g in step.groups if g.axes and g is not lane and not (dense and g in mine)]
    numbers = [*(access.step(g.axes[-1]) for g in others), *(() if dense else (lane.size,))]
    found = most
    for number in numbers:  # rows' lengths are spelled as products, arguments of flat kernels not
        found = gcd(found, number) if step.inner or number % DIVISOR == 0 else 1
    for d, index in access.pulled.items():
        found = gcd(found, (_place(step.region, index, {}) or 0) * access.tensor.stride[d])
    return found


def _place(region: Region, index: int, at: Mapping[int, int]) -> int | None:
    """An index at some place along some axes, the first along the others; None where it hangs on
    data."""
    if not evaluates(region, index):
        return None
    where = {**dict.fromkeys(region.depends[index], 0), **at}
    return index_of(region, index, region.sizes)(where)


def _unmasked(step: Step, lane: Group) -> int:
    """Elements of a vector that the end of the rows allows."""
    if step.vector:
        return VECTOR_BYTES
    if step.inner:
        extent = step.length if lane in step.inner else prod(g.size for g in step.outer)
        return gcd(extent, VECTOR_BYTES)
    whole = step.unmasked or prod(g.size for g in step.outer) % DIVISOR == 0
    return VECTOR_BYTES if whole else 1


def _near(step: Step) -> bool:
    """Do all lanes of a program lie in one run of the last group, or in two?"""
    return bool(step.inner) or not step.outer or step.block <= step.outer[-1].size
