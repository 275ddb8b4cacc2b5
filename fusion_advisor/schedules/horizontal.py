"""Results over different iteration spaces, side by side in one launch (horizontal fusion).

The programs of one result follow those of another, each as its own schedule has them. One launch
is waited for, not one for each; what several of them read, such as the sines of a rotary embedding
of queries and keys, comes from memory once where the L2 holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.region.exprs import INDEX
from fusion_advisor.region.region import Output, Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import (
    Plan,
    Planner,
    Refused,
    Step,
    by_storage,
    by_tensor,
    loaded_bytes,
)
from fusion_advisor.schedules.cutting import piece, pool_of
from fusion_advisor.schedules.layout import Access, reach

NAME = "horizontal"


def plan(region: Region, device: Device, rulebook: Rulebook, best: Planner) -> Plan:
    """The plans of all iteration spaces, each made by `best`, as one launch.

    Refused when what is made for one of them is needed for another, and when a space has no plan.
    """
    steps = [step for side in _sides(region) for step in best(side, device, rulebook).steps]
    warps = max(step.warps for step in steps)
    met = _met(region, steps, device)
    lasting = _lasting(steps, device)
    return Plan(
        NAME,
        region,
        tuple(_beside(step, warps, lasting) for step in sorted(steps, key=lambda s: -s.moved)),
        met=met,
    )


def serves(region: Region) -> bool:
    """Is it pointwise work over several iteration spaces?"""
    return len(_spaces(region)) > 1 and not region.reduced


def _spaces(region: Region) -> list[list[Output]]:
    """The results of each iteration space."""
    spaces: dict[frozenset[int], list[Output]] = {}
    for output in region.outputs:
        spaces.setdefault(output.axes, []).append(output)
    return list(spaces.values())


def _sides(region: Region) -> list[Region]:
    """What makes the results of each iteration space."""
    spaces, made = _spaces(region), set[str]()
    for outputs in spaces:
        behind = frozenset[int]().union(*(reach(region, output.value) for output in outputs))
        own = {region.labels[number] for number in behind if _costs(region, number)}
        if own & made:
            raise Refused("parallel-pattern", "the results span different iteration spaces")
        made |= own
    pool, sizes = pool_of(region, region.sizes), region.sizes
    sides = [piece(region, pool, outputs, (), sizes) for outputs in spaces]
    return [replace(side, results=region.results) for side in sides]


def _costs(region: Region, number: int) -> bool:
    """Is a node's value worked out from data, so that making it for each of several results is
    work?"""
    expr = region.exprs[number]
    if expr.op in ("load", "cast", "round") or expr.dtype == INDEX or number not in region.labels:
        return False
    return any(region.exprs[behind].op == "load" for behind in reach(region, number))


def _beside(step: Step, warps: int, lasting: frozenset[str]) -> Step:
    """A kernel as one of those that share a launch, which has one number of warps."""
    return replace(
        step,
        beside=True,
        warps=warps,
        registers=step.registers * step.warps // warps,
        lasting=step.lasting | (lasting & {load.name for load in step.loads}),
    )


def _shared(steps: Sequence[Step]) -> dict[str, list[Access]]:
    """The loads of each tensor that several of some kernels read."""
    found: dict[str, list[Access]] = {}
    for name, loads in by_tensor([load for step in steps for load in step.loads]).items():
        if sum(any(load.name == name for load in step.loads) for step in steps) > 1:
            found[name] = loads
    return found


def _met(region: Region, steps: Sequence[Step], device: Device) -> int:
    """Bytes that a kernel finds in the L2, where another one has read them."""
    found = 0
    for loads in by_storage([load for step in steps for load in step.loads]):
        tensors = {load.name: load.tensor for load in loads}
        if addressed_bytes(tensors.values()) > device.memory.l2.count:
            continue
        each = [
            loaded_bytes(step.region, own, tensors, region.sizes)
            for step in steps
            if (own := [load for load in step.loads if load.name in tensors])
        ]
        known = [count for count in each if count is not None]
        union = loaded_bytes(region, loads, tensors, region.sizes)
        if union is not None and len(known) == len(each):
            found += sum(known) - union
    return found


def _lasting(steps: Sequence[Step], device: Device) -> frozenset[str]:
    """What several kernels read while results go through the L2 that are larger than it: queries of
    4 x 32 heads of 4096 tokens and keys of 8, rotated, took 88 us, and take 86 with the sines kept
    for both, on an H200."""
    most = device.memory.l2.count
    if sum(store.tensor.bytes for step in steps for store in step.stores) <= most:
        return frozenset()
    return frozenset(
        name for name, loads in _shared(steps).items() if loads[0].tensor.bytes <= most
    )
