"""FA901: existence of a plan. Without a plan the outcome is unknown, and unknown never fuses."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """Count the plans; unknown when there is none."""
    limit = subject.rulebook.gate("no-schedule").number("plans").value
    if subject.planned is None:
        return Reading(None, limit, str(subject.problem))
    if subject.plan is not None:
        return Reading(len(subject.planned.plans), limit, f"schedule {subject.plan.schedule}")
    reasons = dict.fromkeys(refusal.why for refusal in subject.planned.refusals)
    return Reading(None, limit, "; ".join(reasons))
