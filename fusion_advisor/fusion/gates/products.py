"""Matrix products beside what would be fused with them: what one kernel for both would save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_advisor.cost.annotate import Cost
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.gates.base import PRODUCTS
from fusion_advisor.fusion.lower import boundary, fused_traffic
from fusion_advisor.ir.graph import Ref
from fusion_advisor.rulebook.schema import Rulebook

_SUMS = ("matmul", "convolution")
"""Patterns of products of which each element of the one result is a sum of products."""


@dataclass(frozen=True)
class ShortestProduct:
    """Product of a set that has the shortest contraction, with the launches of the set that are no
    products. Times are us: of the product, of the others as eager runs them, and of what would go
    with one kernel for all in place of the product and one kernel for the others. `pays_below` is
    the contraction below which that one kernel is faster by the ratio of the traffic gate: the
    product's time grows with its contraction, what goes does not."""

    name: str
    us: float
    others_us: float
    removed_us: float
    contraction: int
    pays_below: int
    only: bool
    """Whether the set has no other product."""

    @property
    def pays(self) -> bool:
        return self.only and self.contraction < self.pays_below

    def __str__(self) -> str:
        return (
            f"{self.name} takes {self.us:.4g} us over a contraction of {self.contraction}, what is "
            f"beside it {self.others_us:.4g} us; one kernel for both would save "
            f"{self.removed_us:.4g} us, which pays below a contraction of {self.pays_below}"
        )


def shortest_product(
    flow: Dataflow, launches: Sequence[int], rulebook: Rulebook
) -> ShortestProduct | None:
    """The product of a set of launches that gains most from what is beside it; None without a
    product, or with nothing beside one."""
    device = flow.annotated.device
    costs = {number: flow.annotated.costs[flow.nodes[number].name] for number in launches}
    others = [number for number, cost in costs.items() if cost.pattern not in PRODUCTS]
    lengths = {
        number: _contraction(flow, number, cost)
        for number, cost in costs.items()
        if cost.pattern in _SUMS and len(flow.nodes[number].outputs) == 1
    }
    if not lengths or not others:
        return None
    product = min(lengths, key=lambda number: (lengths[number], number))
    cost, launch_us = costs[product], device.launch_us
    alone = fused_traffic(flow, boundary(flow, others))
    joint = fused_traffic(flow, boundary(flow, sorted((product, *others))))
    removed_us = max(0, alone + cost.bytes - joint) / device.bandwidth * 1e6 + launch_us
    ratio = rulebook.gate("traffic-saving").number("ratio").value
    beside_us = alone / device.bandwidth * 1e6 + launch_us
    most_us = removed_us * ratio / (ratio - 1.0) - beside_us
    return ShortestProduct(
        flow.nodes[product].name,
        cost.time_us,
        sum(costs[number].time_us for number in others),
        removed_us,
        lengths[product],
        max(0, int(lengths[product] * most_us / cost.time_us)),
        only=len(launches) == len(others) + 1,
    )


def _contraction(flow: Dataflow, product: int, cost: Cost) -> int:
    """Number of products that one element of the result is the sum of."""
    return cost.flops // (2 * flow.annotated.tensors[Ref(flow.nodes[product].name)].numel)
