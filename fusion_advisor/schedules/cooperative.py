"""Long rows shared by several programs in one launch: each program keeps its part of a row on chip,
leaves what the part gives where the others find it, waits for theirs, and writes its part of the
results. Every input is read once and every result written once, however long the row.

The same kernel, launched once for each exchange and once more, needs no waiting: a launch leaves
the partial results for the next one, which reads the row again. So it runs where programs may not
wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, Step, check_room, power_of_two
from fusion_advisor.schedules.layout import Group, reach
from fusion_advisor.schedules.online import passes
from fusion_advisor.schedules.parts import Cut
from fusion_advisor.schedules.reducing import row_axes
from fusion_advisor.schedules.rows import Rows, laid_out, rows_of

NAME = "cooperative"

REGISTERS = 256
"""A thread has fewer: at most 255, allocated in eights."""


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The plan of rows that several programs share; Refused for short rows, for reductions that
    make no word of 32 bits, and where too many programs would wait for each other."""
    numbers = rulebook.schedules.cooperative
    inner, serial = row_axes(region, rulebook.schedules.flat)
    if any(region.all("scan")) or serial:
        raise Refused("no-schedule", "scans and small reductions are not made in parts of rows")
    if region.random_state:
        raise Refused("no-schedule", "random bits are not drawn by programs that share a row")
    laid = rows_of(region, inner, serial)
    if laid.length <= numbers.least_row_elements.count:
        raise Refused("no-schedule", "one program takes a whole row")
    if not any(region.depends[output.value] & inner for output in region.outputs):
        raise Refused("no-schedule", "no result lies along the row")
    if laid.coalesced(rulebook.schedules.row.sector_bytes.count) > 1:
        raise Refused("no-schedule", "the row does not lie along contiguous memory")
    kept = _kept_bytes(laid)
    part = 1 << min(numbers.part_bytes.count // kept, numbers.part_elements.count).bit_length() - 1
    warps = power_of_two(part * kept // (numbers.thread_bytes.count * device.warp_size))
    together = max(numbers.waiting_kernels.count, min(numbers.rows_at_once.count, laid.count))
    most = resident(device, warps) // together
    part = _part(laid, part, most, device, rulebook)
    parts = -(-laid.length // part)
    if parts > most:
        raise Refused("no-schedule", f"{parts} programs share a row, and {most} may wait")
    step = replace(laid.step(NAME, device, rows=1, block=part, warps=warps), part=part)
    phases = _phases(region, inner, laid, step, device)
    waiting = numbers.waiting_kernels.count
    step = replace(step, parts=phases[0].parts, phases=phases, waiting=waiting)
    check_room(step, device, rulebook)
    return Plan(NAME, region, (step,))


def resident(device: Device, warps: int) -> int:
    """Programs that the device holds at once at the least, whatever else the compiler does."""
    threads = warps * device.warp_size
    fit = device.multiprocessor.registers.count // (REGISTERS * threads)
    return device.multiprocessor.count.count * max(fit, 1)


def _kept_bytes(laid: Rows) -> int:
    """What a program keeps of each place of its row while it waits."""
    region = laid.region
    asked = {n for reduced in region.all("reduce") for n in reach(region, reduced)}
    kept = {
        access.name: access.tensor.itemsize
        for number, access in zip(region.all("load"), laid.loads, strict=True)
        if number in asked and laid.axes & set(access.strides)
    }
    return max(sum(kept.values()), 1)


def _part(laid: Rows, part: int, most: int, device: Device, rulebook: Rulebook) -> int:
    """Elements of a row that one program has: fewer where there are too few rows to fill the
    device."""
    numbers = rulebook.schedules.cooperative
    wanted = device.multiprocessor.count.count * numbers.programs_per_multiprocessor.count
    while part > numbers.least_elements.count:
        shorter = -(-laid.length // (part // 2))
        if laid.count * -(-laid.length // part) >= wanted or shorter > most:
            break
        part //= 2
    return part


def _phases(
    region: Region, inner: frozenset[int], laid: Rows, step: Step, device: Device
) -> tuple[Step, ...]:
    """What a program does one after the other: for each exchange the partial results of its part
    and what all parts make together, and then the results along the row."""
    found: list[Step] = []
    left: Region | None = region
    while left is not None and any(left.all("reduce")):
        cut = Cut(left, inner, passes(left, inner)[0], step.part, len(found), exact=False)
        partial = cut.partial()
        _check_partials(partial, frozenset(laid.across))
        combined, left = cut.combined()
        parts = Group("part", (cut.parts,), cut.count)
        found.append(_phase(partial, step.outer, step.inner, step, device, parts))
        found.append(_phase(combined, step.outer, (parts,), step, device))
        if left is not None:  # the parts of a later exchange are the same ones
            left = replace(left, free_axis=cut.parts)
    if left is not None:
        found.append(_phase(left, step.outer, step.inner, step, device))
    return tuple(found)


def _check_partials(partial: Region, rows: frozenset[int]) -> None:
    """Refused unless what a part leaves is a float32 for each row."""
    for output in partial.outputs:
        if partial.exprs[output.value].monoid in ("argmax", "argmin"):
            raise Refused("no-schedule", "an arg-reduction needs a whole row on chip")
        if output.tensor.dtype != "float32":
            raise Refused("no-schedule", f"a {output.tensor.dtype} is not half a word")
        if partial.depends[output.value] != rows:
            raise Refused("no-schedule", "a reduction does not depend on every row")


def _phase(
    region: Region,
    outer: Sequence[Group],
    inner: Sequence[Group],
    step: Step,
    device: Device,
    parts: Group | None = None,
) -> Step:
    """One phase as a step of its own, over the same groups as the whole."""
    axes = frozenset(axis for group in inner for axis in group.axes)
    rows = frozenset(axis for group in outer for axis in group.axes)
    laid = laid_out(region, axes, rows, frozenset())
    along = inner == step.inner
    block = step.part if along else prod(group.size for group in inner)
    made = laid.step("phase", device, rows=1, block=block, warps=step.warps)
    made = replace(made, outer=tuple(outer), inner=tuple(inner), parts=parts)
    if not along:
        return replace(made, part=0)
    return replace(made, block=step.block, part=step.part)
