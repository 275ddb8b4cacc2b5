"""Tensors made from nothing: written once, read never. `empty` launches no kernel at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import creation, formula, nothing_read, pointwise
from fusion_advisor.region.builder import Builder, Scalar, Value


def _filled(b: Builder, value: Scalar) -> Value:
    assert b.out is not None
    return b.full(b.out.shape, value, b.out.dtype)


def _filled_like(b: Builder, x: Value, value: Scalar) -> Value:
    """A scalar over the dimensions of another value."""
    assert b.out is not None
    return replace(b.const(value, b.out.dtype), dims=x.dims)


@creation("aten.full.default", sizes={0: "{shape}"})
def full(b: Builder, shape: Sequence[int], value: Scalar, **_: Arg) -> Value:
    return _filled(b, value)


@creation("aten.scalar_tensor.default")
def scalar_tensor(b: Builder, value: Scalar, **_: Arg) -> Value:
    return _filled(b, value)


@creation("aten.full_like.default", traffic=nothing_read)
def full_like(b: Builder, x: Value, value: Scalar, **_: Arg) -> Value:
    return _filled_like(b, x, value)


@creation("aten.new_full.default", sizes={1: "{shape}"}, traffic=nothing_read)
def new_full(b: Builder, x: Value, shape: Sequence[int], value: Scalar, **_: Arg) -> Value:
    return _filled(b, value)


for _name, _number in (("zeros", 0), ("ones", 1)):

    @creation(f"aten.{_name}.default", sizes={0: "{shape}"})
    def _constant(b: Builder, shape: Sequence[int], _value: Scalar = _number, **_: Arg) -> Value:
        return _filled(b, _value)

    @creation(f"aten.{_name}_like.default", traffic=nothing_read)
    def _constant_like(b: Builder, x: Value, _value: Scalar = _number, **_: Arg) -> Value:
        return _filled_like(b, x, _value)

    @creation(f"aten.new_{_name}.default", sizes={1: "{shape}"}, traffic=nothing_read)
    def _new(
        b: Builder, x: Value, shape: Sequence[int], _value: Scalar = _number, **_: Arg
    ) -> Value:
        return _filled(b, _value)


def _ramp(b: Builder, start: Scalar, step: Scalar) -> Value:
    assert b.out is not None
    place = b.cast(b.index(b.out.shape[0]), b.out.dtype)
    scaled = place if step == 1 else place * step
    return scaled if start == 0 else scaled + start


@creation("aten.arange.default", sizes={0: "{size}"})
def arange(b: Builder, end: Scalar, **_: Arg) -> Value:
    return _ramp(b, 0, 1)


@creation("aten.arange.start", sizes={1: "{0} + {size}"})
def arange_start(b: Builder, start: Scalar, end: Scalar, **_: Arg) -> Value:
    return _ramp(b, start, 1)


@creation("aten.arange.start_step", sizes={1: "{0} + {size} * {2}"})
def arange_step(b: Builder, start: Scalar, end: Scalar, step: Scalar = 1, **_: Arg) -> Value:
    return _ramp(b, start, step)


@pointwise("aten.tril.default")
def tril(b: Builder, x: Value, diagonal: int = 0) -> Value:
    keep = b.index_of(x, -1) - b.index_of(x, -2) <= diagonal
    return b.apply("where", keep, x, 0)


@pointwise("aten.triu.default")
def triu(b: Builder, x: Value, diagonal: int = 0) -> Value:
    keep = b.index_of(x, -1) - b.index_of(x, -2) >= diagonal
    return b.apply("where", keep, x, 0)


formula(
    "allocation",
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.empty_permuted.default",
    traffic=lambda call: (0, 0),
)
formula(
    "creation",
    "aten.linspace.default",
    "aten.eye.default",
    "aten.eye.m",
    traffic=lambda call: (0, call.out.bytes),
)
