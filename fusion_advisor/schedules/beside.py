"""Results that have nothing in common but what they read: each has kernels of its own, and one
launcher begins them all. A call that gives several tensors, the rotated queries and keys of an
attention, is replaced as a whole."""

from __future__ import annotations

from networkx.utils import UnionFind

from fusion_advisor.region.region import Output, Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Planner, Refused
from fusion_advisor.schedules.cutting import piece, pool_of
from fusion_advisor.schedules.layout import reach


def plan(region: Region, device: Device, rulebook: Rulebook, best: Planner) -> Plan:
    """The plans of all results that share their values, one after the other, each made by `best`.
    Refused where all results share some."""
    parts = _parts(region)
    if len(parts) < 2:
        raise Refused("no-schedule", "its results share values")
    plans, free = list[Plan](), region.free_axis
    for outputs in parts:
        alone = piece(region, pool_of(region, region.sizes), outputs, (), region.sizes, free)
        plans.append(best(alone, device, rulebook))
        free = max(step.region.free_axis for step in plans[-1].steps)
    return Plan(
        " + ".join(each.schedule for each in plans),
        region,
        tuple(step for each in plans for step in each.steps),
        finish_share=max(each.finish_share for each in plans),
    )


def _parts(region: Region) -> list[list[Output]]:
    """The results by what they share: values that vary along all axes of one of them. What is
    smaller, the cosines of each row, each kernel makes for itself."""
    behind = [reach(region, output.value) | {output.value} for output in region.outputs]
    made = [{n for n in each if region.exprs[n].op != "load"} for each in behind]
    joint: UnionFind[int] = UnionFind(range(len(made)))
    for one, output in enumerate(region.outputs):
        for other in range(len(made)):
            if any(region.depends[n] >= frozenset(output.axes) for n in made[one] & made[other]):
                joint.union(one, other)
    parts = sorted(sorted(part) for part in joint.to_sets())
    return [[region.outputs[n] for n in part] for part in parts]
