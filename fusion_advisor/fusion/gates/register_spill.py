"""FA501: registers that the live values need at the most warps that a block may have."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """Registers per thread, estimated from the smallest tile; unknown without a plan."""
    gate = subject.rulebook.gate("register-spill")
    limit = subject.device.multiprocessor.registers_per_thread.count
    plan = subject.plan
    if plan is None:
        return Reading(None, limit, "no plan, so no tile")
    threads = gate.number("max_warps").count * subject.device.warp_size
    needed = -(-plan.on_chip_bytes // (4 * threads))
    count = len(subject.launches)
    advice = ""
    if count > gate.number("op_count_confirm").count:
        advice = f"; {count} ops: the compiled kernel must confirm that nothing spills"
    elif count > gate.number("op_count_watch").count:
        advice = f"; {count} ops: watch the registers"
    return Reading(
        needed,
        limit,
        f"{needed} registers a thread at {threads} threads, {plan.registers} at"
        f" {plan.widest.warps} warps{advice}",
    )
