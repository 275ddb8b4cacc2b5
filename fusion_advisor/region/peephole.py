"""Values that a kernel makes together with what uses them, in fewer instructions than apart."""

from __future__ import annotations

from fusion_advisor.region.primitives import LIBRARY
from fusion_advisor.region.region import Region

WITH_ONE = {"erf": "one_plus_erf", "tanh": "one_plus_tanh"}
"""What makes the sum of 1 and a function. Near zero it loses what the function alone would keep,
as the sum does; it takes half the instructions and less."""


def one_more(region: Region) -> frozenset[int]:
    """Values of such functions, in float32, to which 1 is added wherever they are used, as the
    forms of GELU do."""
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
    """Are there functions of the math library whose code is long?"""
    short = one_more(region)
    return any(region.exprs[n].op in LIBRARY and n not in short for n in region.live)


def _adds_one(region: Region, number: int) -> bool:
    expr = region.exprs[number]
    literals = {region.exprs[arg].literal for arg in expr.args}
    return expr.op == "add" and bool(literals & {"1", "1.0"})
