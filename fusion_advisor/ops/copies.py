"""Copies: ops that move elements. A region copies nothing: the consumer of the result reads the
element of the operand."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import copied, formula, meaning_of
from fusion_advisor.ops.views import reshaped, shape_of
from fusion_advisor.region.axes import AxisList, NotExpressible
from fusion_advisor.region.builder import Builder, Scalar, Value

Where = Callable[[int, int, int], int]
"""Gives the index in the operand for an index in the result; takes the dimension, the index and the
size."""


def _moved(b: Builder, x: Value, sizes: Mapping[int, int], where: Where) -> Value:
    """The value with new sizes of some dimensions, whose elements are read at the indices that
    `where` gives."""
    dims = list(x.dims)
    wheres: dict[int, int] = {}
    for dim, size in sizes.items():
        dims[dim] = b.new_axis(size)
        wheres[dim] = where(dim, b.place(dims[dim]), x.shape[dim])
    return b.pull_all(x, wheres, tuple(dims))


# -- joined ----------------------------------------------------------------------------------------


@copied("aten.cat.default", inputs="result")
def cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    """Concatenation. Empty tensors of one dimension are left out, as in eager."""
    full = [x for x in tensors if 0 not in x.shape]
    if not full or any(0 in x.shape and len(x.shape) > 1 for x in tensors):
        raise NotExpressible("an empty tensor")
    return b.cat(full, dim)


@copied("aten.stack.default", inputs="result")
def stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    dim %= len(tensors[0].dims) + 1
    return b.cat([replace(x, dims=(*x.dims[:dim], (), *x.dims[dim:])) for x in tensors], dim)


# -- padded ----------------------------------------------------------------------------------------


def _pads(x: Value, pad: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Each padded dimension, with the number of elements before and behind it."""
    for n in range(len(pad) // 2):
        before, behind = pad[2 * n], pad[2 * n + 1]
        if before or behind:
            yield len(x.dims) - 1 - n, before, behind


@copied("aten.constant_pad_nd.default")
def constant_pad(b: Builder, x: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    dims, inside = list(x.dims), None
    wheres: dict[int, int] = {}
    for dim, before, behind in _pads(x, pad):
        size = x.shape[dim]
        dims[dim] = b.new_axis(size + before + behind)
        wheres[dim] = b.reckon("sub", b.place(dims[dim]), b.whole(before))
        inside = b.both(inside, b.within(wheres[dim], size, before > 0, behind > 0))
    found = b.pull_all(x, wheres, tuple(dims), inside)
    chosen = b.choose(inside, found.id, b.const(value, x.dtype).id)
    return b.seen(chosen, found.dims, x.logical)


def _padded(b: Builder, x: Value, pad: Sequence[int], where: Where) -> Value:
    """The value padded with its own elements; `where` maps an index that may lie outside to
    one inside."""
    pads = {dim: (before, behind) for dim, before, behind in _pads(x, pad)}

    def shifted(dim: int, place: int, size: int) -> int:
        return where(dim, b.reckon("sub", place, b.whole(pads[dim][0])), size)

    return _moved(b, x, {d: x.shape[d] + sum(pads[d]) for d in pads}, shifted)


@copied(
    "aten.reflection_pad1d.default",
    "aten.reflection_pad2d.default",
    "aten.reflection_pad3d.default",
)
def reflection_pad(b: Builder, x: Value, pad: Sequence[int]) -> Value:
    def where(dim: int, index: int, size: int) -> int:
        low = b.reckon("lt", index, b.whole(0))
        high = b.reckon("ge", index, b.whole(size))
        beyond = b.choose(high, b.reckon("sub", b.whole(2 * size - 2), index), index)
        return b.choose(low, b.reckon("sub", b.whole(0), index), beyond)

    return _padded(b, x, pad, where)


@copied(
    "aten.replication_pad1d.default",
    "aten.replication_pad2d.default",
    "aten.replication_pad3d.default",
)
def replication_pad(b: Builder, x: Value, pad: Sequence[int]) -> Value:
    def where(dim: int, index: int, size: int) -> int:
        low = b.reckon("lt", index, b.whole(0))
        return b.choose(low, b.whole(0), b.reckon("minimum", index, b.whole(size - 1)))

    return _padded(b, x, pad, where)


@copied("aten._pad_circular.default")
def circular_pad(b: Builder, x: Value, pad: Sequence[int]) -> Value:
    if min(pad) < 0:
        raise NotExpressible("a circular padding that cuts off")

    def where(dim: int, index: int, size: int) -> int:
        return b.reckon("mod", b.reckon("add", index, b.whole(size)), b.whole(size))

    return _padded(b, x, pad, where)


# -- turned ----------------------------------------------------------------------------------------


@copied("aten.flip.default")
def flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    def where(dim: int, place: int, size: int) -> int:
        return b.reckon("sub", b.whole(size - 1), place)

    turned = {dim % len(x.dims): x.shape[dim] for dim in dims} if x.dims else {}
    return _moved(b, x, turned, where)


@copied("aten.roll.default")
def roll(b: Builder, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    """Roll along dimensions; without dimensions, along all elements in row-major order."""
    if not dims:
        flat = roll(b, reshaped(b, x, (prod(x.shape),)), shifts, (0,))
        return reshaped(b, flat, x.shape)
    back: dict[int, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        back[dim % len(x.dims)] = back.get(dim % len(x.dims), 0) + shift

    def where(dim: int, place: int, size: int) -> int:
        ahead = b.reckon("add", place, b.whole(-back[dim] % size))
        return b.reckon("mod", ahead, b.whole(size))

    return _moved(b, x, {dim: x.shape[dim] for dim in back if x.shape[dim] > 1}, where)


# -- repeated: dimensions along which nothing changes ----------------------------------------------


@copied("aten.repeat.default", "aten.tile.default")
def repeat(b: Builder, x: Value, repeats: Sequence[int]) -> Value:
    if 0 in repeats:
        raise NotExpressible("an empty tensor")
    rank = max(len(repeats), len(x.dims))
    times = (1,) * (rank - len(repeats)) + tuple(repeats)
    dims = ((),) * (rank - len(x.dims)) + x.dims
    grown = tuple((*b.new_axis(n), *dim) for n, dim in zip(times, dims, strict=True))
    return b.seen(x.id, grown, x.logical)


@copied("aten.repeat_interleave.self_int")
def repeat_interleave(
    b: Builder, x: Value, repeats: int, dim: int | None = None, output_size: int | None = None
) -> Value:
    if dim is None:
        return repeat_interleave(b, reshaped(b, x, (prod(x.shape),)), repeats, 0)
    return _each_repeated(b, x, dim % len(x.dims), repeats)


def _each_repeated(b: Builder, x: Value, dim: int, times: int) -> Value:
    within: AxisList = (*x.dims[dim], *b.new_axis(times))
    return b.seen(x.id, (*x.dims[:dim], within, *x.dims[dim + 1 :]), x.logical)


# -- shuffled --------------------------------------------------------------------------------------


def _shuffled(
    b: Builder, x: Value, shape: Sequence[int], fixed: Sequence[int], order: Sequence[int]
) -> Value:
    """The value regrouped to `shape`, permuted, and regrouped to the result; `fixed` sizes are
    arguments of the op."""
    cut = reshaped(b, x, shape)
    b.pin(cut.dims[dim] for dim in fixed)
    return reshaped(b, b.permute(cut, order), shape_of(b))


@copied("aten.pixel_shuffle.default")
def pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n = len(batch)
    shape = (*batch, channels // factor**2, factor, factor, height, width)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return _shuffled(b, x, shape, (n + 1, n + 2), order)


@copied("aten.pixel_unshuffle.default")
def pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n = len(batch)
    shape = (*batch, channels, height // factor, factor, width // factor, factor)
    order = (*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return _shuffled(b, x, shape, (n + 2, n + 4), order)


@copied("aten.channel_shuffle.default", "aten.native_channel_shuffle.default")
def channel_shuffle(b: Builder, x: Value, groups: int) -> Value:
    batch, channels, *rest = x.shape
    shape = (batch, groups, channels // groups, *rest)
    return _shuffled(b, x, shape, (1,), (0, 2, 1, *range(3, len(shape))))


# -- enlarged --------------------------------------------------------------------------------------

_SHAPE = {1: "{shape}[2:]"}


def _nearest(b: Builder, x: Value, scales: Sequence[Scalar | None], twice: int) -> Value:
    """Nearest upsampling: each element takes the element that it lies over; `twice` is the sampling
    point within an element, in halves."""
    places: dict[int, int] = {}
    for dim, scale in enumerate(scales, 2):
        size, wanted = x.shape[dim], shape_of(b)[dim]
        exact = [(2 * i + twice) * size // (2 * wanted) for i in range(wanted)]
        if _sources(size, wanted, scale, twice / 2) != exact:
            raise NotExpressible("an enlargement whose places float rounding decides")
        if wanted % size:
            places[dim] = wanted
        else:
            x = _each_repeated(b, x, dim, wanted // size)

    def where(dim: int, place: int, size: int) -> int:
        ahead = b.reckon("add", b.reckon("mul", place, b.whole(2)), b.whole(twice))
        return b.reckon("floordiv", b.reckon("mul", ahead, b.whole(size)), b.whole(2 * places[dim]))

    return _moved(b, x, places, where)


def _sources(size: int, wanted: int, scale: Scalar | None, half: float) -> list[int]:
    """The source index of each position, computed in single precision as eager does."""
    step = _single(1.0 / scale if scale else size / wanted)
    return [min(int(_single(_single(i + half) * step)), size - 1) for i in range(wanted)]


def _single(value: float) -> float:
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return rounded


def _register_nearest(name: str, spatial: int, twice: int) -> None:
    """Register both overloads for a number of spatial dimensions."""

    @meaning_of("window", f"{name}.default", inputs="raw", sizes=_SHAPE)
    def sized(b: Builder, x: Value, size: Arg, *scales: Scalar | None) -> Value:
        return _nearest(b, x, (*scales, *(None,) * spatial)[:spatial], twice)

    @meaning_of("window", f"{name}.vec", inputs="raw", sizes=_SHAPE)
    def scaled(b: Builder, x: Value, size: Arg, scales: Sequence[Scalar] | None) -> Value:
        return _nearest(b, x, scales or (None,) * spatial, twice)


for _spatial in (1, 2, 3):
    _register_nearest(f"aten.upsample_nearest{_spatial}d", _spatial, 0)
    _register_nearest(f"aten._upsample_nearest_exact{_spatial}d", _spatial, 1)

formula(
    "window",
    "aten.upsample_bilinear2d.default",
    "aten.upsample_bilinear2d.vec",
    "aten.upsample_trilinear3d.default",
    "aten.upsample_bicubic2d.default",
    "aten.upsample_linear1d.default",
    "aten.grid_sampler_2d.default",
    flops=lambda call: 8 * call.out.numel,
)
formula(
    "copy",
    "aten.repeat_interleave.Tensor",
    "aten.diag_embed.default",
    "aten.col2im.default",
    "aten.im2col.default",
)
