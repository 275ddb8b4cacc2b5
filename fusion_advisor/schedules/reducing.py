"""Which reductions run along the row that a program holds, and which within a lane."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import gcd, prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import LINE_BYTES
from fusion_advisor.rulebook.schema import Device, FlatSchedule, Rulebook
from fusion_advisor.schedules.base import Refused, Step
from fusion_advisor.schedules.layout import Access, load_access, reach, traced


def row_axes(region: Region, numbers: FlatSchedule) -> tuple[frozenset[int], frozenset[int]]:
    """The axes of the row, as many as they may be, and those that each lane walks by itself.

    Refused when the reductions run along different axes and no lane can walk the others.
    """
    sets = {frozenset(region.exprs[i].axes) for op in ("reduce", "scan") for i in region.all(op)}
    if not sets:
        raise Refused("no-schedule", "a row schedule needs a reduction")
    for inner in sorted(
        sets, key=lambda axes: (prod(region.sizes[a] for a in axes), sorted(axes)), reverse=True
    ):
        serial = serial_axes(region, inner, numbers)
        if all(axes == inner or axes <= serial for axes in sets):
            return inner, serial
    raise Refused("parallel-pattern", "the reductions run along different axes")


def widest(region: Region, numbers: FlatSchedule) -> frozenset[int]:
    """The axes of the widest reduction that no other one feeds, of those along rows.

    Refused when there is none.
    """
    rows = along_rows(region, numbers)
    leaves = [n for n in rows if not set(rows) & (reach(region, n) - {n})]
    if not leaves:
        raise Refused("no-schedule", "there is no reduction")

    def extent(number: int) -> int:
        return prod(region.sizes[a] for a in region.depends[region.exprs[number].args[0]])

    return frozenset(region.exprs[max(leaves, key=extent)].axes)


def along_rows(region: Region, numbers: FlatSchedule) -> list[int]:
    """Reductions and scans but those that a lane walks by itself, such as a pooling window; all,
    where there are no others."""
    everything = [n for op in ("reduce", "scan") for n in region.all(op)]
    serial = serial_axes(region, frozenset(), numbers)
    wide = [n for n in everything if not serial.issuperset(region.exprs[n].axes)]
    return wide or everything


def serial_axes(region: Region, inner: frozenset[int], numbers: FlatSchedule) -> frozenset[int]:
    """Axes along which each lane may combine place after place: few places, no result along
    them, no scan and no arg-reduction, and no rows that lie one behind the other for longer than
    the L1 keeps what lanes have begun to read."""
    scanned = {axis for i in region.all("scan") for axis in region.exprs[i].axes}
    scanned |= {
        axis
        for i in region.all("reduce")
        if region.exprs[i].monoid in ("argmax", "argmin")
        for axis in region.exprs[i].axes
    }
    found: set[int] = set()
    for number in region.all("reduce"):
        axes = frozenset(region.exprs[number].axes)
        barred = axes & (inner | region.kept | scanned)
        few = prod(region.sizes[a] for a in axes) <= numbers.serial_elements.count
        if not barred and few and not _behind(region, number, numbers):
            found |= axes
    return frozenset(found)


def _behind(region: Region, number: int, numbers: FlatSchedule) -> bool:
    """Would a lane walk a row whose next one is its neighbour's, further away than lanes may be?"""
    axes = frozenset(region.exprs[number].axes)
    behind = reach(region, number)
    loads = (load_access(region, n) for n in behind if region.exprs[n].op == "load")
    return any(
        far_apart([load], axes, numbers)
        and min(_across(load, axes)) * load.tensor.itemsize > numbers.walked_bytes.count
        for load in loads
    )


def far_apart(loads: Sequence[Access], serial: frozenset[int], numbers: FlatSchedule) -> bool:
    """Do neighbouring lanes read further apart than they may, in steps of a lane's own?"""
    for load in loads:
        walked = [abs(step) for axis, step in load.strides.items() if axis in serial and step]
        across = _across(load, serial)
        if walked and across and min(across) > _most_apart(load, across, numbers) * min(walked):
            return True
    return False


def _most_apart(load: Access, across: Sequence[int], numbers: FlatSchedule) -> int:
    """How many steps of a lane's own its neighbour's place may be away: more where a row begins at
    an odd element, since then a program that holds rows reads their elements one by one, too."""
    if gcd(*across) % 2 == 0:
        return numbers.serial_stride.count
    most = numbers.single_serial_bytes.count // load.tensor.itemsize
    return max(numbers.serial_stride.count, min(numbers.single_serial_stride.count, most))


def _across(load: Access, serial: frozenset[int]) -> list[int]:
    """How far apart neighbours along the other axes read, in elements."""
    return [abs(step) for axis, step in load.strides.items() if axis not in serial and step]


def walked_nearby(loads: Sequence[Access], serial: frozenset[int], sizes: Mapping[int, int]) -> int:
    """Bytes that each lane walks where its next place is in the same line of memory; other lanes
    find theirs there, too."""
    found = 0
    for load in loads:
        steps = {axis: abs(load.step(axis)) for axis in serial if load.step(axis)}
        if steps and min(steps.values()) * load.tensor.itemsize < LINE_BYTES:
            found += prod(sizes[axis] for axis in steps) * load.tensor.itemsize
    return found


def walks(region: Region, serial: frozenset[int]) -> dict[int, int]:
    """How often each lane walks the places of a load, by the load: once for each reduction of its
    own that the load is read for, one after the other. A window's maximum within a sum over
    channels is made again in the loop of whatever else needs it."""
    found: dict[int, int] = {}

    def within(number: int) -> Iterable[int] | None:
        return region.exprs[number].args if region.depends[number] & serial else None

    for number in region.all("reduce"):
        expr = region.exprs[number]
        if set(expr.axes) <= serial and not region.depends[number] & serial:
            for load in set(region.all("load")) & traced(expr.args, within).passed:
                if region.depends[load] & serial:
                    found[load] = found.get(load, 0) + 1
    return found


def read_again(step: Step, device: Device, rulebook: Rulebook) -> int:
    """Bytes that lanes fetch from HBM again as they walk places more than once: where what the
    resident programs walk does not fit into the L2 together."""
    region, times = step.region, dict[int, int]()
    for load, count in walks(region, step.serial).items():
        tensor = region.exprs[load].input
        times[tensor] = max(times.get(tensor, 0), count)
    again = sum((count - 1) * region.inputs[tensor].bytes for tensor, count in times.items())
    resident = device.multiprocessor.count.count * (device.multiprocessor.warps.count // step.warps)
    held = sum(region.inputs[tensor].bytes for tensor, count in times.items() if count > 1)
    held *= min(1.0, resident / max(step.programs, 1))
    return again if held > rulebook.schedules.blocked.l2_share.value * device.memory.l2.count else 0
