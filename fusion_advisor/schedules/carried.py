"""Reductions along the rows and down all of them in one pass: persistent programs carry from row to
row what is combined down the columns, or of what each row has once (its loss, say), and a second
kernel combines what they carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from fusion_advisor.ir.graph import DTYPE_BYTES
from fusion_advisor.region.exprs import Expr, Pool
from fusion_advisor.region.region import JOINED, Output, Region
from fusion_advisor.rulebook.devices import VECTOR_BYTES
from fusion_advisor.rulebook.schema import Device, PersistentSchedule, Rulebook
from fusion_advisor.schedules import row
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
    by_rows,
    combined_parts,
    loaded,
    piece,
    pool_of,
    space,
)
from fusion_advisor.schedules.layout import (
    Access,
    Group,
    accesses,
    leading,
    load_access,
    ordered,
    reach,
    traced,
)
from fusion_advisor.schedules.rows import Rows, laid_out

NAME = "carried"
WALKED = "persistent"
"""Kernel of as many programs as the device runs at once, each of which walks its share of rows."""


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The plan in one pass and a combining kernel; Refused unless every reduction runs along the
    rows or down all of them, and no row needs what is combined down all of them."""
    if any(region.all("scan")) or not region.reduced:
        raise Refused("no-schedule", "nothing is carried from row to row")
    region = _rows_first(region)
    inner = _row(region)
    outer = region.space - inner
    carried = [n for n in region.all("reduce") if set(region.exprs[n].axes) <= outer]
    late = [o for o in region.outputs if set(carried) & reach(region, o.value)]
    early = [o for o in region.outputs if o not in late]
    for output in late:
        if region.depends[output.value] & outer:
            raise Refused("parallel-pattern", "the rows need what the columns give")
    parts = region.free_axis
    laid = laid_out(region, inner, outer, frozenset())
    once = not any(region.depends[n] for n in carried)
    if once:
        _check_share(laid, carried, rulebook)
    tile = (_of_rows if once else _of_columns)(laid, device, rulebook)
    sizes = {
        **region.sizes,
        parts: min(tile.most, -(-laid.count // tile.rows)) if once else tile.most,
    }
    if not all(_differs(region, region.exprs[n].args[0], outer) for n in carried):
        raise Refused("no-schedule", "what is carried is the same in every row")
    left = {n: _left(region, n, inner, parts, sizes) for n in carried}
    pool = pool_of(region, sizes)
    first = piece(region, pool, [*early, *left.values()], (), sizes)
    if not inner <= first.sizes.keys():
        raise Refused("no-schedule", "nothing that is carried is made along a row")
    step = _walk(laid_out(first, inner, outer, frozenset()), tile, parts, device)
    check_room(step, device, rulebook)
    lasts: list[Step] = []
    for axes in dict.fromkeys(output.axes for output in late):
        outputs = [output for output in late if output.axes == axes]
        combined = _combined(region, left, outputs, parts, sizes)
        lasts.append(row.tile(combined, frozenset({parts}), frozenset(), device, rulebook))
    again = sum(last.bytes_read for last in lasts)
    share = again / (step.bytes_read + step.bytes_written)
    return Plan(NAME, region, (step, *lasts), finish_share=share)


def _rows_first(region: Region) -> Region:
    """The region with each reduction along more than the rows as one along them and one of what the
    rows give."""
    reductions = set(region.all("reduce"))
    leaves = (n for n in reductions if not reductions & (reach(region, n) - {n}))
    inner = min(
        (frozenset(region.exprs[n].axes) for n in leaves), key=lambda a: (len(a), sorted(a))
    )
    wider = [n for n in region.all("reduce") if inner < set(region.exprs[n].axes)]
    if not all(region.exprs[n].monoid in JOINED for n in wider):
        return region
    return replace(by_rows(region, inner, _down), results=region.results)


def _down(pool: Pool, expr: Expr, given: int, axes: tuple[int, ...], label: str) -> int:
    """A reduction of what the rows give, as it is carried from row to row."""
    return pool.add(replace(expr, args=(given,), axes=axes), label)


def _differs(region: Region, number: int, outer: frozenset[int]) -> bool:
    """Does a value hang on the row? One that is read without a step does not."""

    def further(one: int) -> Sequence[int] | None:
        return None if region.exprs[one].op == "load" else region.exprs[one].args

    trace = traced([number], further)
    loads = [load_access(region, end) for end in trace.ends]
    places = any(region.exprs[n].op == "place" for n in trace.passed)
    return places or any(load.pulled or outer & load.strides.keys() for load in loads)


def _left(
    region: Region, number: int, inner: frozenset[int], parts: int, sizes: dict[int, int]
) -> Output:
    """What each program carried to the end of its rows: a number, or one for each column."""
    loads, stores = accesses(region)
    axes = ordered(sorted(region.depends[number]), leading((*loads, *stores)))
    if frozenset(axes) not in (inner, frozenset()):
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


@dataclass(frozen=True)
class _Tile:
    """The rows that a program has at once, and how many programs walk them at most."""

    rows: int
    block: int
    warps: int
    stages: int
    most: int
    least: int = 1
    """Rows that it could not do without."""


def _of_columns(laid: Rows, device: Device, rulebook: Rulebook) -> _Tile:
    """Where something is carried for each column."""
    numbers = rulebook.schedules.persistent
    if laid.coalesced(rulebook.schedules.row.sector_bytes.count) > 1:
        raise Refused("no-schedule", "the columns do not lie along contiguous memory")
    narrow = _narrow(laid, numbers)
    block = power_of_two(laid.length)
    tile = (numbers.narrow_tile_elements if narrow else numbers.tile_elements).count
    each = numbers.narrow_elements_per_thread if narrow else numbers.elements_per_thread
    rows = min(max(tile // block, 1), power_of_two(laid.count))
    stages = 1 if narrow else numbers.stages.count
    room = device.multiprocessor.shared_memory_per_block.count
    outer = frozenset(laid.across)
    while rows > 1 and staged_bytes(laid.loads, outer, rows * block, stages) > room:
        rows //= 2
    if staged_bytes(laid.loads, outer, rows * block, stages) > room:
        raise Refused("on-chip", f"rows on their way do not fit into {room} B of shared memory")
    warps = power_of_two(max(1, rows * block // (each.count * device.warp_size)))
    warps = min(warps, numbers.max_warps.count)
    programs = numbers.programs_per_multiprocessor.count
    if narrow:
        programs = max(numbers.short_warps_per_multiprocessor.count // warps, 1)
    most = device.multiprocessor.count.count * programs
    return _Tile(rows, block, warps, stages, most)


def _narrow(laid: Rows, numbers: PersistentSchedule) -> bool:
    """Do rows begin where fewer bytes are taken at once than an asynchronous copy takes? They
    cannot be copied ahead: more warps wait instead."""

    def taken(load: Access) -> int:
        steps = (load.step(axis) * load.tensor.itemsize for axis in laid.across)
        return gcd(VECTOR_BYTES, *steps)

    return any(taken(load) <= numbers.narrow_bytes.count for load in laid.own)


def _of_rows(laid: Rows, device: Device, rulebook: Rulebook) -> _Tile:
    """Where all that is carried each row has once. While the few warps of one program wait for
    their rows, those of the others work."""
    numbers = rulebook.schedules.persistent
    block = power_of_two(laid.length)
    least = laid.coalesced(rulebook.schedules.row.sector_bytes.count)
    rows = max(_rows(laid, block, device, numbers), least)
    rows = min(rows, power_of_two(laid.count))
    shared = rows > 1
    each = (numbers.short_elements_per_thread if shared else numbers.elements_per_thread).count
    warps = min(max(rows * block // (each * device.warp_size), 1), numbers.max_warps.count)
    programs = max(numbers.short_warps_per_multiprocessor.count // warps, 1)
    most = device.multiprocessor.count.count * programs
    return _Tile(rows, block, warps, 1, most, min(least, rows))


def _rows(laid: Rows, block: int, device: Device, numbers: PersistentSchedule) -> int:
    """Rows of a tile: few elements of all tensors together that lie along the rows and differ from
    row to row; but a row for each lane of a warp where rows have a number of their own in memory (a
    class, and its logit), for Triton then works out in one lane what it otherwise does in all, if
    that is not too much for a thread."""
    across = frozenset(laid.across)
    along = {
        load.name
        for load in laid.loads
        if laid.axes & load.walks and (load.pulled or across & load.walks)
    }
    rows = max(numbers.short_tile_elements.count // (block * max(len(along), 1)), 1)
    own = any(not laid.axes & load.walks and load.strides for load in laid.loads)
    if own and block <= numbers.short_elements_per_thread.count:
        rows = max(rows, device.warp_size)
    return 1 << (rows.bit_length() - 1)


def _check_share(laid: Rows, carried: Sequence[int], rulebook: Rulebook) -> None:
    """Refused where what the rows give is so little that it goes through memory as well; not where
    rows are so few that a lane may walk down them, for then there is a plan of one program, and no
    other is asked for a finishing kernel."""
    region = laid.region
    given = {region.exprs[n].args[0] for n in carried}
    handed = sum(laid.count * DTYPE_BYTES[region.exprs[n].dtype] for n in given)
    moved = {access.name: access.tensor.bytes for access in laid.everything}
    limit = rulebook.gate("parallel-pattern").number("finish_share").value
    several = laid.count > rulebook.schedules.flat.serial_elements.count
    if several and handed <= limit * sum(moved.values()):
        raise Refused("no-schedule", "a finishing kernel does as well")


def _walk(laid: Rows, tile: _Tile, parts: int, device: Device) -> Step:
    """The kernel that walks the rows."""
    step = laid.step(
        WALKED,
        device,
        rows=tile.rows,
        block=tile.block,
        warps=tile.warps,
        stages=tile.stages,
        smallest=(tile.least, tile.block),
    )
    group = Group("part", (parts,), min(tile.most, -(-laid.count // tile.rows)))
    return replace(step, parts=group, most=tile.most)


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
