"""Kernels of a plan: what their warps issue, ask for and wait for (`model`).

A program's values lie spread over its threads: a warp makes each as often as a thread has places
for it, and once where the threads have more places than it has elements. What lanes ask for is
taken in vectors where neighbours lie together, from a multiple of the vector on, up to an end that
is one, too; else element by element.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import gcd, log2, prod

from fusion_advisor.perfmodel.model import Work, kept, sectors_apart
from fusion_advisor.region.instruction_mix import instructions, precise
from fusion_advisor.region.primitives import MONOIDS
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import LINE_BYTES, SECTOR_BYTES, VECTOR_BYTES, Device
from fusion_advisor.schedules.base import DIVISOR, Plan, Step
from fusion_advisor.schedules.layout import Access, Group
from fusion_advisor.schedules.reducing import walks


def plan_works(plan: Plan, device: Device, registers: Sequence[int]) -> tuple[Work, ...]:
    """Works of a plan's kernels, each with the bytes that those before it left in the L2;
    `registers` of a thread of each, as compiled, or empty."""
    found: list[Work] = []
    left: dict[str, tuple[int, int]] = {}
    known = registers if len(registers) == len(plan.steps) else [None] * len(plan.steps)
    for step, compiled in zip(plan.steps, known, strict=True):
        names = {load.name for load in step.loads}
        moved = step.bytes_read + step.bytes_written
        resident = step.in_common + sum(
            kept(size, (before + moved) / 2, device)
            for name, (size, before) in left.items()
            if name in names
        )
        work = _work(step, device, exact=precise(plan.region), compiled=compiled, resident=resident)
        found.append(work)
        left |= {store.name: (store.tensor.bytes, moved) for store in step.stores}
    return tuple(found)


def _work(step: Step, device: Device, *, exact: bool, compiled: int | None, resident: int) -> Work:
    warps = step.programs * step.warps * step.turns
    again = walks(step.region, step.serial)
    most = max(again.values(), default=1)

    def lanes(region: Region, number: int) -> float:
        return _per_warp(step, region.depends[number], most, device)

    parts = [part.region for part in step.phases or (step,)]
    scanned = _combinations(step, device)
    made = [
        instructions(r, device, precise=exact, lanes=partial(lanes, r), scanned=scanned)
        for r in parts
    ]
    read, rounds = step.bytes_read + step.in_common, step.chunks * step.turns
    each = (read + step.bytes_written) / (step.programs * step.warps * device.warp_size)
    if step.turns > 1 and step.stages > 1:  # further tiles are on their way
        each /= step.stages - 1
    waits = max(1.0, each / VECTOR_BYTES) + (rounds - 1) / 2
    if step.chunked and step.rows > 1 and step.stages > 1:  # a chunk is asked for at once
        waits = 1.0 + rounds / (step.stages - 1)
    return Work(
        "kernel",
        read,
        step.bytes_written,
        resident=min(resident, read),
        scattered=sum(_scattered(step, store) for store in step.stores),
        torn=_torn(step),
        halved=_halved(step),
        primitives=warps * sum(one.primitives for one in made),
        steps=warps * sum(one.steps for one in made),
        requests=warps * _requests(step, again, device),
        programs=step.programs,
        warps=step.warps,
        at_once=at_once(step, device, compiled),
        depth=waits,
        chained=_chained(step, scanned, device, exact=exact),
    )


def _combinations(step: Step, device: Device) -> float:
    """How often a scan combines for each element: once for one position. In a tile each thread
    combines its own elements, a warp what its threads have, and each element is combined with what
    comes before; a chunk is also reduced, and joined with the chunks before."""
    if step.block == 1:
        return 1.0
    threads = step.warps * device.warp_size
    among = log2(device.warp_size) * threads / max(step.rows * step.block, threads)
    return (2 + among) * (2 if step.chunked else 1)


def _chained(step: Step, combinations: float, device: Device, *, exact: bool) -> float:
    """Instructions of a thread's scans, one behind the other, with so many combinations for each
    element."""
    each = max(1.0, step.rows * step.block / (step.warps * device.warp_size))
    each = each if step.block > 1 else 1.0  # neighbours do not wait for each other
    found = 0.0
    for number in step.region.all("scan"):
        expr = step.region.exprs[number]
        within = MONOIDS[expr.monoid].within
        found += sum(device.worth(one, expr.dtype, precise=exact) for one in within) or 1.0
    return found * each * combinations * step.chunks * step.turns


def at_once(step: Step, device: Device, compiled: int | None = None) -> int:
    """Programs that the device holds at a time, by their warps and registers: as many as they are
    compiled to, or an estimate."""
    by, of = device.times.registers, device.multiprocessor
    estimate = by.least.value + by.alive.value * step.registers
    registers = compiled or min(estimate, of.registers_per_thread.value)
    return of.holds(step.warps, registers) * device.sm_count


def _per_warp(step: Step, axes: frozenset[int], again: int, device: Device) -> float:
    """Number of times that a warp makes a value along some axes: the places of a thread, at least
    one, at each place that lanes walk by themselves, `again` times."""
    places = 1.0
    if axes & _axes(step.inner or step.outer):
        places *= step.block * step.chunks + step.rest
    if step.inner and axes & _axes(step.outer):
        places *= step.rows
    found = max(1.0, places / (step.warps * device.warp_size))
    walked = axes & step.serial
    return found * again * prod(step.region.sizes[axis] for axis in walked) if walked else found


def _requests(step: Step, again: Mapping[int, int], device: Device) -> float:
    """Loads and stores of one warp; those of masked ends count, those beyond a row do not. `again`
    says by the load how often lanes walk its places."""
    numbers, found = tuple(step.region.all("load")), 0.0
    for place, access in enumerate((*step.loads, *step.stores)):
        axes = _hangs(step, access)
        often = again.get(numbers[place], 1) if place < len(numbers) else 1
        each = _per_warp(step, axes, often, device)
        if step.inner and axes & step.along:
            each *= min(1.0, (step.part or step.length) / (step.block * step.chunks + step.rest))
        found += max(1.0, each / _vector(step, access))
    return found


def _hangs(step: Step, access: Access) -> frozenset[int]:
    """Axes that an access depends on."""
    pulled = (step.region.depends[index] for index in access.pulled.values())
    return frozenset(access.strides).union(access.walks, *pulled)


def _lane(step: Step, access: Access) -> Group:
    """Group along which neighbouring lanes lie: the group that memory follows."""
    tile = [*step.inner[-1:], *(step.outer[-1:] if step.rows > 1 or not step.inner else ())]
    tile = [group for group in tile if group.axes]
    close = [group for group in tile if access.step(group.axes[-1]) == 1]
    return (close or tile or [Group("", (), 1)])[0]


def _vector(step: Step, access: Access) -> int:
    """Elements that a lane takes at once."""
    lane = _lane(step, access)
    if not lane.axes or access.step(lane.axes[-1]) != 1 or access.pulled:
        return 1
    mine = [g for g in (step.inner if lane in step.inner else step.outer) if g.axes]
    dense = all(
        access.step(g.axes[-1]) == prod(later.size for later in mine[place + 1 :])
        for place, g in enumerate(mine)
    )
    others = [g for g in step.groups if g.axes and g is not lane and not (dense and g in mine)]
    numbers = [*(access.step(g.axes[-1]) for g in others), *(() if dense else (lane.size,))]
    numbers += [access.step(axis) for axis in step.serial]
    if lane in step.inner:
        end = step.length
    else:  # Triton knows of 16 alone that they divide a size
        end = DIVISOR if prod(g.size for g in step.outer) % DIVISOR == 0 else 1
    return gcd(max(1, VECTOR_BYTES // access.tensor.itemsize), end, *numbers)


def _scattered(step: Step, store: Access) -> int:
    """Sectors that neighbouring lanes write one by one, where a result lies across them. What is
    read so comes out of the L1, where the next row finds the sector."""
    lane = _lane(step, store)
    if not lane.axes:
        return 0
    itemsize = store.tensor.itemsize
    return sectors_apart(store.tensor.numel, abs(store.step(lane.axes[-1])) * itemsize, itemsize)


def _torn(step: Step) -> int:
    """Over-fetched bytes of sectors: for tiles across contiguous memory whose rows begin anywhere,
    one sector for each row of the tile."""
    found = 0.0
    for access in _across(step):
        itemsize = access.tensor.itemsize
        pitches = [access.step(group.axes[-1]) * itemsize for group in step.inner if group.axes]
        if any(pitch % SECTOR_BYTES for pitch in pitches):
            found += access.tensor.bytes * SECTOR_BYTES / (step.rows * itemsize)
    return int(found)


def _halved(step: Step) -> float:
    """Bytes of lines of which programs take parts, times how often these halve a line."""
    found = 0.0
    for access in _across(step):
        part = step.rows * access.tensor.itemsize
        if step.rows < _lane(step, access).size:
            found += access.tensor.bytes * max(0.0, log2(LINE_BYTES / part))
    return found


def _across(step: Step) -> Iterator[Access]:
    """Accesses of tiles whose rows lie across contiguous memory."""
    for access in (*step.loads, *step.stores):
        lane = _lane(step, access)
        if step.rows > 1 and lane in step.outer and access.step(lane.axes[-1]) == 1:
            yield access


def _axes(groups: Sequence[Group]) -> frozenset[int]:
    return frozenset(axis for group in groups for axis in group.axes)
