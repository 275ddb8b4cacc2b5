"""Rows that do not fit on chip, one program each: the program walks its row chunk by chunk, once
for each pass of dependent reductions and once for the results along the row that need them. A scan
is carried from chunk to chunk. Where rows lie across contiguous memory, a program walks neighbours
together, as many as whole lines of memory have: rows that fit go so, too, if one walk is enough.

Later passes find the row in the L2 when the rows of all resident programs fit there together.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.ir.graph import DTYPE_BYTES
from fusion_advisor.region.peephole import calls_library
from fusion_advisor.region.primitives import LONG, MONOIDS
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import SECTOR_BYTES
from fusion_advisor.rulebook.schema import BlockedSchedule, Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, Step, power_of_two, staged_bytes
from fusion_advisor.schedules.layout import reach
from fusion_advisor.schedules.online import passes
from fusion_advisor.schedules.reducing import row_axes
from fusion_advisor.schedules.row_walks import row_walks
from fusion_advisor.schedules.rows import Rows, rows_of

NAME = "blocked"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The blocked plan of a region; Refused when there are too few rows to fill the device, or
    when it needs a whole row at once."""
    inner, serial = row_axes(region, rulebook.schedules.flat)
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
    _check_scans(region)
    apart = serial if parts is None else serial | {parts}
    laid = rows_of(region, inner, apart)
    numbers = rulebook.schedules.blocked
    again = parts is None and len(row_walks(region, inner)) > 1
    most, programs, lanes = _across(laid, rulebook, again=again)
    few = device.multiprocessor.count.count * programs
    rows = _neighbours(laid, rulebook, most, few if parts is None else 0)
    share = rulebook.schedules.split if parts is not None else numbers
    longest, each = share.chunk_elements.count, share.elements_per_thread.count
    stages = numbers.stages.count if rows == 1 or laid.at_once >= numbers.staged_bytes.count else 1
    if again and rows == 1:
        stages = 1  # what the L2 holds comes soon enough
    if rows > 1:
        each = lanes
    if laid.mixed and parts is None:
        rows, stages = min(rows, numbers.mixed_rows.count), 1
        longest = numbers.mixed_elements.count
        each = numbers.mixed_elements_per_thread.count
    if parts is None and walks_steadily(laid, rows):
        each, stages = numbers.steady_elements_per_thread.count, 1
    if any(region.all("scan")):
        longest = rows * scanned_across(laid, numbers) if rows > 1 else _scanned(laid, numbers)
        if rows > 1 and _few_scans(laid, numbers):
            each, stages = numbers.few_scans_elements_per_thread.count, 1
    block = max(1, min(longest // rows, power_of_two(laid.length)))
    room = device.multiprocessor.shared_memory_per_block.count
    while stages > 1 and staged_bytes(laid.loads, inner, rows * block, stages) > room:
        stages -= 1
    if parts is not None and rows == 1:
        each, stages = _of_parts(laid, stages, rulebook)
    if serial:
        each = rulebook.schedules.row.walking_elements_per_thread.count
    warps = rows * block // (each * device.warp_size)
    warps = min(max(1, warps), rulebook.schedules.row.max_warps.count)
    step = laid.step(NAME, device, rows=rows, block=block, warps=warps, stages=stages)
    return replace(
        step,
        serial=serial,
        passing=reduces_alone(laid, rows) and laid.passing(device, rulebook),
        read_again=_read_again(region, inner, rows, device, rulebook),
    )


def _computes_long(region: Region) -> bool:
    """Does a region compute by functions of many instructions?"""
    return bool(LONG & {region.exprs[n].op for n in region.live})


def walks_steadily(laid: Rows, rows: int) -> bool:
    """Does a program wait for nothing but memory while it walks a row and reduces it? Its chunks
    need no room on chip: those of other programs are on their way meanwhile."""
    return reduces_alone(laid, rows) and not _computes_long(laid.region)


def reduces_alone(laid: Rows, rows: int) -> bool:
    """Does a program do nothing but walk a row along contiguous memory once, and reduce it?"""
    alone = rows == 1 and not (laid.mixed or laid.serial or laid.stores_rows)
    return alone and not any(laid.region.all("scan")) and walked_once(laid)


def _across(laid: Rows, rulebook: Rulebook, *, again: bool) -> tuple[int, int, int]:
    """Rows across contiguous memory that a program walks at most, programs a multiprocessor that
    are kept before neighbouring rows share programs, and elements of a thread. Rows that are walked
    once wait for no shared memory; fewer programs walk them where parts of rows would not do."""
    region, numbers = laid.region, rulebook.schedules.blocked
    each, few = numbers.elements_per_thread, numbers.programs_per_multiprocessor
    most = numbers.scan_rows if scanned_across(laid, numbers) == 1 else numbers.rows_across
    if again:
        each = numbers.across_elements_per_thread
    elif laid.mixed or any(region.all("scan")):
        few = rulebook.schedules.row.programs_per_multiprocessor
    else:
        most = numbers.rows_once
        few = few if laid.stores_rows else numbers.once_programs
        if not _computes_long(region) and laid.at_once >= numbers.staged_bytes.count:
            each = numbers.once_elements_per_thread
    return most.count, few.count, each.count


def walked_once(laid: Rows) -> bool:
    """Is one walk over rows enough, which rescales nothing as it goes?"""
    rows = row_walks(laid.region, laid.axes)
    return len(rows) <= 1 and not any(each.followers for each in passes(laid.region, laid.axes))


def _neighbours(laid: Rows, rulebook: Rulebook, most: int, programs: int) -> int:
    """Neighbouring rows that a program walks, where they lie across contiguous memory: as many as
    are read in whole lines, or in whole sectors where fewer than so many programs would walk."""
    nbytes = rulebook.schedules.row.sector_bytes.count
    if laid.coalesced(nbytes) == 1:
        return 1
    sector = laid.coalesced(nbytes, stored=False)
    rows = min(most, power_of_two(laid.count))
    while rows > sector and laid.count < rows * programs:
        rows //= 2
    return rows


def _of_parts(laid: Rows, stages: int, rulebook: Rulebook) -> tuple[int, int]:
    """The elements of a thread where a program walks a part of a row, and how many chunks are on
    their way. Where arithmetic takes long, other warps hide more of it than other chunks."""
    numbers = rulebook.schedules.split
    if calls_library(laid.region):
        return numbers.library_elements_per_thread.count, 1
    if _computes_long(laid.region):
        return numbers.long_elements_per_thread.count, stages
    along = [load.tensor.itemsize for load in laid.loads if load.walks & laid.axes]
    if len(along) > 1 and min(along) >= numbers.several_bytes.count:
        return numbers.several_elements_per_thread.count, 1
    each = power_of_two(numbers.elements_per_thread.count // max(len(along), 1) + 1) // 2
    return max(each, numbers.long_elements_per_thread.count), stages


def scanned_across(laid: Rows, numbers: BlockedSchedule) -> int:
    """Positions that a scan of neighbouring rows takes at once: one where a combination is long,
    for a chunk takes several for each element; many of few rows, which wait for each position."""
    if _few_scans(laid, numbers):
        return numbers.few_scans_across.count
    return 1 if _combines_long(laid.region) else numbers.scan_across.count


def _few_scans(laid: Rows, numbers: BlockedSchedule) -> bool:
    """Are so few rows across memory scanned that their programs wait longer than they compute?"""
    few = laid.coalesced(SECTOR_BYTES) > 1 and laid.count <= numbers.few_scans.count
    narrow = laid.widest <= DTYPE_BYTES["float16"]
    return few and (narrow or _combines_long(laid.region))


def _combines_long(region: Region) -> bool:
    """Does a scan combine by a long function?"""
    return any(MONOIDS[region.exprs[n].monoid].within for n in region.all("scan"))


def _scanned(laid: Rows, numbers: BlockedSchedule) -> int:
    """Elements of a chunk of which each depends on those before it: as few as keep enough bytes on
    their way, for a program does nothing else meanwhile."""
    wanted = power_of_two(max(1, numbers.scan_chunks_elements.count // laid.count))
    return min(max(wanted, numbers.scan_chunk_elements.count), numbers.chunk_elements.count)


def _check_scans(region: Region) -> None:
    """Refused unless one walk over the row makes every scan."""
    scans = set(region.all("scan"))
    after = [n for n in region.live if region.exprs[n].op in ("reduce", "scan")]
    if any((scans - {n}) & reach(region, n) for n in after):
        raise Refused("no-schedule", "what follows a scan needs the whole row on chip")
    if len({region.exprs[n].reverse for n in scans}) > 1:
        raise Refused("no-schedule", "scans in both directions need the whole row on chip")


def walked_twice(region: Region, inner: frozenset[int], device: Device, rulebook: Rulebook) -> bool:
    """Are rows so long that programs which walk them again find nothing in the L2?"""
    return bool(_read_again(region, inner, 1, device, rulebook))


def _read_again(
    region: Region, inner: frozenset[int], rows: int, device: Device, rulebook: Rulebook
) -> int:
    """Bytes that the walks after a tensor's first, or after a result is stored, fetch from HBM."""
    numbers, walks = rulebook.schedules.blocked, row_walks(region, inner)
    again = resident = 0
    for number in region.all("load"):
        tensor = region.inputs[region.exprs[number].input]
        times = sum(number in walk.made for walk in walks)
        if not region.depends[number] & inner or not times:
            continue
        again += (times - 1) * tensor.bytes
        share = prod(region.sizes[a] for a in region.depends[number] & inner)
        resident += share * rows * tensor.itemsize
    for output in region.outputs:
        times = sum(output.value in walk.back for walk in walks)
        again += times * output.tensor.bytes
        share = prod(region.sizes[axis] for axis in output.axes & inner)
        resident += min(times, 1) * share * rows * output.tensor.itemsize
    held = resident * device.multiprocessor.count.count * numbers.programs_resident.count
    fits = held <= numbers.l2_share.value * device.memory.l2.count
    return 0 if fits else again
