"""Peephole: values that take fewer instructions when they are made together with their user, and
products that must not be."""

from __future__ import annotations

from math import frexp

from fusion_advisor.ir.graph import FLOATS
from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.primitives import LIBRARY
from fusion_advisor.region.region import Region

WITH_ONE = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}
"""Functions for f(x) + 1, by f. Near zero they lose the digits that f alone would keep, as the sum
does; they take half the instructions or fewer."""

_PASSING = ("mul", "neg", "abs")
"""Primitives whose relative error is that of their operands, and their own."""


def one_more(region: Region) -> frozenset[int]:
    """Values of such functions, in float32, to which every user adds 1, as the forms of GELU do."""
    users = region.users()
    results = {output.value for output in region.outputs}
    return frozenset(
        number
        for number in region.live
        if region.exprs[number].op in WITH_ONE
        and region.exprs[number].dtype == "float32"
        and number not in results
        and all(_adds_one(region, user) for user in users[number])
    )


def rounded_apart(region: Region) -> frozenset[int]:
    """Products that are rounded before they are added to anything: where sums have to be exact,
    those that have to be, too; and those that their own maximum is taken from. Of a large product,
    exp(x * s - max(x * s)) would not be 1 at the maximum, but overflow. A product with a power of
    two is not rounded at all."""
    exprs, live = region.exprs, region.live
    products = {
        number
        for number in live
        if exprs[number].op == "mul" and exprs[number].dtype in FLOATS
        if not any(_is_power_of_two(exprs[arg]) for arg in exprs[number].args)
    }
    sums = [exprs[n] for n in live if exprs[n].op in ("add", "sub")]
    exact = {n for n in products if exprs[n].exact and any(each.exact for each in sums)}
    extremes = (n for n in region.all("reduce") if exprs[n].monoid in ("max", "min"))
    compared = products.intersection(exprs[n].args[0] for n in extremes)
    return frozenset(exact | compared.intersection(arg for each in sums for arg in each.args))


def added_up(region: Region) -> frozenset[int]:
    """Values in float32 of which nothing is made but sums, of them or of products with them: in a
    sum an error of their last digit is less than what its rounding loses."""
    users, results = region.users(), {output.value for output in region.outputs}
    found: set[int] = set()
    for number in sorted(region.live, reverse=True):
        expr = region.exprs[number]
        if expr.dtype != "float32" or number in results:
            continue
        if all(
            user in found if region.exprs[user].op in _PASSING else _sums(region, user)
            for user in users[number]
        ):
            found.add(number)
    return frozenset(found)


def calls_library(region: Region) -> bool:
    """Whether a region calls functions of the math library whose code is long."""
    short = one_more(region)
    return any(region.exprs[n].op in LIBRARY and n not in short for n in region.live)


def _is_power_of_two(expr: Expr) -> bool:
    return expr.op == "const" and abs(frexp(float(expr.literal))[0]) == 0.5


def _sums(region: Region, number: int) -> bool:
    return (region.exprs[number].op, region.exprs[number].monoid) == ("reduce", "sum")


def _adds_one(region: Region, number: int) -> bool:
    expr = region.exprs[number]
    literals = {region.exprs[arg].literal for arg in expr.args}
    return expr.op == "add" and bool(literals & {"1", "1.0"})
