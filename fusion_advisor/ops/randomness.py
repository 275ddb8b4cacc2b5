"""Random numbers: a function of seed, offset and the element's number (see `region.random`).

The bits differ from torch's own, which depend on how its kernels are launched; the distribution is
the same. The references draw the same bits as the meanings, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import formula, random
from fusion_advisor.region.axes import Dims, NotExpressible
from fusion_advisor.region.builder import Builder, Scalar, Value, compute_dtype
from fusion_advisor.region.random import DIGITS, threshold

# -- bits as numbers -------------------------------------------------------------------------------


def _chance(b: Builder, dims: Dims, p: float) -> Value:
    """A bool that is True with probability p, to 2**-32."""
    bits = b.random("random16", dims)
    return bits >= threshold(1.0 - p) if p else _filled(b, dims, False, "bool")


def _filled(b: Builder, dims: Dims, value: Scalar, dtype: str) -> Value:
    return replace(b.const(value, dtype), dims=dims)


def _digits(b: Builder, dims: Dims, digits: int) -> Value:
    """A random integer of so many binary digits, in the float type that holds it."""
    bits = b.random("random32", dims)
    if digits <= DIGITS["float32"]:
        return b.cast(b.apply("and", bits, 2**digits - 1), "float32")
    above, below = bits, b.random("random32", dims)
    first = b.cast(b.apply("and", above, 2 ** (digits - 26) - 1), "float64")
    return first * 2.0**26 + b.cast(b.apply("and", below, 2**26 - 1), "float64")


def _uniform(b: Builder, dims: Dims, dtype: str) -> Value:
    """Uniform numbers in [0, 1)."""
    if dtype not in DIGITS:
        raise NotExpressible(f"random numbers in {dtype}")
    return _digits(b, dims, DIGITS[dtype]) * 2.0 ** -DIGITS[dtype]


def _between(b: Builder, dims: Dims, dtype: str) -> Value:
    """Uniform numbers in (0, 1)."""
    digits = DIGITS[dtype]
    return (_digits(b, dims, digits - 1) * 2.0 + 1.0) * 2.0**-digits


def _normal(b: Builder, dims: Dims, dtype: str) -> Value:
    """Normal numbers, from pairs of uniform numbers (Box and Muller)."""
    radius = b.apply("sqrt", b.apply("log", _between(b, dims, dtype)) * -2.0)
    return radius * b.apply("cos", _uniform(b, dims, dtype) * (2.0 * math.pi))


def _out(b: Builder) -> tuple[Dims, str]:
    """Dimensions and dtype of the result of a creation."""
    assert b.out is not None
    return b.full(b.out.shape, 0, "int32").dims, b.out.dtype


def _held(dtype: str) -> str:
    """The float type in which the random numbers of a dtype are computed."""
    if dtype not in DIGITS:
        raise NotExpressible(f"random numbers in {dtype}")
    return compute_dtype(dtype)


# -- dropout ---------------------------------------------------------------------------------------


@random(
    "aten.native_dropout.default",
    reference="dropped({0}, <random16>, {1})",
    reads=True,
    flops=lambda call: 2 * call.operand(0).numel,
)
def native_dropout(
    b: Builder, x: Value, p: float, train: bool | None = True
) -> tuple[Value, Value]:
    """Dropout and its mask. A dropped NaN or infinity becomes NaN, as in eager; with p = 1 eager
    writes zeros."""
    if train is False:
        raise NotExpressible("dropout that drops nothing")
    bits = b.random("random16", x.dims)
    if p == 1:
        return _filled(b, x.dims, 0, x.logical), _filled(b, x.dims, False, "bool")
    kept = bits >= threshold(p)
    factor = b.apply("where", kept, b.const(1.0 / (1.0 - p), x.dtype), 0.0)
    return x * factor, kept


@random(
    "aten.bernoulli.p",
    "aten.bernoulli_.float",
    reference="laid_out(chance(<random16>, {1}), {0}, {dtype})",
)
def bernoulli(b: Builder, x: Value, p: float = 0.5, **_: Arg) -> Value:
    return b.cast(_chance(b, x.dims, p), b.out.dtype if b.out else x.logical)


@random(
    "aten.bernoulli.default",
    reference="laid_out(<uniform> < {0}, {0}, {dtype})",
    discrete=True,
    reads=True,
)
def bernoulli_of(b: Builder, p: Value, **_: Arg) -> Value:
    return b.cast(_uniform(b, p.dims, _held(p.logical)) < p, p.logical)


# -- numbers ---------------------------------------------------------------------------------------


@random("aten.rand.default", reference="<rand>.to({dtype})")
def rand(b: Builder, shape: Sequence[int], **_: Arg) -> Value:
    return _uniform(b, *_out(b))


@random("aten.rand_like.default", reference="laid_out(<rand>, {0}, {dtype})")
def rand_like(b: Builder, x: Value, **_: Arg) -> Value:
    assert b.out is not None
    return _uniform(b, x.dims, b.out.dtype)


@random(
    "aten.uniform_.default",
    "aten.uniform.default",
    reference="laid_out(<rand> * ({2} - {1}) + {1}, {0}, {dtype})",
)
def uniform(b: Builder, x: Value, low: float = 0.0, high: float = 1.0, **_: Arg) -> Value:
    return _uniform(b, x.dims, x.logical) * (high - low) + low


@random("aten.randn.default", reference="normal(<between>, <uniform>).to({dtype})")
def randn(b: Builder, shape: Sequence[int], **_: Arg) -> Value:
    dims, dtype = _out(b)
    return _normal(b, dims, _held(dtype))


@random("aten.randn_like.default", reference="laid_out(normal(<between>, <uniform>), {0}, {dtype})")
def randn_like(b: Builder, x: Value, **_: Arg) -> Value:
    assert b.out is not None
    return _normal(b, x.dims, _held(b.out.dtype))


@random(
    "aten.normal_.default",
    "aten.normal_functional.default",
    reference="laid_out(normal(<between>, <uniform>) * {2} + {1}, {0}, {dtype})",
)
def normal(b: Builder, x: Value, mean: float = 0.0, deviation: float = 1.0, **_: Arg) -> Value:
    return _normal(b, x.dims, _held(x.logical)) * deviation + mean


@random(
    "aten.normal.float_float",
    reference="(normal(<between>, <uniform>) * {1} + {0}).to({dtype})",
)
def normal_of(b: Builder, mean: float, deviation: float, shape: Any, **_: Arg) -> Value:
    dims, dtype = _out(b)
    return _normal(b, dims, _held(dtype)) * deviation + mean


@random(
    "aten.exponential_.default",
    "aten.exponential.default",
    reference="laid_out(torch.log(<between>) / -{1}, {0}, {dtype})",
)
def exponential(b: Builder, x: Value, rate: float = 1.0, **_: Arg) -> Value:
    return b.apply("log", _between(b, x.dims, _held(x.logical))) / -float(rate)


formula(
    "random",
    "aten.randint.low",
    "aten.randint.default",
    "aten.randperm.default",
    traffic=lambda call: (0, call.out.bytes),
)
formula("random", "aten.bernoulli_.Tensor", traffic=lambda call: (0, call.out.bytes))
formula("random", "aten.multinomial.default")
