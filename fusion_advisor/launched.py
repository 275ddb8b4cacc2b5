"""How eager's own kernel walks its tensors, which decides how fast it is (`predict`).

The kind follows from an operator's pattern and from the layouts, not from its name; the name goes
along for kinds whose operators have little in common.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.device import VECTOR_BYTES, Device
from fusion_advisor.ops import Call, Op
from fusion_advisor.predict import Work, kept
from fusion_advisor.records import Tensor

POINTWISE = ("stream", "broadcast", "strided", "transposed", "cast")

TYPED = ("where", "masked_fill")
"""Ops whose kernels are made for operands of differing types."""

MOST_BLOCKS = 32
"""That a multiprocessor holds."""


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
    name = _name(call, op, kind)
    blocks, warps, depth = _blocks(call, kind, name, device)
    resident = min(device.multiprocessor.warps.count // warps, MOST_BLOCKS)
    work = Work(
        f"eager.{kind}",
        *moved,
        elements=_elements(call, op, flops),
        arithmetic_us=arithmetic_us,
        programs=blocks,
        warps=warps,
        at_once=device.sm_count * resident,
        depth=depth,
        op=name,
        unaligned=bool(call.operands) and _unaligned(call, kind, name, depth),
    )
    again = _read_again(call, work, device) if call.operands else 0
    return replace(work, bytes_read=work.bytes_read + again)


def _blocks(call: Call, kind: str, name: str, device: Device) -> tuple[int, int, int]:
    """How many blocks of how many warps there are, and how many places, or stages, each has one
    after the other: 0, some, 1 where that is not known."""
    times = device.times
    if kind in ("row", "column"):
        return _reducing(call, kind, device)
    rows = _rows(call, kind)
    if not rows:
        return 0, times.eager_warps.count, 1
    length = -(-call.operands[0].numel // rows)
    short = times.eager_short.get(name)
    if short is not None and length < short.count:
        return rows, 1, length
    return rows, times.eager_blocks.get(name, times.eager_warps).count, length


def _reducing(call: Call, kind: str, device: Device) -> tuple[int, int, int]:
    """Blocks, their warps, and their stages, of a reduction to fewer elements. A warp has a row,
    or a few neighbouring columns; a long row has a block, or where there are few several, the last
    of which puts their results together."""
    by, lanes = device.times.eager_reduction, device.warp_size
    warps, results = by.warps.count, max(call.out.numel, 1)
    length = -(-call.operands[0].numel // results)
    if kind == "column":
        blocks, threads = -(-results // by.outputs.count), warps
    elif length < by.shared.count * lanes:
        return -(-results // warps), warps, 1
    else:
        blocks, threads = results, warps * lanes
    resident = device.sm_count * device.multiprocessor.warps.count // warps
    several = max(1, min(resident // blocks, length // (threads * by.least.count)))
    return blocks * several, warps, min(several, 2)


def _unaligned(call: Call, kind: str, name: str, length: int) -> bool:
    """Do rows of some operand begin elsewhere than at 16 bytes, so that eager's kernels move single
    elements? Rows are what is combined or normalised, what is joined, and a channel's image."""
    if kind == "copy" and name.startswith("cat"):
        dim = call.arg(1, "dim")
        start = dim if isinstance(dim, int) else 0
        lengths = [
            prod(t.shape[start % max(len(t.shape), 1) :]) for t in (*call.operands, call.out)
        ]
        return any(n * call.out.itemsize % VECTOR_BYTES for n in lengths)
    if name.endswith("_pointwise"):
        length = prod(call.out.shape[2 if len(call.out.shape) > 2 else 1 :])
    elif kind == "row":
        length = call.operands[0].numel // max(call.out.numel, 1)
    elif kind not in ("normal", "scan"):
        return False
    return bool(length * call.operands[0].itemsize % VECTOR_BYTES)


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
    """`stream`: all alike; `cast`: types differ; `broadcast`: some are smaller; `strided`: rows of
    some tensor begin elsewhere; `transposed`: the elements of a row lie apart. `normal`: a
    reduction whose result is as large as its operand; `row`, `column`: it is smaller, and what is
    combined lies contiguous, or does not. Else the op's pattern."""
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
    if _casts(call):
        return "cast"
    if any(found != steps for found in whole):
        return "strided"
    return "stream" if len(whole) == len(call.operands) else "broadcast"


def _casts(call: Call) -> bool:
    """Does a pointwise kernel convert what it loads or stores, one element at a time? A condition
    and what is compared have the types that the kernel is made for."""
    dtypes = {t.dtype for t in (*call.operands, call.out) if t.shape == call.out.shape}
    return (
        len(dtypes) > 1 and call.out.dtype != "bool" and not any(op in call.node.op for op in TYPED)
    )


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


def _rows(call: Call, kind: str) -> int:
    """Rows that a block of threads each has to itself; 0 where there are none."""
    if kind not in ("normal", "scan"):
        return 0
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
