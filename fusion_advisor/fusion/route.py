"""Route of a finding: who should run it, what to do, and what would flip a rejection."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import Finding
from fusion_advisor.fusion.gates.products import shortest_product
from fusion_advisor.fusion.lower import fused_traffic
from fusion_advisor.fusion.verdict import Fix, GateResult
from fusion_advisor.ir.graph import Ref
from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class Action:
    """Advice on a finding; `code` is the code to write, empty where there is nothing to copy."""

    route: str
    text: str
    code: str


def action(finding: Finding, rulebook: Rulebook) -> Action:
    """Advice on a finding."""
    decision = finding.decision
    count = len(decision.subject.launches)
    if not decision.accepted:
        gate = decision.deciding
        return Action("none", rulebook.gate(gate.name).fix if gate else "", "")
    if finding.framework:
        text = f"One PyTorch op computes these {count} launches in as few bytes."
        return Action("framework", text, finding.framework)
    limit = rulebook.route.inductor_max_ops.count
    patterns = {decision.subject.cost(i).pattern for i in decision.subject.launches}
    if count <= limit and patterns == {"pointwise"}:
        text = f"A chain of {count} pointwise ops is what Inductor fuses: compile the model."
        return Action("inductor", text, "model = torch.compile(model)")
    text = f"Call the emitted kernel in place of these {count} launches."
    return Action("triton", text, _call(finding))


def _call(finding: Finding) -> str:
    """Call of the kernel; tensors by the names that they have in the report."""
    expressed = finding.decision.subject.expressed
    assert expressed is not None
    made, taken = ([_name(ref) for ref in refs] for refs in (expressed.outputs, expressed.inputs))
    call = f"{', '.join(made)} = {finding.name}({', '.join(taken)})"
    return f"from {finding.name} import {finding.name}; {call}"


def _name(ref: Ref) -> str:
    return f"{ref.node}_{ref.output}" if ref.output else ref.node


def fix(decision: Decision) -> Fix | None:
    """Smallest change that flips the deciding gate; None unless exactly one gate fails, or nothing
    but a schedule is missing for a product with so short a contraction that one kernel would
    pay: even above the ridge, where a product takes little longer than its bytes."""
    if decision.accepted:
        return None
    subject = decision.subject
    missing = [gate for gate in decision.gates if gate.outcome != "holds"]
    product = shortest_product(subject.flow, subject.launches, subject.rulebook)
    failing = {gate.name for gate in missing if gate.outcome == "fails"}
    if product and product.pays and failing <= {"compute-bound"}:
        change = f"one kernel by hand, for there is no schedule of products here: {product}"
        return Fix(missing[-1].name, missing[-1].limit, change)
    if len(missing) != 1 or missing[0].outcome != "fails":
        return None
    (gate,) = missing
    return Fix(gate.name, gate.limit, _change(decision, gate))


def _change(decision: Decision, gate: GateResult) -> str:
    subject, plan = decision.subject, decision.subject.plan
    if gate.name == "traffic-saving":
        allowed = int(decision.unfused_bytes / gate.limit)
        over = decision.fused_bytes - allowed
        if decision.fused_bytes <= fused_traffic(subject.flow, subject.border):
            least = f"{decision.fused_bytes} B of its inputs and results"
            return f"fewer or narrower tensors: {over} B less than the {least}"
        return f"move {over} B less than the {decision.fused_bytes} B of the fused kernel"
    if gate.name in ("on-chip", "register-spill") and plan is not None and gate.measured:
        row = 1
        for group in plan.widest.inner:
            row *= group.size
        return f"rows of at most {int(row * gate.limit / gate.measured)} elements; here {row}"
    if gate.name == "compute-bound":
        over = [
            subject.flow.nodes[i].name for i in subject.launches if not subject.cost(i).memory_bound
        ]
        return f"leave out {', '.join(over)}"
    return subject.rulebook.gate(gate.name).fix
