"""Pointwise regions of any rank: one program, one block of consecutive elements of the result."""

from __future__ import annotations

from fusion_advisor.region import Region
from fusion_advisor.rulebook import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, emission_order, peak_bytes
from fusion_advisor.schedules.layout import accesses, collapse, leading, ordered

NAME = "flat"


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The flat plan of a region; Refused when it reduces or its results differ in shape."""
    if region.reduced:
        raise Refused("no-schedule", "the flat schedule holds no reduction")
    space = frozenset(region.sizes)
    for output in region.outputs:
        if frozenset(axis for dim in output.dims for axis in dim) != space:
            raise Refused("parallel-pattern", "the results span different iteration spaces")
    loads, stores = accesses(region)
    everything = (*loads, *stores)
    axes = ordered(sorted(space), leading(everything))
    numbers = rulebook.schedules.flat
    block, warps = numbers.block.count, numbers.warps.count
    order = emission_order(region)
    smallest = device.warp_size
    extent = {n: smallest if region.depends[n] else 1 for n in order}
    peak = peak_bytes(region, order, extent)
    return Plan(
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
    )
