"""FA801: values that pick a place, a truth or a draw (arg-max, any, bernoulli) and are rounded
otherwise than eager's."""

from __future__ import annotations

from fusion_advisor.fusion.decisive import decisive_nodes
from fusion_advisor.fusion.gates.base import Reading, Subject


def measure(subject: Subject) -> Reading:
    """Count the floating values computed inside the set that pick something and that a kernel would
    round otherwise; all that do where the set has no region form."""
    flow, limit = subject.flow, subject.rulebook.gate("discontinuous").number("values").value
    if subject.expressed is not None:
        found = list(subject.expressed.flips)
    else:
        found = decisive_nodes(flow, subject.border.members).in_words(flow)
    return Reading(len(found), limit, "; ".join(found) if found else "none")
