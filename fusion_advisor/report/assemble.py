"""Stage: assemble the findings of all stages into one report."""

from __future__ import annotations

import linecache
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fusion_advisor.advice.base import QueueStep
from fusion_advisor.advice.run import advise, rewritings
from fusion_advisor.cost.annotate import Annotated, Cost
from fusion_advisor.cost.dataflow import Dataflow, pass_of, timed
from fusion_advisor.cost.lifetimes import memory, peak_activation_bytes, saved_tensors
from fusion_advisor.cost.recomputed import checkpoints
from fusion_advisor.cost.times import time_model
from fusion_advisor.cost.totals import least_us
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import Finding, Identified, step_us
from fusion_advisor.fusion.route import action, fix
from fusion_advisor.fusion.verdict import GateResult
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.frames import portable_path
from fusion_advisor.ir.graph import Graph, Node, Phase, Ref, Source, Tensor
from fusion_advisor.ir.kernel import Check, Compiled, Kernel
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.measure.search import SearchResult
from fusion_advisor.ops import REGISTRY
from fusion_advisor.profile.profile import Profile, Profiled
from fusion_advisor.report.schema import (
    ActionRow,
    AdviceRow,
    CauseRow,
    CheckpointRow,
    CheckRow,
    DeviceRow,
    GroupRow,
    GroupTimeRow,
    ImpactRow,
    KernelRow,
    LineRow,
    ModelRow,
    NodeRow,
    OnChipRow,
    PhaseRow,
    PredictedRow,
    Report,
    ResourcesRow,
    RewriteRow,
    Rules,
    SavedRow,
    ScenarioRow,
    SourceRow,
    Tool,
    TotalsRow,
    TrafficRow,
    UngroupedRow,
)
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.explain import explanation
from fusion_advisor.rulebook.local_gpu import versions
from fusion_advisor.rulebook.quantities import told_apart
from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class Proof:
    """Kernel of a group and its proof; `why` says why there is no kernel. `file` is the path that a
    report names, None when it is not written; `searched` is the result of a search on a GPU."""

    kernel: Kernel | None
    compiled: Compiled | None = None
    check: Check | None = None
    file: str | None = None
    why: str = ""
    searched: SearchResult | None = None


def assemble(
    flow: Dataflow,
    found: Identified,
    proofs: Mapping[str, Proof],
    scenario: Scenario,
    assumed: Sequence[str],
    rulebook: Rulebook,
    faults: Faults | None = None,
    profile: Profiled | None = None,
) -> Report:
    """Assemble the report; `proofs` are by the id of the group, `faults` are the regions that were
    not analysed so far. Times of a `profile` take the place of predicted ones in all sums."""
    faults = faults or Faults(strict=True)
    annotated = flow.annotated
    graph = annotated.graph
    eager_us = profile.times() if profile else step_us(flow, found.groups)
    beside = _beside(flow, profile.profile) if profile else {}
    total_us = sum(eager_us.values()) + sum(beside.values())

    def rows(findings: Iterable[Finding]) -> list[GroupRow]:
        nothing = Proof(None, why="rejected: no kernel is written")
        return [
            _group(flow, finding, proofs.get(finding.id, nothing), total_us, rulebook, profile)
            for finding in findings
        ]

    grouped = {i for finding in found.groups for place in finding.instances for i in place}
    as_run = timed(flow, profile.times()) if profile else flow
    queue = _queue(flow, profile) if profile else None
    advice = advise(as_run, grouped, scenario.gradients, rulebook, faults, queue)
    rewrites = rewritings(as_run, advice, scenario.gradients, rulebook, faults)
    return Report(
        tool=Tool.model_validate(versions()),
        rules=_rules(rulebook),
        device=_device(annotated),
        scenario=_scenario(graph, scenario, assumed),
        model=ModelRow.of(graph, nodes=sum(map(_listed, graph.nodes))),
        nodes=[
            _node(node, annotated.costs[node.name], annotated.device, profile)
            for node in graph.nodes
            if _listed(node)
        ],
        groups=rows(found.groups),
        candidates=rows(found.candidates),
        ungrouped=_ungrouped(flow, found, grouped),
        advice=[
            AdviceRow.of(one, id=f"a{n}", sources=_sources(one.sources), fingerprint=one.mark)
            for n, one in enumerate(advice, start=1)
        ],
        totals=_totals(
            flow, found, eager_us, beside, len(faults.found), scenario.gradients
        ).model_copy(update={"rewrites_saved_us": sum(one.saved_us or 0.0 for one in rewrites)}),
        rewrites=[
            RewriteRow.of(
                one,
                id=f"r{n}",
                nodes=[flow.nodes[i].name for i in one.nodes],
                sources=_sources(one.sources),
                line=one.line or None,
                advice=[f"a{advice.index(said) + 1}" for said in one.advice],
            )
            for n, one in enumerate(rewrites, start=1)
        ],
        not_rewritten=graph.not_rewritten,
        search_gap=found.gap,
        unmodelled=_unmodelled(as_run.annotated),
        profile=profile.profile if profile else None,
        no_schedule=_no_schedule(found),
        not_run=list(graph.not_run),
        faults=list(faults.found),
        saved=_saved(annotated),
        checkpoints=_checkpoints(annotated),
        memory=memory(annotated, rulebook.workspaces) if _phases(graph) else None,
    )


# -- what was run ----------------------------------------------------------------------------------


def _rules(rulebook: Rulebook) -> Rules:
    gates = {gate.code: explanation(rulebook, gate) for gate in rulebook.gates.values()}
    idioms = {name: explanation(rulebook, idiom) for name, idiom in rulebook.patterns.items()}
    advice = {name: explanation(rulebook, kind) for name, kind in rulebook.advice.items()}
    return Rules(version=rulebook.version, hash=rulebook.hash, explained=gates | idioms | advice)


def _device(annotated: Annotated) -> DeviceRow:
    device = annotated.device
    own = device.achieved
    return DeviceRow.of(
        device,
        times_fitted_on=device.times.fitted_on,
        peaks=_peaks(annotated),
        sources={
            "bandwidth": own.copied.source,
            "launch": own.launch.source,
            "matmul_share": own.matmul_share.source,
        },
    )


def _peaks(annotated: Annotated) -> dict[str, float]:
    """Peak of each unit that runs arithmetic of the graph."""
    device = annotated.device
    return {
        _unit(cost, device): device.peak_flops(cost.unit, cost.dtype)
        for cost in annotated.costs.values()
        if cost.launches and cost.flops
    }


def _unit(cost: Cost, device: Device) -> str:
    return " ".join(device.place(cost.unit, cost.dtype))


def _scenario(graph: Graph, scenario: Scenario, assumed: Sequence[str]) -> ScenarioRow:
    return ScenarioRow.of(
        scenario,
        shapes={
            node.name: _layout(node.outputs[0])
            for node in graph.nodes
            if node.kind == "input" and node.outputs and node.outputs[0]
        },
        defaults=list(assumed),
        optimizer=scenario.optimizer if _phases(graph) else "",
    )


def _layout(tensor: Tensor) -> str:
    sizes = tensor.dims or tuple(map(str, tensor.shape))
    return f"{'x'.join(sizes)}:{tensor.dtype}"


# -- nodes -----------------------------------------------------------------------------------------


def _listed(node: Node) -> bool:
    """Whether a node has a row: launches and views do, tensors that exist before the graph
    runs do not."""
    return node.kind == "call"


def _node(node: Node, cost: Cost, device: Device, profile: Profiled | None) -> NodeRow:
    first = next((tensor for tensor in node.outputs if tensor is not None), None)
    return NodeRow.of(
        node,
        cost,
        shape=list(first.shape) if first else [],
        dtype=first.dtype if first else "",
        arithmetic_intensity=cost.intensity,
        parallelism=f"{cost.pattern} over {cost.axes}" if cost.axes else cost.pattern,
        source=_source(node.source) if node.source else None,
        inputs=list(dict.fromkeys(ref.node for ref in node.refs())),
        unit=_unit(cost, device) if cost.launches else "",
        measured=profile.nodes.get(node.name) if profile else None,
    )


def _source(source: Source) -> SourceRow:
    return _source_row(source, os.getcwd())


@lru_cache(maxsize=4096)  # a layer's lines come back in every layer
def _source_row(source: Source, folder: str) -> SourceRow:
    return SourceRow(file=portable_path(source.file, folder), line=source.line)


def _sources(sources: Iterable[Source | None]) -> list[LineRow]:
    """Source lines, each line once."""
    return [_line(source) for source in dict.fromkeys(sources) if source]


def _line(source: Source) -> LineRow:
    place = _source(source)
    text = linecache.getline(source.file, source.line).strip()
    return LineRow(file=place.file, line=place.line, text=text)


# -- groups and candidates -------------------------------------------------------------------------


def _group(
    flow: Dataflow,
    finding: Finding,
    proof: Proof,
    total_us: float,
    rulebook: Rulebook,
    profile: Profiled | None,
) -> GroupRow:
    decision = finding.decision
    advice = action(finding, rulebook)
    names = [[flow.nodes[i].name for i in place] for place in finding.instances]
    members = (flow.nodes[i] for place in finding.instances for i in place)
    return GroupRow.of(
        finding,
        nodes=names[0],
        instances=names,
        verdict="fuse" if decision.accepted else "reject",
        gates=decision.gates,
        traffic=_traffic(decision),
        on_chip=_on_chip(decision),
        predicted=_predicted(decision),
        impact=ImpactRow.of(
            finding,
            instances=len(finding.instances),
            share=finding.saved_us_total / total_us if total_us else 0.0,
            activation_bytes_saved=_activations_saved(decision),
            basis="predicted" if finding.measured_us is None else "profile",
        ),
        route=advice.route,
        action=ActionRow.of(advice),
        fixable=fix(decision),
        kernel=_kernel(decision, proof),
        measured=None,
        sources=_sources(node.source for node in members),
        launches=len(decision.subject.launches),
        layers=layers(flow.nodes[i].module for place in finding.instances for i in place),
        profile=_group_time(finding, names, profile) if profile else None,
    )


def _group_time(
    finding: Finding, names: Sequence[Sequence[str]], profile: Profiled
) -> GroupTimeRow | None:
    """Times of a group in a trace; None where no instance is in it as a whole."""
    if finding.measured_us is None:
        return None
    decision = finding.decision
    low, high = _interval(decision)
    times = [profile.nodes.get(name) for place in names for name in place]
    backward = [time.backward_us for time in times if time and time.backward_us is not None]
    speedup = finding.unfused_us / decision.fused_us
    return GroupTimeRow(
        unfused_us=finding.measured_us,
        instances=len(names),
        speedup=speedup,
        differs=not low <= speedup <= high,
        backward_us=sum(backward) / len(names) if backward else None,
    )


_NUMBERED = re.compile(r"((?:.*?\.)?[^.\d][^.]*)\.(\d+)(?=\.|$)")
"""Module that its owner has by number: the path of the owner, and the number."""


def layers(modules: Iterable[str]) -> str:
    """Outermost numbered modules that some modules lie in: `layers 0–31`, for one `layers.0`; empty
    where there are none. The owner's path is given where its last name is ambiguous."""
    numbers: dict[str, set[int]] = {}
    for found in map(_NUMBERED.match, modules):
        if found:
            numbers.setdefault(found[1], set()).add(int(found[2]))
    last = [owner.rpartition(".")[2] for owner in numbers]
    names = last if len(set(last)) == len(last) else list(numbers)
    return ", ".join(
        f"{name}{'.' if len(these) == 1 else ' '}{_ranges(sorted(these))}"
        for name, these in zip(names, numbers.values(), strict=True)
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Spell numbers as ranges: `0–3, 7` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}–{high}" for low, high in runs)


def _traffic(decision: Decision) -> TrafficRow:
    unfused, fused = decision.unfused_bytes, decision.fused_bytes
    return TrafficRow.of(
        decision,
        ratio=unfused / fused if fused else float(len(decision.subject.launches)),
        saved_bytes=unfused - fused,
    )


def _on_chip(decision: Decision) -> OnChipRow:
    plan = decision.subject.plan
    budget = next((int(g.limit) for g in decision.gates if g.name == "on-chip"), 0)
    return OnChipRow(bytes=plan.on_chip_bytes if plan else None, budget_bytes=budget)


def _predicted(decision: Decision) -> PredictedRow:
    unfused_us, fused_us = decision.unfused_us, decision.fused_us
    return PredictedRow.of(
        decision,
        speedup=unfused_us / fused_us,
        interval=_interval(decision),
    )


def _interval(decision: Decision) -> tuple[float, float]:
    """Interval of a group's speed-up."""
    subject = decision.subject
    return time_model().interval(subject.flow, subject.launches, decision.fused_us)


def _activations_saved(decision: Decision) -> int:
    """Bytes of the results that no longer reach memory."""
    subject = decision.subject
    kept = {(ref.node, ref.output) for ref in subject.border.outputs}
    return sum(
        tensor.bytes
        for i in subject.launches
        for n, tensor in enumerate(subject.flow.nodes[i].outputs)
        if tensor is not None and (subject.flow.nodes[i].name, n) not in kept
    )


def _kernel(decision: Decision, proof: Proof) -> KernelRow:
    kernel, compiled, check = proof.kernel, proof.compiled, proof.check
    plan = decision.subject.plan
    row = KernelRow(schedule=plan.schedule if plan else None, why=proof.why or None)
    if kernel is None:
        return row
    row.status, row.file, row.entry = "emitted", proof.file, kernel.entry
    if compiled is not None and compiled.failure is None:
        row.status, row.resources = "compiled", _resources(compiled)
    if check is not None:
        row.check = CheckRow.of(check)
    failures = [r.failure for r in (compiled, check) if r is not None and r.failure]
    if failures:
        row.why = "; ".join(failures)
    elif check is not None and check.passed:
        row.status = "gpu-checked" if check.where.startswith("cuda") else "interpreted"
    return row


def _resources(compiled: Compiled) -> ResourcesRow | None:
    if not compiled.resources:
        return None
    worst = max(compiled.resources, key=lambda r: (r.spill_bytes, r.registers))
    return ResourcesRow.of(worst, shared_bytes=max(r.shared_bytes for r in compiled.resources))


# -- what is in no group ---------------------------------------------------------------------------


def _ungrouped(flow: Dataflow, found: Identified, grouped: set[int]) -> list[UngroupedRow]:
    rejected = _rejecting(flow, found.candidates)
    return [
        UngroupedRow(node=node.name, reason=_reason(flow, i, rejected.get(i)))
        for i, node in enumerate(flow.nodes)
        if _listed(node) and i not in grouped
    ]


def _rejecting(flow: Dataflow, candidates: Iterable[Finding]) -> dict[int, Finding]:
    """Smallest candidate of each launch, candidates without compute-bound launches at their
    ends first."""

    def closeness(finding: Finding) -> tuple[bool, int]:
        gate = finding.decision.deciding
        ends = gate is not None and gate.name == "compute-bound"
        return ends, len(finding.decision.subject.launches)

    return {
        i: finding
        for finding in sorted(candidates, key=closeness, reverse=True)
        for place in finding.instances
        for i in place
        if flow.launches(i)
    }


def _reason(flow: Dataflow, number: int, rejected: Finding | None) -> str:
    """Reason why a node stands alone, with the number that decides."""
    node = flow.nodes[number]
    cost = flow.annotated.costs[node.name]
    if not cost.launches:
        return f"{cost.pattern if cost.pattern in ('view', 'allocation') else 'empty'}: no launch"
    if not cost.modelled:
        return "not modelled: counted by its tensors"
    if not cost.memory_bound:
        return f"compute-bound: {cost.intensity:.0f} FLOP/B over the ridge {cost.ridge:.0f}"
    if not cost.fusible:
        return f"no-schedule: {_inexpressible(node)}"
    if rejected is not None and (verdict := _verdict(rejected.decision.deciding)):
        return f"{verdict} (candidate {rejected.id})"
    if not flow.fusible[number]:
        return "in-place: writes what the caller owns or what is later read through an older view"
    if _has_neighbour(flow, number):
        return "left out: the best partition saves more without it"
    return "alone: no memory-bound neighbour to share a kernel with"


def _has_neighbour(flow: Dataflow, number: int) -> bool:
    """Whether the launch could share a kernel with a launch that it reads from or that
    reads from it."""
    node = flow.nodes[number]
    near = {flow.position[flow.base(ref).node] for ref in flow.operands[number]}
    near |= {use for n in range(len(node.outputs)) for use in flow.uses(Ref(node.name, n))}
    barred = flow.beyond[number]
    return any(
        flow.fusible[i] and not (barred >> i | flow.beyond[i] >> number) & 1 for i in near if i >= 0
    )


def _inexpressible(node: Node) -> str:
    op = REGISTRY.get(node.op)
    if op is None or op.meaning is None:
        return op.unstated if op else f"{node.op} is not in the registry"
    return f"the meaning of {node.op} does not cover this call"


def _verdict(gate: GateResult | None) -> str:
    """`traffic-saving: 1.25 x, needs >= 1.5`; for an unknown gate its reason."""
    if gate is None:
        return ""
    if gate.measured is None:
        return f"{gate.name}: {gate.why}"
    measured, limit = told_apart(gate.measured, gate.limit)
    return f"{gate.name}: {measured} {gate.unit}, needs {gate.comparison} {limit}"


def _unmodelled(annotated: Annotated) -> list[CauseRow]:
    """Ops that the registry lacks, the most time first."""
    return _by_cause(
        (node.op, annotated.costs[node.name].bytes, annotated.costs[node.name].time_us)
        for node in annotated.graph.nodes
        if not annotated.costs[node.name].modelled
    )


def _no_schedule(found: Identified) -> list[CauseRow]:
    """Obstacles of the candidates that have no plan; bytes and time are the saving of
    fusing them."""
    rows: list[tuple[str, int, float]] = []
    for finding in found.candidates:
        gate = finding.decision.deciding
        if gate is not None and gate.name == "no-schedule":
            saved = finding.decision.unfused_bytes - finding.decision.fused_bytes
            rows += [(gate.why, saved, finding.saved_us)] * len(finding.instances)
    return _by_cause(rows)


def _by_cause(rows: Iterable[tuple[str, int, float]]) -> list[CauseRow]:
    causes: dict[str, CauseRow] = {}
    for cause, moved, time_us in rows:
        row = causes.setdefault(cause, CauseRow(cause=cause, nodes=0, bytes=0, time_us=0.0))
        row.nodes, row.bytes, row.time_us = row.nodes + 1, row.bytes + moved, row.time_us + time_us
    return sorted(causes.values(), key=lambda row: -row.time_us)


# -- totals ----------------------------------------------------------------------------------------


_UNDER_NO_GRAD = "under torch.no_grad() alone: with gradients eager's own launches run"
_IN_A_STEP = "once a torch.autograd.Function calls the kernels: until then eager's own launches run"


def _condition(graph: Graph, gradients: bool) -> str:
    """Condition for the kernels of the groups to run."""
    if _phases(graph):
        return _IN_A_STEP
    return _UNDER_NO_GRAD if gradients else ""


def _totals(
    flow: Dataflow,
    found: Identified,
    eager_us: Mapping[str, float],
    beside: Mapping[str, float],
    faults: int,
    gradients: bool,
) -> TotalsRow:
    others_us = sum(beside.values())
    total_us = sum(eager_us.values()) + others_us
    costs = [flow.annotated.costs[node.name] for node in flow.nodes]
    saved_us = sum(g.saved_us_total for g in found.groups)
    places = [group for group in found.groups for _ in group.instances]
    by_bound: dict[str, float] = {"compute": 0.0, "memory": 0.0, "overhead": 0.0}
    for name, time_us in eager_us.items():
        by_bound[flow.annotated.costs[name].bound if name else "overhead"] += time_us
    by_bound |= beside
    return TotalsRow(
        **_sums(costs, places, total_us, saved_us),
        saveable_bytes=found.saveable_bytes,
        ceiling_speedup=max(_ratio(total_us, least_us(flow, eager_us) + others_us), 1.0),
        peak_activation_bytes=peak_activation_bytes(flow.annotated.graph),
        time_by_bound=by_bound,
        faults=faults,
        condition=_condition(flow.annotated.graph, gradients),
        by_phase=_by_phase(flow, found, eager_us),
    )


def _sums(
    costs: Sequence[Cost], places: Sequence[Finding], time_us: float, saved_us: float
) -> dict[str, Any]:
    """Totals that the whole and each phase have: of launches by their costs, and of the places of
    groups, a group once for each."""
    hbm_bytes, kernels = sum(c.bytes for c in costs), sum(c.launches for c in costs)
    saved_bytes = sum(g.decision.unfused_bytes - g.decision.fused_bytes for g in places)
    return {
        "flops": sum(c.flops for c in costs),
        "hbm_bytes_unfused": hbm_bytes,
        "hbm_bytes_fused": hbm_bytes - saved_bytes,
        "kernels_unfused": kernels,
        "kernels_fused": kernels - sum(g.launches_saved for g in places),
        "time_us": time_us,
        "predicted_speedup": _ratio(time_us, time_us - saved_us),
        "coverage": _ratio(
            sum(c.time_us for c in costs if c.modelled), sum(c.time_us for c in costs)
        ),
    }


def _phases(graph: Graph) -> list[Phase]:
    """Phases of a training step, in order; [] where the graph is a forward pass alone."""
    found: dict[Phase, None] = {n.phase: None for n in graph.nodes if n.kind == "call"}
    return [*found] if "backward" in found else []


def _by_phase(
    flow: Dataflow, found: Identified, eager_us: Mapping[str, float]
) -> dict[str, PhaseRow]:
    """Totals of each phase; a group is of the phase of its first launch."""
    rows: dict[str, PhaseRow] = {}
    for phase in _phases(flow.annotated.graph):
        names = [node.name for node in flow.nodes if node.phase == phase]
        costs = [flow.annotated.costs[name] for name in names]
        places = [
            group
            for group in found.groups
            for place in group.instances
            if flow.nodes[place[0]].phase == phase
        ]
        by_bound: dict[str, float] = {}
        taken = {name: eager_us[name] for name in names if name in eager_us}
        for name, time_us in taken.items():
            bound = flow.annotated.costs[name].bound
            by_bound[bound] = by_bound.get(bound, 0.0) + time_us
        time_us, saved_us = sum(taken.values()), sum(group.saved_us for group in places)
        rows[phase] = PhaseRow(**_sums(costs, places, time_us, saved_us), time_by_bound=by_bound)
    return rows


def _saved(annotated: Annotated) -> list[SavedRow]:
    """Tensors that a training step keeps for backward, the most bytes first."""
    found = saved_tensors(annotated) if _phases(annotated.graph) else ()
    return [
        SavedRow(
            name=each.name, bytes=each.bytes, shape=list(each.tensor.shape),
            dtype=each.tensor.dtype, source=_source(each.source) if each.source else None,
            saved_by=list(each.saved_by),
            alternative=each.alternative,
        )
        for each in sorted(found, key=lambda each: -each.bytes)
    ]  # fmt: skip


def _checkpoints(annotated: Annotated) -> list[CheckpointRow]:
    """Checkpoints of the model in a training step."""
    return [
        CheckpointRow(
            source=_source(each.first.source) if each.first.source else None,
            freed_bytes=each.freed_bytes, kept_bytes=each.kept_bytes,
            launches=sum(annotated.costs[node.name].launches for node in each.again),
            again_us=each.again_us,
        )
        for each in checkpoints(annotated)
    ]  # fmt: skip


def _beside(flow: Dataflow, profile: Profile) -> dict[str, float]:
    """Time of a trace's step that no launch of the graph takes, us: of the passes that the graph
    has together, of each other one, and idle."""
    here = {pass_of(node) for node in flow.nodes}
    share = profile.linked_by_phase
    parts = {
        "unlinked": sum(us * (1 - share[p]) for p, us in profile.phases.items() if p in here),
        **{phase: us for phase, us in profile.phases.items() if phase not in here},
        "idle": profile.idle_us,
    }
    return {name: us for name, us in parts.items() if us > 0}


def _queue(flow: Dataflow, profile: Profiled) -> QueueStep:
    """Idle time before each launch of the graph, as a trace has it."""
    idle = {flow.position[name]: us for name, us in profile.idle.items()}
    return QueueStep(dict(sorted(idle.items())), profile.profile.step_us)


def _ratio(over: float, under: float) -> float:
    return over / under if under > 0 else 1.0
