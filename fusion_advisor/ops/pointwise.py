"""Ops that compute each element of the result from the elements at the same place."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ir.graph import DTYPE_BYTES, Arg, GivenNumber
from fusion_advisor.ops.registry import Call, Meaning, meaning_of, pointwise
from fusion_advisor.ops.views import parts
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.region.builder import (
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    Builder,
    Scalar,
    Value,
    floats_only,
    rounded,
)

Operand = Value | Scalar
_LARGEST = {
    "float16": 65504.0,
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float32": (2 - 2**-23) * 2.0**127,
    "float64": sys.float_info.max,
}

_EITHER = ("Tensor", "Scalar")
_ALIKE = (
    "abs",
    "neg",
    "exp",
    "exp2",
    "log",
    "log2",
    "sqrt",
    "rsqrt",
    "sin",
    "cos",
    "sigmoid",
    "erf",
    "erfc",
    "erfinv",
    "expm1",
    "log1p",
    "log10",
    "tan",
    "tanh",
    "asin",
    "acos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "acosh",
    "atanh",
    "lgamma",
    "atan2",
    "hypot",
    "maximum",
    "minimum",
)
"""Primitives that are called as the op is."""
_PRIMITIVES = {
    **{f"aten.{name}.default": name for name in _ALIKE},
    **{f"aten.clamp_min.{of}": "maximum" for of in ("default", "Tensor")},
    **{f"aten.clamp_max.{of}": "minimum" for of in ("default", "Tensor")},
    **{f"aten.bitwise_{name}.{of}": name for name in ("and", "or", "xor") for of in _EITHER},
    "aten.bitwise_not.default": "not",
}
"""Ops that are one primitive of their operands."""

for _overload, _name in _PRIMITIVES.items():

    def _same(b: Builder, *operands: Operand, _op: str = _name) -> Value:
        return b.apply(_op, *operands)

    pointwise(_overload)(_same)

for _name in ["floor", "ceil", "trunc"]:

    def _step(b: Builder, x: Value, _op: str = _name) -> Value:
        return b.apply(_op, x) if x.logical in FLOAT_DTYPES else x

    pointwise(f"aten.{_name}.default", discrete=True)(_step)


@pointwise("aten.round.default", discrete=True)
def round_half_even(b: Builder, x: Value) -> Value:
    return b.apply("rint", x) if x.logical in FLOAT_DTYPES else x


@pointwise("aten.frac.default", discrete=True)
def frac(b: Builder, x: Value) -> Value:
    return x - b.apply("trunc", x)


@pointwise("aten.add.Tensor", "aten.add.Scalar")
def add(b: Builder, x: Value, y: Operand, alpha: Scalar = 1) -> Value:
    if x.dtype == "bool":
        return b.apply("or", x, y)
    return x + (
        y if alpha == 1 else b.apply("mul", y, alpha) if isinstance(y, Value) else y * alpha
    )


@pointwise("aten.sub.Tensor", "aten.sub.Scalar")
def sub(b: Builder, x: Value, y: Operand, alpha: Scalar = 1) -> Value:
    return x - (
        y if alpha == 1 else b.apply("mul", y, alpha) if isinstance(y, Value) else y * alpha
    )


@pointwise("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(b: Builder, x: Value, y: Operand, alpha: Scalar = 1) -> Value:
    return b.apply("sub", y, x if alpha == 1 else x * alpha)


@pointwise("aten.mul.Tensor", "aten.mul.Scalar")
def mul(b: Builder, x: Value, y: Operand) -> Value:
    return b.apply("and", x, y) if x.dtype == "bool" else x * y


def _floor_mod(b: Builder, x: Value, y: Operand) -> Value:
    """Python's remainder, with the sign of the divisor."""
    floats_only(x, "an integer remainder")
    rest = b.apply("fmod", x, y)
    signs_differ = b.apply("lt", b.apply("mul", rest, y), 0.0)
    return b.apply("where", signs_differ, b.apply("add", rest, y), rest)


def _inverse(number: Scalar) -> float:
    """The reciprocal of a divisor; an infinity for zero."""
    if isinstance(number, GivenNumber):
        return number.reciprocal
    return 1.0 / number if number else math.copysign(math.inf, number)


@pointwise("aten.div.Tensor", "aten.div.Scalar")
def div(b: Builder, x: Value, y: Operand) -> Value:
    """A number is inverted once, in float64, and multiplied with, as CUDA's kernel does."""
    return x / y if isinstance(y, Value) else x * _inverse(y)


@pointwise("aten.div.Tensor_mode", "aten.div.Scalar_mode", discrete=True)
def div_mode(b: Builder, x: Value, y: Operand, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(b, x, y)
    floats_only(x, "an integer division with rounding")
    return _floor_div(b, x, y) if rounding_mode == "floor" else b.apply("trunc", x / y)


def _floor_div(b: Builder, x: Value, y: Operand) -> Value:
    """Floor division as eager does it: from the exact remainder, so that no rounding of the
    quotient crosses a step; a zero has the sign of the quotient."""
    rest = b.apply("fmod", x, y)
    quotient = (x - rest) / y
    below = b.apply("lt", b.apply("mul", rest, y), 0.0)
    whole = b.apply("rint", b.apply("where", below, quotient - 1.0, quotient))
    zero = b.apply("mul", x / y, 0.0)
    whole = b.apply("where", b.apply("eq", whole, 0.0), zero, whole)
    if not isinstance(y, Value):
        return whole if y else x / y
    return b.apply("where", b.apply("eq", y, 0.0), x / y, whole)


@pointwise("aten.remainder.Scalar", "aten.remainder.Tensor", discrete=True)
def remainder(b: Builder, x: Value, y: Operand) -> Value:
    return _floor_mod(b, x, y)


@pointwise("aten.fmod.Scalar", "aten.fmod.Tensor", discrete=True)
def fmod(b: Builder, x: Value, y: Operand) -> Value:
    floats_only(x, "an integer remainder")
    return b.apply("fmod", x, y)


@pointwise("aten.floor_divide.default", discrete=True)
def floor_divide(b: Builder, x: Value, y: Operand) -> Value:
    floats_only(x, "an integer division with rounding")
    return _floor_div(b, x, y)


@pointwise("aten.reciprocal.default")
def reciprocal(b: Builder, x: Value) -> Value:
    return 1.0 / x


@pointwise("aten.square.default")
def square(b: Builder, x: Value) -> Value:
    return x * x


@pointwise("aten.pow.Tensor_Scalar")
def pow_scalar(b: Builder, x: Value, exponent: Scalar) -> Value:
    """Power with a scalar exponent. The special cases are those of eager's own kernel."""
    if exponent == 2:
        return x * x
    if exponent == 3:
        return x * x * x
    if exponent == 1:
        return x
    floats_only(x, "an integer power")
    if exponent == 0.5:
        return b.apply("sqrt", x)
    if exponent == -0.5:
        return b.apply("rsqrt", x)
    if exponent == -1:
        return 1.0 / x
    if exponent == -2:
        return 1.0 / (x * x)
    return b.apply("pow", x, exponent)


@pointwise("aten.pow.Tensor_Tensor")
def pow_tensor(b: Builder, x: Value, exponent: Value) -> Value:
    floats_only(x, "an integer power")
    return b.apply("pow", x, exponent)


@pointwise("aten.pow.Scalar")
def pow_of_scalar(b: Builder, base: Scalar, exponent: Value) -> Value:
    floats_only(exponent, "an integer power")
    return b.apply("pow", base, exponent)


@pointwise("aten.xlogy.Tensor")
def xlogy(b: Builder, x: Value, y: Operand) -> Value:
    """x log(y): 0 where `x` is 0, but NaN where `y` is NaN."""
    of = y if isinstance(y, Value) else b.const(y, x.logical)
    found = b.apply("where", b.apply("eq", x, 0.0), 0.0, x * b.apply("log", of))
    return b.apply("where", b.apply("ne", of, of), math.nan, found)


@pointwise("aten.logaddexp.default")
def logaddexp(b: Builder, x: Value, y: Value) -> Value:
    """log(exp(x) + exp(y)) from the larger one; of two equal infinities, that."""
    larger = b.apply("maximum", x, y)
    found = larger + b.apply("log1p", b.apply("exp", -b.apply("abs", x - y)))
    same = b.apply("and", b.apply("eq", x, y), b.apply("eq", b.apply("abs", x), math.inf))
    return b.apply("where", same, x, found)


@pointwise("aten.sinc.default")
def sinc(b: Builder, x: Value) -> Value:
    angle = x * math.pi
    return b.apply("where", b.apply("eq", x, 0.0), 1.0, b.apply("sin", angle) / angle)


@pointwise("aten.heaviside.default", discrete=True)
def heaviside(b: Builder, x: Value, at_zero: Value) -> Value:
    step = b.cast(x > 0, x.logical)
    return b.apply("where", b.apply("eq", x, 0), at_zero, step)


@pointwise("aten.nan_to_num.default")
def nan_to_num(
    b: Builder,
    x: Value,
    nan: Scalar | None = None,
    posinf: Scalar | None = None,
    neginf: Scalar | None = None,
) -> Value:
    """Numbers in the place of NaN and infinities: 0 and the largest of the dtype, if not given."""
    if x.logical not in FLOAT_DTYPES:
        return x
    largest = _LARGEST[x.logical]
    high = b.apply("where", b.apply("eq", x, math.inf), largest if posinf is None else posinf, x)
    low = -largest if neginf is None else neginf
    both = b.apply("where", b.apply("eq", x, -math.inf), low, high)
    return b.apply("where", b.apply("ne", x, x), nan or 0.0, both)


@pointwise("aten.sign.default", "aten.sgn.default", discrete=True)
def sign(b: Builder, x: Value) -> Value:
    if x.dtype in ("bool", "uint8"):
        return b.cast(x > 0, x.logical)
    positive = b.apply("where", x > 0, 1, b.apply("where", x < 0, -1, b.const(0, x.logical)))
    return b.cast(positive, x.logical)


# -- activations -----------------------------------------------------------------------------------


@pointwise("aten.relu.default")
def relu(b: Builder, x: Value) -> Value:
    return b.apply("maximum", x, 0)


@pointwise("aten.relu6.default")
def relu6(b: Builder, x: Value) -> Value:
    return b.apply("minimum", b.apply("maximum", x, 0), 6)


@pointwise("aten.hardtanh.default")
def hardtanh(b: Builder, x: Value, low: Scalar = -1, high: Scalar = 1) -> Value:
    return b.apply("minimum", b.apply("maximum", x, low), high)


@pointwise("aten.leaky_relu.default")
def leaky_relu(b: Builder, x: Value, slope: Scalar = 0.01) -> Value:
    return b.apply("where", x > 0, x, x * slope)


@pointwise("aten._prelu_kernel.default")
def prelu(b: Builder, x: Value, weight: Value) -> Value:
    return b.apply("where", x > 0, x, x * weight)


@pointwise("aten.threshold.default", discrete=True)
def threshold(b: Builder, x: Value, limit: Scalar, value: Scalar) -> Value:
    """Threshold as CUDA's kernel does it: the CPU's rounds the limit to float32 alone."""
    assert b.out is not None
    return b.apply("where", x <= rounded(limit, b.out.dtype), value, x)


@pointwise("aten.elu.default")
def elu(
    b: Builder, x: Value, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1
) -> Value:
    below = b.apply("expm1", x if input_scale == 1 else x * input_scale) * (alpha * scale)
    return b.apply("where", x > 0, x if scale == 1 else x * scale, below)


@pointwise("aten.celu.default")
def celu(b: Builder, x: Value, alpha: Scalar = 1.0) -> Value:
    return elu(b, x, alpha, 1, 1.0 / alpha)


@pointwise("aten.selu.default")
def selu(b: Builder, x: Value) -> Value:
    return elu(b, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@pointwise("aten.gelu.default")
def gelu(b: Builder, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + b.apply("tanh", inner))
    return x * 0.5 * (1.0 + b.apply("erf", x * math.sqrt(0.5)))


@pointwise("aten.silu.default")
def silu(b: Builder, x: Value) -> Value:
    return x * b.apply("sigmoid", x)


@meaning_of("pointwise", "aten.glu.default", flops=lambda call: 5 * call.out.numel)
def glu(b: Builder, x: Value, dim: int = -1) -> Value:
    half = x.shape[dim] // 2
    value, gate = parts(b, x, (half, half), dim)
    return value * b.apply("sigmoid", gate)


@pointwise("aten.mish.default")
def mish(b: Builder, x: Value) -> Value:
    """x tanh(log(1 + e)), e = exp(x). The tanh is n / (n + 2) with n = e (e + 2): one exponential
    and one division. Beyond x = 20 it is 1 even in float64."""
    e = b.apply("exp", b.apply("minimum", x, 20.0))
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


@pointwise("aten.softplus.default")
def softplus(b: Builder, x: Value, beta: Scalar = 1, limit: Scalar = 20) -> Value:
    scaled = x if beta == 1 else x * beta
    value = b.apply("log1p", b.apply("exp", scaled))
    return b.apply("where", scaled > limit, x, value if beta == 1 else value / beta)


@pointwise("aten.hardsigmoid.default")
def hardsigmoid(b: Builder, x: Value) -> Value:
    return b.apply("minimum", b.apply("maximum", x + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@pointwise("aten.hardswish.default")
def hardswish(b: Builder, x: Value) -> Value:
    return x * b.apply("minimum", b.apply("maximum", x + 3.0, 0.0), 6.0) * (1.0 / 6.0)


@pointwise("aten.log_sigmoid_forward.default")
def log_sigmoid(b: Builder, x: Value) -> tuple[Value, None]:
    return b.apply("minimum", x, 0.0) - b.apply("log1p", b.apply("exp", -b.apply("abs", x))), None


@pointwise("aten.softshrink.default")
def softshrink(b: Builder, x: Value, limit: Scalar = 0.5) -> Value:
    below = b.apply("where", x < -limit, x + limit, 0.0 * x)
    return b.apply("where", x > limit, x - limit, below)


@pointwise("aten.hardshrink.default", discrete=True)
def hardshrink(b: Builder, x: Value, limit: Scalar = 0.5) -> Value:
    assert b.out is not None
    limit = rounded(limit, b.out.dtype)
    inside = b.apply("and", x >= -limit, x <= limit)
    return b.apply("where", inside, 0.0, x)


# -- selection and clamping ------------------------------------------------------------------------


@pointwise("aten.fmax.default")
def fmax(b: Builder, x: Value, y: Value) -> Value:
    """The larger number; of a number and a NaN, the number."""
    return _number(b, x, y, b.apply("maximum", x, y))


@pointwise("aten.fmin.default")
def fmin(b: Builder, x: Value, y: Value) -> Value:
    """The smaller number; of a number and a NaN, the number."""
    return _number(b, x, y, b.apply("minimum", x, y))


def _number(b: Builder, x: Value, y: Value, chosen: Value) -> Value:
    """`chosen`, or the other operand where one is NaN."""
    if x.logical not in FLOAT_DTYPES:
        return chosen
    there = b.apply("where", b.apply("ne", x, x), y, chosen)
    return b.apply("where", b.apply("ne", y, y), x, there)


@pointwise("aten.clamp.default", "aten.clamp.Tensor")
def clamp(b: Builder, x: Value, min: Operand | None = None, max: Operand | None = None) -> Value:
    low = x if min is None else b.apply("maximum", x, min)
    return low if max is None else b.apply("minimum", low, max)


@pointwise("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", inputs="raw")
def where(b: Builder, condition: Value, x: Operand, y: Operand) -> Value:
    assert b.out is not None
    chosen = [
        b.cast(v, b.out.dtype) if isinstance(v, Value) else b.const(v, b.out.dtype) for v in (x, y)
    ]
    return b.apply("where", condition, *chosen)


@pointwise("aten.masked_fill.Scalar", "aten.masked_fill.Tensor", inputs="raw")
def masked_fill(b: Builder, x: Value, mask: Value, value: Operand) -> Value:
    filling = b.cast(value, x.logical) if isinstance(value, Value) else b.const(value, x.logical)
    return b.apply("where", mask, filling, x)


@pointwise("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(b: Builder, x: Value, end: Value, weight: Operand) -> Value:
    """Linear interpolation as eager does it: from the nearer end."""
    if isinstance(weight, Value):
        near = b.apply("lt", b.apply("abs", weight), 0.5)
        return b.apply("where", near, x + weight * (end - x), end - (end - x) * (1.0 - weight))
    if abs(weight) < 0.5:
        return x + weight * (end - x)
    return end - (end - x) * (1.0 - weight)


@pointwise("aten.addcmul.default")
def addcmul(b: Builder, x: Value, t1: Value, t2: Value, value: Scalar = 1) -> Value:
    if isinstance(value, float):
        floats_only(x, "integers times a fraction")
    product = t1 * t2
    return x + (product if value == 1 else product * value)


@pointwise("aten.addcdiv.default")
def addcdiv(b: Builder, x: Value, t1: Value, t2: Value, value: Scalar = 1) -> Value:
    quotient = t1 / t2
    return x + (quotient if value == 1 else quotient * value)


# -- comparisons and logic: steps, never rounded differently than eager ----------------------------


def _in_one_dtype(b: Builder, x: Value, y: Operand) -> tuple[Value, Operand]:
    """Both sides of a comparison as eager rounds them: numbers, and tensors without dimensions, to
    the dtype of the tensor that they are compared with."""
    if not isinstance(y, Value):
        return x, rounded(y, x.logical)
    if x.logical in FLOAT_DTYPES and y.logical in FLOAT_DTYPES and bool(x.dims) != bool(y.dims):
        dtype = (x if x.dims else y).logical
        return b.convert(x, dtype), b.convert(y, dtype)
    return x, y


for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:

    def _compared(b: Builder, x: Value, y: Operand, _op: str = _name) -> Value:
        return b.apply(_op, *_in_one_dtype(b, x, y))

    pointwise(f"aten.{_name}.Tensor", f"aten.{_name}.Scalar", inputs="raw", discrete=True)(
        _compared
    )

for _aten, _name in (("logical_and", "and"), ("logical_or", "or"), ("logical_xor", "xor")):

    def _logical(b: Builder, x: Value, y: Value, _op: str = _name) -> Value:
        return b.apply(_op, _truth(b, x), _truth(b, y))

    pointwise(f"aten.{_aten}.default", inputs="raw", discrete=True)(_logical)

for _aten, _name in (("lshift", "shl"), ("rshift", "shr")):

    def _shifted(b: Builder, x: Value, by: Operand, _op: str = _name) -> Value:
        """Bits moved. By more than there are, or fewer than none, nothing is left but the sign."""
        if x.logical not in INTEGER_DTYPES:
            raise NotExpressible(f"a shift of {x.logical}")
        most = 8 * DTYPE_BYTES[x.logical] - 1
        if not isinstance(by, Value):
            if not 0 <= by <= most:
                raise NotExpressible(f"a shift of {x.logical} by {by}")
            return b.apply(_op, x, by)
        within = b.apply("and", by >= 0, by <= most)
        signed = _op == "shr" and x.logical != "uint8"
        moved = b.apply(_op, x, b.apply("where", within, by, most))
        return moved if signed else b.apply("where", within, moved, 0)

    meaning_of("pointwise", f"aten.__{_aten}__.Tensor", f"aten.__{_aten}__.Scalar")(_shifted)


def _truth(b: Builder, x: Value) -> Value:
    return x if x.dtype == "bool" else b.apply("ne", x, 0)


@pointwise("aten.logical_not.default", inputs="raw", discrete=True)
def logical_not(b: Builder, x: Value) -> Value:
    return b.apply("not", x) if x.dtype == "bool" else b.apply("eq", x, 0)


@pointwise("aten.isnan.default", inputs="raw")
def isnan(b: Builder, x: Value) -> Value:
    return b.apply("ne", x, x)


@pointwise("aten.isinf.default", inputs="raw")
def isinf(b: Builder, x: Value) -> Value:
    return b.apply("eq", b.apply("abs", x), math.inf)


@pointwise("aten.isposinf.default", inputs="raw")
def isposinf(b: Builder, x: Value) -> Value:
    return b.apply("eq", x, math.inf)


@pointwise("aten.isneginf.default", inputs="raw")
def isneginf(b: Builder, x: Value) -> Value:
    return b.apply("eq", x, -math.inf)


# -- copies and constants --------------------------------------------------------------------------


def _converted(b: Builder, x: Value) -> Value:
    """The value converted to the dtype of the node's result."""
    assert b.out is not None
    if b.out.dtype == "bool" and x.dtype != "bool":
        return b.apply("ne", x, 0)
    return b.convert(x, b.out.dtype)


@pointwise("aten._to_copy.default", inputs="raw")
def to_copy(b: Builder, x: Value, **_: Arg) -> Value:
    return _converted(b, x)


@pointwise(
    "aten.clone.default", "aten.lift_fresh_copy.default", "aten.alias_copy.default", inputs="raw"
)
def clone(b: Builder, x: Value, memory_format: Arg = None) -> Value:
    return x


def _overwritten(call: Call) -> tuple[int, int]:
    """HBM bytes of an op that writes its target and does not read it."""
    return addressed_bytes(call.operands[1:]), call.operand(0).bytes


def _overwriting(name: str) -> Callable[[Meaning], Meaning]:
    return meaning_of("pointwise", name, inputs="raw", also_in_place=True, traffic=_overwritten)


@_overwriting("aten.copy.default")
def copy(b: Builder, target: Value, source: Value, non_blocking: bool = False) -> Value:
    return replace(_converted(b, source), dims=b.broadcast([target.dims, source.dims]))


@_overwriting("aten.fill.Scalar")
def fill(b: Builder, target: Value, value: Scalar) -> Value:
    return replace(b.const(value, target.logical), dims=target.dims)


@_overwriting("aten.zero.default")
def zero(b: Builder, target: Value) -> Value:
    return fill(b, target, 0)
