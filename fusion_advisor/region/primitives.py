"""The scalar primitives of the region form: what each costs and how Triton spells it.

One entry a primitive. FLOPs follow the convention that an arithmetic step on one element is 1 FLOP
(a fused multiply-add is 2), and that comparisons, selects and conversions are 0. Every op's FLOPs
are the sum over the primitives of its meaning, so a formula stands in one place.
"""

from __future__ import annotations

from dataclasses import dataclass


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
    apart: str = ""
    """The form that the compiler contracts with no sum."""
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
    "mul": Primitive("({0} * {1})", exact=True, apart="libdevice.mul_rn({0}, {1})"),
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
    "shl": _binary("<<", 0),
    "shr": _binary(">>", 0),  # with the sign of signed integers
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
        precise="wide_tanh({0})",
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


LIMITS = {
    "int64": ("-9223372036854775808", "9223372036854775807"),
    "int32": ("-2147483648", "2147483647"),
    "int16": ("-32768", "32767"),
    "int8": ("-128", "127"),
    "uint8": ("0", "255"),
}
"""Least and largest number of each integer dtype."""


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
    within: tuple[str, ...] = ()
    """Primitives in one combination of two, where it is more than an instruction."""

    def neutral_of(self, dtype: str) -> str:
        """The neutral element in a dtype."""
        if dtype.startswith("float"):
            return self.neutral
        low, high = LIMITS[dtype]
        return {"lowest": low, "highest": high}.get(self.integer_neutral, self.integer_neutral)


MONOIDS: dict[str, Monoid] = {
    "sum": Monoid("0.0", integer_neutral="0"),
    "max": Monoid("-inf", "max_nan", "lowest"),
    "min": Monoid("inf", "min_nan", "highest"),
    "prod": Monoid("1.0", "multiply", "1"),
    "logsum": Monoid("-inf", "log_add_exp", flops=4, within=("exp", "log1p", "sub", "abs")),
    "argmax": Monoid("-inf", "first_max", "lowest"),
    "argmin": Monoid("inf", "first_min", "highest"),
}

LIBRARY = frozenset(
    name
    for name, primitive in PRIMITIVES.items()
    if "libdevice" in primitive.text + primitive.precise and not name.startswith("exp")
)
"""Functions of the math library whose code is long; the code of the exponential is short."""
LONG = LIBRARY | {"sigmoid", "tanh"}
"""Primitives of many instructions, of the library or of this package."""
