"""Reductions along one set of axes, with everything pointwise around them: a program holds whole
rows on chip, so each input is read once and each result written once.

"Row" is the reduced extent, whatever its place in memory. Where the contiguous axis is not among
the reduced ones, a program takes several neighbouring rows, so that its accesses stay coalesced.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import (
    Plan,
    Step,
    by_tensor,
    check_room,
    lasting,
    loads_first,
    peak_bytes,
    power_of_two,
)
from fusion_advisor.schedules.joined import joined, rows_together
from fusion_advisor.schedules.reducing import read_again, row_axes
from fusion_advisor.schedules.rows import Rows, extents, rows_of
from fusion_advisor.schedules.runs import far_first, run_of_windows
from fusion_advisor.schedules.vectors import between, copied, dense, vector

NAME = "row"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The row plan of a region; Refused when its reductions do not share their axes, or when a row
    does not fit on chip."""
    inner, serial = row_axes(region, rulebook.schedules.flat)
    most = rulebook.schedules.flat.serial_elements.count
    each = far = 0
    if serial and (run := run_of_windows(region, inner, most, device.warp_size)):
        far = prod(region.sizes[axis] for axis in inner - run)
        region, inner, serial = far_first(region, run), run, serial | (inner - run)
        each = rulebook.schedules.row.run_elements_per_thread.count
    step = tile(region, inner, serial, device, rulebook, each=each)
    if far:
        step = replace(step, aloft=min(far, rulebook.schedules.flat.unrolled_elements.count))
    check_room(step, device, rulebook)
    return Plan(NAME, region, (_hurried(step, device, rulebook),))


def _hurried(step: Step, device: Device, rulebook: Rulebook) -> Step:
    """With all loads ahead of the reductions, where the device holds all programs at once, so that
    none of them has another to wait beside, and where registers hold what is loaded."""
    order = loads_first(step.region, step.order)
    threads = step.warps * device.warp_size
    at_once = device.multiprocessor.count.count * device.multiprocessor.threads.count
    extent = extents(step.region, order, step.along, step.rows, step.block)
    registers = -(-peak_bytes(step.region, order, extent) // (4 * threads))
    most = rulebook.schedules.row.early_registers.count
    if (
        step.serial
        or step.rest
        or step.ends
        or step.programs * threads > at_once
        or registers > most
    ):
        return step
    return replace(step, order=order, registers=registers)


def tile(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
    *,
    ends: bool = True,
    each: int = 0,
) -> Step:
    """A kernel whose programs hold whole rows: `inner` is the row, whose ends may be a piece of
    their own. A thread has `each` elements of a tile, by the rules where that is 0."""
    laid = rows_of(region, inner, serial)
    block = power_of_two(laid.length)
    numbers = rulebook.schedules.row
    coalesced = _coalesced(laid, device, rulebook)
    rows = _rows(laid, block, coalesced, device, rulebook)
    if each:
        rows = min(rows, -(-each * rulebook.schedules.flat.warps.count * device.warp_size // block))
    room = 4 * numbers.register_target.count * device.warp_size
    most = numbers.max_warps.count
    while rows > coalesced and laid.held(rows, block) > room * most:
        rows //= 2
    if coalesced == 1:
        fixed = region.pinned | serial
        parts = joined(region, laid.loads, laid.axes, fixed)
        rows = rows_together(parts.values(), laid.outer(), rows, fixed)
    apart = ends and laid.in_pieces
    taken = vector(laid, rulebook, apart=apart) if rows == 1 else 0
    pieces = rows == 1 and laid.in_pieces and (apart or not taken)
    rest = _rest(laid, rulebook) if pieces else 0
    if rest:
        block //= 2
    each = each or _each(laid, rows > 1 and coalesced == 1, device, rulebook)
    by_elements = rows * block // (each * device.warp_size)
    wanted = power_of_two(max(by_elements, -(-laid.held(rows, block) // room)))
    alone = rows > 1 and rows * block <= numbers.single_elements.count
    warps = min(max(wanted, 1 if alone else numbers.min_warps.count), most)
    held = block + rest
    step = laid.step(NAME, device, rows=rows, block=held, warps=warps, smallest=(coalesced, held))
    again = read_again(step, device, rulebook)
    step = replace(step, block=block, rest=rest, vector=taken, read_again=again)
    around = 2 * taken if apart else 0
    written = any(laid.axes & set(store.strides) for store in laid.stores)
    whole = rows == 1 and warps == most and laid.length == block and written
    reciprocal = warps <= numbers.reciprocal_warps.count or bool(rest or around) or whole
    kept = lasting(laid.loads, laid.stores, device)
    shared = copied(laid, rulebook) if around else frozenset[str]()
    singly = (1 + len(shared)) * held // (warps * device.warp_size)
    if singly <= numbers.single_registers.count:
        shared = frozenset[str]()
    gone = frozenset[str]() if serial else _passing(laid, device, rulebook)
    return replace(
        step,
        ends=around,
        copied=shared,
        whole=whole,
        reciprocal=reciprocal,
        lasting=kept,
        passing=gone,
    )


def _passing(laid: Rows, device: Device, rulebook: Rulebook) -> frozenset[str]:
    """Tensors that a kernel reads once, where it writes but a few elements of each row: what others
    left in the L2, to be written or read later, then need not make room for them."""
    numbers, l2 = rulebook.schedules.row, device.memory.l2.count
    if any(laid.axes & set(store.strides) for store in laid.stores):
        return frozenset()
    read = by_tensor(laid.loads)
    if sum(loads[0].tensor.bytes for loads in read.values()) > numbers.passing_most.value * l2:
        return frozenset()
    least = numbers.passing_least.value * l2
    return frozenset(
        name
        for name, (load, *more) in read.items()
        if load.tensor.bytes > least and not more and dense(laid, load)
    )


def _coalesced(laid: Rows, device: Device, rulebook: Rulebook) -> int:
    """Neighbouring rows that share a program, so that its accesses fill memory sectors: all that a
    sector has, unless most multiprocessors would have no program then. What several programs read
    of a sector at about the same time the L2 has."""
    rows = laid.coalesced(rulebook.schedules.row.sector_bytes.count)
    busy = rulebook.schedules.row.busy_multiprocessors.value * device.multiprocessor.count.count
    while rows > 1 and laid.count < rows * busy:
        rows //= 2
    return rows


def _rest(laid: Rows, rulebook: Rulebook) -> int:
    """Elements of a second piece: where a power of two and its half hold a row that is too long
    for the former; else 0."""
    first = power_of_two(laid.length) // 2
    longest = 2 * laid.length <= 3 * first
    return first // 2 if longest and first >= rulebook.schedules.row.first_piece.count else 0


def _rows(laid: Rows, block: int, coalesced: int, device: Device, rulebook: Rulebook) -> int:
    """How many rows share a program: those that fill its tile, but no more than leave several
    programs for each multiprocessor."""
    numbers = rulebook.schedules.row
    tile = _tile(laid, block, coalesced, rulebook)
    rows = min(max(coalesced, tile // block, 1), power_of_two(laid.count))
    across = coalesced > 1 and not laid.serial
    each = numbers.across_programs if across else numbers.programs_per_multiprocessor
    programs = device.multiprocessor.count.count * each.count
    while rows > coalesced and laid.count < rows * programs:
        rows //= 2
    return rows


def _tile(laid: Rows, block: int, coalesced: int, rulebook: Rulebook) -> int:
    """Elements of a tile of rows. What goes from one warp to another, to combine a row or because
    loads and results have other lanes, costs less where rows have few warps."""
    numbers = rulebook.schedules.row
    if coalesced > 1:
        return (numbers.walking_elements if laid.serial else numbers.across_elements).count
    if not laid.serial:
        single = between(laid) > 0
        for number in (numbers.single_elements,) * single + (numbers.sharing_elements,):
            if 2 * block <= number.count:
                return number.count
    return numbers.tile_elements.count


def _each(laid: Rows, shared: bool, device: Device, rulebook: Rulebook) -> int:
    """Elements of a tile that a thread has: fewer where rows that lie one behind the other share
    the program, and where the threads of the device would hold everything at once with fewer."""
    numbers = rulebook.schedules.row
    if laid.serial:
        return numbers.walking_elements_per_thread.count
    few = numbers.sharing_elements_per_thread.count
    most = few if shared else numbers.elements_per_thread.count
    threads = device.multiprocessor.count.count * device.multiprocessor.threads.count
    everything = laid.count * power_of_two(laid.length)
    return min(max(power_of_two(-(-everything // threads)), few // 2), most)
