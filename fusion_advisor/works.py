"""What decides how long a set of launches takes: in eager, and as the kernels of its plan."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.annotate import seconds_of_arithmetic
from fusion_advisor.gates.base import Subject
from fusion_advisor.gates.traffic_saving import fused_bytes
from fusion_advisor.predict import Work, kept
from fusion_advisor.records import Ref
from fusion_advisor.rulebook import Device
from fusion_advisor.schedules.base import Plan, Step


def eager_works(subject: Subject) -> tuple[Work, ...]:
    """The launches in eager's order, each with what the ones before left for it in the L2."""
    flow, device = subject.flow, subject.device
    tensors = flow.annotated.tensors
    moved = 0
    seen: dict[int, int] = {}
    found: list[Work] = []
    for number in subject.launches:
        node, work = flow.nodes[number], subject.cost(number).work
        read = {flow.elements[flow.base(ref)]: tensors[ref].bytes for ref in flow.operands[number]}
        resident = sum(
            kept(size, moved - seen[element] + size, device)
            for element, size in read.items()
            if element in seen
        )
        found.append(replace(work, resident=min(resident, work.bytes_read)))
        moved += work.bytes
        made = (Ref(node.name, i) for i, tensor in enumerate(node.outputs) if tensor is not None)
        seen |= dict.fromkeys((*read, *(flow.elements[ref] for ref in made)), moved)
    return tuple(found)


def fused_works(subject: Subject) -> tuple[Work, ...]:
    """The kernels of the plan; without one, a kernel that moves what crosses the border."""
    device = subject.device
    arithmetic_us = 1e6 * sum(
        seconds_of_arithmetic(device, cost.unit, cost.dtype, cost.flops, cost.special_flops)
        for cost in map(subject.cost, subject.launches)
    )
    if subject.plan is not None:
        return _plan_works(subject.plan, arithmetic_us, device)
    return (Work("kernel.other", fused_bytes(subject), 0, arithmetic_us=arithmetic_us),)


def _plan_works(plan: Plan, arithmetic_us: float, device: Device) -> tuple[Work, ...]:
    """The kernels of a plan; the arithmetic is spread over them as the bytes are."""
    total = max(plan.bytes_read + plan.bytes_written, 1)
    found: list[Work] = []
    left: dict[str, int] = {}
    for step in plan.steps:
        moved = step.bytes_read + step.bytes_written
        names = {load.name for load in step.loads}
        resident = sum(kept(size, size, device) for name, size in left.items() if name in names)
        walked = prod(group.size for group in (*step.outer, *step.inner)) * _serial(step)
        lanes = _lanes(step)
        found.append(
            Work(
                kind=f"kernel.{step.schedule}",
                bytes_read=step.bytes_read,
                bytes_written=step.bytes_written,
                elements=lanes,
                arithmetic_us=arithmetic_us * moved / total * lanes / max(walked, 1),
                resident=min(resident, step.bytes_read),
                programs=programs(step),
                unaligned=_unaligned(step),
            )
        )
        left |= {store.name: store.tensor.bytes for store in step.stores}
    return tuple(found)


def programs(step: Step) -> int:
    """Programs of one kernel's grid."""
    outer = prod(group.size for group in step.outer)
    if not step.inner:
        return -(-outer // step.block)
    count = -(-outer // step.rows)
    if step.parts:
        count *= step.parts.size
    elif step.part:
        count *= -(-step.length // step.part)
    return min(count, step.most) if step.most else count


def _lanes(step: Step) -> int:
    """Elements that threads walk: whole tiles, every place that a lane walks by itself, and each
    row as often as there are results that ask for it."""
    serial = _serial(step)
    outer = prod(group.size for group in step.outer)
    if not step.inner:
        return -(-outer // step.block) * step.block * serial
    length = -(-step.length // step.block) * step.block
    return -(-outer // step.rows) * step.rows * length * serial


def _serial(step: Step) -> int:
    """Places that a lane walks one after the other."""
    return prod(step.region.sizes[axis] for axis in step.serial)


def _unaligned(step: Step) -> bool:
    """Rows of some tensor begin elsewhere than at 16 bytes, so that lanes load singly."""
    along = {axis for group in step.inner for axis in group.axes}
    across = [axis for group in step.outer for axis in group.axes]
    return bool(along) and any(
        access.step(axis) * access.tensor.itemsize % 16
        for access in (*step.loads, *step.stores)
        if along & set(access.strides)
        for axis in across
    )
