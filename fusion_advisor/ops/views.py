"""Views: other dimensions over the same elements. The consumer pulls its element through them.

A view that keeps only some elements (`slice`, `select`, `split`) is a strided input when a region
reads it; inside a region it has no meaning yet unless it keeps everything.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.ops.registry import view
from fusion_advisor.records import Arg
from fusion_advisor.region import Builder, NotExpressible, Value


def _shape(b: Builder) -> tuple[int, ...]:
    assert b.out is not None
    return b.out.shape


@view(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    sizes={1: "{shape}"},
)
def reshape(b: Builder, x: Value, *_: Arg, **__: Arg) -> Value:
    return b.reshape(x, _shape(b))


@view(
    "aten.unsqueeze.default",
    "aten.unsqueeze_.default",
    "aten.squeeze_.dim",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
)
def resized(b: Builder, x: Value, *_: Arg, **__: Arg) -> Value:
    return b.reshape(x, _shape(b))


@view("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default")
def alias(b: Builder, x: Value) -> Value:
    return x


@view("aten.permute.default")
def permute(b: Builder, x: Value, order: Sequence[int]) -> Value:
    return b.permute(x, order)


@view("aten.transpose.int")
def transpose(b: Builder, x: Value, first: int, second: int) -> Value:
    order = list(range(len(x.dims)))
    order[first], order[second] = order[second], order[first]
    return b.permute(x, order)


@view("aten.t.default")
def t(b: Builder, x: Value) -> Value:
    return b.permute(x, tuple(reversed(range(len(x.dims)))))


@view("aten.expand.default", sizes={1: "{shape}"})
def expand(b: Builder, x: Value, shape: Sequence[int], implicit: bool = False) -> Value:
    return b.expand(x, shape)


@view("aten.slice.Tensor", sizes={3: "9223372036854775807"})
@view("aten.select.int")
def part(b: Builder, x: Value, *_: Arg, **__: Arg) -> Value:
    if _shape(b) == x.shape:
        return x
    if [n for n in _shape(b) if n != 1] == [n for n in x.shape if n != 1]:
        return b.reshape(x, _shape(b))
    raise NotExpressible("a slice of a value that the region computes")
