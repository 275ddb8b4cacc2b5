"""Workflow of `update`: each kernel that is already in a model's source is written anew under the
same name, from the launches of its own reference.

The model's source stays. A kernel takes its arguments in the order that its calls give them, so one
that these rules would call otherwise is left as it is, with the reason.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fusion_advisor.codegen.eager_reference import numbers_of
from fusion_advisor.codegen.emit import attempt
from fusion_advisor.codegen.header import edited, read_stamp, stamped
from fusion_advisor.codegen.kernel_package import (
    ASKING,
    kernels_of,
    mark_of,
    package_files,
    package_name,
    read_package,
    written_for,
)
from fusion_advisor.codegen.pair import has_backward
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.fusion.decide import Decision, deciding
from fusion_advisor.fusion.idioms import name_of
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.graph import Graph, Node, Ref, Source
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.ir.scenario import Moved, Request, Scenario
from fusion_advisor.ir.source_trace import Evaluation, Moment
from fusion_advisor.report.assemble import Proof
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device
from fusion_advisor.sourcepatch.editing.rewrite import NotPlaced
from fusion_advisor.sourcepatch.editing.sequential import SpelledOut
from fusion_advisor.sourcepatch.editing.sources import Sources
from fusion_advisor.sourcepatch.equivalence import difference
from fusion_advisor.sourcepatch.given import given_numbers
from fusion_advisor.sourcepatch.other_sizes import Serving, widened
from fusion_advisor.sourcepatch.placement import Patch
from fusion_advisor.sourcepatch.trial import Trial, run_trial
from fusion_advisor.verify.driver import provers
from fusion_advisor.workflows.analyze import Listener, Silent, stamp_of
from fusion_advisor.workflows.patch import (
    Captured,
    capture_everywhere,
    capturer,
    passing_kernels,
    runs_of,
)

STAGES = ("capture", "emit", "verify", "try")
"""Stages of `update_kernels`, in order."""

_REFERENCE = "reference"
"""Name of the function of an emitted file that runs eager's launches."""


@dataclass(frozen=True)
class UpdateResult:
    """Changed files of a package; the names of the kernels that were written anew, and for the
    others why they stay. `wrong` and `ran` are as of a patch."""

    patch: Patch = field(default_factory=Patch)
    written: tuple[str, ...] = ()
    left: dict[str, str] = field(default_factory=dict[str, str])
    tried: tuple[str, ...] = ()
    wrong: dict[str, str] = field(default_factory=dict[str, str])
    ran: str = ""


def update_kernels(
    request: Request,
    root: Path,
    listener: Listener | None = None,
    captured: Captured | None = None,
) -> UpdateResult:
    """Write the kernels of the package beside a model's file as this version and these rules write
    them.

    Each kernel is found by its calls in the model, which is captured with the kernels' references,
    and is written from the launches of its reference; then the model with the new kernels is
    compared with the model with the old ones, as a patch is. Nothing is written here. Raises
    UsageError and CaptureError as `patch_model` does.
    """
    listener, captured = listener or Silent(), captured or capturer(request)
    model = Path(request.model.partition(":")[0]).resolve()
    folder = written_for(model, root) or model.parent / package_name(model)
    standing = read_package(folder)
    rulebook = load_rulebook(request.rules)
    device, chosen = choose_device(request.device, rulebook, request.gpus)

    def graph_of(scenario: Scenario) -> Graph:
        return _at_calls(captured(request.model, scenario, folder.name, None), folder)

    def flow_at(model: str, scenario: Scenario, moved: Moved | None) -> Dataflow:
        return dataflow(captured(model, scenario, folder.name, moved), device)

    with (
        provers(
            device.capability, rulebook.verify, check=request.verify, compile=request.compile
        ) as children,
        ThreadPoolExecutor(2) as pool,
    ):
        listener.stage("capture")
        seen = capture_everywhere(request.scenario, graph_of, device, pool)
        if not request.pairs:
            seen = seen.given(given_numbers(_sources(seen.flow.annotated.graph), seen.flow))
        flow = replace(seen.flow, asked=_asked(seen.flow.annotated.graph, kernels_of(standing)))
        listener.assumed((chosen, *flow.annotated.graph.assumed))
        listener.stage("emit")
        decided = deciding(flow, rulebook, Faults(strict=request.strict))
        at = widened(flow, seen.batch and seen.batch.flow, rulebook)
        calls = _Calls(flow, Serving(at, rulebook))
        made: dict[str, Kernel] = {}
        decisions: dict[str, Decision] = {}
        left: dict[str, str] = {}
        for name, text in kernels_of(standing).items():
            try:
                _require_ours(text)
                if has_backward(text) and not request.pairs:
                    raise NotPlaced("it has its backward, which --mode train writes anew")
                decision = at(calls.decision(folder / f"{name}.py", text, decided))
                subject = decision.subject
                kernel = attempt(
                    subject.flow, decision, name, rulebook,
                    framework=exact(subject, name_of(subject, rulebook)),
                )  # fmt: skip
                if not isinstance(kernel, Kernel):
                    raise NotPlaced(kernel)
                made[name], decisions[name] = kernel, decision
            except NotPlaced as reason:
                left[name] = str(reason)
        listener.stage("verify")
        checks = passing_kernels(made, children)
        left |= dict.fromkeys(made.keys() - checks.keys(), "the new kernel is not proven")
        proofs = {name: Proof(made[name], check=check) for name, check in checks.items()}
        if request.pairs:
            from fusion_advisor.workflows.pairs import Occurrences, for_training  # torch, too

            groups = {
                name: Occurrences(decisions[name], calls.runs(folder / f"{name}.py"))
                for name in proofs
            }
            proofs, idle = for_training(groups, proofs, children, rulebook)
            left |= idle
        new = {name: (p.kernel, p.check) for name, p in proofs.items() if p.kernel}
        patch = Patch()
        texts = dict(kernels_of(standing))
        for name, (kernel, check) in new.items():
            old = read_stamp(texts[name])
            assert old is not None  # asked for above
            marks = [(place, mark, mark_of(folder.parent / place)) for place, mark in old.sources]
            if changed := [place for place, before, now in marks if now != before]:
                patch.outdated[folder / f"{name}.py"] = ", ".join(changed)
            sources = tuple((place, now) for place, _, now in marks if now)
            stamp = replace(stamp_of(request, check, rulebook), sources=sources)
            texts[name] = stamped(kernel.text, stamp)
        asking = standing.get(folder / ASKING, "")
        files = package_files(folder, texts, asking) if texts else {}
        patch.after |= {path: text for path, text in files.items() if standing.get(path) != text}
        patch.before |= {path: standing[path] for path in patch.after if path in standing}
        written = tuple(name for name in new if folder / f"{name}.py" in patch.after)
        if not patch.after:
            return UpdateResult(patch, (), left)
        listener.stage("try")
        originals = [*seen.originals, *seen.at_sizes]
        trials = [Trial(said, at, partial(difference, flow)) for said, at, flow in originals]
        package = folder.relative_to(root).as_posix()
        kernels = [new[name][0] for name in written]
        runs = runs_of(request, flow, package, rulebook, seen.resized, kernels)
        wrong, ran = run_trial(
            patch.diff(root), patch.after, root, request.model, trials, flow_at, pool, runs
        )
    said = tuple(said for said, _, _ in originals)
    return UpdateResult(patch, written, left, said, wrong, ran)


def _require_ours(text: str) -> None:
    """Raise NotPlaced for a kernel that was edited."""
    if read_stamp(text) is None:
        raise NotPlaced("it does not say what wrote it")
    if edited(text):
        raise NotPlaced("it was edited since it was written")


class _Calls:
    """Calls of emitted kernels in a model that was captured with their references."""

    def __init__(self, flow: Dataflow, serving: Serving) -> None:
        self._serving = serving
        graph = flow.annotated.graph
        self._sources = _sources(graph)
        self._flow, self._trail = flow, self._sources.trail
        self._launches: dict[int, list[int]] = {}
        """Launches of each run of a reference, by its activation."""
        for number, node in enumerate(flow.nodes):
            run = _run_of(graph, node)
            if run is not None and flow.launches(number):
                self._launches.setdefault(run, []).append(number)

    def runs(self, file: Path) -> tuple[tuple[int, ...], ...]:
        """Launches of each call of a kernel."""
        return tuple(map(tuple, self._runs(file).values()))

    def _runs(self, file: Path) -> dict[int, list[int]]:
        activations = self._trail.activations
        return {r: n for r, n in self._launches.items() if Path(activations[r].file) == file}

    def decision(
        self, file: Path, text: str, decided: Callable[[Iterable[int]], Decision]
    ) -> Decision:
        """Decision of these rules on the launches behind a kernel, the same at all of its calls.
        Raises NotPlaced where the rules do not fuse them as the kernel does."""
        runs = self._runs(file)
        if not runs:
            raise NotPlaced("the model does not call it as it was run")
        every = {run: decided(launches) for run, launches in runs.items()}
        run, decision = next(
            ((run, one) for run, one in every.items() if self._serves_all(one, every.values())),
            next(iter(every.items())),
        )
        expressed = decision.subject.expressed
        if not decision.accepted or expressed is None:
            gate = decision.deciding
            said = f"{gate.code} {gate.name}" if gate else "it is one launch"
            raise NotPlaced(f"these rules do not fuse what it computes: {decision.fault or said}")
        if not self._serves_all(decision, every.values()):
            raise NotPlaced("its calls give it tensors of different forms")
        names, results = _signature(text)
        tensors = len(names) - len(expressed.numbers)
        numbers = [number.name for number in expressed.numbers]
        same = [*expressed.inputs] == self._given(run, names[:tensors])
        if not same or numbers != names[tensors:]:
            raise NotPlaced("it would take other arguments")
        if len(expressed.outputs) != results:
            raise NotPlaced("it would have other results, of which the model uses some")
        return decision

    def _serves_all(self, one: Decision, others: Iterable[Decision]) -> bool:
        """Whether the kernel of some launches serves those of all calls."""
        mine = one.subject.expressed
        return one.accepted and all(
            (theirs := other.subject.expressed) is not None
            and ((mine and mine.form == theirs.form) or self._serving.serves(one, other))
            for other in others
        )

    def _given(self, run: int, names: Sequence[str]) -> list[Ref | None]:
        """Tensors that a run of a reference was given, by the names of its parameters."""
        begun = next(
            step
            for step in self._trail.steps
            if isinstance(step, Moment) and step.activation == run
        )
        return [self._sources.value(begun.names.get(name)) for name in names]


def _sources(graph: Graph) -> Sources:
    assert graph.trail is not None  # asked for
    return Sources(graph, SpelledOut().trail(graph.trail), {})


def _run_of(graph: Graph, node: Node) -> int | None:
    """Activation of the reference of an emitted file that a node was made in; None where
    there is none."""
    trail = graph.trail
    step = trail.steps[node.step] if trail and node.step is not None else None
    at = step.activation if isinstance(step, Evaluation) else None
    while trail and at is not None and trail.activations[at].function != _REFERENCE:
        at = trail.activations[at].caller
    return at


def _asked(graph: Graph, texts: Mapping[str, str]) -> frozenset[tuple[str, float]]:
    """Numbers of nodes in the references of kernels that serve every size: what wrote these knew
    that they follow from none."""
    trail, found = graph.trail, set[tuple[str, float]]()
    for node in graph.nodes:
        run = _run_of(graph, node)
        if trail is not None and run is not None:
            text = texts.get(Path(trail.activations[run].file).stem, "held_to(")
            if "held_to(" not in text:
                found |= {(node.name, n) for n in numbers_of(node) if n is not None}
    return frozenset(found)


def _at_calls(graph: Graph, folder: Path) -> Graph:
    """Graph whose nodes that stand for a kernel of a package have the lines that call the
    kernel."""
    trail = graph.trail
    assert trail is not None  # asked for

    def placed(node: Node) -> Node:
        at = _run_of(graph, node)
        while at is not None and Path(trail.activations[at].file).is_relative_to(folder):
            call = trail.activations[at]
            if call.caller is None or call.place is None:
                return node
            at, line = call.caller, call.place.line
            node = replace(node, source=Source(trail.activations[at].file, line))
        return node

    return replace(graph, nodes=tuple(map(placed, graph.nodes)))


def _signature(text: str) -> tuple[list[str], int]:
    """Parameters of an emitted file's reference, and the number of its results."""
    functions = (n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
    reference = next(function for function in functions if function.name == _REFERENCE)
    last = reference.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    count = len(value.elts) if isinstance(value, ast.Tuple) else 1
    return [each.arg for each in reference.args.args], count
