"""Peephole: values that take fewer instructions when they are made together with their user."""

from __future__ import annotations

from fusion_advisor.region.primitives import LIBRARY
from fusion_advisor.region.region import Region

WITH_ONE = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}
"""Functions for f(x) + 1, by f. Near zero they lose the digits that f alone would keep, as the sum
does; they take half the instructions or fewer."""


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


def calls_library(region: Region) -> bool:
    """Whether a region calls functions of the math library whose code is long."""
    short = one_more(region)
    return any(region.exprs[n].op in LIBRARY and n not in short for n in region.live)


def _adds_one(region: Region, number: int) -> bool:
    expr = region.exprs[number]
    literals = {region.exprs[arg].literal for arg in expr.args}
    return expr.op == "add" and bool(literals & {"1", "1.0"})
