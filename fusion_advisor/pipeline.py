"""The table of contents: where the stages meet, and the only place where they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fusion_advisor.annotate import annotate
from fusion_advisor.assemble import Proof, assemble
from fusion_advisor.axes import NotExpressible
from fusion_advisor.dataflow import Dataflow, dataflow
from fusion_advisor.decide import Decision, decide
from fusion_advisor.emit import emit
from fusion_advisor.group import group
from fusion_advisor.identify import Finding, Identified, identify
from fusion_advisor.inductor import weigh
from fusion_advisor.kernels import Kernel
from fusion_advisor.machine import choose_device, gpu_names
from fusion_advisor.records import Graph
from fusion_advisor.report import Report
from fusion_advisor.routing import action
from fusion_advisor.rulebook import Device, Rulebook
from fusion_advisor.rulefiles import load_rulebook
from fusion_advisor.scenario import Request, Scenario
from fusion_advisor.verify import provers, verify


class Listener(Protocol):
    """Told of each stage as it begins, and of what was assumed as soon as that is known."""

    def stage(self, name: str) -> None: ...

    def assumed(self, facts: Sequence[str]) -> None: ...


class _Silent:
    def stage(self, name: str) -> None:
        del name

    def assumed(self, facts: Sequence[str]) -> None:
        del facts


@dataclass(frozen=True)
class Analysis:
    """The report, and the kernels of the accepted groups."""

    report: Report
    kernels: tuple[Kernel, ...]
    flow: Dataflow


def analyze(
    request: Request, captured: Callable[[], Graph], listener: Listener | None = None
) -> Analysis:
    """From a model's capture to a report with proven kernels.

    `captured` waits for the graph: `capture.capturing` begins before this module, and all it
    imports, was loaded. Raises UsageError for a wrong request and CaptureError for a model that
    cannot be captured.
    """
    listener = listener or _Silent()
    rulebook = load_rulebook(request.rules)
    gpus = gpu_names()
    device, chosen = choose_device(request.device, rulebook, gpus)
    with provers(
        device.capability, rulebook.verify, check=request.verify, compile=request.compile
    ) as children:  # they warm up while the model is captured
        listener.stage("capture")
        graph = captured()
        assumed = (chosen, *graph.assumed)
        listener.assumed(assumed)
        listener.stage("annotate")
        flow = dataflow(annotate(graph, device))
        listener.stage("group")
        grouping = group(flow, lambda launches: decide(flow, launches, rulebook), rulebook)
        found = identify(flow, grouping, rulebook)
        listener.stage("emit")
        proofs = _emitted(request, flow, found, rulebook, full_size=bool(gpus))
        listener.stage("verify")
        kernels = {name: proof.kernel for name, proof in proofs.items() if proof.kernel}
        proven = verify(list(kernels.values()), children)
        for name, (check, compiled) in zip(kernels, proven, strict=True):
            proofs[name] = replace(proofs[name], check=check, compiled=compiled)
    listener.stage("report")
    report = assemble(flow, grouping, found, proofs, request.scenario, assumed, rulebook)
    return Analysis(report, tuple(kernels.values()), flow)


def _emitted(
    request: Request, flow: Dataflow, found: Identified, rulebook: Rulebook, *, full_size: bool
) -> dict[str, Proof]:
    """A kernel for each accepted group, by its id."""

    def one(finding: Finding) -> Proof:
        file = f"{request.folder}/{finding.name}.py" if request.folder is not None else None
        try:
            kernel = emit(
                flow, finding.decision, finding.name, rulebook,
                regenerate=request.command, full_size=full_size,
            )  # fmt: skip
        except (NotExpressible, ValueError) as error:
            return Proof(None, why=f"not emitted: {error}")
        return Proof(kernel, file=file)

    return {finding.id: one(finding) for finding in found.groups}


@dataclass(frozen=True)
class Compiler:
    """Who compiles what we do not take, and how: `tuned` where Inductor measures its choices,
    `graphed` where launches are replayed by a CUDA graph. With `take_all` every accepted group is
    taken, whether its kernel wins or not: for comparisons and tests."""

    tuned: bool = False
    graphed: bool = False
    take_all: bool = False


@dataclass(frozen=True)
class Place:
    """One occurrence of an accepted group; without a kernel, `why` says why it is Inductor's."""

    group: str
    name: str
    why: str
    decision: Decision
    kernel: Kernel | None = None


@dataclass(frozen=True)
class Division:
    """A graph divided between our kernels and Inductor, with its report."""

    flow: Dataflow
    places: tuple[Place, ...]
    report: Report


def divide(
    graph: Graph, device: Device, rulebook: Rulebook, compiler: Compiler, assumed: Sequence[str]
) -> Division:
    """From a captured graph to the kernels that its compiler should leave to us, in this process.

    Kernels are emitted, not proven: `analyze` does that.
    """
    flow = dataflow(annotate(graph, device))
    grouping = group(flow, lambda launches: decide(flow, launches, rulebook), rulebook)
    found = identify(flow, grouping, rulebook)
    places: list[Place] = []
    proofs: dict[str, Proof] = {}
    for finding in found.groups:
        own = list(_divided(flow, finding, rulebook, compiler))
        kernel = next((place.kernel for place in own if place.kernel), None)
        proofs[finding.id] = Proof(kernel, why="" if kernel else own[0].why)
        places += own
    report = assemble(flow, grouping, found, proofs, Scenario(), assumed, rulebook)
    return Division(flow, tuple(places), report)


def _divided(
    flow: Dataflow, finding: Finding, rulebook: Rulebook, compiler: Compiler
) -> Iterator[Place]:
    """The occurrences of one group. Neighbours differ, and so may what is best."""
    route = action(finding, rulebook).route
    known: dict[object, Kernel] = {}
    for instance in finding.instances:
        decision = decide(flow, [i for i in instance if flow.launches(i)], rulebook)
        weighed = weigh(decision, rulebook, tuned=compiler.tuned, graphed=compiler.graphed)
        place = Place(finding.id, finding.name, str(weighed), decision)
        if not compiler.take_all and route == "inductor":
            yield replace(place, why="a short chain of pointwise ops, which Inductor fuses as well")
            continue
        if not compiler.take_all and not weighed.wins:
            yield place
            continue
        expressed = decision.subject.expressed
        assert expressed is not None
        try:
            if expressed.form not in known:
                known[expressed.form] = emit(flow, decision, finding.name, rulebook)
        except (NotExpressible, ValueError) as error:
            yield replace(place, why=f"not emitted: {error}")
            continue
        yield replace(place, kernel=known[expressed.form])
