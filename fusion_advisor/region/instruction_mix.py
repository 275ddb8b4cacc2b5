"""Instruction mix of a region: instructions per value, by `rules/instructions.toml`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from fusion_advisor.region.exprs import INDEX
from fusion_advisor.region.peephole import WITH_ONE, one_more
from fusion_advisor.region.primitives import MONOIDS
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import Device

UNISSUED = ("load", "const", "given", "place", "extent", "size", "taken")
"""Operations of addresses and constants, whose cost is counted with the elements."""


def precise(region: Region) -> bool:
    """Whether some result is float32, which takes the longer, exact forms of primitives."""
    return any(output.tensor.dtype == "float32" for output in region.outputs)


@dataclass(frozen=True, slots=True)
class Issued:
    """Instructions of lanes: of steps of reductions, one each; and of primitives."""

    steps: float
    primitives: float

    @property
    def total(self) -> float:
        return self.steps + self.primitives


def instructions(
    region: Region,
    device: Device,
    *,
    precise: bool,
    lanes: Callable[[int], float] | None = None,
    scanned: float = 1.0,
) -> Issued:
    """Instructions for the values of a region. `lanes` says how many lanes make each value; without
    it, each is made once for every element that it has. `scanned` is how often a scan combines for
    each of its elements."""
    steps = primitives = 0.0
    sums = one_more(region)
    for number in region.live:
        expr = region.exprs[number]
        if expr.op in UNISSUED or expr.dtype == INDEX:
            continue
        combined = expr.op in ("reduce", "scan")
        places = expr.args[0] if combined else number
        if lanes is None:
            count = float(prod(region.sizes[axis] for axis in region.depends[places]))
        else:
            count = lanes(places)
        made = WITH_ONE[expr.op] if number in sums else expr.op
        longer = precise and not expr.rough
        each = device.worth(made, expr.dtype, precise=longer or expr.exact)
        if combined:
            count *= scanned if expr.op == "scan" else 1.0
            steps += count
            for one in MONOIDS[expr.monoid].within:
                primitives += count * device.worth(one, expr.dtype, precise=precise)
        else:
            primitives += count * each
    return Issued(steps, primitives)
