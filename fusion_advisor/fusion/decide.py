"""Stage: verdict on a set of launches. Every gate runs; one gate that fails or is unknown is enough
not to fuse."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.cost.times import time_model
from fusion_advisor.fusion.gates import GATES, Subject
from fusion_advisor.fusion.gates.traffic_saving import fused_bytes, fused_of
from fusion_advisor.fusion.lower import boundary, lower_region
from fusion_advisor.fusion.verdict import GateResult
from fusion_advisor.ir.faults import Faults
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.rulebook.schema import Comparison, Rulebook
from fusion_advisor.schedules.select import plan

_COMPARE: dict[Comparison, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True)
class Decision:
    """Verdict on a set of launches, with everything known of the set. Times are microseconds of a
    call with a cold L2."""

    subject: Subject
    gates: tuple[GateResult, ...]
    fused_bytes: int
    unplaced: str = ""
    """Reason why the model's source cannot express the set, where that was asked."""
    fault: str = ""
    """Fault of the analyzer that left the set without gates."""
    registers: tuple[int, ...] = ()
    """Registers per thread of each kernel, from ptxas; () before compilation, when they are
    estimated."""

    @cached_property  # of most sets that are tried nobody asks
    def unfused_us(self) -> float:
        if self.fault:
            return sum(self.subject.cost(launch).time_us for launch in self.subject.launches)
        return time_model().eager_us(self.subject.flow, self.subject.launches)

    @cached_property
    def fused_us(self) -> float:
        if self.fault:
            return self.unfused_us
        fused = fused_of(self.subject, self.registers)
        return time_model().fused_us(fused, self.subject.device)

    @property
    def accepted(self) -> bool:
        """Whether a set becomes a kernel: several launches, or one of eager's that is slow."""
        launches = self.subject.launches
        reduces = any(self.subject.cost(launch).pattern == "reduction" for launch in launches)
        worth = len(launches) > 1 or reduces
        return worth and not self.unplaced and all(g.outcome == "holds" for g in self.gates)

    @property
    def worthwhile(self) -> bool:
        """Verdict of the time model, which stands beside the verdict of the gates."""
        return self.fused_us < self.unfused_us

    @property
    def deciding(self) -> GateResult | None:
        """First gate that fails, else the last gate that is unknown; None where all hold."""
        fails = next((g for g in self.gates if g.outcome == "fails"), None)
        return fails or next((g for g in reversed(self.gates) if g.outcome == "unknown"), None)

    @property
    def unfused_bytes(self) -> int:
        return self.subject.unfused_bytes

    @property
    def hopeless(self) -> bool:
        """Whether no larger set with this one in it can be accepted either: it has an op or a tile
        that only gets worse, or two parts that no plan brings together."""
        growing = ("compute-bound", "on-chip", "register-spill", "discontinuous")
        return self.subject.hopeless or any(
            gate.outcome == "fails" and gate.name in growing for gate in self.gates
        )


def subject_of(flow: Dataflow, launches: Iterable[int], rulebook: Rulebook) -> Subject:
    """Lower and plan a set of launches as far as that is possible."""
    chosen = tuple(sorted(launches))
    border = boundary(flow, chosen)
    try:
        expressed = lower_region(flow, border)
    except NotExpressible as problem:
        return Subject(flow, chosen, border, None, None, problem, rulebook)
    planned = plan(
        expressed.region, flow.annotated.device, rulebook, apart=chosen in flow.called_together
    )
    return Subject(flow, chosen, border, expressed, planned, None, rulebook)


def deciding(
    flow: Dataflow, rulebook: Rulebook, faults: Faults | None = None
) -> Callable[[Iterable[int]], Decision]:
    """Memoised `decide` for one graph, since several partitions ask about the same sets."""
    known: dict[tuple[tuple[int, ...], bool], Decision] = {}

    def decided(launches: Iterable[int]) -> Decision:
        chosen = tuple(sorted(launches))
        key = chosen, chosen in flow.called_together
        if key not in known:
            known[key] = decide(flow, chosen, rulebook, faults)
        return known[key]

    return decided


def decide(
    flow: Dataflow, launches: Iterable[int], rulebook: Rulebook, faults: Faults | None = None
) -> Decision:
    """Run every gate on a set of launches and compare. With `faults`, a set that cannot be judged
    is rejected, and the fault of the analyzer is noted."""
    chosen = tuple(sorted(launches))
    try:
        decision = judge(subject_of(flow, chosen, rulebook))
        if faults is not None:  # the time model is a part of it
            _ = decision.unfused_us, decision.fused_us
    except Exception as error:
        if faults is None:
            raise
        why = faults.note(error, (flow.nodes[number].name for number in chosen))
        return _unjudged(flow, chosen, rulebook, why)
    return decision


def _unjudged(flow: Dataflow, launches: tuple[int, ...], rulebook: Rulebook, why: str) -> Decision:
    """Decision on a set whose gates are all unknown."""
    border = boundary(flow, launches)
    problem = NotExpressible(why, final=False)
    subject = Subject(flow, launches, border, None, None, problem, rulebook)
    gates = tuple(
        GateResult(rule.code, name, None, 0.0, rule.unit, "unknown", why, rule.comparison)
        for name in GATES
        for rule in [rulebook.gate(name)]
    )
    return Decision(subject, gates, subject.unfused_bytes, fault=why)


def judge(subject: Subject) -> Decision:
    """Run every gate on a prepared set of launches, and compare."""
    results: list[GateResult] = []
    for name, measure in GATES.items():
        rule, reading = subject.rulebook.gate(name), measure(subject)
        outcome = "unknown"
        if reading.measured is not None:
            held = _COMPARE[rule.comparison](reading.measured, reading.limit)
            outcome = "holds" if held else "fails"
        found = reading.measured, reading.limit, rule.unit, outcome, reading.why
        results.append(GateResult(rule.code, name, *found, rule.comparison))
    return Decision(subject, tuple(results), fused_bytes(subject))
