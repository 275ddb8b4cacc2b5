"""Pointwise work in two dimensions: a program takes one part of one or of several rows.

What belongs to a row is worked out once and costs no index arithmetic in every lane; and a tensor
that lies across the others (a transpose) is read in lines as long as those that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, Step, power_of_two
from fusion_advisor.schedules.joined import joined, rows_together
from fusion_advisor.schedules.layout import Access, Group, accesses, collapse, leading, ordered
from fusion_advisor.schedules.places import in_runs
from fusion_advisor.schedules.reducing import serial_axes
from fusion_advisor.schedules.rows import Rows, rows_of

NAME = "tiled"
_MOST_PARTS = 65535
"""Programs along the second dimension of a CUDA grid."""


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The tiled plan of a region; Refused when it reduces along what one lane cannot walk, or when
    a flat kernel serves as well."""
    numbers = rulebook.schedules.tiled
    serial = serial_axes(region, frozenset(), rulebook.schedules.flat)
    if region.reduced:
        raise Refused("no-schedule", "a tiled kernel holds no reduction")
    space = region.space - serial
    for output in region.outputs:
        if output.axes != space:
            raise Refused("parallel-pattern", "the results span different iteration spaces")
    loads, stores = accesses(region)
    everything = (*loads, *stores)
    groups = collapse(ordered(sorted(space), leading(everything)), everything, region, "n")
    if len(groups) < 2:
        raise Refused("no-schedule", "a flat kernel serves as well")
    inner = _line(stores[0], groups[-1])
    across = _across(loads, inner, prod(group.size for group in groups))
    least = numbers.least_groups.count
    moved = any(load.pulled for load in loads)
    block = rulebook.schedules.flat.block.count
    if across is None and (
        (len(groups) < least and not moved)
        or groups[-1].size < device.warp_size
        or in_runs(everything, groups, block)
    ):
        raise Refused("no-schedule", "a flat kernel serves as well")
    return Plan(NAME, region, (tile(region, inner, serial, device, rulebook, across),))


def _line(store: Access, last: Group) -> frozenset[int]:
    """The axes of a result's contiguous dimension, with those that every tensor joins to it."""
    for dim, stride in zip(store.dims, store.tensor.stride, strict=True):
        if stride == 1 and dim:
            return frozenset(dim) | frozenset(last.axes)
    return frozenset(last.axes)


def _across(loads: Sequence[Access], inner: frozenset[int], elements: int) -> int | None:
    """The axis along which a large tensor lies contiguous, when it is not that of the results."""
    for load in loads:
        if 4 * load.tensor.addressed < elements or load.pulled:
            continue
        close = [axis for axis, step in load.strides.items() if step == 1]
        if close and not set(close) & inner:
            return close[0]
    return None


def tile(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
    across: int | None = None,
) -> Step:
    """A kernel without a reduction along the row, whose programs take parts of rows; neighbouring
    rows follow the axis `across`."""
    laid = rows_of(region, inner, serial)
    numbers = rulebook.schedules.tiled
    fixed = region.pinned | serial
    parts = joined(region, laid.loads, laid.axes, fixed)
    order = laid.across if parts or across is not None else _as_read(laid, device)
    elements, rows = numbers.elements.count, 1
    if across is not None:
        order = (*(axis for axis in order if axis != across), across)
        elements = numbers.side.count**2
        rows = min(numbers.side.count, power_of_two(region.sizes[across]))
    block = min(power_of_two(laid.length), elements // rows)
    if across is None:
        rows = min(max(elements // block, 1), power_of_two(laid.count))
        rows = rows_together(parts.values(), laid.outer(), rows, fixed)
    block = max(block, power_of_two(-(-laid.length // _MOST_PARTS)))
    warps = max(1, rows * block // (numbers.elements_per_thread.count * device.warp_size))
    warps = min(warps, rulebook.schedules.row.max_warps.count)
    step = laid.step(NAME, device, rows=rows, block=block, warps=warps, across=order)
    smallest = min(rows * block, device.warp_size)
    held = step.on_chip_bytes * smallest // (rows * block)
    step = replace(step, part=block, smallest_tile=smallest, on_chip_bytes=held)
    step = replace(step, lasting=_shared(laid, device), whole=rows > 1)
    whole = len(step.outer) == 2 and step.outer[1].size % rows == 0
    if parts or rows == 1 or not whole:
        return step
    return _at_once(replace(step, in_planes=True), device, rulebook)


def _shared(laid: Rows, device: Device) -> frozenset[str]:
    """What rows read again and again while results go through the L2 that are larger than it. A
    rotary embedding of 4 x 32 heads of 4096 tokens took 73.1 us, and takes 71.3 with its sines
    kept, on an H200."""
    most = device.memory.l2.count
    if max(store.tensor.bytes for store in laid.stores) <= most:
        return frozenset()
    every = frozenset(laid.across)
    return frozenset(
        load.name
        for load in laid.loads
        if load.tensor.bytes <= most and not load.pulled and not every <= load.walks
    )


def _at_once(step: Step, device: Device, rulebook: Rulebook) -> Step:
    """With more elements a thread, where that is what lets the device hold all programs at once."""
    numbers = rulebook.schedules.tiled
    threads = device.multiprocessor.count.count * device.multiprocessor.threads.count
    most = numbers.most_elements_per_thread.count
    each, warps = numbers.elements_per_thread.count, step.warps
    while each < most and warps > 1 and step.lanes > threads * each:
        each, warps = 2 * each, warps // 2
    if step.lanes > threads * each:
        return step
    return replace(step, warps=warps, registers=step.registers * step.warps // warps)


def _as_read(laid: Rows, device: Device) -> tuple[int, ...]:
    """The axes that number the rows, in the order in which most of what is read lies in memory:
    programs wait for that. Results that fit into the L2 are put in order there; others keep
    theirs."""
    if sum(store.tensor.bytes for store in laid.stores) > device.memory.l2.count:
        return laid.across
    weights: dict[tuple[int, ...], int] = {}
    for load in laid.loads:
        if load.walks.issuperset(laid.across):
            order = ordered(laid.across, load)
            weights[order] = weights.get(order, 0) + load.tensor.addressed * load.tensor.itemsize
    first = max(weights, key=lambda order: (weights[order], order == laid.across), default=None)
    return first or laid.across
