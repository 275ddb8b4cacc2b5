"""Builds `Work` records for the time model: one per eager launch, one per planned kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.cost.times import EagerLaunch, Fused
from fusion_advisor.ir.graph import Ref
from fusion_advisor.perfmodel.aten_kernels import POINTWISE, launched
from fusion_advisor.perfmodel.coalescing import scattered, torn
from fusion_advisor.perfmodel.instruction_count import Program, tally, wavefronts
from fusion_advisor.perfmodel.model import (
    NOTHING,
    Work,
    call_us,
    kept,
    launch_us,
    narrow,
    speedup_interval,
)
from fusion_advisor.region.instruction_mix import precise
from fusion_advisor.rulebook.devices import NARROW, Device
from fusion_advisor.schedules.base import Plan, Step
from fusion_advisor.schedules.reducing import walks

_DIGITS = 9
"""Significant digits of a predicted time. Powers come from the machine's own math library, which
differs from another's in the last bit; a report must not."""


class Fitted:
    """The time model whose figures were fitted to measurements: `times.TimeModel`."""

    def launch(self, launch: EagerLaunch, device: Device) -> tuple[float, Work]:
        op, moved = launch.op, (launch.bytes_read, launch.bytes_written)
        work = launched(launch.call, op, moved, device)
        # Figures of a kind, and not of one kernel, were counted beside what primitives issue.
        shared = device.times.named(work.kind, work.op).removesuffix(NARROW) in POINTWISE
        if op is not None and (op.pattern == "pointwise" or shared):
            work = replace(work, instructions=launch.instructions)
        if launch.unit == "tensor" or device.times.named(work.kind, work.op) == "other":
            work = replace(work, arithmetic_us=launch.arithmetic_us)  # instructions: not counted
        return _rounded(launch_us(work, device)), work

    def eager_us(self, flow: Dataflow, launches: Sequence[int]) -> float:
        return _rounded(call_us(eager_works(flow, launches), flow.annotated.device))

    def fused_us(self, fused: Fused, device: Device) -> float:
        return _rounded(call_us(fused_works(fused, device), device))

    def interval(self, unfused_us: float, fused_us: float, device: Device) -> tuple[float, float]:
        low, high = speedup_interval(unfused_us, fused_us, device)
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
        return _plan_works(fused.plan, device, fused.registers)
    return (Work("kernel.other", fused.moved, 0, arithmetic_us=fused.arithmetic_us),)


def _plan_works(plan: Plan, device: Device, registers: Sequence[int]) -> tuple[Work, ...]:
    found: list[Work] = []
    left: dict[str, tuple[int, int]] = {}
    known = registers if len(registers) == len(plan.steps) else [None] * len(plan.steps)
    for step, compiled in zip(plan.steps, known, strict=True):
        names = {load.name for load in step.loads}
        moved = step.bytes_read + step.bytes_written
        resident = sum(
            kept(size, (before + moved) / 2, device)
            for name, (size, before) in left.items()
            if name in names
        )
        resident += step.in_common
        read = step.bytes_read + step.in_common
        kind, program = _kind(step), Program(step, device.warp_size)
        done = tally(program, device, precise=precise(plan.region))
        found.append(
            Work(
                kind=f"kernel.{kind}",
                op=kind + NARROW if narrow(load.tensor for load in step.loads) else "",
                bytes_read=read,
                bytes_written=step.bytes_written,
                instructions=int(done.instructions(device)),
                wavefronts=wavefronts(program),
                resident=min(resident, read),
                programs=step.programs,
                warps=step.warps,
                at_once=at_once(step, device, compiled),
                depth=_depth(step),
                chained=_chained(step),
                torn=torn(step, program.every),
                scattered=scattered(step, program.every),
            )
        )
        left |= {store.name: (store.tensor.bytes, moved) for store in step.stores}
    return tuple(found)


def at_once(step: Step, device: Device, compiled: int | None = None) -> int:
    """Programs that the device holds at a time, by their warps and registers: as many as they are
    compiled to, or an estimate."""
    by, of = device.times.registers, device.multiprocessor
    if compiled is not None:
        return of.holds(step.warps, compiled) * device.sm_count
    registers = by.least.value + by.alive.value * step.registers
    registers += by.store.value * len(step.stores) + by.serial.value * bool(step.serial)
    registers = min(registers, of.registers_per_thread.value)
    return of.holds(step.warps, registers) * device.sm_count


def _depth(step: Step) -> int:
    """Places, chunks of a row, or rows that a program walks one after the other."""
    return step.chunks * _serial(step) * step.turns


def _chained(step: Step) -> int:
    """Reductions along the row that a program makes one after the other, each of which gives its
    result to all lanes; those of what lanes walk as often as there are places."""
    each = sum(_reductions(part, _serial(step)) for part in step.phases or (step,))
    return each * step.turns


def _reductions(step: Step, places: int) -> int:
    region = step.region
    along = [
        n
        for n in (*region.all("reduce"), *region.all("scan"))
        if {*region.exprs[n].axes} & step.along
    ]
    return sum(places if region.depends[number] & step.serial else 1 for number in along)


def _kind(step: Step) -> str:
    """Kind of the kernel: its schedule; `serial` where lanes walk places by themselves,
    `serial_row` where those of a row do, `scan` where a row is scanned, `transposed` where
    neighbours of a tile lie apart in some tensor."""
    if step.serial:
        return "serial_row" if step.inner else "serial"
    if any(step.region.all("scan")):
        return "scan"
    axes = [axis for group in (step.inner or step.outer)[-1:] for axis in group.axes]
    apart = (abs(access.step(axes[-1])) > 1 for access in (*step.loads, *step.stores))
    return "transposed" if step.schedule == "tiled" and any(apart) else step.schedule


def _serial(step: Step) -> int:
    """Places that a lane walks one after the other, as often as it walks them; of a row's lanes
    those that its elements hang on: what all of them share is walked once for the row."""
    region, axes = step.region, step.serial
    again = walks(region, step.serial)
    if step.inner:
        axes &= {axis for each in region.depends if each & step.along for axis in each}
        again = {n: count for n, count in again.items() if region.depends[n] & step.along}
    return max(again.values(), default=1) * prod(region.sizes[axis] for axis in axes)
