"""Rows split over several programs: kernels that leave partial results for each other.

The first kernel reduces the parts of each row, the second combines the parts, and what lies along
the row is made by a kernel for what is left of the region. No program waits for another. Where no
result lies along the rows, and these fit on chip, one kernel reduces whole rows instead of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules import flat, row, tiled
from fusion_advisor.schedules.base import Plan, Refused, Step
from fusion_advisor.schedules.blocked import chunks, walked_twice
from fusion_advisor.schedules.layout import Group
from fusion_advisor.schedules.online import Pass, passes
from fusion_advisor.schedules.parts import Cut
from fusion_advisor.schedules.reducing import serial_axes, widest
from fusion_advisor.schedules.rows import Rows, laid_out, rows_of_step

NAME = "split"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The plan in several kernels; Refused when a reduction cannot be made in parts."""
    inner = widest(region, rulebook.schedules.flat)
    if any(region.all("scan")):
        raise Refused("no-schedule", "a scan is not made in parts of rows by several programs")
    along = any(region.depends[output.value] & inner for output in region.outputs)
    serial = serial_axes(region, inner, rulebook.schedules.flat)
    if along and _enough(region, inner, serial, device, rulebook):
        raise Refused("no-schedule", "there are rows enough for a program each")
    if not along and (steps := _whole_rows(region, inner, device, rulebook)):
        return Plan(NAME, region, steps)

    def parts_of(left: Region, before: int) -> tuple[Cut, Step]:
        cut = Cut(left, inner, passes(left, inner)[0], 1, before)
        serial = serial_axes(cut.partial(), inner, rulebook.schedules.flat)
        partial = chunks(cut.partial(), inner, serial, device, rulebook, cut.parts)
        lines = _lines(partial)
        if lines and not along and _fill(partial, device, rulebook):
            raise Refused("no-schedule", "there are lines of rows enough for a program each")
        cut = replace(cut, part=_part(partial, device, rulebook, lines=lines))
        parts = Group("part", (cut.parts,), cut.count)
        partial = chunks(cut.partial(), inner, serial, device, rulebook, cut.parts)
        partial = replace(partial, part=cut.part, parts=parts, read_again=0)
        if cut.part == partial.block:  # a part is one chunk: nothing to walk
            partial = replace(partial, schedule=row.NAME, stages=1)
        return cut, partial

    steps, left = in_parts(region, inner, parts_of, row.tile, device, rulebook)
    if left is not None:
        steps.append(_results(left, inner, device, rulebook))
    return Plan(NAME, region, tuple(steps))


def _whole_rows(
    region: Region, inner: frozenset[int], device: Device, rulebook: Rulebook
) -> tuple[Step, ...]:
    """The kernel that reduces rows, of which each fits on chip, and that of the results, which lie
    along other axes; none where there is nothing but rows, or too few of them."""
    every = tuple(n for n in region.all("reduce") if frozenset(region.exprs[n].axes) == inner)
    cut = Cut(region, inner, Pass(every, (), (), ()), 1, 0)
    reduced, left = cut.whole()
    if left is None:
        return ()
    try:
        (step,) = row.plan(reduced, device, rulebook).steps
    except Refused:  # parts of rows fit
        return ()
    if prod(group.size for group in step.outer) < device.multiprocessor.count.count:
        return ()
    return step, _results(left, inner, device, rulebook)


def in_parts(
    region: Region,
    inner: frozenset[int],
    parts_of: Callable[[Region, int], tuple[Cut, Step]],
    combine: Callable[[Region, frozenset[int], frozenset[int], Device, Rulebook], Step],
    device: Device,
    rulebook: Rulebook,
) -> tuple[list[Step], Region | None]:
    """The kernels that reduce along some axes, pass after pass, and what they leave of the region.
    `parts_of` gives the first kernel of a pass, behind so many others, and how it cuts rows."""
    steps: list[Step] = []
    left: Region | None = region
    while left is not None and any(
        frozenset(left.exprs[n].axes) == inner for n in left.all("reduce")
    ):
        cut, partial = parts_of(left, len(steps))
        steps.append(partial)
        combined, left = cut.combined()
        steps.append(combine(combined, frozenset({cut.parts}), frozenset(), device, rulebook))
    return steps, left


def _enough(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
) -> bool:
    """Are there programs enough that walk whole rows, of a sector together, and read them once?"""
    laid = laid_out(region, inner, region.space - inner - serial, serial)
    together = laid.coalesced(rulebook.schedules.row.sector_bytes.count, stored=False)
    if laid.count < device.multiprocessor.count.count * together:
        return False
    return not (walked_twice(region, inner, device, rulebook) or _torn(laid, device))


def _torn(laid: Rows, device: Device) -> bool:
    """Whether tensors that lie one way are reduced, and others that lie across them are needed for
    the results alone: a program that has both takes few elements of each line of the former, and
    more sectors than these fill where lines begin between two."""
    if not (laid.torn(device, 1) and laid.crossed):
        return False
    region, inner = laid.region, laid.axes
    reduced = Cut(region, inner, passes(region, inner)[0], 1, 0).partial()
    return not laid_out(reduced, inner, frozenset(laid.across), frozenset()).crossed


def _results(left: Region, inner: frozenset[int], device: Device, rulebook: Rulebook) -> Step:
    """The kernel of what lies along the rows, once their reductions are known."""
    along = all(inner <= output.axes for output in left.outputs)
    if along and not left.reduced:
        across = tiled.across_axis(left, inner, rulebook)
        return tiled.tile(left, inner, frozenset(), device, rulebook, across)
    (step,) = flat.plan(left, device, rulebook).steps
    return step


def _lines(step: Step) -> bool:
    """Does a program walk neighbouring rows, in lines of all that it reads?"""
    return step.rows > 1 and not rows_of_step(step).mixed


def _fill(step: Step, device: Device, rulebook: Rulebook) -> bool:
    """Do programs that walk whole rows, neighbours together, fill the device?"""
    wanted = device.multiprocessor.count.count * rulebook.schedules.blocked.once_programs.count
    return prod(group.size for group in step.outer) >= wanted * step.rows


def _part(step: Step, device: Device, rulebook: Rulebook, *, lines: bool) -> int:
    """Elements of a row that one program takes: as many as leave few enough parts while the
    programs still fill the device; of rows that are walked by themselves one chunk, where that
    leaves few enough."""
    numbers = rulebook.schedules.split
    rows = -(-prod(group.size for group in step.outer) // step.rows)
    length = prod(group.size for group in step.inner)
    wanted = device.multiprocessor.count.count * numbers.programs_per_multiprocessor.count
    most = max(1 if lines else numbers.most_parts.count, wanted // rows)
    parts = max(1, min(-(-length // step.block), most))
    return -(-length // (parts * step.block)) * step.block
