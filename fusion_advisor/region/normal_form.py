"""Normal form of a region's values over the real numbers: equal forms are equal functions.

A value is a sum of products of atoms, each to a power. Sums along a row are linear, and what does
not change along the row stands in front of them; an exponential of a sum is a product. What has no
rule (a comparison, a maximum, a cast to an integer, a load that is shifted) is an atom of its own,
equal to nothing but itself. Rounding between float types is left out.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import NamedTuple

from fusion_advisor.ir.graph import FLOATS
from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.region import Region


class Atom(NamedTuple):
    """A factor that has no parts: what it is, the axes that it changes along, and whether it is
    positive everywhere."""

    key: Hashable
    axes: frozenset[int] = frozenset()
    positive: bool = False


Product = frozenset[tuple[Atom, float]]
"""Atoms with their powers."""
Form = Mapping[Product, float]
"""Products with their coefficients; empty for zero."""

_ONE: Product = frozenset()
_DIGITS = 6
"""Significant digits in which constants of two sources agree: 0.79788456 is the root of 2/pi."""
_MOST = 64
"""Products of a form, beyond which a value is an atom: no op that is looked for has as many."""
_EXPANDED = 4
"""The largest power of a sum that is multiplied out: GELU's cube is the largest looked for."""


def symbol(key: Hashable, axes: Iterable[int] = ()) -> Form:
    """An unknown that changes along some axes."""
    return _alone(Atom(("symbol", key), frozenset(axes)))


def number(value: float) -> Form:
    """A constant."""
    return {_ONE: value} if value else {}


def size(axes: Iterable[int]) -> Form:
    """The number of elements along some axes, whatever it is at run time."""
    return {frozenset((Atom(("size", axis), positive=True), 1.0) for axis in axes): 1.0}


def plus(*forms: Form) -> Form:
    """The sum of some forms, without what cancels."""
    found: dict[Product, float] = {}
    for form in forms:
        for product, factor in form.items():
            before = found.pop(product, 0.0)
            if not math.isclose(before, -factor, rel_tol=1e-9):
                found[product] = before + factor
    return found


def times(one: Form, other: Form) -> Form:
    """The product of two forms, multiplied out."""
    return plus(*({_joined(a, b): x * y} for a, x in one.items() for b, y in other.items()))


def power(form: Form, exponent: float) -> Form:
    """A form to a constant power; a root of a square is no bare value, whose sign it forgets."""
    if exponent == 0.0:
        return number(1.0)
    if len(form) == 1:
        ((product, factor),) = form.items()
        if exponent.is_integer() or (factor > 0 and all(map(_has_roots, product))):
            raised = frozenset((atom, _rounded(n * exponent)) for atom, n in product)
            return {raised: factor**exponent}
    elif exponent.is_integer() and 0 < exponent <= _EXPANDED:
        return times(form, power(form, exponent - 1.0))
    atom = Atom(
        ("power", _key(form)), _axes(form), form.get(_ONE, 0.0) >= 0 and _all_positive(form)
    )
    return _alone(atom, exponent)


def exponential(form: Form) -> Form:
    """e to the power of a form: a product of one factor for each of its products."""
    found = number(math.exp(form.get(_ONE, 0.0)))
    for product, factor in form.items():
        if product != _ONE:
            atom = Atom(("exp", product), _axes({product: 1.0}), True)
            found = times(found, _alone(atom, _rounded(factor)))
    return found


def total(form: Form, axes: frozenset[int]) -> Form:
    """The sum of a form along some axes: what does not change along them stands in front."""
    found: Form = {}
    for product, factor in form.items():
        inside = frozenset(pair for pair in product if pair[0].axes & axes)
        outside: Form = {product - inside: factor}
        if not inside:
            found = plus(found, times(outside, size(axes)))
            continue
        key = ("sum", tuple(sorted(axes)), inside)
        atom = Atom(key, _axes({inside: 1.0}) - axes, all(map(_positive, inside)))
        found = plus(found, times(outside, _alone(atom)))
    return found


def logistic(form: Form) -> Form:
    """1 / (1 + exp(-x))."""
    return power(plus(number(1.0), exponential(times(form, number(-1.0)))), -1.0)


def hyperbolic_tangent(form: Form) -> Form:
    """tanh(x), which is 2 logistic(2 x) - 1."""
    return plus(times(logistic(times(form, number(2.0))), number(2.0)), number(-1.0))


def equal(one: Form, other: Form) -> bool:
    """The same function, but for the rounding of constants in the source."""
    return one.keys() == other.keys() and all(
        math.isclose(factor, other[product], rel_tol=10.0**-_DIGITS)
        for product, factor in one.items()
    )


class Forms:
    """The normal forms of a region's values; `known` stands for values that are given."""

    def __init__(self, region: Region, known: Mapping[int, Form] | None = None) -> None:
        self._region = region
        self._found: dict[int, Form] = dict(known or {})

    def of(self, value: int) -> Form:
        """The normal form of a value."""
        if value not in self._found:
            form = self._made(value)
            self._found[value] = form if len(form) <= _MOST else self._opaque(value)
        return self._found[value]

    def _made(self, value: int) -> Form:
        expr = self._region.exprs[value]
        if expr.dtype not in FLOATS:
            return self._opaque(value)
        try:
            found = self._by_rule(expr)
        except (OverflowError, ZeroDivisionError):  # a constant that has no such function
            found = None
        return self._opaque(value) if found is None else found

    def _by_rule(self, expr: Expr) -> Form | None:
        """The form that an operation's rule gives; None where there is no rule."""
        args = [self.of(arg) for arg in expr.args if self._region.exprs[arg].dtype in FLOATS]
        if len(args) != len(expr.args):
            return None
        match expr.op, args:
            case "const", []:
                literal = float(expr.literal)
                return number(literal) if math.isfinite(literal) else None
            case "given", []:
                return number(expr.captured)
            case "size", []:
                return size(expr.axes)
            case (("cast" | "round"), [x]):
                return x if (expr.to or expr.dtype) in _ROUNDED else None
            case "add", [x, y]:
                return plus(x, y)
            case "sub", [x, y]:
                return plus(x, times(y, number(-1.0)))
            case "neg", [x]:
                return times(x, number(-1.0))
            case "mul", [x, y]:
                return times(x, y)
            case "div", [x, y]:
                return times(x, power(y, -1.0))
            case "pow", [x, y] if y.keys() <= {_ONE}:
                return power(x, y.get(_ONE, 0.0))
            case "sqrt", [x]:
                return power(x, 0.5)
            case "rsqrt", [x]:
                return power(x, -0.5)
            case "exp", [x]:
                return exponential(x)
            case "exp2", [x]:
                return exponential(times(x, number(math.log(2.0))))
            case "sigmoid", [x]:
                return logistic(x)
            case "tanh", [x]:
                return hyperbolic_tangent(x)
            case "reduce", [x] if expr.monoid == "sum":
                return total(x, frozenset(expr.axes))
            case _:
                return None

    def _opaque(self, value: int) -> Form:
        """A value that is equal to itself alone."""
        return _alone(Atom(("value", value), self._region.depends[value]))


_ROUNDED = (*FLOATS, "bfloat16", "float16")
"""Float types that count as the real numbers here. Types of 8 bits do not: they quantise."""


def _alone(atom: Atom, exponent: float = 1.0) -> Form:
    return {frozenset({(atom, exponent)}): 1.0}


def _joined(one: Product, other: Product) -> Product:
    """Two products as one, powers of the same atom added."""
    found = dict(one)
    for atom, exponent in other:
        found[atom] = _rounded(found.get(atom, 0.0) + exponent)
    return frozenset((atom, exponent) for atom, exponent in found.items() if exponent)


def _has_roots(pair: tuple[Atom, float]) -> bool:
    """Whether a root of a power is the atom to the quotient: not of squares of what has a sign."""
    atom, exponent = pair
    return atom.positive or not exponent.is_integer()


def _positive(pair: tuple[Atom, float]) -> bool:
    """Whether a power is nowhere negative."""
    return _has_roots(pair) or pair[1] % 2 == 0


def _all_positive(form: Form) -> bool:
    return all(factor > 0 and all(map(_positive, product)) for product, factor in form.items())


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _key(form: Form) -> Hashable:
    return frozenset((product, _rounded(factor)) for product, factor in form.items())


def _axes(form: Form) -> frozenset[int]:
    return frozenset[int]().union(*(atom.axes for product in form for atom, _ in product))
