"""Builds `Work` records for the time model: one per eager launch, one per planned kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.cost.times import EagerLaunch, Fused
from fusion_advisor.ir.graph import Ref
from fusion_advisor.perfmodel.eager import launched
from fusion_advisor.perfmodel.kernels import plan_works
from fusion_advisor.perfmodel.model import (
    NOTHING,
    Work,
    call_us,
    kept,
    launch_us,
    speedup_interval,
)
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.schedules.base import Plan

_DIGITS = 9
"""Significant digits of a predicted time. Powers come from the machine's own math library, which
differs from another's in the last bit; a report must not."""


class Fitted:
    """The time model whose figures were fitted to measurements: `times.TimeModel`."""

    def launch(self, launch: EagerLaunch, device: Device) -> tuple[float, Work]:
        moved = launch.bytes_read, launch.bytes_written
        work = launched(launch.call, launch.op, moved, device)
        if launch.unit == "tensor" or work.kind == "other":
            work = replace(work, arithmetic_us=launch.arithmetic_us)
        elif launch.op is not None and launch.op.pattern == "pointwise":
            work = replace(work, primitives=launch.instructions)
        return _rounded(launch_us(work, device)), work

    def scratch_bytes(self, work: object) -> int:
        return work.scratch if isinstance(work, Work) else 0

    def eager_us(self, flow: Dataflow, launches: Sequence[int]) -> float:
        return _rounded(call_us(eager_works(flow, launches), flow.annotated.device))

    def fused_us(self, fused: Fused, device: Device) -> float:
        return _rounded(call_us(fused_works(fused, device), device))

    def interval(
        self, flow: Dataflow, launches: Sequence[int], fused_us: float
    ) -> tuple[float, float]:
        works = eager_works(flow, launches)
        low, high = speedup_interval(works, fused_us, flow.annotated.device)
        return _rounded(low), _rounded(high)


def _rounded(figure: float) -> float:
    return float(f"{figure:.{_DIGITS}g}")


MODEL = Fitted()


def eager_works(flow: Dataflow, launches: Sequence[int]) -> tuple[Work, ...]:
    """Works of the launches in eager's order, each with the bytes that the launches before left for
    it in the L2. Between two uses of an element lie the rest of the launch that touched it first,
    and the beginning of the one that reads it: on average half of each."""
    device, tensors = flow.annotated.device, flow.annotated.tensors
    moved = 0
    seen: dict[int, tuple[int, int]] = {}
    found: list[Work] = []
    for number in launches:
        node = flow.nodes[number]
        work = flow.annotated.costs[node.name].work
        work = work if isinstance(work, Work) else NOTHING
        read = {flow.elements[flow.base(ref)]: tensors[ref].bytes for ref in flow.operands[number]}
        resident = 0
        for element, size in read.items():
            if element in seen:
                before, then = seen[element]
                resident += kept(size, moved - then + (before + work.bytes) / 2, device)
        found.append(replace(work, resident=min(work.resident + resident, work.bytes_read)))
        moved += work.bytes
        made = (Ref(node.name, i) for i, tensor in enumerate(node.outputs) if tensor is not None)
        touched = (*read, *(flow.elements[ref] for ref in made))
        seen |= dict.fromkeys(touched, (work.bytes, moved))
    return tuple(found)


def fused_works(fused: Fused, device: Device) -> tuple[Work, ...]:
    """Works of the plan's kernels, with the registers of each where they are compiled; without a
    plan, of one kernel that moves the bytes across the border."""
    if isinstance(fused.plan, Plan):
        return plan_works(fused.plan, device, fused.registers)
    return (Work("kernel", fused.moved, 0, arithmetic_us=fused.arithmetic_us),)
