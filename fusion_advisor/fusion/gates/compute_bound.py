"""FA101: arithmetic intensity of the most intense op against the ridge of its unit."""

from __future__ import annotations

from fusion_advisor.fusion.gates.base import Reading, Subject
from fusion_advisor.fusion.gates.products import shortest_product


def measure(subject: Subject) -> Reading:
    """FLOP/B of the op that comes nearest to its ridge, or passes it furthest."""
    worst = max(subject.launches, key=lambda i: subject.cost(i).intensity / subject.cost(i).ridge)
    cost = subject.cost(worst)
    name = subject.flow.nodes[worst].name
    why = f"{name} does {cost.intensity:.2f} FLOP/B; the ridge of the {cost.unit} unit in"
    why += f" {cost.dtype} is {cost.ridge:.2f}"
    if product := shortest_product(subject.flow, subject.launches, subject.rulebook):
        why += f"; {product}"
    return Reading(cost.intensity, cost.ridge, why)
