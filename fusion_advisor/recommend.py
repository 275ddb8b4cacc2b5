"""What measurements say: each group's figures beside its predictions, and how to run the model."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.measurements import Ceilings, Measurement
from fusion_advisor.report import BenchRow, GroupRow, MeasuredRow, WayRow

_ADVICE = {
    "eager": "leave it as it is",
    "compile": "torch.compile(model)",
    "max-autotune": 'torch.compile(model, mode="max-autotune-no-cudagraphs")',
    "reduce-overhead": 'torch.compile(model, mode="reduce-overhead")',
    "kernel": "put the emitted kernels in place of their groups",
}


def way_row(found: Measurement, least_bytes: int, copy: float) -> WayRow:
    """A measurement as the report has it; `copy` in bytes a second."""
    timing, seen = found.timing, found.inductor
    row = WayRow(
        way=found.way, error=found.error, eager_error=found.eager_error,
        failure=found.failure, absent=found.absent,
    )  # fmt: skip
    if timing is not None:
        row.us, row.low_us, row.high_us = timing.us, timing.low_us, timing.high_us
        row.wall_us, row.runs, row.host_ahead = timing.wall_us, timing.runs, timing.host_ahead
        row.share = least_bytes / (timing.us * 1e-6) / copy if copy and least_bytes else None
    if seen is not None:
        row.covers = [(name, list(ops)) for name, ops in seen.kernels]
        row.refusals = list(seen.refusals)
    return row


def measured(group: GroupRow, ways: Sequence[WayRow]) -> MeasuredRow:
    """A group's measurements beside its predictions."""
    times = {row.way: row.us for row in ways if row.us}
    eager, kernel = times.get("eager"), times.get("kernel")
    speedup = eager / kernel if eager and kernel else None
    return MeasuredRow(
        ways=list(ways),
        best=min(times, key=lambda way: times[way]) if times else None,
        speedup=speedup,
        fused_error=group.predicted.fused_us / kernel - 1 if kernel else None,
        speedup_error=group.predicted.speedup / speedup - 1 if speedup else None,
    )


def settle(group: GroupRow, found: MeasuredRow) -> None:
    """Write a group's measurements into its row: what it saves is measured from here on."""
    group.measured = found
    times = {row.way: row.us for row in found.ways if row.us}
    if "kernel" in times:
        group.kernel.status = "gpu-timed"
    if "eager" in times and "kernel" in times:
        impact = group.impact
        before = impact.saved_us_total or 1.0
        impact.saved_us = times["eager"] - times["kernel"]
        impact.saved_us_total = impact.saved_us * impact.instances
        impact.share *= impact.saved_us_total / before
        impact.basis = "measured"


def bench_row(ceilings: Ceilings, model: Sequence[WayRow], complete: bool) -> BenchRow:
    """The run as a whole. The fastest step, host included, is recommended; within two percent the
    simpler way is, which comes first."""
    steps = {row.way: row.wall_us for row in model if row.wall_us}
    best = min(steps.values(), default=0.0)
    chosen = next((way for way, us in steps.items() if us <= 1.02 * best), "")
    said = ", ".join(f"{way} {us / 1000:.3g} ms" for way, us in steps.items())
    return BenchRow(
        machine=dict(ceilings.machine),
        copy_bandwidth=ceilings.copy,
        matmul=dict(ceilings.matmul),
        launch_us=ceilings.launch_us,
        host_launch_us=ceilings.host_launch_us,
        model=list(model),
        recommended=_ADVICE.get(chosen, "not known: no way of running the whole model was timed"),
        why=f"a step takes {said}" if said else "the whole model was not timed",
        complete=complete,
    )
