"""Measured times of a graph's launches, from a trace: linked, summed up, and checked to be of this
model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from pathlib import Path
from statistics import median

from fusion_advisor.cost.dataflow import Dataflow, pass_of
from fusion_advisor.profile.kineto import read_kineto
from fusion_advisor.profile.link import ANCHORS, Link, link, op_name, sizes_of, worded, words
from fusion_advisor.profile.steps import PHASES, SEVERAL, TracedKernel, TracedStep, one_step
from fusion_advisor.profile.trace import HostOp, ProfilerTrace, Sizes
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.errors import UsageError

_FUSED = "fused by a compiler"
"""Class of kernels that compute several launches."""
_MOST_UNLINKED = 20
"""Limit on the rows of unlinked kernels; the last has the rest."""
_SHORT = 0.01
"""Share of a group's predicted time that need not be linked."""
_NAMED = 3
"""Limit on the ops of each side that a refusal names."""


@dataclass(frozen=True)
class NodeTime:
    """Measurement of one launch: microseconds of its kernels in one step. None where the kernel of
    `within` computes the launch, too. `by` is how the kernels were linked: `id` or `alignment`;
    `names` are theirs, in order; `backward_us` is the time of the launch's backward pass, by
    sequence numbers, where the graph has none."""

    us: float | None
    by: str
    kernels: int
    within: str = ""
    backward_us: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ClassTime:
    """Launches of one class that have kernels of their own: predicted and measured microseconds of
    all, and the median error of the predictions, as a share of what was measured; None for kernels
    that compute several launches."""

    name: str
    launches: int
    predicted_us: float
    measured_us: float
    error: float | None


@dataclass(frozen=True)
class UnlinkedTime:
    """Kernels of one name and phase without a launch in the graph; `under` is the op that launched
    them, `function` the user's function around it, where the trace has stacks."""

    kernel: str
    phase: str
    count: int
    us: float
    under: str = ""
    function: str = ""


@dataclass(frozen=True)
class Profile:
    """Totals of a trace's step, in microseconds: the median of `steps` alike of `of`.

    `step_us` is the time from one step's end to the next; in `idle_us` of it no kernel runs: in
    `host_us` of that the host had not launched the next one, in `gaps_us` it had. Of `host_us`,
    `between_us` is before the step's first kernel, and `waited_us` after the host had waited for
    the GPU. `linked` are the shares of the kernels' time by how they were linked to the graph's
    launches, `unlinked_share` of the rest, by phase; `linked_by_phase` is how much of each phase's
    time is linked. `error` is the median error of predicted times, as a share of the measured.
    """

    file: str
    device: str
    steps: int
    of: int
    step_us: float
    busy_us: float
    idle_us: float
    host_us: float
    gaps_us: float
    between_us: float
    waited_us: float
    collectives_us: float
    copies_us: float
    kernels: int
    phases: dict[str, float]
    streams: dict[str, float]
    linked: dict[str, float]
    unlinked_share: dict[str, float]
    forward_linked: float
    linked_by_phase: dict[str, float]
    error: float | None
    classes: list[ClassTime]
    unlinked: list[UnlinkedTime]
    notes: list[str]


@dataclass(frozen=True)
class Profiled:
    """Profile with the measured time of each launch, by the node's name, and the nodes that each
    kernel computes, where it computes several."""

    profile: Profile
    nodes: Mapping[str, NodeTime]
    shared: Mapping[str, tuple[str, ...]]
    idle: Mapping[str, float] = field(default_factory=dict[str, float])
    """Time before a launch, us, in which the GPU was idle and the host still to launch it; 0 for a
    launch in a CUDA graph, and for the step's first."""

    def times(self) -> dict[str, float]:
        """Measured microseconds of each linked launch; 0 for one that another's kernel computes."""
        return {name: time.us or 0.0 for name, time in self.nodes.items()}

    def unfused_us(self, names: Sequence[str], predicted: Callable[[str], float]) -> float | None:
        """Measured time of some launches together, where they are linked but for a part that is
        short by prediction, else None. A kernel that computes others, too, counts by their
        predicted times."""
        missing = sum(predicted(name) for name in names if name not in self.nodes)
        if missing > _SHORT * sum(map(predicted, names)):
            return None
        owners = dict.fromkeys(self.nodes[n].within or n for n in names if n in self.nodes)
        inside, total = {*names}, missing
        for owner in owners:
            computed = self.shared.get(owner, (owner,))
            whole = sum(map(predicted, computed)) or 1.0
            part = sum(predicted(name) for name in computed if name in inside) / whole
            total += (self.nodes[owner].us or 0.0) * (part if len(computed) > 1 else 1.0)
        return total


def read_trace(file: Path) -> ProfilerTrace:
    """Read a trace of torch.profiler. Raises UsageError, one line, for anything else, and for a
    trace without GPU kernels."""
    trace = read_kineto(file)
    if not trace.events:
        raise UsageError(
            f"--profile {file}: has no GPU kernels; record with"
            " activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
        )
    return trace


def device_of(trace: ProfilerTrace) -> str:
    """Name of the GPU whose kernels are taken, as its driver calls it; empty where the trace does
    not say."""
    return trace.devices.get(trace.device, "")


def choose_traced_device(
    trace: ProfilerTrace, asked: str | None, rulebook: Rulebook
) -> tuple[Device, str] | None:
    """Device that a trace was recorded on, and how it was chosen; None where the trace does not
    say. Raises UsageError where another one is `asked` for, or there are no rules for it."""
    name = device_of(trace)
    if not name:
        return None
    try:
        found = rulebook.device(name)
    except UsageError as error:
        raise UsageError(
            f"--profile {trace.file}: recorded on {name}, a device without rules; add"
            " some (docs/add-a-device.md)"
        ) from error
    if asked is not None and rulebook.device(asked) != found:
        raise UsageError(
            f"--profile {trace.file}: recorded on {name}, and --device {asked} is another; leave"
            " --device out"
        )
    return found, f"device={found.name} (the trace's)"


def profiled(trace: ProfilerTrace, flow: Dataflow, least: float) -> Profiled:
    """Link a trace to a graph and sum it up. Raises UsageError where less than the share `least` of
    the graph's predicted time is in the trace, or most of its launches have other sizes there."""
    step = one_step(trace, _passes(flow))
    links = link(flow, step.kernels)
    _refuse_other_phases(trace, flow, step)
    _refuse_other_model(trace, flow, step, links, least)
    _refuse_other_sizes(trace, flow, links)
    _refuse_other_optimizer(trace, flow, step, links, least)
    backward = _backward(flow, step.kernels, links)
    names = [node.name for node in flow.nodes]
    backward_us: dict[str, float] = {}
    for kernel, number in backward.items():
        name = names[number]
        backward_us[name] = backward_us.get(name, 0.0) + step.kernels[kernel].us
    nodes: dict[str, NodeTime] = {}
    for one in links:
        own = names[one.node]
        us = sum(step.kernels[k].us for k in one.kernels)
        for number in one.nodes:
            name = names[number]
            whole = number == one.node
            nodes[name] = NodeTime(
                us if whole else None, one.by, len(one.kernels) if whole else 0,
                "" if whole else own, backward_us.get(name),
                tuple(step.kernels[k].name for k in one.kernels) if whole else (),
            )  # fmt: skip
    idle: dict[str, float] = {}
    for one in links:
        launched = [step.kernels[k] for k in one.kernels if step.kernels[k].graph < 0]
        within = (kernel for kernel in launched if kernel is not step.first)
        idle[names[one.node]] = sum(kernel.host - kernel.waited for kernel in within)
    shared = {names[one.node]: tuple(names[i] for i in one.nodes) for one in links if one.also}
    return Profiled(_totals(trace, flow, step, links, backward), nodes, shared, idle)


def _passes(flow: Dataflow) -> Callable[[Iterable[TracedKernel]], float]:
    """Number of forward passes of the model that some kernels are, by its products, attention and
    convolutions; of a model without them, by its launches."""
    nodes = (node for node in flow.nodes if pass_of(node) == PHASES[0])
    costs = (flow.annotated.costs[node.name] for node in nodes)
    patterns = [cost.pattern for cost in costs if cost.launches]
    anchors = sum(pattern in ANCHORS for pattern in patterns)

    def passes(kernels: Iterable[TracedKernel]) -> float:
        forward = [kernel for kernel in kernels if kernel.phase == PHASES[0]]
        if anchors:
            return sum(kernel.sort in ANCHORS for kernel in forward) / anchors
        return len(forward) / (len(patterns) or 1)

    return passes


# -- refusals --------------------------------------------------------------------------------------


_MISSING = {
    "backward": "give --mode eval, or record whole steps, not in a CUDA graph",
    "forward": "record whole steps",
    "optimizer": "give --optimizer none, or record whole steps",
}


def _refuse_other_phases(trace: ProfilerTrace, flow: Dataflow, step: TracedStep) -> None:
    """Raise UsageError where the graph has a pass and the trace none that can be told."""
    passes = _analysed(flow) - {kernel.phase for kernel in step.kernels}
    if missing := next((phase for phase in _MISSING if phase in passes), None):
        raise UsageError(
            f"--profile {trace.file}: no kernel of a step's {missing} pass is told in it;"
            f" {_MISSING[missing]}"
        )


def _refuse_other_optimizer(
    trace: ProfilerTrace, flow: Dataflow, step: TracedStep, links: Sequence[Link], least: float
) -> None:
    """Raise UsageError where the graph has an optimizer, and too little of the trace's is in it."""
    if "optimizer" not in _analysed(flow):
        return
    linked = {number for one in links for number in one.kernels}
    whole = [number for number, k in enumerate(step.kernels) if k.phase == "optimizer"]
    left = [step.kernels[number] for number in whole if number not in linked]
    whole_us = sum(step.kernels[number].us for number in whole)
    linked_us = whole_us - sum(kernel.us for kernel in left)
    if linked_us >= least * whole_us:
        return
    name = next((op.name for op in left[0].chain if op.name.startswith("Optimizer.")), "")
    there = Counter(_under(kernel) or kernel.sort for kernel in left)
    raise UsageError(
        f"--profile {trace.file}: a trace of another optimizer{f' ({name})' if name else ''}:"
        f" {_share(linked_us, whole_us)} of its time is in the graph; only there"
        f" {_more(there, Counter())}; give --optimizer"
    )


def _analysed(flow: Dataflow) -> set[str]:
    """Passes of a step that a graph has."""
    return {pass_of(node) for i, node in enumerate(flow.nodes) if flow.launches(i)}


def _refuse_other_model(
    trace: ProfilerTrace, flow: Dataflow, step: TracedStep, links: Sequence[Link], least: float
) -> None:
    """Raise UsageError where too little of the graph is in the trace; of links that no sizes
    confirm, also where too little of the trace is in the graph: a large trace has ops of any
    name."""
    costs = [flow.annotated.costs[node.name].time_us for node in flow.nodes]
    whole = sum(costs)
    found = sum(costs[number] for one in links for number in one.nodes)
    sure = sum(costs[one.node] for one in links if one.by == "id" and _same_sizes(flow, one))
    passes = _analysed(flow)
    traced_us = sum(kernel.us for kernel in step.kernels if kernel.phase in passes)
    linked_us = sum(step.kernels[k].us for one in links for k in one.kernels)
    enough = found >= least * whole and linked_us >= least * traced_us
    if enough or (whole and sure >= least * whole):
        return
    here = Counter(op_name(flow.nodes[i].op) for i in range(len(flow.nodes)) if flow.launches(i))
    there = Counter(
        next((op.name for op in kernel.chain if op.name in here), _under(kernel) or kernel.sort)
        for kernel in step.kernels
        if kernel.phase in passes
    )
    raise UsageError(
        f"--profile {trace.file}: a trace of another model: {_share(found, whole)} of the graph's"
        f" predicted time is in it, and {_share(linked_us, traced_us)} of its time in the graph;"
        f" only here {_more(here, there)}; only there {_more(there, here)}"
    )


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "nothing"


def _more(some: Counter[str], others: Counter[str]) -> str:
    rows = (some - others).most_common(_NAMED)
    return ", ".join(f"{count} {name}" for name, count in rows) or "nothing"


def _refuse_other_sizes(trace: ProfilerTrace, flow: Dataflow, links: Sequence[Link]) -> None:
    """Raise UsageError where most launches, of products and the like if there are any, have other
    sizes."""
    sized = [one for one in links if one.by == "id" and one.op and one.op.sizes is not None]
    costs = flow.annotated.costs
    sized = [one for one in sized if costs[flow.nodes[one.node].name].pattern in ANCHORS] or sized
    other = [one for one in sized if not _same_sizes(flow, one)]
    if 2 * len(other) <= len(sized):
        return
    first = max(other, key=lambda one: costs[flow.nodes[one.node].name].time_us)
    node = flow.nodes[first.node]
    place = f" at {Path(node.source.file).name}:{node.source.line}" if node.source else ""
    raise UsageError(
        f"--profile {trace.file}: a trace of other sizes: {op_name(node.op)}{place} takes"
        f" {_spelled(sizes_of(flow, first.node))} here and {_spelled(_recorded(first))} there;"
        " give the trace's with --batch, --seq or --input"
    )


def _same_sizes(flow: Dataflow, one: Link) -> bool:
    """Whether the recorded sizes of a link's op begin with those of the launch."""
    sizes = sizes_of(flow, one.node)
    return _recorded(one)[: len(sizes)] == sizes


def _recorded(one: Link) -> Sizes:
    return (one.op.sizes if one.op else None) or ()


def _spelled(sizes: Sizes) -> str:
    return ", ".join("x".join(map(str, shape)) for shape in sizes)


# -- sums ------------------------------------------------------------------------------------------


def _backward(
    flow: Dataflow, kernels: Sequence[TracedKernel], links: Sequence[Link]
) -> dict[int, int]:
    """Forward launch of each backward kernel: the one whose op has its sequence number, and whose
    name the backward function has. None of a graph that has the backward pass itself."""
    if "backward" in _analysed(flow):
        return {}
    made: dict[int, list[int]] = {}
    for one in links:
        sequences = {n for k in one.kernels for n in _sequences(kernels[k], one.op)}
        for sequence in sequences:
            made.setdefault(sequence, []).append(one.node)
    found: dict[int, int] = {}
    for number, kernel in enumerate(kernels):
        ran = next((op for op in kernel.chain if op.sequence >= 0), None)
        if kernel.phase != "backward" or ran is None:
            continue
        called = words(ran.name.rpartition(" ")[2])
        for node in reversed(made.get(ran.sequence, [])):
            if worded(words(op_name(flow.nodes[node].op).rpartition("::")[2]), called):
                found[number] = node
                break
    return found


def _sequences(kernel: TracedKernel, op: HostOp | None) -> Iterator[int]:
    """Yield the sequence numbers of the ops around a kernel, from the linked op inwards."""
    inside = dropwhile(lambda other: other is not op, kernel.chain)
    return (other.sequence for other in inside if other.sequence >= 0)


def _totals(
    trace: ProfilerTrace,
    flow: Dataflow,
    step: TracedStep,
    links: Sequence[Link],
    backward: Mapping[int, int],
) -> Profile:
    kernels = step.kernels
    how: dict[int, str] = dict.fromkeys(backward, "sequence")
    how |= {number: one.by for one in links for number in one.kernels}
    gpu_us = sum(kernel.us for kernel in kernels) or 1.0
    shares: dict[str, float] = {"id": 0.0, "alignment": 0.0, "sequence": 0.0}
    missing: dict[str, float] = {}
    for number, kernel in enumerate(kernels):
        if number in how:
            shares[how[number]] += kernel.us / gpu_us
        else:
            missing[kernel.phase] = missing.get(kernel.phase, 0.0) + kernel.us / gpu_us
    phases = {phase: sum(k.us for k in kernels if k.phase == phase) for phase in PHASES}
    found = {
        phase: sum(kernels[n].us for n in how if kernels[n].phase == phase) for phase in PHASES
    }
    by_phase = {phase: found[phase] / us for phase, us in phases.items() if us}
    streams: dict[str, float] = {}
    for kernel in kernels:
        streams[str(kernel.stream)] = streams.get(str(kernel.stream), 0.0) + kernel.us
    classes, errors = _classes(flow, kernels, links)
    return Profile(
        file=Path(trace.file).name,
        device=device_of(trace),
        steps=step.count,
        of=step.of,
        step_us=step.wall_us,
        busy_us=step.busy_us,
        idle_us=step.idle_us,
        host_us=min(step.host_us, step.idle_us),
        gaps_us=max(step.idle_us - step.host_us, 0.0),
        between_us=min(step.first.host, step.host_us),
        waited_us=min(step.waited_us, step.host_us),
        collectives_us=sum(k.us for k in kernels if k.sort == "collective"),
        copies_us=sum(k.us for k in kernels if k.kind == "copy"),
        kernels=len(kernels),
        phases={phase: us for phase, us in phases.items() if us},
        streams=streams,
        linked=shares,
        unlinked_share=missing,
        forward_linked=by_phase.get(PHASES[0], 0.0),
        linked_by_phase=by_phase,
        error=median(errors) if errors else None,
        classes=classes,
        unlinked=_unlinked(kernels, how),
        notes=[*step.left_out, *_notes(trace, kernels, links, _passes(flow)(kernels))],
    )


def _classes(
    flow: Dataflow, kernels: Sequence[TracedKernel], links: Sequence[Link]
) -> tuple[list[ClassTime], list[float]]:
    """Predicted and measured time by class, the most time first; the error of each launch."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for one in links:
        us = sum(kernels[k].us for k in one.kernels)
        costs = [flow.annotated.costs[flow.nodes[i].name] for i in one.nodes]
        name = _FUSED if one.also else costs[0].pattern
        rows.setdefault(name, []).append((sum(cost.time_us for cost in costs), us))
    errors = {
        name: [abs(predicted / us - 1) for predicted, us in pairs if us]
        for name, pairs in rows.items()
    }
    classes = [
        ClassTime(
            name, len(pairs), sum(p for p, _ in pairs), sum(us for _, us in pairs),
            median(errors[name]) if errors[name] and name != _FUSED else None,
        )
        for name, pairs in rows.items()
    ]  # fmt: skip
    alone = [error for name in rows if name != _FUSED for error in errors[name]]
    return sorted(classes, key=lambda row: -row.measured_us), alone


def _unlinked(kernels: Sequence[TracedKernel], how: Mapping[int, str]) -> list[UnlinkedTime]:
    """Kernels without a launch in the graph, by name, the most time first."""
    rows: dict[tuple[str, str, str, str], list[float]] = {}
    for number, kernel in enumerate(kernels):
        if number not in how:
            key = (_shortened(kernel.name), kernel.phase, _under(kernel), kernel.frame)
            rows.setdefault(key, []).append(kernel.us)
    found = [
        UnlinkedTime(name, phase, len(times), sum(times), under, function)
        for (name, phase, under, function), times in rows.items()
    ]
    found.sort(key=lambda row: -row.us)
    for phase in PHASES:
        rest = [row for row in found[_MOST_UNLINKED:] if row.phase == phase]
        if rest:
            count, us = sum(row.count for row in rest), sum(row.us for row in rest)
            found.append(UnlinkedTime("others", phase, count, us))
    tail = [row for row in found[_MOST_UNLINKED:] if row.kernel == "others"]
    return [*found[:_MOST_UNLINKED], *tail]


_TEMPLATE = re.compile(r"<.*|\(.*")


def _shortened(name: str) -> str:
    """Kernel's name without its template arguments and parameters."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return _TEMPLATE.sub("", plain) or name


def _under(kernel: TracedKernel) -> str:
    """Op that launched a kernel, empty where none is recorded; annotations are none."""
    return next((op.name for op in reversed(kernel.chain) if "::" in op.name), "")


def _notes(
    trace: ProfilerTrace,
    kernels: Sequence[TracedKernel],
    links: Sequence[Link],
    passes: float,
) -> Iterator[str]:
    """Yield what a reader has to know of the links and of idle time."""
    if passes >= SEVERAL:
        yield f"the model runs {passes:.0f} times a step: what is linked is one of them"
    if not any(op.sizes for op in trace.ops):
        yield "no sizes recorded: they could not be compared; record with record_shapes=True"
    if all(one.by == "alignment" for one in links):
        why = "in a CUDA graph" if any(k.graph >= 0 for k in kernels) else "none are recorded"
        yield f"no launch has an op of its own ({why}): linked by class and order"
    if all(kernel.launched is None for kernel in kernels):
        yield "no runtime calls recorded: whether the host had launched is not known"
    if several := sum(bool(one.also) for one in links):
        yield f"{several} kernels of a compiler compute several launches: gains are over those"
    if trace.frames:
        yield "recorded with_stack, which slows the host: idle time is less without"
