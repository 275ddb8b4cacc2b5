"""FA801: values that feed a step (comparison, rounding, arg-reduction) unlike eager's rounding."""

from __future__ import annotations

from fusion_advisor.builder import FLOAT_DTYPES
from fusion_advisor.gates.base import Reading, Subject
from fusion_advisor.ops import REGISTRY


def measure(subject: Subject) -> Reading:
    """How many floating values computed inside feed an op that can jump."""
    flow, inside = subject.flow, set(subject.launches)
    found: list[str] = []
    for launch in subject.launches:
        node = flow.nodes[launch]
        op = REGISTRY.get(node.op)
        if op is None or not (op.discrete or node.out.dtype not in FLOAT_DTYPES):
            continue
        for ref in flow.operands[launch]:
            source = flow.base(ref)
            tensor = flow.annotated.tensors[ref]
            if flow.position[source.node] in inside and tensor.dtype in FLOAT_DTYPES:
                found.append(f"{source.node} feeds {node.name}")
    limit = subject.rulebook.gate("discontinuous").number("values").value
    return Reading(len(found), limit, "; ".join(found) if found else "none")
