"""Reductions along the rows and down the columns in one pass: persistent programs carry what is
combined down the columns from row to row, and a second kernel combines what they carried."""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.region import Output, Region
from fusion_advisor.rulebook import Device, Rulebook
from fusion_advisor.schedules import persistent, row
from fusion_advisor.schedules.base import (
    Plan,
    Refused,
    Step,
    check_room,
    power_of_two,
    staged_bytes,
)
from fusion_advisor.schedules.cutting import (
    Copier,
    combined_parts,
    loaded,
    piece,
    pool_of,
    space,
)
from fusion_advisor.schedules.layout import Group, accesses, leading, ordered, reach
from fusion_advisor.schedules.rows import laid_out

NAME = "carried"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The plan in one pass and a combining kernel; Refused unless every reduction runs along the
    rows or down all of them, and no row needs what is combined down the columns."""
    if any(region.all("scan")) or not region.reduced:
        raise Refused("no-schedule", "nothing is carried from row to row")
    inner = _row(region)
    outer = region.space - inner
    carried = [n for n in region.all("reduce") if set(region.exprs[n].axes) <= outer]
    late = [o for o in region.outputs if set(carried) & reach(region, o.value)]
    early = [o for o in region.outputs if o not in late]
    for output in late:
        if region.depends[output.value] & outer:
            raise Refused("parallel-pattern", "the rows need what the columns give")
    parts = region.free_axis
    numbers = rulebook.schedules.persistent
    most = device.multiprocessor.count.count * numbers.programs_per_multiprocessor.count
    sizes = {**region.sizes, parts: most}
    left = {n: _left(region, n, inner, parts, sizes) for n in carried}
    pool = pool_of(region, sizes)
    first = piece(region, pool, [*early, *left.values()], (), sizes)
    step = _walk(first, inner, outer, parts, device, rulebook)
    check_room(step, device, rulebook)
    combined = _combined(region, left, late, parts, sizes)
    last = row.tile(combined, frozenset({parts}), frozenset(), device, rulebook)
    share = last.bytes_read / (step.bytes_read + step.bytes_written)
    return Plan(NAME, region, (step, last), finish_share=share)


def _left(
    region: Region, number: int, inner: frozenset[int], parts: int, sizes: dict[int, int]
) -> Output:
    """What each program carried to the end of its rows."""
    loads, stores = accesses(region)
    axes = ordered(sorted(region.depends[number]), leading((*loads, *stores)))
    if frozenset(axes) != inner:
        raise Refused("no-schedule", "a column's result spans a part of a row")
    name = f"ws_part0_{number}"
    return space(name, number, (parts, *axes), region.exprs[number].dtype, sizes)


def _row(region: Region) -> frozenset[int]:
    """The axes of a row: those that the reductions down the columns leave."""
    sets = {frozenset(region.exprs[i].axes) for i in region.all("reduce")}
    for down in sorted(sets, key=sorted):
        inner = region.space - down
        if inner and all(axes in (inner, down) for axes in sets):
            columns = {n for n in region.all("reduce") if frozenset(region.exprs[n].axes) == down}
            rows = [n for n in region.all("reduce") if n not in columns]
            crossed = any(columns & reach(region, n) for n in rows)
            nested = any(columns & reach(region, region.exprs[n].args[0]) for n in columns)
            plain = all(region.exprs[n].monoid in ("sum", "max", "min", "prod") for n in columns)
            if not crossed and not nested and plain:
                return inner
    raise Refused("parallel-pattern", "the reductions run neither along rows nor down all of them")


def _walk(
    region: Region,
    inner: frozenset[int],
    outer: frozenset[int],
    parts: int,
    device: Device,
    rulebook: Rulebook,
) -> Step:
    """The kernel that walks the rows."""
    numbers = rulebook.schedules.persistent
    laid = laid_out(region, inner, outer, frozenset())
    if laid.coalesced(rulebook.schedules.row.sector_bytes.count) > 1:
        raise Refused("no-schedule", "the columns do not lie along contiguous memory")
    block = power_of_two(laid.length)
    rows = min(max(numbers.tile_elements.count // block, 1), power_of_two(laid.count))
    stages, room = numbers.stages.count, device.multiprocessor.shared_memory_per_block.count
    while rows > 1 and staged_bytes(laid.loads, outer, rows * block, stages) > room:
        rows //= 2
    if staged_bytes(laid.loads, outer, rows * block, stages) > room:
        raise Refused("on-chip", f"rows on their way do not fit into {room} B of shared memory")
    warps = power_of_two(
        max(1, rows * block // (numbers.elements_per_thread.count * device.warp_size))
    )
    warps = min(max(warps, rulebook.schedules.row.min_warps.count), numbers.max_warps.count)
    step = laid.step(
        persistent.NAME,
        device,
        rows=rows,
        block=block,
        warps=warps,
        stages=stages,
        smallest=(1, block),
    )
    most = region.sizes[parts]
    group = Group("part", (parts,), min(most, -(-laid.count // rows)))
    return replace(step, parts=group, most=most)


def _combined(
    region: Region, left: dict[int, Output], late: list[Output], parts: int, sizes: dict[int, int]
) -> Region:
    """The results that come from what all programs carried."""
    pool, known = pool_of(region, sizes), dict[int, int]()
    for place, (number, output) in enumerate(left.items()):
        expr = region.exprs[number]
        part = loaded(pool, len(region.inputs) + place, output)
        known[number] = combined_parts(pool, expr, part, parts, region.labels.get(number, ""))
    copier = Copier(pool, region, known)
    outputs = [replace(output, value=copier.copied(output.value)) for output in late]
    return piece(region, pool, outputs, list(left.values()), sizes)
