"""Windows over the last dimensions: pooling.

A window is a reduction over dimensions of its own, whose elements are read at the window's
positions; outside the operand they are the neutral element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import Call, Formula, Traffic, meaning_of
from fusion_advisor.ops.views import reshaped, shape_of
from fusion_advisor.region.axes import AxisList, Dims, NotExpressible
from fusion_advisor.region.builder import Builder, Value, floats_only


def spread(value: object, count: int) -> tuple[int, ...]:
    """One number for each of `count` dimensions."""
    if isinstance(value, int):
        return (value,) * count
    found = tuple(int(v) for v in value) if isinstance(value, tuple) else ()  # pyright: ignore
    return found * count if len(found) == 1 else found


def _covered(size: int, out: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Distinct positions of one dimension that some window touches."""
    touched = bytearray(size)
    for tap in range(kernel):
        first = tap * dilation - pad
        skipped = max(0, -(first // stride)) if first < 0 else 0
        last = max(0, min(size, first + out * stride))  # below 0: this tap is in the padding alone
        places = range(first + skipped * stride, last, stride)
        touched[places.start : places.stop : stride] = b"\1" * len(places)
    return sum(touched)


@dataclass(frozen=True)
class Windows:
    """The layout of windows along each of the last dimensions of a value."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]

    @classmethod
    def laid(
        cls,
        sizes: tuple[int, ...],
        counts: tuple[int, ...],
        kernel: Arg,
        stride: Arg,
        pad: Arg,
        dilation: Arg,
    ) -> Windows:
        """Windows from arguments that may be one number for all dimensions; without a stride,
        windows do not overlap."""
        extents, *others = (spread(arg, len(sizes)) for arg in (kernel, stride, pad, dilation))
        return cls(sizes, counts, extents, others[0] or extents, *others[1:])

    @property
    def touched(self) -> int:
        """Distinct positions that some window touches."""
        along = zip(
            self.sizes, self.counts, self.kernel, self.stride, self.pad, self.dilation, strict=True
        )
        return math.prod(_covered(*each) for each in along)

    @property
    def each_once(self) -> bool:
        """Whether the windows partition the dimensions."""
        parts = all(
            n * k == size for n, k, size in zip(self.counts, self.kernel, self.sizes, strict=True)
        )
        return parts and self.stride == self.kernel and not any(self.pad + self.spare)

    @property
    def spare(self) -> tuple[int, ...]:
        """The elements that a dilation adds to the extent of a window."""
        return tuple((k - 1) * (d - 1) for k, d in zip(self.kernel, self.dilation, strict=True))

    def end(self, d: int) -> int:
        """The position behind the last element of the last window, along one dimension."""
        reach = self.kernel[d] + self.spare[d]
        return (self.counts[d] - 1) * self.stride[d] - self.pad[d] + reach


# -- what eager moves and computes -----------------------------------------------------------------


def _pooling(spatial: int, dilated: bool) -> Traffic:
    def traffic(call: Call) -> tuple[int, int]:
        x = call.operand(0)
        windows = Windows.laid(
            x.shape[-spatial:],
            call.out.shape[-spatial:],
            call.arg(1, "kernel_size"),
            call.arg(2, "stride", ()),
            call.arg(3, "padding", 0),
            call.arg(4, "dilation", 1) if dilated else 1,
        )
        read = math.prod(x.shape[:-spatial]) * windows.touched * x.itemsize
        return read, sum(t.bytes for t in call.node.outputs if t is not None)

    return traffic


def _window_flops(spatial: int) -> Formula:
    def flops(call: Call) -> int:
        return call.out.numel * math.prod(spread(call.arg(1, "kernel_size"), spatial))

    return flops


# -- windows of a fixed extent ---------------------------------------------------------------------


def _laid(
    b: Builder, x: Value, spatial: int, kernel: Arg, stride: Arg, pad: Arg, dilation: Arg = 1
) -> Windows:
    floats_only(x, "a pooling of integers")
    sizes, counts = x.shape[-spatial:], shape_of(b)[-spatial:]
    return Windows.laid(sizes, counts, kernel, stride, pad, dilation)


def _parts(b: Builder, x: Value, counts: Sequence[int], kernel: Sequence[int]) -> Value:
    """The last dimensions split into parts of a fixed extent; the positions within a part
    come last."""
    spatial, outer = len(counts), len(x.dims) - len(counts)
    pairs = [size for pair in zip(counts, kernel, strict=True) for size in pair]
    cut = reshaped(b, x, (*x.shape[:outer], *pairs))
    order = [outer + 2 * d + side for side in (0, 1) for d in range(spatial)]
    parts = b.permute(cut, (*range(outer), *order))
    b.pinned.update(b.axes.resolve(tuple(a for dim in parts.dims[-spatial:] for a in dim)))
    return parts


def _in_windows(b: Builder, x: Value, windows: Windows, neutral: float) -> Value:
    """The elements of every window, in dimensions behind those of the windows."""
    if windows.each_once:
        return _parts(b, x, windows.counts, windows.kernel)
    outer = len(x.dims) - len(windows.sizes)
    over: list[AxisList] = []
    within: list[AxisList] = []
    wheres: dict[int, int] = {}
    inside = None
    for d, size in enumerate(windows.sizes):
        over.append(b.new_axis(windows.counts[d]))
        within.append(b.new_axis(windows.kernel[d]))
        tap = b.reckon("mul", b.place(within[d]), b.whole(windows.dilation[d]))
        where = b.reckon("add", _start(b, windows, d, over[d]), tap)
        here = b.within(where, size, windows.pad[d] > 0, windows.end(d) > size)
        inside, wheres[outer + d] = b.both(inside, here), where
    found = b.pull_all(x, wheres, (*x.dims[:outer], *over, *within), inside)
    chosen = b.choose(inside, found.id, b.const(neutral, x.dtype).id)
    return b.seen(chosen, found.dims, x.logical)


def _start(b: Builder, windows: Windows, d: int, axes: AxisList) -> int:
    """The first position of each window, which may lie outside the operand."""
    ahead = b.reckon("mul", b.place(axes), b.whole(windows.stride[d]))
    return b.reckon("sub", ahead, b.whole(windows.pad[d]))


def _last(spatial: int) -> tuple[int, ...]:
    return tuple(range(-spatial, 0))


def _max_pool(
    b: Builder,
    x: Value,
    spatial: int,
    kernel: Arg,
    stride: Arg = (),
    pad: Arg = 0,
    dilation: Arg = 1,
    ceil_mode: bool = False,
) -> tuple[Value, None]:
    windows = _laid(b, x, spatial, kernel, stride, pad, dilation)
    return b.reduce("max", _in_windows(b, x, windows, -math.inf), _last(spatial)), None


def _avg_pool(
    b: Builder,
    x: Value,
    spatial: int,
    kernel: Arg,
    stride: Arg = (),
    pad: Arg = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    windows = _laid(b, x, spatial, kernel, stride, pad)
    total = b.reduce("sum", _in_windows(b, x, windows, 0.0), _last(spatial))
    if divisor_override:
        return total / divisor_override
    return total / _averaged(b, x, windows, total.dims[-spatial:], count_include_pad)


def _averaged(b: Builder, x: Value, windows: Windows, over: Dims, padding: bool) -> Value | int:
    """The number of elements of each window that count."""
    count = b.whole(1)
    for d, size in enumerate(windows.sizes):
        pad, extent = windows.pad[d], windows.kernel[d]
        low, high = (-pad, size + pad) if padding else (0, size)
        found = b.whole(extent)
        if low > -pad or windows.end(d) > high:
            start = _start(b, windows, d, over[d])
            end = b.reckon("minimum", b.reckon("add", start, b.whole(extent)), b.whole(high))
            before = b.reckon("lt", start, b.whole(low))
            found = b.reckon("sub", end, b.choose(before, b.whole(low), start))
        count = b.reckon("mul", count, found)
    known = b.known(count)
    if known is not None:
        return known
    outer: Dims = ((),) * (len(x.dims) - len(over))
    return b.reckoned(count, (*outer, *over), x.dtype)


def _register(spatial: int) -> None:
    """Register the pooling ops over a number of spatial dimensions."""

    def window(
        *names: str, traffic: Traffic | None = None, flops: Formula, sized: bool = False
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        sizes = {1: f"{{shape}}[-{spatial} :]"} if sized else None
        return meaning_of("window", *names, inputs="raw", traffic=traffic, flops=flops, sizes=sizes)

    @window(
        f"aten.max_pool{spatial}d_with_indices.default",
        f"aten.max_pool{spatial}d.default",
        traffic=_pooling(spatial, True),
        flops=_window_flops(spatial),
    )
    def max_pool(b: Builder, x: Value, *args: Any, **kwargs: Any) -> tuple[Value, None]:
        return _max_pool(b, x, spatial, *args, **kwargs)

    @window(
        f"aten.avg_pool{spatial}d.default",
        traffic=_pooling(spatial, False),
        flops=_window_flops(spatial),
    )
    def avg_pool(b: Builder, x: Value, *args: Any, **kwargs: Any) -> Value:
        return _avg_pool(b, x, spatial, *args, **kwargs)

    private = [f"aten._adaptive_avg_pool{spatial}d.default"] if spatial > 1 else []

    @window(
        *private,
        f"aten.adaptive_avg_pool{spatial}d.default",
        flops=lambda call: call.operand(0).numel,
        sized=True,
    )
    def adaptive_avg(b: Builder, x: Value, size: Arg) -> Value:
        cut = _evenly(b, x, spatial)
        return b.reduce("sum", cut, _last(spatial)) / math.prod(cut.shape[-spatial:])

    @window(
        f"aten.adaptive_max_pool{spatial}d.default",
        flops=lambda call: call.operand(0).numel,
        sized=True,
    )
    def adaptive_max(b: Builder, x: Value, size: Arg) -> tuple[Value, None]:
        return b.reduce("max", _evenly(b, x, spatial), _last(spatial)), None


def _evenly(b: Builder, x: Value, spatial: int) -> Value:
    """The last dimensions split into the parts of an adaptive pooling."""
    sizes, counts = x.shape[-spatial:], shape_of(b)[-spatial:]
    if any(size % count for size, count in zip(sizes, counts, strict=True)):
        raise NotExpressible("an adaptive pooling whose windows differ in size")
    floats_only(x, "a pooling of integers")
    parts = _parts(b, x, counts, [size // n for size, n in zip(sizes, counts, strict=True)])
    b.pin(parts.dims[-2 * spatial : -spatial])  # how many is an argument
    return parts


for _spatial in (1, 2, 3):
    _register(_spatial)
