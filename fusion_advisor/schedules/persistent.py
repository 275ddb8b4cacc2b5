"""As many programs as the device runs at once, each of which walks its share of the rows: while one
row is worked on, the next is on its way."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules import row
from fusion_advisor.schedules.base import (
    Plan,
    Refused,
    check_room,
    power_of_two,
    staged_bytes,
)
from fusion_advisor.schedules.reducing import row_axes

NAME = "persistent"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The plan of rows so long that few of them fit on a multiprocessor at once; Refused for
    shorter rows, or for few of them."""
    numbers = rulebook.schedules.persistent
    inner, serial = row_axes(region, rulebook.schedules.flat)
    length = prod(region.sizes[axis] for axis in inner)
    rows = prod(region.sizes[axis] for axis in region.space - inner - serial)
    turns = rows // (2 * device.multiprocessor.count.count)  # of two rows for each program
    programs = min(turns, numbers.long_programs_per_multiprocessor.count)
    if power_of_two(length) < numbers.row_elements.count or not programs:
        raise Refused("no-schedule", "one row a program does as well")
    step = row.tile(region, inner, serial, device, rulebook, ends=False)
    if step.rows > 1 or step.rest:
        raise Refused("no-schedule", "one row a program does as well")
    check_room(step, device, rulebook)
    warps = min(
        step.block // (numbers.elements_per_thread.count * device.warp_size),
        numbers.max_warps.count,
    )
    outer = region.space - inner - serial
    held = staged_bytes(step.loads, outer, step.block, numbers.stages.count)
    if held > device.multiprocessor.shared_memory_per_block.count:
        raise Refused("no-schedule", f"rows on their way take {held} B of shared memory")
    step = replace(
        step,
        schedule=NAME,
        warps=warps,
        stages=numbers.stages.count,
        whole=False,
        reciprocal=False,
        most=programs * device.multiprocessor.count.count,
    )
    return Plan(NAME, region, (step,))
