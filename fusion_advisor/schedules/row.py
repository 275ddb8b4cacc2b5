"""Reductions along one set of axes, with everything pointwise around them: a program holds whole
rows on chip, so each input is read once and each result written once.

"Row" is the reduced extent, whatever its place in memory. Where the contiguous axis is not among
the reduced ones, a program takes several neighbouring rows, so that its accesses stay coalesced.
"""

from __future__ import annotations

from math import prod

from fusion_advisor.region import Region
from fusion_advisor.rulebook import Device, Rulebook
from fusion_advisor.schedules.base import (
    Plan,
    Refused,
    Step,
    budget_bytes,
    emission_order,
    peak_bytes,
    power_of_two,
)
from fusion_advisor.schedules.layout import Access, accesses, collapse, leading, ordered
from fusion_advisor.schedules.reducing import row_axes

NAME = "row"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The row plan of a region; Refused when its reductions do not share their axes, or when a row
    does not fit on chip."""
    inner, serial = row_axes(region, rulebook.schedules.flat.serial_elements.count)
    step = tile(region, inner, serial, device, rulebook)
    if step.on_chip_bytes >= budget_bytes(device, rulebook):
        room = budget_bytes(device, rulebook)
        raise Refused("on-chip", f"a row takes {step.on_chip_bytes} B on chip, of {room} B")
    return Plan(NAME, region, (step,))


def tile(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
) -> Step:
    """A kernel whose programs hold whole rows: `inner` is the row."""
    outer = region.space - inner - serial
    check_results(region, outer, inner)
    for number in (*region.all("reduce"), *region.all("scan")):
        if frozenset(region.exprs[number].axes) != inner and not (
            frozenset(region.exprs[number].axes) <= serial
        ):
            raise Refused("parallel-pattern", "the reductions run along different axes")
    loads, stores = accesses(region)
    everything = (*loads, *stores)
    lead = leading(everything)
    rows_of = ordered(sorted(outer), lead)
    row = collapse(ordered(sorted(inner), lead), everything, region, "col")
    block = power_of_two(prod(group.size for group in row))
    numbers = rulebook.schedules.row
    order = emission_order(region)
    coalesced = rows_for_coalescing(everything, inner, numbers.sector_bytes.count)
    peak = peak_bytes(region, order, extents(region, order, inner, coalesced, block))
    rows = min(
        max(coalesced, numbers.tile_elements.count // block, 1),
        power_of_two(prod(region.sizes[a] for a in outer)),
    )
    bytes_held = peak_bytes(region, order, extents(region, order, inner, rows, block))
    room = 4 * numbers.register_target.count * device.warp_size
    most = numbers.max_warps.count
    while rows > coalesced and bytes_held > room * most:
        rows, bytes_held = rows // 2, bytes_held // 2
    by_elements = rows * block // (numbers.elements_per_thread.count * device.warp_size)
    wanted = power_of_two(max(by_elements, -(-bytes_held // room)))
    warps = min(max(wanted, numbers.min_warps.count), most)
    return Step(
        schedule=NAME,
        region=region,
        loads=loads,
        stores=stores,
        outer=collapse(rows_of, everything, region, "row"),
        inner=row,
        order=order,
        rows=rows,
        block=block,
        warps=warps,
        stages=1,
        smallest_tile=coalesced * block,
        on_chip_bytes=peak,
        registers=-(-bytes_held // (4 * warps * device.warp_size)),
        serial=serial,
    )


def check_results(region: Region, outer: frozenset[int], inner: frozenset[int]) -> None:
    """Refused unless every result lies along all rows, and along whole rows or none of them."""
    for output in region.outputs:
        axes = frozenset(axis for dim in output.dims for axis in dim)
        if not outer <= axes:
            raise Refused("parallel-pattern", "a result does not depend on every row")
        if axes & inner and not inner <= axes:
            raise Refused("no-schedule", "a result spans a part of a row")


def rows_for_coalescing(
    everything: tuple[Access, ...], inner: frozenset[int], sector_bytes: int
) -> int:
    """Neighbouring rows that fill a memory sector, when rows lie across the contiguous axis."""
    needed = 1
    for access in everything:
        if not any(axis in inner for axis in access.strides):
            continue
        if not any(abs(s) == 1 and axis in inner for axis, s in access.strides.items()):
            needed = max(needed, sector_bytes // access.tensor.itemsize)
    return needed


def extents(
    region: Region, order: tuple[int, ...], inner: frozenset[int], rows: int, block: int
) -> dict[int, int]:
    """Elements that each value holds in a tile of rows × block. A row's scalars (its maximum, its
    sum) are a register each and not counted."""
    return {
        n: (rows if region.depends[n] - inner else 1) * block if region.depends[n] & inner else 0
        for n in order
    }
