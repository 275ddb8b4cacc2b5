"""Gates by the name of the obstacle that each measures."""

from collections.abc import Callable

from fusion_advisor.fusion.gates import (
    compute_bound,
    discontinuous,
    feeds_matmul,
    no_schedule,
    on_chip,
    parallel_pattern,
    register_spill,
    shared_intermediate,
    traffic_saving,
)
from fusion_advisor.fusion.gates.base import Reading, Subject

GATES: dict[str, Callable[[Subject], Reading]] = {
    "compute-bound": compute_bound.measure,
    "on-chip": on_chip.measure,
    "parallel-pattern": parallel_pattern.measure,
    "traffic-saving": traffic_saving.measure,
    "register-spill": register_spill.measure,
    "shared-intermediate": shared_intermediate.measure,
    "feeds-matmul": feeds_matmul.measure,
    "discontinuous": discontinuous.measure,
    "no-schedule": no_schedule.measure,
}

__all__ = ["GATES", "Reading", "Subject"]
