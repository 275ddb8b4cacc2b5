"""Who should run a finding, what to do about it, and what would flip a rejection."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.decide import Decision, GateResult
from fusion_advisor.identify import Finding
from fusion_advisor.rulebook import Rulebook


@dataclass(frozen=True)
class Action:
    """`code` is what to write; empty where there is nothing to copy."""

    route: str
    text: str
    code: str


@dataclass(frozen=True)
class Fix:
    """What the one failing gate would need to hold."""

    gate: str
    needed: float
    change: str


def action(finding: Finding, rulebook: Rulebook) -> Action:
    """The advice on a finding."""
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
    return Action("triton", text, f"from {finding.name} import {finding.name}")


def fix(decision: Decision) -> Fix | None:
    """The smallest change that flips the deciding gate; None unless exactly one gate fails."""
    missing = [gate for gate in decision.gates if gate.outcome != "holds"]
    if decision.accepted or len(missing) != 1 or missing[0].outcome != "fails":
        return None
    (gate,) = missing
    return Fix(gate.name, gate.limit, _change(decision, gate))


def _change(decision: Decision, gate: GateResult) -> str:
    subject, plan = decision.subject, decision.subject.plan
    if gate.name == "traffic-saving":
        allowed = int(decision.unfused_bytes / gate.limit)
        over = decision.fused_bytes - allowed
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
