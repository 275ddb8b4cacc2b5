"""FA801: values that feed a discontinuous op (comparison, rounding, arg-reduction) and are rounded
otherwise than eager's."""

from __future__ import annotations

import math

from fusion_advisor.fusion.gates.base import Reading, Subject
from fusion_advisor.ir.graph import Node
from fusion_advisor.ops import REGISTRY
from fusion_advisor.region.builder import FLOAT_DTYPES


def _asks_for_infinity(node: Node) -> bool:
    """Whether the node is `x == inf`: rounding does not change its answer, short of an overflow
    that eager has too."""
    other = node.args[1] if len(node.args) > 1 else None
    compares = node.op in ("aten.eq.Scalar", "aten.ne.Scalar")
    return compares and isinstance(other, float) and math.isinf(other)


def measure(subject: Subject) -> Reading:
    """Count the floating values computed inside the set that feed a discontinuous op."""
    flow, inside = subject.flow, set(subject.launches)
    found: list[str] = []
    for launch in subject.launches:
        node = flow.nodes[launch]
        op = REGISTRY.get(node.op)
        if (
            op is None
            or _asks_for_infinity(node)
            or not (op.discrete or node.out.dtype not in FLOAT_DTYPES)
        ):
            continue
        for ref in flow.operands[launch]:
            source = flow.base(ref)
            tensor = flow.annotated.tensors[ref]
            if flow.position[source.node] in inside and tensor.dtype in FLOAT_DTYPES:
                found.append(f"{source.node} feeds {node.name}")
    limit = subject.rulebook.gate("discontinuous").number("values").value
    return Reading(len(found), limit, "; ".join(found) if found else "none")
