"""FA901: is there a plan at all? Without one the outcome is unknown, and unknown never fuses."""

from __future__ import annotations

from fusion_advisor.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """The number of plans; unknown when there is none."""
    if subject.plan is not None and subject.planned is not None:
        return Reading(len(subject.planned.plans), 1, f"schedule {subject.plan.schedule}")
    reasons = [r.why for r in subject.planned.refusals] if subject.planned else [str(subject.problem)]
    return Reading(None, 1, "; ".join(dict.fromkeys(reasons)))
