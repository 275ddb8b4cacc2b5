"""Partition of a Dynamo graph: groups predicted to beat Inductor become custom ops, the rest is
Inductor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.cost.dataflow import Dataflow, Variation, dataflow
from fusion_advisor.dynamo.weigh import InductorComparison, compare_with_inductor, may_win
from fusion_advisor.fusion.decide import Decision, decide
from fusion_advisor.fusion.findings import Finding, fuse
from fusion_advisor.fusion.route import action
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.report.assemble import Proof, assemble
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook

_BATCHED = ("aten.bmm.default", "aten.baddbmm.default", "aten.matmul.default")


@dataclass(frozen=True)
class InnerCompiler:
    """Compiler of the rest of the graph: `tuned` where Inductor measures its choices, `graphed`
    where launches are replayed by a CUDA graph. With `take_all` every accepted group is taken,
    whether its kernel wins or not: for comparisons and tests. `baseline`: savings are against this
    compiler, not against eager. `timed`: kernels are timed beside this compiler's before they are
    placed, so that those that may win are offered, too. `channels_last`: it lays convolutions of
    this graph out so. `fuses_attention`: whether it has one operator for the attention around a
    softmax."""

    tuned: bool = False
    graphed: bool = False
    take_all: bool = False
    baseline: bool = False
    timed: bool = False
    channels_last: bool = False
    fuses_attention: Callable[[Ref], bool] = lambda softmax: True


@dataclass(frozen=True)
class Occurrence:
    """One occurrence of an accepted group; without a kernel, `why` says why it is Inductor's."""

    group: str
    name: str
    why: str
    decision: Decision
    kernel: Kernel | None = None
    as_fast: bool = False
    """Whether the group is Inductor's because its kernel is expected to be as fast."""
    saved_us: float = 0.0
    """Predicted saving of the kernel here, us: against eager, or against Inductor's kernel where
    that is the baseline."""
    weighed: InductorComparison | None = None
    """Its kernel beside Inductor's; None where it need not win."""


@dataclass(frozen=True)
class Division:
    """Graph divided between our kernels and Inductor, with its report."""

    flow: Dataflow
    places: tuple[Occurrence, ...]
    report: Report


def divide(
    graph: Graph,
    device: Device,
    rulebook: Rulebook,
    compiler: InnerCompiler,
    assumed: Sequence[str],
) -> Division:
    """Divide a captured graph: emit the kernels that its compiler should leave to us, in this
    process. Kernels are emitted, not proven: `analyze` does that."""
    flow, faults = dataflow(graph, device), Faults()
    # Dynamo's guards, and the symbols of sizes that no number is taken for, see to every size.
    shapes = {ref: frozenset(range(len(t.shape))) for ref, t in flow.annotated.tensors.items()}
    flow = replace(flow, varied=(Variation(shapes),))
    may = partial(may_win, flow, rulebook, tuned=compiler.tuned, graphed=compiler.graphed)
    every = compiler.take_all or compiler.timed  # a prediction does not decide there
    found = fuse(flow, rulebook, faults, worth=lambda component: every or may(component))
    places: list[Occurrence] = []
    proofs: dict[str, Proof] = {}
    for finding in found.groups:
        own = list(_divided(flow, finding, rulebook, compiler))
        kernel = next((place.kernel for place in own if place.kernel), None)
        proofs[finding.id] = Proof(kernel, why="" if kernel else own[0].why)
        places += own
    report = assemble(flow, found, proofs, Scenario(), assumed, rulebook, faults)
    return Division(flow, tuple(places), report)


def _divided(
    flow: Dataflow, finding: Finding, rulebook: Rulebook, compiler: InnerCompiler
) -> Iterator[Occurrence]:
    """Yield the occurrences of one group. Their neighbours differ, and so may the best choice."""
    route = action(finding, rulebook).route
    known: dict[object, Kernel] = {}
    attention: list[bool] = []  # what Inductor answered for the first one of the group

    def fused_whole(decision: Decision) -> bool:
        softmax = _softmax_of_attention(flow, decision)
        if softmax is not None and not attention:
            attention.append(compiler.fuses_attention(softmax))
        return softmax is not None and attention[0]

    for instance in finding.instances:
        decision = decide(flow, [i for i in instance if flow.launches(i)], rulebook)
        weighed = compare_with_inductor(
            decision, rulebook,
            tuned=compiler.tuned, graphed=compiler.graphed, channels_last=compiler.channels_last,
        )  # fmt: skip
        over_eager = decision.unfused_us - decision.fused_us
        over_inductor = max(weighed.gain_us, 0.0)
        saved_us = over_inductor if compiler.baseline else over_eager
        place = Occurrence(finding.id, finding.name, str(weighed), decision, saved_us=saved_us)
        if not compiler.take_all and route == "inductor":
            why = "a short chain of pointwise ops, which Inductor fuses as well"
            yield replace(place, why=why, as_fast=True)
            continue
        doubt = rulebook.inductor.doubted.value if compiler.timed else 1.0
        if not compiler.take_all and weighed.ours_us >= doubt * weighed.inductor_us:
            yield replace(place, as_fast=True)
            continue
        least = rulebook.inductor.least.value
        if not (compiler.take_all or compiler.timed) and weighed.gain_us < least:
            yield replace(place, why=f"{weighed}: less than {least:g} us between", as_fast=True)
            continue
        if not (compiler.take_all or compiler.baseline) and fused_whole(decision):
            why = "attention that is written out, for which Inductor has one operator"
            yield replace(place, why=why, as_fast=True)
            continue
        if compiler.baseline and weighed.kept_bytes > rulebook.inductor.kept.value * weighed.bytes:
            yield replace(place, why=f"would keep {weighed.kept_bytes} B in memory; {weighed}")
            continue
        expressed = decision.subject.expressed
        assert expressed is not None
        kernel = known.get(expressed.form) or attempt(flow, decision, finding.name, rulebook)
        if isinstance(kernel, str):
            yield replace(place, why=kernel)
            continue
        known[expressed.form] = kernel
        beside = None if compiler.take_all else weighed
        yield replace(place, kernel=kernel, weighed=beside)


def _softmax_of_attention(flow: Dataflow, decision: Decision) -> Ref | None:
    """The softmax between two batched products that a set has; None without one. Inductor looks for
    attention before it divides a graph into passes, and finds none where the softmax is a kernel of
    ours."""
    subject = decision.subject

    def batched(number: int) -> bool:
        return number >= 0 and flow.nodes[number].op in _BATCHED

    before = any(batched(flow.position[flow.base(ref).node]) for ref in subject.border.inputs)
    behind = any(batched(use) for ref in subject.border.outputs for use in flow.uses(ref))
    nodes = (flow.nodes[number] for number in subject.launches if before and behind)
    return next((Ref(node.name) for node in nodes if "softmax" in node.op), None)
