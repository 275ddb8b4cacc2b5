"""Launches of ATen's kernels: how each walks its tensors, which decides its speed (`model`).

The kind follows from an operator's pattern and from the layouts; of reductions that have kernels of
their own (norms, softmaxes, extremes) from the name, too. What is known of grids is what
`Reduce.cuh` computes, and that norms, softmaxes and scans have a block for each row; how often a
block waits for its loads follows from that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod

from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.ops import Call, Op
from fusion_advisor.perfmodel.model import Work, kept, sectors_apart
from fusion_advisor.rulebook.devices import Device

CONTIGUOUS = ("layer_norm", "rms_norm", "group_norm", "softmax", "aten.cum", "aten.logcum")
"""Ops that copy an operand of another layout first (native/cuda/: layer_norm_kernel.cu,
group_norm.cpp, SoftMax.cu, ScanUtils.cuh)."""

EXTREMES = ("max", "min")
"""Reductions whose steps test for NaN, or keep an index, which takes longer."""

TYPED = ("where", "masked_fill")
"""Ops whose kernels are made for operands of differing types."""

FILLED = "aten.masked_fill."
"""Ops that copy first and then fill the copy (native/cuda/Indexing.cu)."""

MULTIPLIED = "aten._softmax_backward_data."
"""Ops that multiply their two operands first, and read the product and the second of them again
(native/cuda/SoftMax.cu). The bytes of both launches are in the operator's traffic."""


_WIDENED = 4
"""Least bytes of a number that is being summed: a float32."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Grid of a launch: `count` blocks of `warps` warps, 0 where it is not known and enough; each
    waits `rounds` times for loads. `launches` counts what the operator launches, and `scratch` has
    the bytes in which blocks leave each other what they have found."""

    count: int
    warps: int = 1
    rounds: int = 1
    launches: int = 1
    scratch: int = 0


def launched(call: Call, op: Op | None, moved: tuple[int, int], device: Device) -> Work:
    """Work of one eager launch, which reads and writes `moved` HBM bytes; with a copy before it
    where the kernel accepts contiguous tensors only."""
    first = call.node.args[0] if call.node.args else None
    copies = any(name in call.node.op for name in CONTIGUOUS)
    if copies and isinstance(first, Ref) and not call.operands[0].contiguous:
        given = call.operands[0]
        steps = tuple(prod(given.shape[d + 1 :]) for d in range(len(given.shape)))
        whole = replace(given, stride=steps, offset=0, storage=-1)
        alone = replace(call, tensors={**call.tensors, first: whole})
        work = launched(alone, op, moved, device)
        return _twice(work, whole.bytes, scattered=_apart(given, whole), device=device)
    kind = _kind(call, op)
    blocks = _blocks(call, kind, device)
    work = Work(
        kind,
        *moved,
        elements=_elements(call, kind),
        scattered=_scattered(call, kind),
        programs=blocks.count,
        warps=blocks.warps,
        at_once=device.sm_count * device.multiprocessor.holds(blocks.warps, 0),
        depth=blocks.rounds,
        launches=blocks.launches,
        scratch=blocks.scratch,
    )
    if call.node.op.startswith(FILLED):
        return _twice(work, call.out.bytes, scattered=0, device=device)
    if call.node.op.startswith(MULTIPLIED):
        left, right = call.operands[:2]
        product = moved[1] - call.out.bytes
        again = kept(product + right.bytes, left.bytes + right.bytes + product, device)
        return replace(work, resident=work.resident + again, scratch=product)
    return work


def _twice(work: Work, size: int, *, scattered: int, device: Device) -> Work:
    """Work of a launch and of a copy of `size` bytes, of which one reads what the other wrote."""
    return replace(
        work,
        bytes_read=work.bytes_read + size,
        bytes_written=work.bytes_written + size,
        resident=work.resident + kept(size, 2 * size, device),
        scattered=work.scattered + scattered,
        launches=work.launches + 1,
    )


def _kind(call: Call, op: Op | None) -> str:
    """Kind of the launch. `stream`: all layouts alike; `cast`: types differ; `broadcast`: some
    tensors are smaller; `strided`: rows of some tensor begin elsewhere; `transposed`: the elements
    of a row lie apart. `layer`, `rms`, `norm` (of channels), `softmax`: the result is as large as
    the operand; `row`, `column`: it is smaller, and the reduced elements lie contiguous, or do not;
    `extreme`: either, for the largest or least; `norm_backward`: a norm's gradients. Else the op's
    pattern."""
    if op is None:
        return "other"
    if op.pattern == "reduction" and "norm_backward" in call.node.op:
        return "norm_backward"
    if op.pattern == "reduction" and _combines(call):
        if call.out.numel == call.operands[0].numel and not _of_one(call):
            return _normalises(call) or "scan"
        if any(word in call.node.op.split(".")[1] for word in EXTREMES):
            return "extreme"
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


def _normalises(call: Call) -> str:
    """The kind of a norm or a softmax, whose result is as large as its operand; else empty."""
    name = call.node.op
    if "softmax" in name:
        return "softmax"
    if "rms_norm" in name:
        return "rms"
    if "layer_norm" in name:
        return "layer"
    return "norm" if "norm" in name and "vector_norm" not in name else ""


def _casts(call: Call) -> bool:
    """Whether a pointwise kernel converts the elements that it loads or stores, one at a time. A
    condition and the operands of a comparison have the types that the kernel is made for; so have
    copies of float32 to narrower floats."""
    dtypes = {t.dtype for t in (*call.operands, call.out) if t.shape == call.out.shape}
    if len(dtypes) == 1 or call.out.dtype == "bool" or any(op in call.node.op for op in TYPED):
        return False
    narrowed = call.operands[0].dtype == "float32" and "float" in call.out.dtype
    return not (len(call.operands) == 1 and narrowed)


def _combines(call: Call) -> bool:
    """Whether the launch reduces; a batch norm with given statistics does not, nor does a loss that
    keeps its elements."""
    further = call.node.outputs[1:]
    if further:
        return any(tensor is not None and tensor.numel for tensor in further)
    as_large = call.out.shape == call.operands[0].shape and not _reduced(call)
    return bool(_normalises(call)) or not as_large


def _scattered(call: Call, kind: str) -> int:
    """Sectors that neighbouring lanes ask for one by one."""
    if kind == "copy":  # of parts that lie between each other in the result
        parts, dim = len(call.operands), call.arg(1, "dim")
        last = isinstance(dim, int) and dim in (-1, len(call.out.shape) - 1)
        return call.out.numel if last and call.out.shape[-1] == parts > 1 else 0
    if kind not in ("cast", "strided", "transposed"):
        return 0
    return sum(_apart(t, call.out) for t in call.operands if t.shape == call.out.shape)


def _apart(tensor: Tensor, walked: Tensor) -> int:
    """Sectors of a tensor that lie apart for neighbouring elements of another tensor of the
    same shape."""
    sizes = [d for d, size in enumerate(walked.shape) if size > 1]
    if not sizes:
        return 0
    step = tensor.stride[min(sizes, key=lambda d: walked.stride[d])] * tensor.itemsize
    return sectors_apart(walked.numel, step, tensor.itemsize)


def _blocks(call: Call, kind: str, device: Device) -> Blocks:
    """Grid of the launch, as far as it is known."""
    warp = device.warp_size
    if kind in ("row", "column", "extreme"):
        return _reducing(call, device)
    rows = _rows(call) if kind in ("softmax", "norm", "layer", "rms", "scan") else 0
    if rows:
        return _by_rows(call, kind, rows, device)
    if kind == "gather" and _elements(call, kind) == 1:  # a loss: one block walks all samples
        samples, most = call.operands[1].numel, device.multiprocessor.threads_per_block.count
        return Blocks(1, -(-_power(samples, most) // warp), 2 * -(-samples // most))
    return Blocks(0)


def _by_rows(call: Call, kind: str, rows: int, device: Device) -> Blocks:
    """Grid of a norm, a softmax or a scan: a block for each row, of a softmax a warp for each row
    that is short and the largest block for one that is not; where rows lie across memory, a thread
    for each. A norm of rows takes two kernels where rows are no whole vectors (native/cuda/:
    SoftMax.cu, PersistentSoftmax.cuh, layer_norm_kernel.cu)."""
    times, warp = device.times, device.warp_size
    length, threads = -(-call.operands[0].numel // rows), times.eager_threads.count
    vector = times.eager_reduction.unrolled.count
    if not _contiguous(call) and kind == "softmax":
        return _softmax_across(call, length, rows, device)
    if not _contiguous(call):
        return Blocks(-(-rows // threads), threads // warp, length)
    if kind == "scan":
        return _scan_along(call, length, rows, device)
    if kind == "softmax" and length <= times.eager_short.count:
        return Blocks(-(-rows // (threads // warp)), threads // warp)
    if kind == "softmax":
        threads = device.multiprocessor.threads_per_block.count
    group = "group" in call.node.op
    if group or (kind in ("layer", "rms") and length % vector):  # one for moments, one for results
        threads, passes = times.eager_reduction.threads.count, 1 if group else 2
        return Blocks(rows, threads // warp, passes * -(-length // threads), 2)
    passes = 2 if kind in ("layer", "norm") else 1  # the moments, and then the results
    return Blocks(rows, threads // warp, passes * -(-length // (threads * vector)))


def _scan_along(call: Call, length: int, rows: int, device: Device) -> Blocks:
    """Grid of a scan along contiguous memory: of a block's threads as many share a row as keep the
    operand's proportions, 16 at least; all of them, too, where rows are so many that the unsigned
    difference of the two logarithms wraps around (native/cuda/ScanUtils.cuh of PyTorch 2.11). A
    thread has two elements at a time, and waits for its loads, for its row's tree and for what came
    before; twice as long where a step takes a logarithm."""
    threads = device.times.eager_reduction.threads.count
    most = threads.bit_length() - 1
    shared = most + (length - 1).bit_length() - (rows - 1).bit_length()
    across = 1 << (most if shared < 0 else min(max(4, shared // 2), most))
    waits = 6 if "log" in call.node.op else 3
    rounds = -(-length // (2 * across))
    return Blocks(-(-rows * across // threads), threads // device.warp_size, waits * rounds)


def _softmax_across(call: Call, length: int, rows: int, device: Device) -> Blocks:
    """Grid of a softmax across memory: a block has neighbouring columns, of which several threads
    share each where they are few, and walks them three times (native/cuda/SoftMax.cu)."""
    warp, most = device.warp_size, device.multiprocessor.threads_per_block.count
    beside = prod(call.operands[0].shape[max(_reduced(call), default=0) + 1 :])
    close = min(beside, most)
    several = _power(most // close, length) if close <= 2 * warp <= length else 1
    warps = -(-close * several // warp)
    return Blocks(-(-rows // close), warps, 3 * -(-length // several))


def _reducing(call: Call, device: Device) -> Blocks:
    """Grid of a reduction to fewer elements (native/cuda/Reduce.cuh, setReduceConfig): neighbouring
    threads have neighbouring places of one result, or neighbouring results."""
    by, warp, across = device.times.eager_reduction, device.warp_size, not _contiguous(call)
    operand, results = call.operands[0], max(call.out.numel, 1)
    length = -(-operand.numel // results)
    apart = [operand.stride[d] for d in _reduced(call)] if across else [1]
    vector = gcd(by.unrolled.count, min(apart, default=1))
    wide, high = (results // vector, length) if across else (length, results)
    threads = by.threads.count // vector
    if results == 1 and operand.contiguous:
        wide //= by.unrolled.count
    width = min(_power(wide, threads), warp)
    height = min(_power(high, threads), threads // width)
    width = min(_power(wide, threads), threads // height)
    warps = -(-width * height // warp)
    each = length if across else -(-length // width)
    outputs = width * vector if across else 1
    shared = each >= min(height * by.least.count, by.most.count)
    each, outputs = (-(-each // height), outputs) if shared else (each, outputs * height)
    blocks, several = -(-results // outputs), 1
    room = device.sm_count * (device.multiprocessor.warps.count // warps)
    if shared and each >= by.most.count and blocks <= room:
        most, least = -(-each // by.least.count), -(-each // by.most.count)
        several = max(min(-(-room // blocks), most), least)
    rounds = max(-(-each // several // by.unrolled.count), 1)
    # Blocks that share a result count who is done, in memory that another launch clears. They leave
    # what they have found in room for every thread of a block, whichever of them uses it.
    kept = max(operand.itemsize, _WIDENED) * results * several * (width * vector if across else 1)
    return Blocks(blocks * several, warps, rounds, 1 + (several > 1), kept if several > 1 else 0)


def _power(count: int, most: int) -> int:
    """Largest power of two up to a count and a limit; at least 1."""
    return 1 << max(0, min(count, most).bit_length() - 1)


def _elements(call: Call, kind: str) -> int:
    """Elements that the kernel walks: for a gather those that it takes, for pools all places
    of their windows; adaptive ones are given no windows, and walk their operand once."""
    made = max((tensor.numel for tensor in call.node.outputs if tensor is not None), default=0)
    if kind == "gather":
        return made
    windows = "pool" in call.node.op and "adaptive" not in call.node.op
    if windows and isinstance(sizes := call.arg(1), tuple):
        return made * prod(size for size in sizes if isinstance(size, int))
    return max([made, *(tensor.numel for tensor in call.operands)])


def _rows(call: Call) -> int:
    """Rows that a norm, a softmax or a scan walks each by itself; 0 where there are none."""
    others = [t.numel for t in call.node.outputs[1:] if t is not None and t.numel]
    if others:
        return min(others)
    shape, dims = call.operands[0].shape, _reduced(call)
    return call.out.numel // max(prod(shape[d] for d in dims), 1) if shape and dims else 0


def _contiguous(call: Call) -> bool:
    """Whether the reduced elements lie one after the other."""
    operand, out = call.operands[0], call.out
    as_before = out.shape if len(out.shape) == len(operand.shape) else ()
    gone = [i for i, n in enumerate(operand.shape) if not as_before or as_before[i] != n]
    close = [
        i for i in range(len(operand.shape)) if operand.stride[i] == 1 and operand.shape[i] > 1
    ]
    dims = set(_reduced(call))
    return not close or close[0] in (dims or gone) or not (dims or gone)


def _reduced(call: Call) -> Sequence[int]:
    """Dimensions that a reduction names; none where it reduces all, and for a number."""
    dim = call.arg(2 if "norm" in call.node.op else 1, "dim")
    dims = dim if isinstance(dim, tuple) else (dim,)
    rank = len(call.operands[0].shape) if call.operands else 0
    return tuple(d % rank for d in dims if isinstance(d, int)) if rank else ()


def _steps(tensor: Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that have any extent."""
    pairs = zip(tensor.shape, tensor.stride, strict=True)
    return tuple(stride for size, stride in pairs if size != 1)
