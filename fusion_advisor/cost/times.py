"""Protocol of a time model, and the plain model: bytes over bandwidth, or arithmetic, plus
launches.

The model that was fitted to measurements stands behind this protocol; where its room is deleted,
the plain one serves. All times are microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, cast

from fusion_advisor.ops import Call, Op
from fusion_advisor.rulebook.devices import Device, Unit

if TYPE_CHECKING:  # which is built on costs, and so on this
    from fusion_advisor.cost.dataflow import Dataflow

ROOM = "fusion_advisor.perfmodel"


@dataclass(frozen=True, slots=True)
class EagerLaunch:
    """One eager launch: HBM bytes, time of the arithmetic at the device's peaks, and instructions
    that its warps issue for its primitives. `op` is None where the op has no entry."""

    call: Call
    op: Op | None
    bytes_read: int
    bytes_written: int
    unit: Unit
    arithmetic_us: float
    instructions: int


@dataclass(frozen=True, slots=True)
class Fused:
    """Kernels of a group: `plan`, None where there is none; HBM bytes; time of the arithmetic at
    the device's peaks; number of launches; registers per thread of each kernel, once compiled."""

    plan: object
    moved: int
    arithmetic_us: float
    launches: int
    registers: Sequence[int] = ()


class TimeModel(Protocol):
    """Protocol of a model that predicts times, us."""

    def launch(self, launch: EagerLaunch, device: Device) -> tuple[float, object]:
        """Time of one launch among others, us, and the model's own notes on the launch, which the
        model alone reads."""
        ...

    def scratch_bytes(self, work: object) -> int:
        """Bytes that a launch takes for itself while it runs, by the model's notes on it."""
        ...

    def eager_us(self, flow: Dataflow, launches: Sequence[int]) -> float:
        """Time of a call of launches, by number, in eager's order, with a cold L2, us."""
        ...

    def fused_us(self, fused: Fused, device: Device) -> float:
        """Time of a call of a group's kernels, with a cold L2, us."""
        ...

    def interval(
        self, flow: Dataflow, launches: Sequence[int], fused_us: float
    ) -> tuple[float, float]:
        """Interval that holds 90 % of measured speed-ups of a call of launches, by number, whose
        kernels are predicted to take `fused_us`."""
        ...


class Roofline:
    """Plain time model: the longer of bytes and arithmetic, plus launches."""

    def launch(self, launch: EagerLaunch, device: Device) -> tuple[float, object]:
        moved = launch.bytes_read + launch.bytes_written
        return _longer(moved, launch.arithmetic_us, device) + device.launch_us, None

    def scratch_bytes(self, work: object) -> int:
        return 0

    def eager_us(self, flow: Dataflow, launches: Sequence[int]) -> float:
        costs = flow.annotated.costs
        return sum(costs[flow.nodes[number].name].time_us for number in launches)

    def fused_us(self, fused: Fused, device: Device) -> float:
        busy = _longer(fused.moved, fused.arithmetic_us, device)
        return busy + fused.launches * device.launch_us

    def interval(
        self, flow: Dataflow, launches: Sequence[int], fused_us: float
    ) -> tuple[float, float]:
        """Interval from no gain to the roofline's gain: nothing narrower is known here."""
        ratio = self.eager_us(flow, launches) / fused_us
        return min(1.0, ratio), max(1.0, ratio)


def _longer(moved: int, arithmetic_us: float, device: Device) -> float:
    return max(1e6 * moved / device.bandwidth, arithmetic_us)


@cache
def time_model() -> TimeModel:
    """Fitted model of the room `perfmodel`, else the plain one."""
    if find_spec(ROOM) is None:
        return Roofline()
    return cast("TimeModel", import_module(f"{ROOM}.workload").MODEL)
