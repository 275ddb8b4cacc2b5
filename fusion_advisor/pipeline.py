"""The table of contents: where the stages meet, and the only place where they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fusion_advisor.annotate import annotate
from fusion_advisor.assemble import Proof, assemble
from fusion_advisor.dataflow import Dataflow, dataflow
from fusion_advisor.decide import decide
from fusion_advisor.emit import attempt
from fusion_advisor.group import group
from fusion_advisor.identify import Finding, Identified, identify
from fusion_advisor.kernels import Kernel
from fusion_advisor.machine import choose_device, gpu_names
from fusion_advisor.records import Graph
from fusion_advisor.report import Report
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.rulefiles import load_rulebook
from fusion_advisor.scenario import Request
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
        kernel = attempt(
            flow, finding.decision, finding.name, rulebook,
            regenerate=request.command, full_size=full_size,
        )  # fmt: skip
        return Proof(None, why=kernel) if isinstance(kernel, str) else Proof(kernel, file=file)

    return {finding.id: one(finding) for finding in found.groups}
