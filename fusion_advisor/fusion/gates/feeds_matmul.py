"""FA701: reduced-and-broadcast value that a matrix product inside the group would consume."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject

_PRODUCTS = ("matmul", "attention", "convolution")


def measure(subject: Subject) -> Reading:
    """Count the products inside whose operand comes from a reduction inside: every program of the
    product would need the whole operand, so it stays a tensor."""
    flow, inside = subject.flow, 0
    launches = set(subject.launches)
    for product in subject.launches:
        if subject.cost(product).pattern not in _PRODUCTS:
            continue
        feeding = [i for i in launches if flow.above[product] >> i & 1]
        if any(subject.cost(i).pattern == "reduction" for i in feeding):
            inside += 1
    limit = subject.rulebook.gate("feeds-matmul").number("inside").value
    return Reading(inside, limit, f"{inside} matrix products fed by a reduction inside the group")
