"""The scalar primitives of the region form: what each costs and how Triton spells it.

One entry a primitive. FLOPs follow the convention that an arithmetic step on one element is 1 FLOP
(a fused multiply-add is 2), and that comparisons, selects and conversions are 0. Every op's FLOPs
are the sum over the primitives of its meaning, so a formula stands in one place.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.region.random import KERNEL_HELPERS


@dataclass(frozen=True, slots=True)
class Primitive:
    """`text` is Triton for the operands `{0}`, `{1}`, `{2}`.

    `precise` replaces it where the result is stored as float32 and must be as good as CUDA's own
    math library; `double` replaces both for float64; `integer` for integers. `result` is the
    dtype of the result: that of the operands, or bool.
    `exact` primitives round once, exactly as eager's kernel does in the same dtype.
    """

    text: str
    flops: int = 1
    precise: str = ""
    double: str = ""
    integer: str = ""
    result: str = "operand"
    exact: bool = False
    scalar: str = ""
    """The form to use as `precise` where it is evaluated once a row only."""
    special: bool = False
    """Runs on the special-function unit (transcendentals)."""


def _binary(sign: str, flops: int = 1) -> Primitive:
    return Primitive(f"({{0}} {sign} {{1}})", flops, exact=True)


def _compare(sign: str) -> Primitive:
    return Primitive(f"({{0}} {sign} {{1}})", 0, result="bool", exact=True)


def _library(name: str, arity: int = 1) -> Primitive:
    operands = ", ".join(f"{{{i}}}" for i in range(arity))
    return Primitive(f"libdevice.{name}({operands})", special=True)


PRIMITIVES: dict[str, Primitive] = {
    "add": _binary("+"),
    "sub": _binary("-"),
    "mul": _binary("*"),
    "div": Primitive(
        "({0} / {1})", precise="tl.div_rn({0}, {1})", double="({0} / {1})", exact=True, special=True
    ),
    "floordiv": Primitive("({0} // {1})"),  # integers, truncating; builders correct the sign
    "mod": Primitive("({0} % {1})"),
    "neg": Primitive("(-{0})", exact=True),
    "abs": Primitive("tl.abs({0})", exact=True),
    "exp": Primitive(
        "tl.exp2({0} * 1.44269504)",  # tl.exp spends three more instructions on denormals
        precise="libdevice.exp({0})",
        double="libdevice.exp({0})",
        special=True,
    ),
    "exp2": Primitive(
        "tl.exp2({0})", precise="libdevice.exp2({0})", double="libdevice.exp2({0})", special=True
    ),
    "log": Primitive(
        "tl.log({0})", precise="libdevice.log({0})", double="libdevice.log({0})", special=True
    ),
    "log2": Primitive(
        "tl.log2({0})", precise="libdevice.log2({0})", double="libdevice.log2({0})", special=True
    ),
    "sqrt": Primitive(
        "tl.sqrt({0})", precise="tl.sqrt_rn({0})", double="tl.sqrt({0})", exact=True, special=True
    ),
    "rsqrt": Primitive(
        "tl.rsqrt({0})",
        double="libdevice.rsqrt({0})",
        scalar="tl.div_rn(1.0, tl.sqrt_rn({0}))",
        special=True,
    ),
    "sin": Primitive(
        "tl.sin({0})", precise="libdevice.sin({0})", double="libdevice.sin({0})", special=True
    ),
    "cos": Primitive(
        "tl.cos({0})", precise="libdevice.cos({0})", double="libdevice.cos({0})", special=True
    ),
    "sigmoid": Primitive(
        "(1.0 / (1.0 + tl.exp2({0} * -1.44269504)))",
        4,
        precise="logistic({0})",
        double="(1.0 / (1.0 + libdevice.exp(-{0})))",
        special=True,
    ),
    "floor": Primitive("tl.floor({0})", exact=True),
    "ceil": Primitive("tl.ceil({0})", exact=True),
    "rint": Primitive("libdevice.rint({0})", exact=True),
    "trunc": Primitive("libdevice.trunc({0})", exact=True),
    "maximum": Primitive(
        "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        integer="tl.maximum({0}, {1})",
        exact=True,
    ),
    "minimum": Primitive(
        "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
        integer="tl.minimum({0}, {1})",
        exact=True,
    ),
    "eq": _compare("=="),
    "ne": _compare("!="),
    "lt": _compare("<"),
    "le": _compare("<="),
    "gt": _compare(">"),
    "ge": _compare(">="),
    "and": _binary("&", 0),
    "or": _binary("|", 0),
    "xor": _binary("^", 0),
    "not": Primitive("(~{0})", 0, exact=True),
    "where": Primitive("tl.where({0}, {1}, {2})", 0, exact=True),
    "erf": Primitive(
        "narrow_erf({0})",
        precise="libdevice.erf({0})",
        double="libdevice.erf({0})",
        special=True,
    ),
    "erfc": _library("erfc"),
    "erfinv": _library("erfinv"),
    "expm1": _library("expm1"),
    "log1p": _library("log1p"),
    "log10": _library("log10"),
    "tan": _library("tan"),
    "tanh": Primitive(
        "narrow_tanh({0})",
        precise="libdevice.tanh({0})",
        double="libdevice.tanh({0})",
        special=True,
    ),
    "asin": _library("asin"),
    "acos": _library("acos"),
    "atan": _library("atan"),
    "sinh": _library("sinh"),
    "cosh": _library("cosh"),
    "asinh": _library("asinh"),
    "acosh": _library("acosh"),
    "atanh": _library("atanh"),
    "lgamma": _library("lgamma"),
    "pow": _library("pow", 2),
    "atan2": _library("atan2", 2),
    "fmod": _library("fmod", 2),
    "hypot": _library("hypot", 2),
    "copysign": Primitive("libdevice.copysign({0}, {1})", 0, exact=True),
}


@dataclass(frozen=True, slots=True)
class Monoid:
    """A reduction: its neutral element by dtype class.

    `helper` names the device function that combines two, where a language's own loses NaN or does
    not exist.
    """

    neutral: str
    helper: str = ""
    integer_neutral: str = ""
    flops: int = 1


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid("0.0", integer_neutral="0"),
    "max": Monoid("-inf", "max_nan", "lowest"),
    "min": Monoid("inf", "min_nan", "highest"),
    "prod": Monoid("1.0", "multiply", "1"),
    "argmax": Monoid("-inf", "first_max", "lowest"),
    "argmin": Monoid("inf", "first_min", "highest"),
}

_FIRST = """\
@triton.jit
def {name}(a, i, b, j):
    # NaN counts as the extreme; of equal ones the first.
    same = (a == b) | ((a != a) & (b != b))
    left = (a {sign} b) | ((a != a) & (b == b)) | (same & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)
"""

_TANH = """\
@triton.jit
def narrow_tanh(x):
    # Good to 16-bit results, relative error 2e-5: near zero, where the quotient cancels, a series.
    square = x * x
    far = 1.0 - libdevice.fast_dividef(2.0, tl.exp2(x * 2.88539008) + 1.0)
    return tl.where(square < 1e-4, x - x * square * 0.33333333, far)
"""
_ERF = """\
@triton.jit
def narrow_erf(x):
    # Good to 16-bit results, relative error 1e-5: erfc is 2 to the power of a polynomial fitted to
    # its logarithm; near zero, where 1 - erfc cancels, a series.
    square = x * x
    near = x * (1.1283792 + square * (-0.37612639 + square * 0.11283792))
    t = tl.minimum(tl.abs(x) * 1.4142135, 16.0)
    power = -1.8209877e-06 * t + 6.1363673e-05
    power = power * t - 0.00092898862
    power = power * t + 0.0085030086
    power = power * t - 0.053952299
    power = power * t - 0.45847011
    power = power * t - 1.1512495
    power = power * t - 0.99999535
    far = 1.0 - 2.0 * tl.exp2(power)
    return tl.where(square < 0.04, near, tl.where(x < 0, -far, tl.where(x == x, far, x)))
"""

_ONE_PLUS_ERF = """\
@triton.jit
def one_plus_erf(x):
    # 1 + erf(x) within an ulp of 1: erfc is 2 to the power of a polynomial fitted to its logarithm,
    # of odd degree, so that it goes to zero.
    t = tl.abs(x)
    power = -1.90930245e-06 * t + 3.2739048e-05
    power = power * t - 0.000249749079
    power = power * t + 0.00108669873
    power = power * t - 0.0026190686
    power = power * t + 0.000382207043
    power = power * t + 0.0275739934
    power = power * t - 0.148266196
    power = power * t - 0.918448389
    power = power * t - 1.62790704
    complement = tl.exp2(power * t)
    return tl.where(x < 0, complement, 2.0 - complement)
"""
_ONE_PLUS_TANH = """\
@triton.jit
def one_plus_tanh(x):
    # 1 + tanh(x) within an ulp of 1.
    return libdevice.fast_dividef(2.0, 1.0 + tl.exp2(x * -2.88539008))
"""
_LOGISTIC = """\
@triton.jit
def logistic(x):
    # 1 / (1 + exp(-x)) within 5 ulp: what rounding leaves out of the power is multiplied in again,
    # and is bounded for where the power is infinite.
    power = x * -1.44269504
    rest = tl.fma(x, -1.44269504, -power)
    rest = tl.clamp(tl.fma(x, -1.925963e-08, rest), -1.0, 1.0)
    power = tl.exp2(power) * tl.fma(rest, 0.69314718, 1.0)
    return libdevice.fast_dividef(1.0, 1.0 + power)
"""

_SHARE_OF = """\
@triton.jit
def share_of(x, total):
    # x / total as a division rounds it, where total is 1 at the least and x is none of the largest:
    # a quotient from the reciprocal, which a row has once, and what that leaves over.
    inverse = tl.div_rn(1.0, total)
    share = x * inverse
    return tl.fma(tl.fma(-share, total, x), inverse, share)
"""

LIBRARY = frozenset(
    name
    for name, primitive in PRIMITIVES.items()
    if "libdevice" in primitive.text + primitive.precise and not name.startswith("exp")
)
"""Functions of the math library whose code is long; the code of the exponential is short."""
LONG = LIBRARY | {"sigmoid"}
"""Primitives of many instructions, of the library or of this package."""

_FLOAT8_E5M2 = """\
@triton.jit
def as_float8_e5m2(x):
    # What rounds beyond the largest number is infinite to torch; the hardware stops there.
    bits = x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    infinite = tl.where(x < 0.0, 0xFC, 0x7C).to(tl.uint8)
    bits = tl.where(tl.abs(x) >= 61440.0, infinite, bits)
    return bits.to(tl.float8e5, bitcast=True)
"""
"""Conversion to e5m2 with infinities. For the other 8-bit type, e4m3fn, torch stops at the largest
number too, from 2.12 on (its pull request 178817); before, eager gave NaN there."""

HELPERS: dict[str, str] = {
    "as_float8_e5m2": _FLOAT8_E5M2,
    "share_of": _SHARE_OF,
    "max_nan": (
        "@triton.jit\n"
        "def max_nan(a, b):\n"
        "    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)\n"
    ),
    "min_nan": (
        "@triton.jit\n"
        "def min_nan(a, b):\n"
        "    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)\n"
    ),
    "narrow_tanh": _TANH,
    "narrow_erf": _ERF,
    "one_plus_erf": _ONE_PLUS_ERF,
    "one_plus_tanh": _ONE_PLUS_TANH,
    "logistic": _LOGISTIC,
    "first_max": _FIRST.format(name="first_max", sign=">"),
    "first_min": _FIRST.format(name="first_min", sign="<"),
    "multiply": "@triton.jit\ndef multiply(a, b):\n    return a * b\n",
    **{name: text for name, (text, _) in KERNEL_HELPERS.items()},
}
