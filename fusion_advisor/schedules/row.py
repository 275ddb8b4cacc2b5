"""Reductions along one set of axes, with everything pointwise around them: a program holds whole
rows on chip, so each input is read once and each result written once.

"Row" is the reduced extent, whatever its place in memory. Where the contiguous axis is not among
the reduced ones, a program takes several neighbouring rows, so that its accesses stay coalesced.
"""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, Step, check_room, power_of_two
from fusion_advisor.schedules.reducing import read_again, row_axes
from fusion_advisor.schedules.rows import Rows, rows_of

NAME = "row"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The row plan of a region; Refused when its reductions do not share their axes, or when a row
    does not fit on chip."""
    inner, serial = row_axes(region, rulebook.schedules.flat)
    step = tile(region, inner, serial, device, rulebook)
    check_room(step, device, rulebook)
    longest = rulebook.schedules.row.longest_row.count
    if step.length > longest and any(store.walks & step.along for store in step.stores):
        raise Refused("no-schedule", f"{step.length} elements of a row are more than {longest}")
    return Plan(NAME, region, (step,))


def tile(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
) -> Step:
    """A kernel whose programs hold whole rows; `inner` is the row."""
    laid = rows_of(region, inner, serial)
    block = power_of_two(laid.length)
    numbers = rulebook.schedules.row
    coalesced = _coalesced(laid, device, rulebook)
    rows = _rows(laid, block, coalesced, device, rulebook)
    room = 4 * numbers.register_target.count * device.warp_size
    most = numbers.max_warps.count
    while rows > coalesced and laid.held(rows, block) > room * most:
        rows //= 2
    rest = _rest(laid, rulebook) if rows == 1 and laid.in_pieces else 0
    if rest:
        block, most = block // 2, numbers.pieced_warps.count
    held = block + rest
    each = _each(laid, rows, block, coalesced, device, rulebook)
    wanted = rows * block // (each * device.warp_size)  # a second piece is as many for each
    large = rows * block > numbers.across_elements.count
    if large and laid.crossed:  # elements change lanes in the tile: fewer warps wait for others
        wanted, room = numbers.crossed_warps.count, 2 * room
    if large or coalesced == 1:
        wanted = power_of_two(max(wanted, -(-laid.held(rows, block) // room)))
    warps = min(max(wanted, 1), most)
    if rows == coalesced == 1:
        warps = _overlapping(laid, held, warps, device, rulebook)
    step = laid.step(NAME, device, rows=rows, block=held, warps=warps, smallest=(coalesced, held))
    again = read_again(step, device, rulebook)
    passing = laid.passing(device, rulebook)
    return replace(step, block=block, rest=rest, read_again=again, passing=passing)


def _overlapping(laid: Rows, held: int, warps: int, device: Device, rulebook: Rulebook) -> int:
    """The warps of a program: fewer than wanted where then another program loads its row while one
    combines what it has, and bytes on their way are few otherwise."""
    numbers, kept = rulebook.schedules.row, laid.kept(1, held)
    row = sum(load.tensor.itemsize for load in laid.own) * laid.length

    def on_the_way(warps: int) -> int:
        registers = -(-kept // (4 * warps * device.warp_size)) + numbers.other_registers.count
        return device.multiprocessor.holds(warps, registers) * row

    while (
        warps > numbers.overlapped_warps.count
        and on_the_way(warps) < numbers.bytes_on_the_way.count
        and on_the_way(warps // 2) > on_the_way(warps)
    ):
        warps //= 2
    return warps


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
    """Elements of a second piece: where a power of two and at most its half hold a row that is too
    long for the former; else 0. `second_piece` of the runtime says the same."""
    first = power_of_two(laid.length) // 2
    over = laid.length - first
    if 2 * over > first or first < rulebook.schedules.row.first_piece.count:
        return 0
    return max(power_of_two(over), first // 8)


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
    loads and results have other lanes, costs more than what a longer tile saves."""
    numbers = rulebook.schedules.row
    if laid.serial:
        return numbers.walking_elements.count
    if coalesced > 1:
        line = laid.coalesced(numbers.line_bytes.count) * block
        return min(line, numbers.across_elements.count)
    if laid.only_combines:
        return numbers.combined_elements.count
    return numbers.tile_bytes.count // laid.widest


def _each(
    laid: Rows, rows: int, block: int, coalesced: int, device: Device, rulebook: Rulebook
) -> int:
    """The elements of a thread: few where each is an access of its own, many where warps would do
    no more than combine what they found."""
    numbers = rulebook.schedules.row
    if laid.serial:
        return numbers.walking_elements_per_thread.count
    if any(laid.region.all("scan")):
        return numbers.elements_per_thread.count
    if coalesced > 1:
        vectors = laid.vector > 1
        each = numbers.across_elements_per_thread if vectors else numbers.elements_per_thread
        return each.count
    if laid.only_combines and laid.count > device.multiprocessor.count.count:
        return numbers.combined_elements_per_thread.count
    if laid.vector == 1 and laid.stores_rows:
        if rows > 1 and block < numbers.first_piece.count:
            return rows * block  # one warp, as below
        short = laid.length <= 2 * numbers.first_piece.count  # in the shortest pieces
        single = rows == 1 and (short or len(laid.own) > 1)
        return (numbers.single_elements_per_thread if single else numbers.elements_per_thread).count
    if rows * block <= _tile(laid, block, coalesced, rulebook):
        return rows * block  # one warp, which combines rows without waiting for others
    return numbers.elements_per_thread.count
