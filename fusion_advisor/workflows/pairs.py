"""Pairs: a group of the forward pass with its backward, as one file of kernels.

    group → its statements → forward and backward graphs → fused each → one file

The group stays as it is, with the reason, where it has no such file: its launcher then runs its
eager statements where a gradient is required.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import combinations, islice
from math import inf
from typing import Any

import torch

from fusion_advisor.codegen.emit import attempt, written
from fusion_advisor.codegen.kernel_file import KernelFile
from fusion_advisor.codegen.pair import Pair, PassFiles, paired
from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.frontend.pairs import Parted, parts
from fusion_advisor.fusion.decide import Decision, decide, subject_of
from fusion_advisor.fusion.lower import boundary, lower_region
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.ir.kernel import Check, Compiled, Kernel
from fusion_advisor.report.assemble import Proof
from fusion_advisor.report.formats import wording
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.support.errors import CaptureError
from fusion_advisor.verify.driver import Provers, holds, verify


@dataclass(frozen=True)
class Occurrences:
    """Decision on a group, and the launches of each of its occurrences, which one file serves."""

    decision: Decision
    launches: tuple[tuple[int, ...], ...]

    @cached_property
    def wanted(self) -> list[int]:
        """Numbers of the tensors that the group takes whose gradients some occurrence asks for: the
        first layer's may require none, and the others' do."""
        flow = self.decision.subject.flow
        given = _given_gradients(flow)
        found: set[int] = set()
        for each in (self.decision.subject.launches, *self.launches):
            inputs = lower_region(flow, boundary(flow, filter(flow.launches, each))).inputs
            found |= {n for n, ref in enumerate(inputs) if ref in given}
        return sorted(found)


def with_backward(
    groups: Mapping[str, Occurrences],
    proofs: Mapping[str, Proof],
    children: Provers,
    rulebook: Rulebook,
) -> dict[str, Proof]:
    """Proofs of groups, by the names of these, whose kernels' files have the backward, too, where
    it can be written and passes; elsewhere with the reason."""
    found = {
        name: pair_of(group, proof.kernel, rulebook)
        for name, group in groups.items()
        if (proof := proofs[name]).kernel and holds(proof.check, proof.compiled)
    }
    pairs = [(name, pair) for name, pair in found.items() if not isinstance(pair, str)]
    whole = verify([pair.kernel for _, pair in pairs], children)
    parts = [part for _, pair in pairs for part in pair.parts]
    alone = iter(verify(parts, children, seeds=PART_SEEDS))
    made: dict[str, Proof] = {}
    for (name, pair), (check, compiled) in zip(pairs, whole, strict=True):
        wrong = [_fault(*proof) for proof in [(check, compiled), *islice(alone, len(pair.parts))]]
        why = next(filter(None, wrong), "")
        found[name] = why or found[name]
        made[name] = replace(
            proofs[name],
            kernel=pair.kernel,
            check=check,
            compiled=compiled,
            why=pair.said,
        )
    reasons = {name: why for name, why in found.items() if isinstance(why, str)}
    plain = {
        name: replace(proofs[name], why=f"no backward: {why}") for name, why in reasons.items()
    }
    return {**proofs, **made, **plain}


def for_training(
    groups: Mapping[str, Occurrences],
    proofs: Mapping[str, Proof],
    children: Provers,
    rulebook: Rulebook,
) -> tuple[dict[str, Proof], dict[str, str]]:
    """Proofs of the kernels that run in a training step, by the names of `groups`: files with
    their backward, and kernels of groups that no gradient passes through. And for the other groups
    why there is no backward: their statements would run wherever the model trains."""
    made = with_backward(groups, proofs, children, rulebook)
    idle = {
        name: made[name].why
        for name, group in groups.items()
        if group.wanted and not ((kernel := made[name].kernel) and kernel.gradients)
    }
    return {name: proof for name, proof in made.items() if name not in idle}, idle


def training_kernel(group: Occurrences, kernel: Kernel, rulebook: Rulebook) -> Kernel | None:
    """Kernel of a group that runs in a training step, from the `kernel` of the group alone; None
    where there is none."""
    pair = pair_of(group, kernel, rulebook)
    if isinstance(pair, str):
        return None if group.wanted else kernel
    return pair.kernel


def _fault(check: Check | None, compiled: Compiled | None) -> str:
    """Reason why a kernel has not passed; "" where it has."""
    failures = (proof.failure for proof in (check, compiled) if proof and proof.failure)
    return next(failures, "")


PART_SEEDS = 1
"""Draws of a kernel alone. Its numbers are no statistics of its rows then, so that most draws would
overflow: the file as a whole is checked with all."""


@dataclass(frozen=True)
class WholePair:
    """File of a group with its backward, and its kernels each as a file of its own, with which its
    own cases are checked. `said` has in words what backward takes."""

    kernel: Kernel
    parts: tuple[Kernel, ...]
    said: str


def pair_of(group: Occurrences, kernel: Kernel, rulebook: Rulebook) -> WholePair | str:
    """File of a group with its backward, from the `kernel` of the group alone; or the reason why
    there is none."""
    try:
        return _paired(group, kernel, rulebook)
    except (CaptureError, ValueError, RuntimeError) as error:  # the last is autograd's
        return " ".join(str(error).split())


def _paired(group: Occurrences, kernel: Kernel, rulebook: Rulebook) -> WholePair:
    expressed = group.decision.subject.expressed
    assert expressed is not None  # it has a kernel
    if expressed.draws:
        raise ValueError("it draws random numbers, which backward would have to draw again")
    wanted = group.wanted
    if not wanted:
        raise ValueError("none of its inputs requires a gradient")
    inputs = [*zip(kernel.inputs, expressed.region.inputs, strict=True)]
    more_kept = rulebook.pairs.more_kept.value
    why: ValueError | None = None
    for parted in parts(_function(kernel.yardstick), inputs, wanted, more_kept):
        try:
            return _written(group, kernel, parted, rulebook)
        except ValueError as error:  # another cut may have kernels
            why = why or error
    assert why is not None
    raise why


def _written(group: Occurrences, kernel: Kernel, parted: Parted, rulebook: Rulebook) -> WholePair:
    """File of a group whose graphs are parted so. Raises ValueError where a part has no kernel."""
    decision, subject = group.decision, group.decision.subject
    separate: list[Kernel] = []

    def run(graph: Graph, which: str, most: int) -> PassFiles:
        graph = replace(graph, outputs=dataflow(graph, subject.device).results)
        decisions = _covering(graph, subject.device, rulebook, most)
        files: list[KernelFile] = []
        for number, each in enumerate(decisions):
            name = f"{kernel.name}_{which}{f'_{number}' * (len(decisions) > 1)}"
            flow = each.subject.flow
            alone = attempt(flow, each, name, rulebook)
            if isinstance(alone, str):
                raise ValueError(alone)
            separate.append(alone)
            files.append(written(flow, each, name, rulebook))
        return PassFiles(graph, tuple(files))

    pair = Pair(
        run(parted.forward, "forward", 1),
        run(parted.backward, "backward", rulebook.pairs.launchers.count),
        parted.origins,
        parted.gradients,
    )
    file = written(subject.flow, decision, kernel.name, rulebook)
    count = sum(len(file.kernels) for file in pair.backward.files)
    launches = f"{count} launch{'es' * (count != 1)}"
    note = (
        f"Trains: backward is {launches}; {parted.kept_bytes} B are alive for it, in eager "
        f"{parted.eager_bytes} B."
    )
    said = (
        f"with its backward in {launches}, for which {wording.size(parted.kept_bytes)} are kept "
        f"instead of {wording.size(parted.eager_bytes)}"
    )
    return WholePair(paired(kernel, file, pair, note, rulebook), tuple(separate), said)


def _function(text: str) -> Callable[..., Any]:
    """The eager statements of a group, from their text."""
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(text, "<the group's statements>", "exec"), scope)
    return scope["reference"]


def _given_gradients(flow: Dataflow) -> set[Ref]:
    """Tensors that autograd gives a gradient to: parameters and inputs that require one, and what
    is computed from them. Where no floating input says so, all of them do."""
    graph = flow.annotated.graph
    floats = [n.name for n in graph.nodes if n.kind == "input" and "float" in n.out.dtype]
    roots = {*graph.trained, *(floats if {*floats}.isdisjoint(graph.trained) else ())}
    found: set[Ref] = set()
    for number, node in enumerate(flow.nodes):
        follows = node.op != "aten.detach.default" and not found.isdisjoint(flow.operands[number])
        if node.name in roots or (node.kind == "call" and follows):
            found |= {
                Ref(node.name, n)
                for n, tensor in enumerate(node.outputs)
                if tensor is not None and "float" in tensor.dtype
            }
    return found


_Results = tuple[Ref, ...]


def _covering(graph: Graph, device: Device, rulebook: Rulebook, most: int) -> list[Decision]:
    """Sets of launches that make all results of a graph, each from the graph's inputs alone: what
    several need, each makes again. Results are made together unless that is predicted to take
    longer by more than a launch. Raises ValueError where a set has no kernel, or there are more
    than `most`."""
    whole = dataflow(graph, device)
    bases = dict.fromkeys(whole.base(ref) for ref in whole.results)
    made = tuple(ref for ref in bases if whole.launches(whole.position[ref.node]))

    @cache
    def decided(refs: _Results) -> Decision:
        return _deciding(_making(whole, refs), device, rulebook)

    def together(one: _Results, other: _Results) -> _Results:
        return tuple(ref for ref in made if ref in one or ref in other)

    def saved_us(pair: tuple[_Results, _Results]) -> float:
        try:
            return sum(decided(each).fused_us for each in pair) - decided(together(*pair)).fused_us
        except ValueError:  # no kernel makes both
            return -inf

    sets: list[_Results] = [(ref,) for ref in made]
    if most == 1 and made:
        sets = [made]
    while len(sets) > 1:
        pair = max(combinations(sets, 2), key=saved_us)
        if saved_us(pair) < -device.launch_us:  # which a launcher more costs the host
            break
        sets = [*(each for each in sets if each not in pair), together(*pair)]
    if len(sets) > most:
        raise ValueError(f"its gradients take {len(sets)} kernels, more than {most}")
    return [*map(decided, sets)]


def _making(flow: Dataflow, refs: _Results) -> Graph:
    """The part of a graph that makes some tensors. Raises ValueError where that is written in place
    by what nothing reads."""
    needed: set[int] = set()
    waiting = {flow.position[ref.node] for ref in refs}
    while waiting:
        number = waiting.pop()
        needed.add(number)
        waiting |= {flow.position[ref.node] for ref in flow.operands[number]} - needed
    nodes = [flow.nodes[number] for number in sorted(needed)]
    held = {tensor.storage for node in nodes for tensor in node.outputs if tensor}
    for number, node in enumerate(flow.nodes):
        if number not in needed and not held.isdisjoint(node.mutates):
            raise ValueError(f"{node.op} of it writes in place")
    return replace(flow.annotated.graph, nodes=tuple(nodes), outputs=refs)


def _deciding(graph: Graph, device: Device, rulebook: Rulebook) -> Decision:
    """Decision on all launches of a graph, with the views among them: a file takes tensors as the
    graph has them. Raises ValueError where it has no kernel.

    Lanes walk no axis whose size the file reads off a tensor, if there is another plan: such a
    kernel serves one size of it, and a weight's gradient is a sum over the batch."""
    decision = _planned(graph, device, rulebook)
    plan = decision.subject.plan
    if plan is not None and not plan.serial <= plan.region.pinned:
        flat = rulebook.schedules.flat
        one = flat.serial_elements.model_copy(update={"value": 1.0})
        flat = flat.model_copy(update={"serial_elements": one})
        schedules = rulebook.schedules.model_copy(update={"flat": flat})
        other = _planned(graph, device, rulebook.model_copy(update={"schedules": schedules}))
        decision = decision if other.subject.plan is None else other
    if decision.subject.plan is None:
        refused = decision.deciding
        raise ValueError(f"a part of it has no kernel: {refused.why if refused else 'no plan'}")
    return decision


def _planned(graph: Graph, device: Device, rulebook: Rulebook) -> Decision:
    flow = dataflow(graph, device)
    numbers = range(len(flow.nodes))
    decision = decide(flow, filter(flow.launches, numbers), rulebook)
    inside = [n for n in numbers if flow.launches(n) or flow.is_view(n)]
    subject = subject_of(flow, inside, rulebook)
    return replace(decision, subject=replace(subject, launches=decision.subject.launches))
