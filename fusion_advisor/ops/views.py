"""Views: other dimensions over the same elements. The consumer reads its element through them.

A view of an input of the region is a strided input of the kernel; these meanings serve views of
values that the region computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import view
from fusion_advisor.region.axes import Dims, NotExpressible
from fusion_advisor.region.builder import Builder, Value

_TO_THE_END = 2**62
"""The end of a slice from which on it means "all"."""


def shape_of(b: Builder) -> tuple[int, ...]:
    """The shape of the node's first result."""
    assert b.out is not None
    return b.out.shape


def reshaped(b: Builder, x: Value, shape: Sequence[int]) -> Value:
    """The value regrouped; by the linear position of its elements where no axis can be
    split that way."""
    try:
        return b.reshape(x, shape)
    except NotExpressible:
        pass
    before, shape = x.shape, tuple(shape)
    pairs = list(zip(before, shape, strict=False))
    first = next((i for i, (m, n) in enumerate(pairs) if m != n), len(pairs))
    fresh: Dims = tuple(b.new_axis(size) for size in shape[first:])
    where = b.place(tuple(axis for dim in fresh for axis in dim))
    wheres: dict[int, int] = {}
    for dim in range(len(before) - 1, first - 1, -1):
        outer = b.reckon("floordiv", where, b.whole(before[dim]))
        inside = b.reckon("mod", where, b.whole(before[dim]))
        wheres[dim], where = where if dim == first else inside, outer
    return b.pull_all(x, wheres, (*x.dims[:first], *fresh))


def without(dims: Dims, dim: int) -> Dims:
    """All dimensions but one."""
    dim %= len(dims)
    return (*dims[:dim], *dims[dim + 1 :])


@view(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    sizes={1: "{shape}"},
)
def reshape(b: Builder, x: Value, *_: Arg, **__: Arg) -> Value:
    return reshaped(b, x, shape_of(b))


@view(
    "aten.unsqueeze.default",
    "aten.unsqueeze_.default",
    "aten.squeeze_.dim",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
)
def resized(b: Builder, x: Value, *_: Arg, **__: Arg) -> Value:
    return b.reshape(x, shape_of(b))


@view("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default")
def alias(b: Builder, x: Value) -> Value:
    return x


@view("aten.permute.default")
def permute(b: Builder, x: Value, order: Sequence[int]) -> Value:
    return b.permute(x, order)


@view("aten.transpose.int")
def transpose(b: Builder, x: Value, first: int, second: int) -> Value:
    if not x.dims:
        return x
    order = list(range(len(x.dims)))
    order[first], order[second] = order[second], order[first]
    return b.permute(x, order)


@view("aten.t.default")
def t(b: Builder, x: Value) -> Value:
    return b.permute(x, tuple(reversed(range(len(x.dims)))))


@view("aten.expand.default", sizes={1: "{shape}"})
def expand(b: Builder, x: Value, shape: Sequence[int], implicit: bool = False) -> Value:
    return b.expand(x, shape)


# -- parts -----------------------------------------------------------------------------------------


@view("aten.slice.Tensor")
def slice_(
    b: Builder, x: Value, dim: int = 0, start: int | None = 0, end: int | None = None, step: int = 1
) -> Value:
    """A slice. A start counted from the end, and an end that is a number, hold for one size alone,
    even where they cut nothing off."""
    whole, size = x.shape[dim], shape_of(b)[dim]
    if not size:
        raise NotExpressible("an empty slice")
    first = start or 0
    if first < 0 or (end is not None and end < _TO_THE_END):
        b.pin([x.dims[dim]])
    return b.slice(x, dim, max(0, first + whole if first < 0 else first), step, size)


@view("aten.select.int")
def select(b: Builder, x: Value, dim: int, index: int) -> Value:
    found = b.slice(x, dim, index % x.shape[dim], 1, 1)
    return replace(found, dims=without(found.dims, dim))


def parts(b: Builder, x: Value, sizes: Sequence[int], dim: int) -> tuple[Value, ...]:
    """A dimension split into parts."""
    if 0 in sizes:
        raise NotExpressible("an empty part")
    b.pin([x.dims[dim]])
    return tuple(b.slice(x, dim, sum(sizes[:n]), 1, size) for n, size in enumerate(sizes))


@view("aten.split.Tensor")
def split(b: Builder, x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    whole = x.shape[dim]
    return parts(b, x, [min(size, whole - first) for first in range(0, whole, size)], dim)


@view("aten.split_with_sizes.default")
def split_with_sizes(b: Builder, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    return parts(b, x, sizes, dim)


@view("aten.unbind.int")
def unbind(b: Builder, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(select(b, x, dim, index) for index in range(x.shape[dim]))


@view("aten.unfold.default")
def unfold(b: Builder, x: Value, dim: int, size: int, step: int) -> Value:
    """Windows over one dimension; the elements of a window are the last dimension."""
    if not x.dims:
        return resized(b, x)
    dim %= len(x.dims)
    window, inside = b.new_axis(shape_of(b)[dim]), b.new_axis(size)
    start = b.reckon("mul", b.place(window), b.whole(step))
    where = b.reckon("add", start, b.place(inside))
    return b.pull(x, dim, where, (*x.dims[:dim], window, *x.dims[dim + 1 :], inside))
