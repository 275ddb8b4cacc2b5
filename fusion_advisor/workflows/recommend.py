"""Summary of measurements: each group's figures beside its predictions, and how to run the
model."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.measure.protocol import (
    BACKEND,
    BACKEND_GRAPHED,
    COMPILED,
    EAGER,
    KERNEL,
    KERNEL_COMPILED,
    KERNEL_GRAPHED,
    KERNEL_TUNED,
    OWN_OPS,
    Ceilings,
    Measurement,
)
from fusion_advisor.report.schema import (
    BenchRow,
    GroupRow,
    MeasuredRow,
    WayRow,
)

_ADVICE = {
    EAGER.name: "leave it as it is",
    OWN_OPS.name: "write the framework's own op in place of {own}",
    KERNEL.name: "put the emitted kernels in place of their groups",
    COMPILED[0].name: "torch.compile(model)",
    COMPILED[2].name: 'torch.compile(model, mode="reduce-overhead")',
    BACKEND.name: 'torch.compile(model, backend="fusion_advisor")',
    BACKEND_GRAPHED.name: 'torch.compile(model, backend="fusion_advisor", mode="reduce-overhead")',
    KERNEL_COMPILED.name: "put the emitted kernels in place of their groups and torch.compile"
    " the rest",
    KERNEL_GRAPHED.name: "put the emitted kernels in place of their groups and torch.compile the"
    ' rest with mode="reduce-overhead"',
}
"""Ways of running a whole model, the simplest first."""


def way_row(found: Measurement, least_bytes: int, copy: float) -> WayRow:
    """Row of a measurement in the report; `copy` in bytes a second."""
    timing = found.timing
    row = WayRow(
        way=found.way, error=found.error, eager_error=found.eager_error,
        failure=found.failure, absent=found.absent,
    )  # fmt: skip
    if timing is not None:
        row.us, row.low_us, row.high_us = timing.us, timing.low_us, timing.high_us
        row.wall_us, row.runs, row.host_ahead = timing.wall_us, timing.runs, timing.host_ahead
        row.share = least_bytes / (timing.us * 1e-6) / copy if copy and least_bytes else None
    return row


def measured(group: GroupRow, ways: Sequence[WayRow]) -> MeasuredRow:
    """Row of a group's measurements beside its predictions."""
    times = _times(ways)
    eager, kernel = times.get(EAGER.name), times.get(KERNEL.name)
    speedup = eager / kernel if eager and kernel else None
    tuned = times.get(KERNEL_TUNED.name, kernel)
    return MeasuredRow(
        ways=list(ways),
        best=min(times, key=lambda way: times[way]) if times else None,
        speedup=speedup,
        fused_error=group.predicted.fused_us / kernel - 1 if kernel else None,
        speedup_error=group.predicted.speedup / speedup - 1 if speedup else None,
        verdict=("faster" if tuned < eager else "slower") if eager and tuned else None,
    )


def settle(group: GroupRow, found: MeasuredRow) -> None:
    """Write a group's measurements into its row: its saving is measured from here on."""
    group.measured = found
    times = _times(found.ways)
    if KERNEL.name in times:
        group.kernel.status = "gpu-timed"
    if EAGER.name in times and KERNEL.name in times:
        impact = group.impact
        before = impact.saved_us_total or 1.0
        impact.saved_us = times[EAGER.name] - times[KERNEL.name]
        impact.saved_us_total = impact.saved_us * impact.instances
        impact.share *= impact.saved_us_total / before
        impact.basis = "measured"


def own_op_serves(ways: Sequence[WayRow], tie: float) -> bool:
    """Whether the framework's own op was measured as good as the kernel, and better than eager.
    `tie` is the ratio within which times are equal."""
    times = _times(ways)
    own, eager = times.get(OWN_OPS.name), times.get(EAGER.name)
    kernel = times.get(KERNEL_TUNED.name, times.get(KERNEL.name))
    return bool(own and eager and own < eager and (kernel is None or own <= tie * kernel))


def bench_row(
    ceilings: Ceilings,
    model: Sequence[WayRow],
    complete: bool,
    *,
    tie: float,
    own_ops: Sequence[str] = (),
) -> BenchRow:
    """Row of the whole run. The fastest step, host included, is recommended; of those within `tie`
    of it the simplest. `own_ops` are the groups that the way `framework` replaces."""
    steps = {row.way: row.wall_us for row in model if row.wall_us}
    best = min(steps.values(), default=0.0)
    chosen = next((way for way in _ADVICE if way in steps and steps[way] <= tie * best), "")
    said = ", ".join(f"{way} {us / 1000:.3g} ms" for way, us in steps.items())
    advice = _ADVICE.get(chosen, "not known: no way of running the whole model was timed")
    return BenchRow(
        machine=dict(ceilings.machine),
        copy_bandwidth=ceilings.copy,
        matmul=dict(ceilings.matmul),
        launch_us=ceilings.launch_us,
        host_launch_us=ceilings.host_launch_us,
        model=list(model),
        recommended=advice.format(own=", ".join(own_ops)),
        why=f"a step takes {said}" if said else "the whole model was not timed",
        complete=complete,
        own_ops=list(own_ops),
    )


def _times(ways: Sequence[WayRow]) -> dict[str, float]:
    return {row.way: row.us for row in ways if row.us}
