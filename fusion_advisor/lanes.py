"""A region's values on one short row, in double precision: enough to tell what it computes.

A value is a list of lanes along the row, or a single lane where it does not change along it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence

from fusion_advisor.region import Region

Lanes = list[float]

WIDTH = 5
"""How many lanes a row has."""


def near(got: float, wanted: float) -> bool:
    """Equal but for the rounding of a constant in the source."""
    return math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-12)


def evaluate(
    region: Region, given: Mapping[int, Lanes], wanted: Sequence[int]
) -> dict[int, Lanes] | None:
    """The values wanted from the values given; None where they need others, where an op is not
    among those of the idioms, or where it is not defined on these numbers."""
    values = dict(given)

    def value(number: int) -> Lanes:
        if number not in values:
            values[number] = made(number)
        return values[number]

    def made(number: int) -> Lanes:
        expr = region.exprs[number]
        if expr.op == "const":
            return [_number(expr.literal)]
        if expr.op == "size":
            return [float(WIDTH)]
        if expr.op in ("cast", "round"):
            return value(expr.args[0])
        if expr.op == "reduce":
            return [_MONOIDS[expr.monoid](value(expr.args[0]))]
        operands = [value(arg) for arg in expr.args]
        width = max(map(len, operands), default=0)
        columns = [lanes * width if len(lanes) == 1 else lanes for lanes in operands]
        return [_PRIMITIVES[expr.op](*column) for column in zip(*columns, strict=True)]

    try:
        return {number: value(number) for number in wanted}
    except (KeyError, ValueError, ZeroDivisionError, OverflowError, TypeError):
        return None


def _number(text: str) -> float:
    """A constant as the region spells it."""
    return float({"True": "1", "False": "0"}.get(text, text))


def _neg(a: float) -> float:
    return -a


def _divided(a: float, b: float) -> float:
    return a / b


def _rsqrt(a: float) -> float:
    return 1.0 / math.sqrt(a)


def _sigmoid(a: float) -> float:
    return 1.0 / (1.0 + math.exp(-a))


_PRIMITIVES: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": _divided,
    "neg": _neg,
    "abs": math.fabs,
    "exp": math.exp,
    "exp2": math.exp2,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": _rsqrt,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": _sigmoid,
    "pow": math.pow,
    "maximum": max,
    "minimum": min,
}

_MONOIDS: dict[str, Callable[[Lanes], float]] = {
    "sum": math.fsum,
    "max": max,
    "min": min,
    "prod": math.prod,
}
