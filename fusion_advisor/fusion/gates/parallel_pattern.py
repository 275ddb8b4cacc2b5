"""FA301: bytes that a plan reads again because its reductions do not share one pattern."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """Share of bytes read again; a whole further pass where no plan covers the axes."""
    limit = subject.rulebook.gate("parallel-pattern").number("finish_share").value
    if subject.plan is not None:
        return Reading(
            subject.plan.finish_share, limit, f"one {subject.plan.schedule} plan covers every axis"
        )
    clashes = [
        refusal.why
        for refusal in (subject.planned.refusals if subject.planned else ())
        if refusal.gate == "parallel-pattern"
    ]
    if clashes:
        return Reading(1.0, limit, clashes[0])
    return Reading(None, limit, "no plan, so no pattern")
