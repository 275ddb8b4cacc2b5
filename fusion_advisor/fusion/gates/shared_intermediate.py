"""FA601: intermediates that a launch outside needs too. Each is stored once and counted."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """Count the results that are also read inside."""
    inside = set(subject.launches)
    flow = subject.flow
    shared = [r.node for r in subject.border.outputs if any(u in inside for u in flow.uses(r))]
    why = f"{', '.join(shared)} stored once for readers outside" if shared else "none"
    limit = subject.rulebook.gate("shared-intermediate").number("stored").value
    return Reading(len(shared), limit, why)
