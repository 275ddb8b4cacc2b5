"""Rows that do not fit on chip, one program each: the program walks its row chunk by chunk, once
for each pass of dependent reductions and once for the results that lie along the row. A scan is
carried from chunk to chunk.

Later passes find the row in the L2 when the rows of all resident programs fit there together.
"""

from __future__ import annotations

from math import prod

from fusion_advisor.region import Region
from fusion_advisor.rulebook import Device, Rulebook
from fusion_advisor.schedules.base import (
    Plan,
    Refused,
    Step,
    emission_order,
    peak_bytes,
    power_of_two,
    staged_bytes,
)
from fusion_advisor.schedules.layout import accesses, collapse, leading, ordered, reach
from fusion_advisor.schedules.online import passes
from fusion_advisor.schedules.reducing import row_axes
from fusion_advisor.schedules.row import check_results, extents, rows_for_coalescing

NAME = "blocked"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The blocked plan of a region; Refused when there are too few rows to fill the device, or
    when it needs a whole row at once."""
    inner, serial = row_axes(region, rulebook.schedules.flat.serial_elements.count)
    step = chunks(region, inner, serial, device, rulebook)
    programs = -(-prod(group.size for group in step.outer) // step.rows)
    least = device.multiprocessor.count.count
    if programs < least:
        raise Refused("no-schedule", f"{programs} rows leave most of {least} multiprocessors idle")
    return Plan(NAME, region, (step,))


def chunks(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
    parts: int | None = None,
) -> Step:
    """A kernel whose programs walk their rows in chunks; results may lie along `parts` of rows."""
    for number in region.live:
        expr = region.exprs[number]
        if expr.monoid in ("argmax", "argmin"):
            raise Refused("no-schedule", f"{expr.monoid} needs a whole row on chip")
    _check_scans(region, inner)
    outer = region.space - inner - serial - {parts}
    check_results(region, outer, inner)
    loads, stores = accesses(region)
    everything = (*loads, *stores)
    lead = leading(everything)
    numbers = rulebook.schedules.blocked
    order = emission_order(region)
    rows_of = ordered(sorted(outer), lead)
    row = collapse(ordered(sorted(inner), lead), everything, region, "col")
    length = prod(group.size for group in row)
    coalesced = rows_for_coalescing(everything, inner, rulebook.schedules.row.sector_bytes.count)
    rows = 1
    if coalesced > 1:
        rows = min(numbers.rows_across.count, power_of_two(prod(region.sizes[a] for a in outer)))
    share = rulebook.schedules.split if parts is not None else numbers
    block = max(1, min(share.chunk_elements.count // rows, power_of_two(length)))
    stages, room = numbers.stages.count, device.multiprocessor.shared_memory_per_block.count
    while stages > 1 and staged_bytes(loads, inner, rows * block, stages) > room:
        stages -= 1
    peak = peak_bytes(region, order, extents(region, order, inner, rows, block))
    walks = _walks(region, inner)
    warps = max(1, rows * block // (share.elements_per_thread.count * device.warp_size))
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
        stages=stages,
        smallest_tile=rows * block,
        on_chip_bytes=peak,
        registers=-(-peak // (4 * warps * device.warp_size)),
        serial=serial,
        read_again=_read_again(region, inner, walks, rows, device, rulebook),
    )


def _check_scans(region: Region, inner: frozenset[int]) -> None:
    """Refused unless one walk over the row makes every scan."""
    scans = set(region.all("scan"))
    after = [n for n in region.live if region.exprs[n].op in ("reduce", "scan")]
    if any((scans - {n}) & set(reach(region, n)) for n in after):
        raise Refused("no-schedule", "what follows a scan needs the whole row on chip")
    if len({region.exprs[n].reverse for n in scans}) > 1:
        raise Refused("no-schedule", "scans in both directions need the whole row on chip")


def _walks(region: Region, inner: frozenset[int]) -> list[set[int]]:
    """What each walk over a row needs: the operands of a pass, or the results along the row."""
    found: list[set[int]] = []
    known: set[int] = set()
    for one in passes(region, inner):
        needed = {n for number in one.found for n in _until(region, number, known)}
        known |= one.found
        found.append(needed)
    along = [out.value for out in region.outputs if region.depends[out.value] & inner]
    if along:
        found.append({n for number in along for n in _until(region, number, known)})
    return found


def _until(region: Region, number: int, known: set[int]) -> set[int]:
    """What a value is made from, not looking behind reductions that are known already."""
    seen: set[int] = set()
    todo = [number]
    while todo:
        one = todo.pop()
        if one not in seen and (one not in known or one == number):
            seen.add(one)
            todo.extend(arg for arg in region.exprs[one].args if arg not in known)
    return seen


def _read_again(
    region: Region,
    inner: frozenset[int],
    walks: list[set[int]],
    rows: int,
    device: Device,
    rulebook: Rulebook,
) -> int:
    """Bytes that the walks after a tensor's first fetch from HBM again."""
    numbers = rulebook.schedules.blocked
    again = resident = 0
    for number in region.all("load"):
        tensor = region.inputs[region.exprs[number].input]
        times = sum(number in walk for walk in walks)
        if not region.depends[number] & inner or not times:
            continue
        again += (times - 1) * tensor.bytes
        share = prod(region.sizes[a] for a in region.depends[number] & inner)
        resident += share * rows * tensor.itemsize
    held = resident * device.multiprocessor.count.count * numbers.programs_resident.count
    fits = held <= numbers.l2_share.value * device.memory.l2.count
    return 0 if fits else again
