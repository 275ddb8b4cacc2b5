"""Pointwise work in two dimensions: a program takes one part of one or of several rows.

What belongs to a row is worked out once and costs no index arithmetic in every lane; and a tensor
that lies across the others (a transpose) is read in lines as long as those that are written.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Refused, Step, power_of_two
from fusion_advisor.schedules.layout import Access, Group, accesses, collapse, leading, ordered
from fusion_advisor.schedules.reducing import serial_axes
from fusion_advisor.schedules.rows import rows_of

NAME = "tiled"


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
    across = across_axis(region, inner, rulebook)
    least = numbers.least_groups.count
    moved = any(load.pulled for load in loads)
    few = len(groups) < least and not moved
    vectors = rows_of(region, inner, serial).vector > 1
    plain = (few or vectors) and not _loads_for_rows(region, inner, rulebook)
    if across is None and (plain or groups[-1].size < device.warp_size):
        raise Refused("no-schedule", "a flat kernel serves as well")
    return Plan(NAME, region, (tile(region, inner, serial, device, rulebook, across),))


def _line(store: Access, last: Group) -> frozenset[int]:
    """The axes of a result's contiguous dimension, with those that every tensor joins to it."""
    for dim, stride in zip(store.dims, store.tensor.stride, strict=True):
        if stride == 1 and dim:
            return frozenset(dim) | frozenset(last.axes)
    return frozenset(last.axes)


def _loads_for_rows(region: Region, inner: frozenset[int], rulebook: Rulebook) -> bool:
    """Does a tile load so many numbers once for a row that lanes which load them for each of their
    elements lose more time than those of a tile that are idle behind the row's end?"""
    numbers = rulebook.schedules.tiled
    length = prod(region.sizes[axis] for axis in inner)
    block = min(power_of_two(length), numbers.elements.count)
    filled = length / (-(-length // block) * block)
    axes = (region.depends[number] for number in region.all("load"))
    loads = sum(bool(each) and not each & inner for each in axes)
    return loads >= numbers.row_loads.count and filled >= numbers.row_filled.value


def across_axis(region: Region, inner: frozenset[int], rulebook: Rulebook) -> int | None:
    """The axis along which a large tensor, read or written, lies contiguous for a sector and more,
    when it is not that of the first result: what is shorter, lanes along that result have moved
    soon enough."""
    elements = prod(region.sizes[axis] for axis in region.space)
    least_bytes = rulebook.schedules.row.sector_bytes.count
    loads, stores = accesses(region)
    for access in (*loads, *stores):
        if 4 * access.tensor.addressed < elements or access.pulled:
            continue
        for axis, step in access.strides.items():
            long = region.sizes[axis] * access.tensor.itemsize >= least_bytes
            if step == 1 and axis not in inner and long:
                return axis
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
    numbers, order = rulebook.schedules.tiled, laid.across
    block, elements = power_of_two(laid.length), numbers.elements.count
    each = numbers.elements_per_thread.count
    if across is None:
        block = min(block, elements)
        rows = min(max(elements // block, 1), power_of_two(laid.count))
    else:
        order = (*(axis for axis in order if axis != across), across)
        block, each = min(block, numbers.side.count), numbers.across_elements_per_thread.count
        rows = min(numbers.across_elements.count // block, numbers.side.count)
        rows = min(rows, power_of_two(region.sizes[across]))
    warps = max(1, rows * block // (each * device.warp_size))
    warps = min(warps, rulebook.schedules.row.max_warps.count)
    step = laid.step(NAME, device, rows=rows, block=block, warps=warps, across=order)
    smallest = min(rows * block, device.warp_size)
    held = step.on_chip_bytes * smallest // (rows * block)
    return replace(step, part=block, smallest_tile=smallest, on_chip_bytes=held)
