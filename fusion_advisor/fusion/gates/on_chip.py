"""FA201: bytes of the values alive at once at the plan's smallest tile, against a share of shared
memory."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """Bytes on chip; unknown without a plan."""
    fraction = subject.rulebook.gate("on-chip").number("smem_fraction").value
    budget = subject.device.smem_budget_bytes(fraction)
    plan = subject.plan
    if plan is None:
        return Reading(None, budget, "no plan, so no tile")
    return Reading(
        plan.on_chip_bytes,
        budget,
        f"{plan.on_chip_bytes} B alive at once in the smallest {plan.widest.schedule} tile of"
        f" {plan.widest.smallest_tile} elements, of {budget} B",
    )
