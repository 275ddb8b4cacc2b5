"""FA701: reduced-and-broadcast value that a matrix product inside the group would consume."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import PRODUCTS, Reading, Subject
from fusion_advisor.fusion.gates.products import shortest_product


def measure(subject: Subject) -> Reading:
    """Count the products inside whose operand comes from a reduction inside: every program of the
    product would need the whole operand, so it stays a tensor."""
    flow, inside = subject.flow, 0
    launches = set(subject.launches)
    for product in subject.launches:
        if subject.cost(product).pattern not in PRODUCTS:
            continue
        feeding = [i for i in launches if flow.above[product] >> i & 1]
        if any(subject.cost(i).pattern == "reduction" for i in feeding):
            inside += 1
    limit = subject.rulebook.gate("feeds-matmul").number("inside").value
    why = f"{inside} matrix products fed by a reduction inside the group"
    if inside and (product := shortest_product(flow, subject.launches, subject.rulebook)):
        why += f"; {product}"
    return Reading(inside, limit, why)
