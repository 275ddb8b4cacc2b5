"""Workflow of `analyze`: from a capture to a report with proven kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.codegen.header import Stamp, checked, stamped
from fusion_advisor.codegen.kernel_package import mark_of
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import (
    Finding,
    Identified,
    fuse,
    with_measured,
    with_registers,
)
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.frames import portable_path
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Check, Kernel
from fusion_advisor.ir.scenario import Request
from fusion_advisor.measure.search import Proven, Searcher, SearchResult
from fusion_advisor.profile.profile import (
    Profiled,
    choose_traced_device,
    profiled,
    read_trace,
)
from fusion_advisor.report.assemble import Proof, assemble
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device, version
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.verify.driver import Provers, holds, provers, verify
from fusion_advisor.verify.proofs import Proofs

STAGES = ("capture", "annotate", "group", "emit", "verify", "report")
"""Stages of `analyze`, in order; a search follows `verify` where one is asked for."""


class Listener(Protocol):
    """Listener that is told each stage as it begins, and the assumptions as soon as they
    are known."""

    def stage(self, name: str) -> None: ...

    def assumed(self, facts: Sequence[str]) -> None: ...


class Silent:
    def stage(self, name: str) -> None:
        del name

    def assumed(self, facts: Sequence[str]) -> None:
        del facts


@dataclass(frozen=True)
class Analysis:
    """Result of `analyze`: the report, the kernels of the accepted groups, and the results of
    searches, by the group."""

    report: Report
    kernels: tuple[Kernel, ...]
    flow: Dataflow
    searches: Mapping[str, SearchResult] = field(default_factory=dict[str, SearchResult])


def analyze(
    request: Request,
    captured: Callable[[], Graph],
    listener: Listener | None = None,
    searcher: Searcher | None = None,
) -> Analysis:
    """Analyse a model: from its capture to a report with proven kernels.

    `captured` waits for the graph: `frontend.child.capturing` begins before this module, and all it
    imports, was loaded. A `searcher` finds the fastest configuration of each kernel. Raises
    UsageError for a wrong request and CaptureError for a model that cannot be captured.
    """
    listener = listener or Silent()
    rulebook = load_rulebook(request.rules)
    trace = read_trace(request.profile) if request.profile else None
    traced = choose_traced_device(trace, request.device, rulebook) if trace else None
    device, chosen = traced or choose_device(request.device, rulebook, request.gpus)
    known = Proofs(request.proofs, rulebook.cache.proofs.count) if request.proofs else None
    with provers(
        device.capability, rulebook.verify,
        check=request.verify, compile=request.compile,
        where="auto" if searcher else "interpreter", known=known,
    ) as children:  # fmt: skip # they import while the model is captured
        listener.stage("capture")
        graph = captured()
        assumed = (chosen, *graph.assumed)
        listener.assumed(assumed)
        listener.stage("annotate")
        flow = dataflow(graph, device)
        profile = profiled(trace, flow, rulebook.profile.linked.value) if trace else None
        listener.stage("group")
        faults = Faults(strict=request.strict)
        found = fuse(flow, rulebook, faults)
        listener.stage("emit")
        full_size = searcher is not None and bool(request.gpus)
        proofs = emit_groups(request, found, rulebook, faults, full_size=full_size)
        listener.stage("verify")
        kernels = {name: proof.kernel for name, proof in proofs.items() if proof.kernel}
        proven = verify(list(kernels.values()), children)
        for name, (check, compiled) in zip(kernels, proven, strict=True):
            proofs[name] = replace(proofs[name], check=check, compiled=compiled)
        registers = {name: p.compiled.registers for name, p in proofs.items() if p.compiled}
        found = with_registers(found, registers)
        if request.pairs:
            from fusion_advisor.workflows.pairs import Occurrences, with_backward  # torch, too

            groups = {f.id: Occurrences(f.decision, f.instances) for f in found.groups}
            proofs = with_backward(groups, proofs, children, rulebook)
        if profile:
            found = with_measured(found, _measured(flow, found, profile))
        if searcher:
            listener.stage("search")
            for finding in found.groups:
                proof = proofs[finding.id]
                proofs[finding.id] = search_kernel(finding, proof, searcher, children, rulebook)
    listener.stage("report")
    report = assemble(flow, found, proofs, request.scenario, assumed, rulebook, faults, profile)
    signed = [
        _signed(request, flow, finding, proofs[finding.id], rulebook) for finding in found.groups
    ]
    for row, kernel in zip(report.groups, signed, strict=True):
        row.kernel.text = kernel.text if kernel else None
    searches = {name: proof.searched for name, proof in proofs.items() if proof.searched}
    return Analysis(report, tuple(kernel for kernel in signed if kernel), flow, searches)


def _measured(flow: Dataflow, found: Identified, profile: Profiled) -> dict[str, float]:
    """Measured time of an instance of each finding, by id, us: the mean of its instances, where all
    of their launches are linked."""

    def predicted(name: str) -> float:
        return flow.annotated.costs[name].time_us

    measured: dict[str, float] = {}
    for finding in (*found.groups, *found.candidates):
        launches = [[i for i in place if flow.launches(i)] for place in finding.instances]
        times = [
            profile.unfused_us([flow.nodes[i].name for i in place], predicted) for place in launches
        ]
        known = [us for us in times if us is not None]
        if known and len(known) == len(times):
            measured[finding.id] = sum(known) / len(known)
    return measured


def _signed(
    request: Request, flow: Dataflow, finding: Finding, proof: Proof, rulebook: Rulebook
) -> Kernel | None:
    """Kernel of a group whose file says what it was made from and how it was checked."""
    if proof.kernel is None:
        return None
    home = Path(request.model.partition(":")[0]).resolve().parent
    made_in = (flow.nodes[number].source for place in finding.instances for number in place)
    files = sorted({Path(source.file).resolve() for source in made_in if source})
    sources = tuple((_beside(file, home), mark) for file in files if (mark := mark_of(file)))
    stamp = stamp_of(request, proof.check, rulebook)
    stamp = replace(stamp, sources=sources)
    return replace(proof.kernel, text=stamped(proof.kernel.text, stamp))


def _beside(file: Path, home: Path) -> str:
    """Path of a source file relative to the model's folder, the same on every machine."""
    name = portable_path(str(file), str(home))
    return Path(name).name if Path(name).is_absolute() else Path(name).as_posix()


def stamp_of(request: Request, check: Check | None, rulebook: Rulebook) -> Stamp:
    """Header of a kernel's file: the tool that wrote and checked the kernel."""
    tool = version("fusion-advisor") or "unknown"
    return Stamp(tool, rulebook.hash, checked=checked(check), command=request.command)


def search_kernel(
    finding: Finding, proof: Proof, searcher: Searcher, children: Provers, rulebook: Rulebook
) -> Proof:
    """Proof of a group with the fastest numbers for its kernel's launches; where the kernel has not
    passed, with why there was no search."""
    kernel = proof.kernel
    if kernel is None:
        return proof
    if not holds(proof.check, proof.compiled):
        return replace(proof, searched=SearchResult(kernel, failure="the kernel has not passed"))

    def write(decision: Decision) -> Kernel | str:
        return emit_group(replace(finding, decision=decision), rulebook, full_size=True)

    def proven(other: Kernel) -> Proven:
        return verify([other], children)[0]

    return replace(proof, searched=searcher(finding.decision, kernel, write, proven))


def emit_groups(
    request: Request,
    found: Identified,
    rulebook: Rulebook,
    faults: Faults | None = None,
    *,
    full_size: bool,
) -> dict[str, Proof]:
    """Kernel of each accepted group, by the group's id."""

    def one(finding: Finding) -> Proof:
        file = f"{request.folder}/{finding.name}.py" if request.folder is not None else None
        try:
            kernel = emit_group(finding, rulebook, full_size=full_size)
        except Exception as error:
            if faults is None:
                raise
            flow, launches = finding.decision.subject.flow, finding.decision.subject.launches
            kernel = faults.note(error, (flow.nodes[number].name for number in launches))
        return Proof(None, why=kernel) if isinstance(kernel, str) else Proof(kernel, file=file)

    return {finding.id: one(finding) for finding in found.groups}


def emit_group(finding: Finding, rulebook: Rulebook, *, full_size: bool) -> Kernel | str:
    """Kernel of a group, beside PyTorch's own op; or the reason why none can be written."""
    subject = finding.decision.subject
    own_op = exact(subject, finding.pattern) if finding.framework else None
    return attempt(
        subject.flow, finding.decision, finding.name, rulebook,
        framework=own_op, full_size=full_size,
    )  # fmt: skip
