"""Several scenarios of a model as one: their totals, each weighted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import Report


@dataclass(frozen=True)
class Total:
    """Cost of a step of a scenario, or of a sum of steps: microseconds, HBM bytes and kernels,
    before and after the accepted groups are fused."""

    time_us: float
    fused_us: float
    hbm_bytes: float
    fused_bytes: float
    kernels: float
    fused_kernels: float


@dataclass(frozen=True)
class WeightedScenario:
    """A scenario by its name: `weight` steps of its report. Under a `condition`, which is where
    kernels run, none runs in these steps, and nothing is saved."""

    name: str
    weight: float
    total: Total
    condition: str = ""


def weighted_scenario(name: str, weight: float, report: Report) -> WeightedScenario:
    row = report.totals
    runs = not row.condition
    return WeightedScenario(
        name,
        weight,
        Total(
            time_us=row.time_us,
            fused_us=row.time_us / row.predicted_speedup if runs else row.time_us,
            hbm_bytes=row.hbm_bytes_unfused,
            fused_bytes=row.hbm_bytes_fused if runs else row.hbm_bytes_unfused,
            kernels=row.kernels_unfused,
            fused_kernels=row.kernels_fused if runs else row.kernels_unfused,
        ),
        row.condition,
    )


def weighted_total(rows: Sequence[WeightedScenario]) -> Total:
    """The sum over all scenarios."""
    return Total(
        **{
            field.name: sum(row.weight * getattr(row.total, field.name) for row in rows)
            for field in fields(Total)
        }
    )


def as_data(rows: Sequence[WeightedScenario]) -> Mapping[str, object]:
    """Each scenario, and all of them, for a file."""
    return {
        "scenarios": [asdict(row) for row in rows],
        "total": asdict(weighted_total(rows)),
    }


def scenario_lines(rows: Sequence[WeightedScenario]) -> list[str]:
    """A line for each scenario and one for all."""
    lines = [f"{row.name}, weight {row.weight:g}: {_row_said(row)}" for row in rows]
    return [*lines, f"all, by weight: {_said(weighted_total(rows))}"]


def _row_said(row: WeightedScenario) -> str:
    if row.condition:
        total = row.total
        return (
            f"{wording.time(total.time_us)} predicted, {wording.size(total.hbm_bytes)} through HBM,"
            f" {total.kernels:g} kernels; nothing is saved, for kernels run {row.condition}"
        )
    return _said(row.total)


def _said(total: Total) -> str:
    faster = total.time_us / total.fused_us if total.fused_us else 1.0
    return (
        f"{wording.time(total.time_us)} → {wording.time(total.fused_us)} predicted"
        f" ({faster:.2f}x), {wording.size(total.hbm_bytes)} →"
        f" {wording.size(total.fused_bytes)} through HBM,"
        f" {total.kernels:g} → {total.fused_kernels:g} kernels"
    )
