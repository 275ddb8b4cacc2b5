"""Stage: the plans of a region. A plan says what the fused kernel reads, writes and holds."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.region import Region
from fusion_advisor.rulebook import Device, Rulebook
from fusion_advisor.schedules import SCHEDULES, finishing
from fusion_advisor.schedules.base import Plan, Refused


@dataclass(frozen=True)
class Planned:
    """The plans that serve a region, best first, and why the other schedules do not."""

    plans: tuple[Plan, ...]
    refusals: tuple[Refused, ...]


def plan(region: Region, device: Device, rulebook: Rulebook) -> Planned:
    """Try every schedule on a region."""
    loads = (region.exprs[i].input for i in region.live if region.exprs[i].op == "load")
    if not set(loads) - region.random_state:
        return Planned((), (Refused("no-schedule", "it reads no tensor that names the device"),))
    if not all(region.sizes.values()):
        return Planned((), (Refused("no-schedule", "a dimension has no elements"),))
    plans, refusals = _tried(region, device, rulebook)
    if not plans:
        try:
            plans.append(finishing.plan(region, device, rulebook, _best))
        except Refused as refusal:
            refusals.append(refusal)
    return Planned(tuple(plans), tuple(refusals))


def _tried(region: Region, device: Device, rulebook: Rulebook) -> tuple[list[Plan], list[Refused]]:
    plans: list[Plan] = []
    refusals: list[Refused] = []
    for schedule in SCHEDULES:
        try:
            plans.append(schedule.plan(region, device, rulebook))
        except Refused as refusal:
            refusals.append(refusal)
    return plans, refusals


def _best(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The first plan of a part of a region; Refused when it has none."""
    plans, refusals = _tried(region, device, rulebook)
    if not plans:
        raise refusals[0]
    return plans[0]
