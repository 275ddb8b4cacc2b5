"""How many instructions of lanes the values of a region are worth, by `rules/instructions.toml`."""

from __future__ import annotations

from math import prod

from fusion_advisor.exprs import INDEX
from fusion_advisor.region import Region
from fusion_advisor.rulebook import Rulebook

_UNISSUED = ("load", "const", "place", "extent", "size", "taken")
"""Addresses and numbers, whose cost goes with the elements."""


def precise(region: Region) -> bool:
    """Whether a result is as narrow as float32, which asks for the longer forms."""
    return any(output.tensor.dtype == "float32" for output in region.outputs)


def instructions(region: Region, rulebook: Rulebook, *, precise: bool) -> float:
    """Instructions for the values of a region, each at every place that it has, once."""
    found = 0.0
    for number in region.live:
        expr = region.exprs[number]
        if expr.op in _UNISSUED or expr.dtype == INDEX:
            continue
        own = rulebook.instructions.get(expr.op, rulebook.instructions["other"])
        places = expr.args[0] if expr.op in ("reduce", "scan") else number
        count = prod(region.sizes[axis] for axis in region.depends[places])
        found += count * own.of(expr.dtype, precise=precise)
    return found
