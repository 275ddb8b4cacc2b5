"""Grids of eager's own kernels: how they spread over blocks of threads, and how often each block
waits for its loads.

A thread asks for a few elements, waits for them, and asks for the next: however few bytes a kernel
moves, it takes as long as its longest chain of such rounds. How many there are follows from the
launch, which PyTorch computes from sizes and strides alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, log2, prod

from fusion_advisor.ops import Call
from fusion_advisor.ops.losses import MEAN, NONE
from fusion_advisor.rulebook.devices import LANES_SERVED, LINE_BYTES, VECTOR_BYTES, Device

ROW_OF_PLANE = 32
"""Threads along a plane's rows where blocks cover a volume (cuda/AveragePool3d.cu)."""
LAYER_NORM_VECTOR = 4
"""Elements that a layer norm moves at a time where rows are so many (cuda/layer_norm_kernel.cu)."""
OF_CHANNEL, BLOCKS_BELOW = 16, 128
"""Elements of each thread where channels are neighbours, and blocks below each other at most
(cuda/Normalization.cuh)."""
AROUND = {"linear": 2, "grid_sampler": 2, "cubic": 4}
"""Places along a dimension that a resampled result lies between (cuda/UpSample*.cu)."""
IMAGES_OF_CHANNELS = 1 << 18
"""Limit on the blocks of a batch norm (cuda/Normalization.cuh)."""
LEAST_OF_LOSS = 16
"""Samples of each thread of nll_loss, before a block has its full size (cuda/Loss.cu)."""
OF_IMAGE = 128
"""Least samples of a thread of nll_loss2d where an image has several blocks (cuda/NLLLoss2d.cu)."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Launch of `count` blocks of `warps` warps; a `count` of 0 is unknown, and taken as enough.
    Each block waits `rounds` times for loads from beyond the L1 and `near` times for loads from it.
    `last` are the rounds of the block that combines the others' results after they have ended.
    `launches` counts the further launches, `held` the values that a thread holds at once where its
    registers depend on that: elements of a row, or results side by side."""

    count: int
    warps: int
    rounds: int = 1
    near: int = 0
    last: int = 0
    launches: int = 1
    held: int = 0


def pointwise(call: Call, device: Device, *, cast: bool, contiguous: bool) -> Blocks:
    """Grid of a pointwise kernel: vectors where all tensors have one layout, else threads compute
    each element's address in each tensor, a few elements each."""
    by, warp = device.times.eager_pointwise, device.warp_size
    each = by.contiguous if contiguous else by.wide if call.out.itemsize >= 4 else by.narrow
    each = by.cast if cast else each
    return Blocks(-(-call.out.numel // (by.threads.count * each.count)), by.threads.count // warp)


def taking(call: Call, device: Device) -> Blocks:
    """Grid of an index select: a block for each index where rows are whole vectors, however short
    they are."""
    by, out = device.times.eager_pointwise, call.out
    row = prod(out.shape[len(call.operands[1].shape) :]) * out.itemsize
    if row % VECTOR_BYTES:
        return pointwise(call, device, cast=False, contiguous=False)
    most, vectors = 2 * by.threads.count, row // VECTOR_BYTES
    threads = min(-(-vectors // device.warp_size) * device.warp_size, most)
    numbers = call.operands[1].numel
    return Blocks(numbers * -(-vectors // most), threads // device.warp_size, 2)


def rolling(call: Call, device: Device) -> Blocks:
    """Grid of a roll along one dimension: one element a thread."""
    threads = device.times.eager_reduction.threads.count
    return Blocks(-(-call.out.numel // threads), threads // device.warp_size)


def reducing(call: Call, dims: Sequence[int], *, across: bool, device: Device) -> Blocks:
    """Grid of a reduction to fewer elements; `across`: neighbouring threads have neighbouring
    results, and not neighbouring places of one."""
    by, warp = device.times.eager_reduction, device.warp_size
    operand, results = call.operands[0], max(call.out.numel, 1)
    length = -(-operand.numel // results)
    whole = results == 1 and operand.contiguous
    apart = [operand.stride[d] for d in dims] if across else [1]
    vector = gcd(by.unrolled.count, min(apart, default=1))
    wide, high = (results // vector, length) if across else (length, results)
    threads = by.threads.count // vector
    if whole:
        wide //= by.unrolled.count
    width = min(_power(wide, threads), warp)
    height = min(_power(high, threads), threads // width)
    width = min(_power(wide, threads), threads // height)
    warps = -(-width * height // warp)
    each = length if across else -(-length // width)
    outputs = width * vector if across else 1
    shared = each >= min(height * by.least.count, by.most.count)
    if shared:
        each = -(-each // height)
    else:
        outputs *= height
    blocks, several = -(-results // outputs), 1
    room = device.sm_count * (device.multiprocessor.warps.count // warps)
    if shared and each >= by.most.count and blocks <= room:
        most, least = -(-each // by.least.count), -(-each // by.most.count)
        several = max(min(-(-room // blocks), most), least)
    rounds = -(-each // several // by.unrolled.count)
    last = 0 if several == 1 else -(-several // (height if across else width * height))
    # Blocks that share a result count who is done, in memory that another launch clears.
    launches = 1 + (several > 1)
    return Blocks(blocks * several, warps, max(rounds, 1), 0, last, launches, vector * across)


def scanning(call: Call, dim: int, device: Device) -> Blocks:
    """Grid of a running sum. Along the contiguous dimension, blocks walk their rows piece by piece
    through shared memory; across it, each thread walks a column place by place."""
    shape, warp = call.operands[0].shape, device.warp_size
    length, inner = shape[dim], prod(shape[dim + 1 :])
    rows = call.operands[0].numel // max(length, 1)
    threads = device.times.eager_reduction.threads.count
    if inner > 1:
        block = min(inner, threads)
        return Blocks(rows // inner * -(-inner // block), -(-block // warp), length)
    most = _log(threads)
    wide = most + _log(length) - _log(rows)
    wide = 1 << (min(max(wide // 2, 4), most) if wide >= 0 else most)  # PyTorch's are unsigned
    return Blocks(-(-rows * wide // threads), threads // warp, -(-length // (2 * wide)))


def softmax_across(call: Call, dim: int, device: Device) -> Blocks:
    """Grid of a softmax across the contiguous dimension.

    Threads walk a column three times: first from the HBM, and again from there where the columns of
    the blocks that a multiprocessor holds do not fit into its L1. There are no more blocks than the
    device holds: each goes over rows, and places beside each other (cuda/PersistentSoftmax.cuh,
    SoftMax.cu).
    """
    operand, warp = call.operands[0], device.warp_size
    length, inner = operand.shape[dim], prod(operand.shape[dim + 1 :])
    most = device.multiprocessor.threads_per_block.count
    close, several = min(inner, most), 1
    if 2 * warp >= close and length >= 2 * warp:
        several = _power(min(length, most // close), most)
    warps = -(-close * several // warp)
    rows = operand.numel // max(length * inner, 1)
    of = device.multiprocessor
    held = of.holds(warps, device.times.registers_of("eager.normal", "softmax_column"))
    beside = min(-(-inner // close), held * device.sm_count)
    below = min(-(-held * device.sm_count // beside), rows)
    walked = -(-rows // below) * -(-inner // (close * beside))
    near_by = -(-beside * below // device.sm_count) * close * length * operand.itemsize
    rounds = walked * -(-length // several)
    far, near = (rounds, 2 * rounds) if near_by <= of.shared_memory.base else (3 * rounds, 0)
    return Blocks(beside * below, warps, far, near)


def pooling(call: Call, name: str, device: Device) -> Blocks:
    """Grid of a pooling: one thread a window, place by place. A row of the window begins another
    line, and its other places lie in the L1. For volumes, blocks cover tiles of a plane."""
    times, shape = device.times, call.out.shape
    warps = times.eager_blocks.get(name, times.eager_warps).count
    taps, along = _window(call)
    if len(shape) == 5 and call.out.numel:
        count = call.out.numel // prod(shape[-2:]) * _tiles(shape, device)
    else:
        count = -(-call.out.numel // (warps * device.warp_size))
    return Blocks(count, warps, taps // along, taps)


def window_wavefronts(call: Call, device: Device) -> int:
    """Wavefronts of the L1 for the requests of a pooling's warps: one window after the other, with
    places as far apart as the stride says along a row, and in other rows and planes beyond it."""
    warp, shape, given = device.warp_size, call.out.shape, call.operands[0]
    if not shape or not call.out.numel:
        return 0
    taps, _ = _window(call)
    along = min(shape[-1], warp)
    apart = max(given.shape[-1] // shape[-1], 1) * given.itemsize
    each = min(warp, -(-warp // along) * max(1, along * apart // LINE_BYTES))
    return -(-call.out.numel // warp) * taps * each // LANES_SERVED


def unused(call: Call, device: Device) -> float:
    """Ratio of lanes to windows in the warps that have any window, because a row of a plane is no
    whole warp."""
    shape, warp = call.out.shape, device.warp_size
    if len(shape) < 5 or not call.out.numel:
        return 1.0
    return -(-shape[-1] // warp) * warp / shape[-1]


def _tiles(shape: Sequence[int], device: Device) -> int:
    """Number of blocks that cover a plane."""
    high = device.times.eager_warps.count * device.warp_size // ROW_OF_PLANE
    return -(-shape[-1] // ROW_OF_PLANE) * -(-shape[-2] // high)


def _window(call: Call) -> tuple[int, int]:
    """Places that a result is made of, and those of a row of them: of a pooling its window, of an
    adaptive one its share of the operand, of a resampled result the places around it."""
    name, size = call.node.op, call.arg(1, "kernel_size")
    listed = size if isinstance(size, tuple) else (size,)
    sizes = [n for n in listed if isinstance(n, int)] or [1]
    if "adaptive" in name:
        given = call.operands[0].shape[-len(sizes) :]
        sizes = [-(-n // max(made, 1)) for n, made in zip(given, sizes, strict=True)]
    elif "pool" not in name:
        sizes = [next((n for word, n in AROUND.items() if word in name), 1)]
    if len(sizes) == 1:
        sizes *= max(len(call.out.shape) - 2, 1)
    return prod(sizes), sizes[-1]


def normalising(call: Call, name: str, rows: int, device: Device, *, aligned: bool) -> Blocks:
    """Grid of a norm or a softmax whose rows are contiguous: a block or a warp walks a row, one
    element a thread at a time, or one vector where rows are whole vectors. A layer norm walks the
    row twice; where rows are no whole vectors it takes two kernels."""
    times, operand = device.times, call.operands[0]
    length = -(-operand.numel // rows)
    if name.endswith("softmax_warp"):
        by, wide = times.eager_pointwise, 1 << _log(max(length, 1))
        lanes = min(wide, device.warp_size)
        each = by.threads.count // lanes * (1 if wide > by.threads.count else 2)
        warps = by.threads.count // device.warp_size
        return Blocks(-(-rows // each), warps, held=wide // device.warp_size)
    if name == "softmax_held":
        warps = times.eager_blocks.get("softmax", times.eager_warps).count
        held = -(-length // (warps * device.warp_size))
        return Blocks(rows, warps, held, held=held)
    short = times.eager_short.get(name.removesuffix("_warp"))
    if short is not None and length < short.count:
        return Blocks(rows, 1)
    warps = times.eager_blocks.get(name, times.eager_warps).count
    threads = warps * device.warp_size
    if name == "native_layer_norm":
        if aligned:
            rounds = 2 * -(-length // (threads * LAYER_NORM_VECTOR))
            return Blocks(rows, warps, rounds, held=LAYER_NORM_VECTOR)
        first = times.eager_reduction.threads.count
        second = times.eager_warps.count * device.warp_size
        rounds = -(-length // first) + -(-length // second)
        return Blocks(rows, first // device.warp_size, rounds, launches=2)
    if name.endswith("softmax"):
        row = length * operand.itemsize
        passes = times.eager_passes[name].count if row > times.eager_row.base else 1
        return Blocks(rows, warps, passes * -(-row // (threads * VECTOR_BYTES)))
    return Blocks(rows, warps, -(-length // threads))


def given_statistics(call: Call, device: Device) -> Blocks:
    """Grid of a batch norm that has its statistics: blocks of one channel each, whose threads take
    the elements of one image after the other, one at a time."""
    shape, warp = call.out.shape, device.warp_size
    if len(shape) < 3 or not 0 < call.out.numel < 1 << 31:
        return Blocks(0, device.times.eager_warps.count)
    image, most = prod(shape[2:]), device.times.eager_reduction.threads.count
    threads = max(_up(image // 4, warp, most), min(_up(image, warp, most), 2 * warp))
    images = max(2 * warp // threads, 1)
    high = max(1, min(IMAGES_OF_CHANNELS // shape[1], -(-shape[0] // images)))
    rounds = -(-shape[0] // (images * high)) * -(-image // threads)
    return Blocks(shape[1] * high, threads * images // warp, rounds)


def channels_last(call: Call, device: Device) -> Blocks:
    """Grid of a batch norm with given statistics over a channels-last tensor: tiles of channels by
    elements of a channel, of which a thread takes a few at a time. The kernels that prepare the
    statistics are launched before it (cuda/Normalization.cuh)."""
    warp, most = device.warp_size, device.times.eager_reduction.threads.count
    channels = call.out.shape[1]
    each = call.out.numel // max(channels, 1)
    wide = _power(channels, warp)
    high = _power(-(-each // OF_CHANNEL), most // wide)
    wide = _power(channels, most // high)
    below = min(-(-each // (high * OF_CHANNEL)), BLOCKS_BELOW)
    rounds = -(-each // (high * below * device.times.eager_reduction.unrolled.count))
    count = -(-channels // wide) * below
    return Blocks(count, -(-wide * high // warp), max(rounds, 1), launches=2)


def picking(call: Call, device: Device) -> Blocks:
    """Grid of nll_loss: each thread loads a sample's class, then the value of that class, then the
    next sample's. Losses that are kept have a thread each. Losses that are reduced have one block;
    those of images have blocks of each image, beside launches that clear the result and the total
    weight, and one that divides by it."""
    target, warp = call.operands[1], device.warp_size
    samples, most = target.numel, device.multiprocessor.threads_per_block.count
    reduction = call.arg(3, "reduction")
    if reduction == NONE:
        return Blocks(-(-samples // most), most // warp, 2)
    if len(target.shape) > 1:
        image = samples // max(target.shape[0], 1)
        each = max(-(-image // most) // OF_IMAGE, 1)
        rounds, launches = 2 * -(-image // (each * most)), 3 + (reduction == MEAN)
        return Blocks(target.shape[0] * each, most // warp, rounds, launches=launches)
    wanted = 1 << round(log2(max(samples / LEAST_OF_LOSS, 1)))
    threads = min(max(wanted, warp), most)
    return Blocks(1, threads // warp, 2 * -(-samples // threads))


def _up(count: int, least: int, most: int) -> int:
    """Least power of two that is not smaller, within bounds."""
    return min(max(1 << _log(max(count, 1)), least), most)


def _log(count: int) -> int:
    """Exponent of the least power of two that is not smaller."""
    return (count - 1).bit_length()


def _power(count: int, most: int) -> int:
    """Largest power of two that is not larger, up to `most`."""
    return min(1 << max(count, 1).bit_length() - 1, most)
