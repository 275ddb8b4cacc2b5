"""FA401: unfused over fused HBM bytes."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject
from fusion_advisor.fusion.lower import fused_traffic


def fused_bytes(subject: Subject) -> int:
    """Bytes that the plan moves; without a plan, the bytes that must cross the border at least."""
    if subject.plan is not None:
        return subject.plan.bytes_read + subject.plan.bytes_written
    return fused_traffic(subject.flow, subject.border)


def measure(subject: Subject) -> Reading:
    """Ratio of unfused bytes to the fused kernel's bytes."""
    limit = subject.rulebook.gate("traffic-saving").number("ratio").value
    unfused, fused = subject.unfused_bytes, fused_bytes(subject)
    ratio = unfused / fused if fused else float(len(subject.launches))
    return Reading(ratio, limit, f"{unfused} B unfused over {fused} B fused")
