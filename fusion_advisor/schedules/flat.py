"""One program, one block of consecutive elements of the result: pointwise regions of any rank.

Small reductions that no result lies along (pooling windows, a few channels) are combined one place
after the other within each lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, Step, emission_order, peak_bytes
from fusion_advisor.schedules.layout import Access, accesses, collapse, leading, ordered
from fusion_advisor.schedules.reducing import far_apart, read_again, serial_axes, walked_nearby

NAME = "flat"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The flat plan of a region; Refused when it reduces along what one lane cannot walk."""
    numbers = rulebook.schedules.flat
    serial = serial_axes(region, frozenset(), numbers)
    if serial != region.reduced:
        raise Refused("no-schedule", "the flat schedule holds no reduction along a row")
    space = region.space - serial
    if serial and not space:
        raise Refused("no-schedule", "one lane would walk everything")
    for output in region.outputs:
        if output.axes != space:
            raise Refused("parallel-pattern", "the results span different iteration spaces")
    loads, stores = accesses(region)
    if serial and far_apart(loads, serial, numbers):
        raise Refused("no-schedule", "lanes that walk a row each would read far apart")
    everything = (*loads, *stores)
    axes = ordered(sorted(space), leading(everything))
    results = prod(region.sizes[axis] for axis in space)
    each = _each(walked_nearby(loads, serial, region.sizes) if serial else None, device, rulebook)
    widest = max((access.tensor.itemsize for access in everything), default=1)
    if results % max(widest, 2) or (not serial and _steps_over(loads, axes, results)):
        each = min(each, numbers.single_elements_per_thread.count)
    block, warps = _block(results, each, bool(serial), device, rulebook)
    order = emission_order(region)
    smallest = device.warp_size
    extent = {n: smallest if region.depends[n] else 1 for n in order}
    peak = peak_bytes(region, order, extent)
    step = Step(
        schedule=NAME,
        region=region,
        loads=loads,
        stores=stores,
        outer=collapse(axes, everything, region, "n"),
        inner=(),
        order=order,
        rows=1,
        block=block,
        warps=warps,
        stages=1,
        smallest_tile=smallest,
        on_chip_bytes=peak,
        registers=-(-peak * block // smallest // (4 * warps * device.warp_size)),
        serial=serial,
    )
    return Plan(NAME, region, (replace(step, read_again=read_again(step, device, rulebook)),))


def _steps_over(loads: Sequence[Access], axes: Sequence[int], results: int) -> bool:
    """Whether lanes that are neighbours read elements of a large tensor that are none, so that each
    element is an access of its own: every second one, and no lane what is between."""
    return any(
        abs(load.step(axes[-1])) > 1 and 4 * load.tensor.addressed > results for load in loads
    )


def _each(near: int | None, device: Device, rulebook: Rulebook) -> int:
    """The elements of a thread, whose lanes walk `near` bytes that lie close together, none of
    them, or nothing (None). Of such bytes threads have so few that the L1 keeps the lines of all
    that are resident until every place in them was walked."""
    numbers = rulebook.schedules.flat
    each = max(1, numbers.block.count // (numbers.warps.count * device.warp_size))
    if near is None:
        return each
    fewer = (
        numbers.walked_bytes.count // near if near else numbers.walking_elements_per_thread.count
    )
    return min(each, 1 << max(fewer, 1).bit_length() - 1)


def _block(
    results: int, each: int, walked: bool, device: Device, rulebook: Rulebook
) -> tuple[int, int]:
    """The elements and the warps of a program, `each` of them a thread, where the rules have one
    for each. Where each lane walks places, so that few results are much work, a program takes fewer
    of them until there is one for each multiprocessor."""
    numbers = rulebook.schedules.flat
    warps = numbers.warps.count
    block = min(numbers.block.count, each * warps * device.warp_size)
    programs = device.multiprocessor.count.count
    while walked and block > warps * device.warp_size and results < programs * block:
        block //= 2
    return block, warps
