"""How eager's own kernel walks its tensors, which decides how fast it is (`predict`).

The kind follows from an operator's pattern and from the layouts, not from its name; the name goes
along for kinds whose operators have little in common.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.device import Device
from fusion_advisor.ops import Call, Op
from fusion_advisor.predict import Work, kept
from fusion_advisor.records import Tensor

POINTWISE = ("stream", "broadcast", "strided", "transposed")


def launched(
    call: Call,
    op: Op | None,
    moved: tuple[int, int],
    flops: int,
    arithmetic_us: float,
    device: Device,
) -> Work:
    """One launch of eager's, which reads and writes `moved` HBM bytes."""
    kind = _kind(call, op)
    warps = device.times.eager_warps.count
    work = Work(
        f"eager.{kind}",
        *moved,
        elements=_elements(call, op, flops),
        arithmetic_us=arithmetic_us,
        programs=_rows(call, kind, device),
        warps=warps,
        at_once=device.sm_count * device.multiprocessor.warps.count // warps,
        op=_name(call, op, kind),
    )
    again = _read_again(call, work, device) if call.operands else 0
    return replace(work, bytes_read=work.bytes_read + again)


def _read_again(call: Call, work: Work, device: Device) -> int:
    """What eager's kernel reads from HBM again because it walks its rows several times and they do
    not stay in the L2. The counts of bytes that decide have each tensor once."""
    further = device.times.eager_passes.get(work.op)
    if further is None or not work.programs:
        return 0
    whole = call.operands[0].bytes
    row = whole // work.programs
    if row <= device.times.eager_row.base:
        return 0
    lost = whole - kept(whole, row * min(work.programs, work.at_once), device)
    return (further.count - 1) * lost


def _kind(call: Call, op: Op | None) -> str:
    """`stream`: all alike; `broadcast`: some are smaller; `strided`: rows of some tensor begin
    elsewhere; `transposed`: the elements of a row lie apart. `normal`: a reduction whose result is
    as large as its operand; `row`, `column`: it is smaller, and what is combined lies contiguous,
    or does not. Else the op's pattern."""
    if op is None:
        return "opaque"
    if op.pattern == "reduction" and _combines(call):
        if call.out.numel == call.operands[0].numel:
            return "normal"
        return "row" if _contiguous(call) else "column"
    if op.pattern not in ("pointwise", "reduction"):
        return op.pattern
    steps = _steps(call.out)
    whole = [_steps(t) for t in call.operands if t.shape == call.out.shape]
    if any(steps and found and found[-1] != steps[-1] for found in whole):
        return "transposed"
    if any(found != steps for found in whole):
        return "strided"
    return "stream" if len(whole) == len(call.operands) else "broadcast"


def _combines(call: Call) -> bool:
    """Not so a batch norm that is given its statistics."""
    further = call.node.outputs[1:]
    return not further or any(tensor is not None and tensor.numel for tensor in further)


def _name(call: Call, op: Op | None, kind: str) -> str:
    """The operator, as the rules name it where it has figures of its own; pointwise ones have none,
    but for a norm that is given its statistics."""
    if op is not None and op.pattern == "pointwise":
        return ""
    parts = call.node.op.split(".")
    name = parts[1].strip("_") if len(parts) > 1 else call.node.op
    if kind in POINTWISE:
        return f"{name}_pointwise"
    if kind in ("normal", "scan") and len(call.node.outputs) == 1 and not _contiguous(call):
        return f"{name}_column"
    if kind == "copy" and any(not _dense(tensor) for tensor in call.operands):
        return f"{name}_strided"
    return name


def _elements(call: Call, op: Op | None, flops: int) -> int:
    """Elements that the kernel walks: of what a gather reads those that it takes, and each element
    of a window as often as there are windows that it lies in."""
    made = [tensor.numel for tensor in call.node.outputs if tensor is not None]
    if op is not None and op.pattern == "gather":
        return max(made, default=0)
    walked = max([*made, *(tensor.numel for tensor in call.operands)])
    return max(walked, flops) if op is not None and op.pattern == "window" else walked


def _rows(call: Call, kind: str, device: Device) -> int:
    """Rows that a block of threads each has to itself; 0 where there are none. Long rows of few are
    shared by blocks where the result is smaller than the operand."""
    if kind not in ("normal", "row", "scan"):
        return 0
    if kind == "row":
        return max(call.out.numel, call.operands[0].numel // device.times.eager_part.count)
    others = [t.numel for t in call.node.outputs[1:] if t is not None and t.numel]
    if others:
        return min(others)
    shape, dims = call.operands[0].shape, _reduced(call)
    return call.out.numel // max(prod(shape[d] for d in dims), 1) if shape and dims else 0


def _contiguous(call: Call) -> bool:
    """Do the elements that are combined lie one after the other?"""
    operand, out = call.operands[0], call.out
    kept = out.shape if len(out.shape) == len(operand.shape) else ()
    gone = [i for i, n in enumerate(operand.shape) if not kept or kept[i] != n]
    close = [
        i for i in range(len(operand.shape)) if operand.stride[i] == 1 and operand.shape[i] > 1
    ]
    dims = {d % len(operand.shape) for d in _reduced(call)} if operand.shape else set[int]()
    return not close or close[0] in (dims or gone) or not (dims or gone)


def _reduced(call: Call) -> tuple[int, ...]:
    """The dimensions that a reduction names; none where it combines all."""
    dim = call.arg(1, "dim")
    if isinstance(dim, tuple):
        return tuple(d for d in dim if isinstance(d, int))
    return (dim,) if isinstance(dim, int) else ()


def _dense(tensor: Tensor) -> bool:
    """Are there no gaps between the first element and the last?"""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return sum((n - 1) * s for n, s in pairs) + 1 == tensor.numel


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have any extent."""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return tuple(stride for size, stride in pairs if size != 1)
