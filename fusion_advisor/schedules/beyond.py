"""What lanes behind a row's end hold, where loads fill them with one number.

Where that number is chosen well, many a reduction finds its own neutral element there, and needs no
mask: filled with 0, a sum of squares; filled with -inf, a maximum and the sum of exp(x - maximum).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fusion_advisor.region.primitives import MONOIDS
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.layout import Access
from fusion_advisor.schedules.online import at_least_one

FILLS = {0.0: "0.0", -math.inf: "-inf", math.inf: "inf"}
"""What lanes may be filled with, and the constant for it; the first that serves most."""

_COMPUTED: dict[str, Callable[..., float]] = {
    "add": float.__add__,
    "sub": float.__sub__,
    "mul": float.__mul__,
    "neg": float.__neg__,
    "abs": float.__abs__,
    "maximum": max,
    "minimum": min,
    "cast": float,
    "round": float,
}


@dataclass(frozen=True)
class Beyond:
    """`fill` is what loads along the row give there; `neutral` are the reductions that find their
    neutral element."""

    fill: float = 0.0
    neutral: frozenset[int] = frozenset()


def beyond(
    region: Region,
    accesses: Mapping[int, Access],
    inner: frozenset[int],
    fills: Iterable[float] = FILLS,
) -> Beyond:
    """The best of some fillings for a region's loads along the row `inner`."""
    found = [Beyond(fill, _neutral(region, accesses, inner, fill)) for fill in fills]
    return max(found, key=lambda each: len(each.neutral))


def filled_beyond(access: Access, inner: frozenset[int]) -> bool:
    """Does a tensor lie along the row, so that its lanes behind the end are masked, in a type that
    has infinities?"""
    along = bool(inner & set(access.strides)) and not access.tensor.dtype.startswith("float8")
    return along and access.guard is None and not access.pulled


def _neutral(
    region: Region, accesses: Mapping[int, Access], inner: frozenset[int], fill: float
) -> frozenset[int]:
    held = _held(region, accesses, inner, fill)
    found: set[int] = set()
    for number in region.all("reduce"):
        expr = region.exprs[number]
        wide = region.exprs[expr.args[0]].dtype in ("float32", "float64")
        neutral = MONOIDS[expr.monoid].neutral
        along = frozenset(expr.axes) == inner and expr.monoid in ("sum", "max", "min")
        if along and wide and FILLS.get(held.get(expr.args[0], math.nan)) == neutral:
            found.add(number)
    return frozenset(found)


def _held(
    region: Region, accesses: Mapping[int, Access], inner: frozenset[int], fill: float
) -> dict[int, float]:
    """The number that each value has behind the row's end, of those that surely have one."""
    powers, floats = set(at_least_one(region, inner).values()), ("float32", "float64")
    held: dict[int, float] = {}
    for number in sorted(region.live):
        expr = region.exprs[number]
        given = [held.get(arg, math.nan) for arg in expr.args]
        found = math.nan
        if expr.op == "load" and filled_beyond(accesses[number], inner):
            found = fill if expr.dtype in floats else 0.0
        elif expr.op == "const" and expr.dtype in floats:
            found = float(expr.literal)
        elif expr.op == "where":
            asked, one, other = given
            found = other if asked == 0.0 or one == other else math.nan
        elif expr.op == "exp":
            lowest = number in powers and _lowest(region, expr.args[0], held)
            found = 0.0 if lowest or given[0] == -math.inf else math.nan
        elif expr.op in _COMPUTED and expr.dtype in floats and not any(map(math.isnan, given)):
            found = _COMPUTED[expr.op](*given)
        if not math.isnan(found):
            held[number] = found
    return held


def _lowest(region: Region, number: int, held: Mapping[int, float]) -> bool:
    """Is a difference from the row's maximum -inf there? Where the maximum itself is -inf or NaN,
    it is NaN, and so is every other of the row."""
    while region.exprs[number].op == "cast":
        number = region.exprs[number].args[0]
    return held.get(region.exprs[number].args[0]) == -math.inf
