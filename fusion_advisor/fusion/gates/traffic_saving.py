"""FA401: unfused over fused HBM bytes, or the least speed-up that the time model predicts."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.cost.annotate import seconds_of_arithmetic
from fusion_advisor.cost.times import Fused, time_model
from fusion_advisor.fusion.gates.base import PRODUCTS, Reading, Subject
from fusion_advisor.fusion.lower import fused_traffic


def fused_bytes(subject: Subject) -> int:
    """Bytes that the plan moves; without a plan, the bytes that must cross the border at least."""
    if subject.plan is not None:
        return subject.plan.bytes_read + subject.plan.bytes_written
    return fused_traffic(subject.flow, subject.border)


def fused_of(subject: Subject, registers: Sequence[int] = ()) -> Fused:
    """Input of the time model for a set's kernels, with the registers per thread of each where they
    are compiled. A product takes in one kernel with others what it takes alone."""
    device, plan = subject.device, subject.plan
    arithmetic_us = sum(
        cost.time_us
        if cost.pattern in PRODUCTS
        else 1e6
        * seconds_of_arithmetic(device, cost.unit, cost.dtype, cost.flops, cost.special_flops)
        for cost in map(subject.cost, subject.launches)
    )
    launches = len(plan.steps) if plan else 1
    return Fused(plan, fused_bytes(subject), arithmetic_us, launches, registers)


def measure(subject: Subject) -> Reading:
    """Ratio of unfused bytes to the fused kernel's bytes; the low end of the predicted speed-up
    where that is more, since eager's kernels may be slower than their bytes."""
    limit = subject.rulebook.gate("traffic-saving").number("ratio").value
    unfused, fused = subject.unfused_bytes, fused_bytes(subject)
    ratio = unfused / fused if fused else float(len(subject.launches))
    why = f"{unfused} B unfused over {fused} B fused"
    if ratio < limit and subject.plan is not None:
        least = _least_speedup(subject)
        if least > ratio:
            return Reading(least, limit, f"{why}; predicted to be {least:.2f}x as fast at least")
    return Reading(ratio, limit, why)


def _least_speedup(subject: Subject) -> float:
    """Low end of the interval that held nine of ten measured speed-ups."""
    model = time_model()
    fused_us = model.fused_us(fused_of(subject), subject.device)
    return model.interval(subject.flow, subject.launches, fused_us)[0]
