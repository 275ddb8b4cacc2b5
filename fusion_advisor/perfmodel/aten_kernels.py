"""Model of ATen's kernels: how each walks its tensors, which decides its speed (`model`).

The kind follows from an operator's pattern and from the layouts, not from its name; the name goes
along for kinds whose operators have little in common.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.ops import Call, Op
from fusion_advisor.ops.losses import NONE
from fusion_advisor.perfmodel.aten_grids import (
    LAYER_NORM_VECTOR,
    Blocks,
    channels_last,
    given_statistics,
    normalising,
    picking,
    pointwise,
    pooling,
    reducing,
    rolling,
    scanning,
    softmax_across,
    taking,
    unused,
    window_wavefronts,
)
from fusion_advisor.perfmodel.model import Work, kept, narrow
from fusion_advisor.rulebook.devices import NARROW, SECTOR_BYTES, VECTOR_BYTES, Device

POINTWISE = ("stream", "broadcast", "strided", "transposed", "cast")

TYPED = ("where", "masked_fill")
"""Ops whose kernels are made for operands of differing types."""

OF_THEIR_OWN = ("tril", "triu")
"""Pointwise ops that have kernels of their own (native/cuda/TriangularOps.cu)."""

CONTIGUOUS = ("native_layer_norm", "native_group_norm", "softmax", "cum")
"""Ops that copy an operand of another layout first (native/cuda/: layer_norm_kernel.cu,
group_norm.cpp, SoftMax.cu, ScanUtils.cuh)."""

PICKING = ("nll_loss_forward", "nll_loss2d_forward")
"""Losses that take one value of each sample's, and keep, add up or average them
(native/cuda/: Loss.cu, NLLLoss2d.cu)."""

NORM = "linalg_vector_norm"
"""Reductions whose steps raise to a power."""

EXTREMES = ("amax", "amin", "max", "min")
"""Reductions whose steps test for NaN, which takes longer, and in 16 bits longer yet."""

FUNCTIONAL = "aten.masked_fill."
"""Ops that copy first and then fill the copy (native/cuda/Indexing.cu)."""


def launched(
    call: Call,
    op: Op | None,
    moved: tuple[int, int],
    device: Device,
) -> Work:
    """Work of one eager launch, which reads and writes `moved` HBM bytes; with a copy before it
    where the kernel accepts contiguous tensors only."""
    kind = _kind(call, op)
    name = _name(call, op, kind, device)
    first = call.node.args[0] if call.node.args else None
    if name.startswith(CONTIGUOUS) and isinstance(first, Ref) and not call.operands[0].contiguous:
        given = call.operands[0]
        steps = tuple(prod(given.shape[d + 1 :]) for d in range(len(given.shape)))
        whole = replace(given, stride=steps, offset=0, storage=-1)
        alone = replace(call, tensors={**call.tensors, first: whole})
        work = launched(alone, op, moved, device)
        return _after_copy(work, given, whole, device)
    blocks = _blocks(call, kind, name, device)
    kernel = _kernel(call, kind, name, blocks)
    registers = device.times.registers_of(f"eager.{kind}", kernel, blocks.held)
    work = Work(
        f"eager.{kind}",
        *moved,
        elements=_elements(call, op, device),
        programs=blocks.count,
        warps=blocks.warps,
        at_once=device.sm_count * device.multiprocessor.holds(blocks.warps, registers),
        depth=blocks.rounds,
        launches=blocks.launches,
        near=blocks.near,
        last=blocks.last,
        op=kernel,
        unaligned=bool(call.operands) and _unaligned(call, kind, name),
        scattered=_scattered(call) if kind in POINTWISE else 0,
        wavefronts=window_wavefronts(call, device) if kind == "window" else 0,
    )
    again = _read_again(call, name, work, device) if call.operands else 0
    work = replace(work, bytes_read=work.bytes_read + again)
    return _in_turn(call, work, _passes(call, name), device)


def _after_copy(work: Work, given: Tensor, whole: Tensor, device: Device) -> Work:
    """Work of a launch, and of the launch that copies its operand for it."""
    return replace(
        work,
        bytes_read=work.bytes_read + whole.bytes,
        bytes_written=work.bytes_written + whole.bytes,
        resident=work.resident + kept(whole.bytes, 2 * whole.bytes, device),
        elements=work.elements + whole.numel,
        launches=work.launches + 1,
        scattered=_apart(given, whole),
    )


def _passes(call: Call, name: str) -> int:
    """Number of launches that each walk the whole result: a copy that is then filled, a roll of
    each dimension."""
    dims = call.arg(2, "dims")
    if name == "roll" and isinstance(dims, tuple):
        return max(len(dims), 1)
    return 1 + call.node.op.startswith(FUNCTIONAL)


def _in_turn(call: Call, work: Work, passes: int, device: Device) -> Work:
    """Work of `passes` launches, each of which reads the result of the launch before."""
    if passes == 1:  # it may return no tensor
        return work
    whole, further = call.out.bytes, passes - 1
    return replace(
        work,
        bytes_read=work.bytes_read + further * whole,
        bytes_written=work.bytes_written + further * whole,
        resident=further * kept(whole, 2 * whole, device),
        elements=passes * work.elements,
        programs=passes * work.programs,
        launches=work.launches + further,
    )


def _blocks(call: Call, kind: str, name: str, device: Device) -> Blocks:
    """Grid of the launch, as far as it is known."""
    if kind in ("row", "column"):
        return reducing(call, _reduced(call), across=kind == "column", device=device)
    if kind == "window":
        return pooling(call, name, device)
    if name.startswith("native_batch_norm") and kind in POINTWISE:
        last = name.endswith("_channels")
        return channels_last(call, device) if last else given_statistics(call, device)
    if name.startswith(PICKING):
        return picking(call, device)
    if kind in POINTWISE:
        alike = {_steps(t) for t in (*call.operands, call.out) if t.numel == call.out.numel}
        contiguous = len(alike) == 1 and all(t.shape == call.out.shape for t in call.operands)
        return pointwise(call, device, cast=kind == "cast", contiguous=contiguous)
    if name == "embedding":
        return taking(call, device)
    if name == "roll":
        return rolling(call, device)
    rows = _rows(call, kind)
    if not rows:
        return Blocks(0, device.times.eager_warps.count)
    dims = _reduced(call)
    if kind == "scan" and dims and name.startswith(("cum", "logcum")):
        return scanning(call, dims[0], device)
    if name.endswith("softmax_column"):
        return softmax_across(call, dims[0], device)
    aligned = not _unaligned(call, kind, name)
    return normalising(call, name, rows, device, aligned=aligned)


def _scattered(call: Call) -> int:
    """Sectors that the kernel's neighbouring lanes request separately."""
    return sum(_apart(t, call.out) for t in call.operands if t.shape == call.out.shape)


def _apart(tensor: Tensor, walked: Tensor) -> int:
    """Sectors of a tensor that lie apart for neighbouring elements of another tensor of the
    same shape."""
    sizes = [d for d, size in enumerate(walked.shape) if size > 1]
    if not sizes:
        return 0
    step = tensor.stride[min(sizes, key=lambda d: walked.stride[d])] * tensor.itemsize
    close = step <= tensor.itemsize
    return 0 if close else int(walked.numel * min(1.0, step / SECTOR_BYTES))


def _unaligned(call: Call, kind: str, name: str) -> bool:
    """Whether rows of some operand begin elsewhere than at a vector, so that eager's kernels move
    single elements. Rows are the reduced or normalised rows, the joined parts, and a channel's
    image."""
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
    elif rows := _rows(call, kind):
        length = call.operands[0].numel // rows
    else:
        return False
    itemsize = call.operands[0].itemsize
    vector = LAYER_NORM_VECTOR * itemsize if name == "native_layer_norm" else VECTOR_BYTES
    return bool(length * itemsize % vector)


def _read_again(call: Call, name: str, work: Work, device: Device) -> int:
    """Bytes that eager's kernel reads again from HBM because it walks its rows several times and
    they do not stay in the L2. The byte counts that gates use have each tensor once."""
    further = device.times.eager_passes.get(name)
    if further is None or not work.programs:
        return 0
    whole = call.operands[0].bytes
    row = whole // work.programs
    if row <= device.times.eager_row.base:
        return 0
    lost = whole - kept(whole, row * min(work.programs, work.at_once), device)
    return (further.count - 1) * lost


def _kind(call: Call, op: Op | None) -> str:
    """Kind of the launch. `stream`: all layouts alike; `cast`: types differ; `broadcast`: some
    tensors are smaller; `strided`: rows of some tensor begin elsewhere; `transposed`: the elements
    of a row lie apart. `normal`: a reduction whose result is as large as its operand; `row`,
    `column`: the result is smaller, and the reduced elements lie contiguous, or do not. Else the
    op's pattern."""
    if op is None:
        return "opaque"
    if op.pattern == "reduction" and _combines(call):
        if call.out.numel == call.operands[0].numel and not _of_one(call):
            return "normal"
        return "row" if _contiguous(call) else "column"
    if op.pattern not in ("pointwise", "reduction"):
        return op.pattern
    steps = _steps(call.out)
    whole = [_steps(t) for t in call.operands if t.shape == call.out.shape and 0 not in t.stride]
    if any(steps and found and found[-1] != steps[-1] for found in whole):
        return "transposed"
    if _casts(call):
        return "cast"
    if any(found != steps for found in whole):
        return "strided"
    return "stream" if len(whole) == len(call.operands) else "broadcast"


def _of_one(call: Call) -> bool:
    """Whether the launch is a reduction along dimensions of one element. A norm or a softmax is as
    large, too."""
    shape, dims = call.operands[0].shape, () if _normalises(call) else _reduced(call)
    return bool(dims) and all(shape[d] == 1 for d in dims)


def _normalises(call: Call) -> bool:
    """Whether the launch is a norm or a softmax, whose result is as large as its operand."""
    name = call.node.op
    return "softmax" in name or ("norm" in name and NORM not in name)


def _casts(call: Call) -> bool:
    """Whether a pointwise kernel converts the elements that it loads or stores, one at a time. A
    condition and the operands of a comparison have the types that the kernel is made for; so have
    copies of float32 to 16 bits."""
    dtypes = {t.dtype for t in (*call.operands, call.out) if t.shape == call.out.shape}
    if len(dtypes) == 1 or call.out.dtype == "bool" or any(op in call.node.op for op in TYPED):
        return False
    narrowed = call.operands[0].dtype == "float32" and call.out.dtype in ("bfloat16", "float16")
    return not (len(call.operands) == 1 and narrowed)


def _combines(call: Call) -> bool:
    """Whether the launch reduces; a batch norm with given statistics does not, nor does a loss that
    keeps its elements."""
    further = call.node.outputs[1:]
    if further:
        return any(tensor is not None and tensor.numel for tensor in further)
    kept = call.out.shape == call.operands[0].shape and not _reduced(call)
    return _normalises(call) or not kept


def _name(call: Call, op: Op | None, kind: str, device: Device) -> str:
    """Name of the operator, and which of its kernels. Pointwise operators have none, nor has a loss
    that keeps its elements; a norm that is given its statistics has one. Reductions to fewer
    elements share one kernel; further kernels exist where they also give an index, for the largest
    or least element, and for a norm."""
    parts = call.node.op.split(".")
    name = parts[1].strip("_") if len(parts) > 1 else call.node.op
    if op is not None and op.pattern == "pointwise":
        return name if name in OF_THEIR_OWN else ""
    if kind in ("row", "column"):
        if any(t is not None and t.dtype == "int64" for t in call.node.outputs):
            return f"{kind}_indexed"
        if name == NORM:
            return f"{kind}_norm"
        return f"{kind}_extreme" if name in EXTREMES else ""
    name = name.removeprefix("log_")  # of a softmax: one kernel makes both
    name = name.replace("fused_rms_norm", "native_layer_norm")  # as one kernel makes both
    if kind in POINTWISE and not _normalises(call):
        return ""
    if kind in POINTWISE:
        return f"{name}_pointwise" if len(call.out.shape) > 2 else f"{name}_channels"
    if kind in ("normal", "scan") and len(call.node.outputs) == 1 and not _contiguous(call):
        return f"{name}_column"
    if name.endswith("softmax"):
        row, times = prod(call.out.shape[d] for d in _reduced(call)), device.times
        if row < times.eager_short["softmax"].count:
            return f"{name}_warp"
        if name == "softmax" and row < times.eager_held["softmax"].count:
            return "softmax_held"
    if kind == "copy" and any(not _dense(tensor) for tensor in call.operands):
        return f"{name}_strided"
    if name in PICKING and call.arg(3, "reduction") == NONE:
        return f"{name}_kept"
    return name


def _kernel(call: Call, kind: str, name: str, blocks: Blocks) -> str:
    """Name of the kernel in the rules where it has figures of its own: separate where a group norm
    has a warp for each row, and where elements are narrow."""
    if name == "native_group_norm" and blocks.warps == 1:
        name = f"{name}_warp"
    return (name or kind) + NARROW if narrow(call.operands) else name


def _elements(call: Call, op: Op | None, device: Device) -> int:
    """Elements that the kernel walks: for a gather the elements that it takes; for windows as many
    as there are lanes in the warps that have any."""
    made = [tensor.numel for tensor in call.node.outputs if tensor is not None]
    if op is not None and op.pattern == "gather":
        return max(made, default=0)
    if op is not None and op.pattern == "window":
        return int(call.out.numel * unused(call, device))
    return max([*made, *(tensor.numel for tensor in call.operands)])


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
    """Whether the reduced elements lie one after the other."""
    operand, out = call.operands[0], call.out
    kept = out.shape if len(out.shape) == len(operand.shape) else ()
    gone = [i for i, n in enumerate(operand.shape) if not kept or kept[i] != n]
    close = [
        i for i in range(len(operand.shape)) if operand.stride[i] == 1 and operand.shape[i] > 1
    ]
    dims = set(_reduced(call))
    return not close or close[0] in (dims or gone) or not (dims or gone)


def _reduced(call: Call) -> tuple[int, ...]:
    """Dimensions that a reduction names; none where it reduces all, and for a number."""
    dim = call.arg(2 if "norm" in call.node.op else 1, "dim")
    dims = dim if isinstance(dim, tuple) else (dim,)
    rank = len(call.operands[0].shape)
    return tuple(d % rank for d in dims if isinstance(d, int)) if rank else ()


def _dense(tensor: Tensor) -> bool:
    """Whether there are no gaps between the first element and the last."""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return sum((n - 1) * s for n, s in pairs) + 1 == tensor.numel


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have any extent."""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return tuple(stride for size, stride in pairs if size != 1)
