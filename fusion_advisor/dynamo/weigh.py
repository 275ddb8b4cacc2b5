"""Predicted time of Inductor's kernel for a region, against our kernel as an opaque op in its
graph.

Inductor fuses the region too, and moves what crosses its border once: where our kernel is a plain
stream it is as fast. It falls behind where a row is walked several times, does not fit into one
program, or is combined from parts. How far was measured beside our kernels, by what the kernel is
and by how wide its tensors are (`rules/inductor.toml`), and is applied to what the time model
predicts for our kernel beyond its launches. Where a reduction follows one over other axes, Inductor
has a kernel for each, and takes no longer than these take at a copy's speed.

An op that Inductor cannot see through blocks fusions. Every launch beside the region that Inductor
could have put into the region's kernel then needs a launch of its own; a tensor between the two is
read again, and written only for that if nobody else wants it. All such neighbours are charged for,
as if Inductor fused each of them. Inductor also computes in one kernel what reads the same tensor
and has the same size, as the rotations of queries and keys are: an op beside such a kernel is
charged with a launch, and with what both read.

Where Inductor lays out convolutions with channels last, what is computed between them has that
layout, and is copied for an op that was traced with another one. These copies are charged for, too.

Without CUDA graphs a call also costs the host more than a kernel that Inductor launches itself.
What the kernel's own time on the GPU does not hide of it is charged for too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.lower import Boundary
from fusion_advisor.ir.graph import DTYPE_BYTES, FLOATS, Ref
from fusion_advisor.region.axes import AxisList
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import InductorRules, Rulebook, Slower
from fusion_advisor.schedules.base import Plan

INLINED = frozenset({"pointwise", "reduction", "window", "copy", "gather", "creation", "random"})
"""Patterns of launches that Inductor fuses with their neighbours; what has no model is taken to be
one of them."""

STREAMED = INLINED - {"reduction", "window"}
"""Patterns of launches whose kernels read and write each element once, without a row to wait for.
"""

JOINED = INLINED | {"scatter"}
"""Patterns of launches into which Inductor fuses those that make what they read: a value that goes
into a cache is computed as it is stored."""

CHANNELS_LAST = (4, 5)
"""Dimensions of a tensor that may have its channels last in memory."""


@dataclass(frozen=True, slots=True)
class InductorComparison:
    """Microseconds of one occurrence: of Inductor's kernel for the region, and of our kernel, its
    blocked fusions and its host overhead. `bytes` are those of its operands and results;
    `blocked_bytes` are the bytes that move only because the op is opaque, `kept_bytes` those of
    tensors that lie in memory only for that; a call costs the host `call_us` more than one of
    Inductor's. `seen`: both kernels were timed, not predicted."""

    inductor_us: float
    kernel_us: float
    blocked_us: float
    bytes: int
    blocked_bytes: int
    kept_bytes: int
    call_us: float
    seen: bool = False

    @property
    def host_us(self) -> float:
        """Host time of a call that the kernel's own time on the GPU does not hide."""
        return max(self.call_us - self.kernel_us, 0.0)

    @property
    def ours_us(self) -> float:
        return self.kernel_us + self.blocked_us + self.host_us

    @property
    def gain_us(self) -> float:
        """Microseconds that our kernel takes less than Inductor's; negative where it takes more."""
        return self.inductor_us - self.ours_us

    @property
    def worth_us(self) -> float:
        """Time of our kernel from which on it loses."""
        return self.inductor_us - self.blocked_us - self.host_us

    @property
    def wins(self) -> bool:
        return self.ours_us < self.inductor_us

    def timed(self, kernel_us: float, inductor_us: float) -> InductorComparison:
        """The same with the times that both kernels take here."""
        return replace(self, kernel_us=kernel_us, inductor_us=inductor_us, seen=True)

    def __str__(self) -> str:
        parts = [f"kernel {self.kernel_us:.1f} us"]
        if self.blocked_us:
            parts.append(f"{self.blocked_us:.1f} us for fusions it blocks ({self.blocked_bytes} B)")
        if self.host_us:
            parts.append(f"{self.host_us:.1f} us of the host")
        here = " (timed here)" * self.seen
        return f"{' + '.join(parts)}, Inductor {self.inductor_us:.1f} us{here}"


def compare_with_inductor(
    decision: Decision,
    rulebook: Rulebook,
    *,
    tuned: bool,
    graphed: bool,
    channels_last: bool = False,
) -> InductorComparison:
    """Weigh one occurrence of an accepted group with a plan. `tuned`: Inductor measures its choices
    (max-autotune); `graphed`: launches are replayed by a CUDA graph; `channels_last`: Inductor lays
    convolutions out so."""
    subject, rules = decision.subject, rulebook.inductor
    plan, device = subject.plan, subject.device
    assert plan is not None
    kernel_us = decision.fused_us - device.times.call.value
    least_us = plan.launches * device.times.launch.value
    slower = _slower(plan, rules).of(narrow=_narrow(plan.region), tuned=tuned)
    blocked_bytes, kept_bytes, launches = _blocked(subject.flow, subject.border)
    crossing = (*subject.border.inputs, *subject.border.outputs)
    for ref in _laid_out_anew(subject.flow, subject.border) if channels_last else ():
        blocked_bytes += 2 * subject.flow.annotated.tensors[ref].bytes
        launches += 1
    blocked_us = 1e6 * blocked_bytes / device.bandwidth + launches * device.times.launch.value
    inductor_us = least_us + max(kernel_us - least_us, 0.0) * slower
    if [step.schedule for step in plan.steps] == ["row"] and (apart := _apart(plan.region)):
        apart_us = len(apart) * device.times.launch.value + 1e6 * sum(apart) / device.bandwidth
        inductor_us = min(inductor_us, apart_us)
    return InductorComparison(
        inductor_us=inductor_us,
        kernel_us=kernel_us,
        blocked_us=blocked_us,
        bytes=sum(subject.flow.annotated.tensors[ref].bytes for ref in crossing),
        blocked_bytes=blocked_bytes,
        kept_bytes=kept_bytes,
        call_us=_call_us(rules, graphed=graphed),
    )


def may_win(
    flow: Dataflow, rulebook: Rulebook, component: Sequence[int], *, tuned: bool, graphed: bool
) -> bool:
    """Whether a kernel of some launches that could share kernels may win by as much as it has to.
    Without a reduction both kernels are streams: what Inductor's takes longer is a share of what
    moves, which is at most what the launches move one by one."""
    costs = [flow.annotated.costs[flow.nodes[number].name] for number in component]
    if not all(cost.pattern in STREAMED for cost in costs):
        return True
    rules, device = rulebook.inductor, flow.annotated.device
    moved_us = 1e6 * sum(cost.bytes for cost in costs) / device.bandwidth
    slower = max(
        each.of(narrow=narrow, tuned=tuned)
        for each in (rules.flat, rules.tiled)
        for narrow in (False, True)
    )
    launch_us = device.times.launch.value
    best = InductorComparison(
        inductor_us=launch_us + slower * moved_us,
        kernel_us=launch_us + moved_us,
        blocked_us=0.0, bytes=0, blocked_bytes=0, kept_bytes=0,
        call_us=_call_us(rules, graphed=graphed),
    )  # fmt: skip
    return best.gain_us >= rules.least.value


def _call_us(rules: InductorRules, *, graphed: bool) -> float:
    """Host time of a call of ours beyond Inductor's; nothing where a CUDA graph replays it."""
    return 0.0 if graphed else rules.call.value


def _slower(plan: Plan, rules: InductorRules) -> Slower:
    """Measured class that a plan belongs to."""
    schedules = {step.schedule for step in plan.steps}
    whole = plan.schedule == "split" and not any(step.part for step in plan.steps)
    if len(plan.steps) > 1 and not (schedules <= {"flat", "tiled"} or whole):
        return rules.parts
    if schedules & {"cooperative", "persistent", "blocked"}:
        return rules.long
    if "row" not in schedules:
        return rules.tiled if "tiled" in schedules else rules.flat
    length = max(step.length for step in plan.steps)
    several = _following(plan.region) > 1 and length > rules.persistent.count
    return rules.rows if several else rules.row


def _following(region: Region) -> int:
    """Length of the longest chain of reductions that wait for each other."""
    depth: dict[int, int] = {}
    for number, expr in enumerate(region.exprs):
        below = max((depth[arg] for arg in expr.args), default=0)
        depth[number] = below + (expr.op in ("reduce", "scan"))
    return max((depth[number] for number in region.live), default=0)


def _apart(region: Region) -> list[int]:
    """Bytes that each of Inductor's kernels for a region moves, where some reduction follows one
    over other axes: Inductor writes what the first gives, and the next kernel reads it, and its own
    share of the inputs. Empty where one kernel has all of them."""
    stages = _stages(region)
    last = max(stages.values(), default=0)
    reductions = {n for op in ("reduce", "scan") for n in region.all(op)}
    found = list[int]()
    for stage in range(last + 1) if last else ():
        made = [output for output in region.outputs if stages[output.value] == stage]
        stored = {n for n in reductions if stages[n] == stage}
        todo, seen = [*stored, *(output.value for output in made)], set[int]()
        while todo:
            number = todo.pop()
            if number in seen:
                continue
            seen.add(number)
            if number not in reductions or stages[number] == stage:
                todo += region.exprs[number].args
        read = {expr.input for n in seen if (expr := region.exprs[n]).op == "load"}
        held = {n for n in seen if n in reductions and (n not in stored or stage < last)}
        found.append(
            sum(region.inputs[number].bytes for number in read)
            + sum(output.tensor.bytes for output in made)
            + sum(_bytes(region, number) for number in held)
        )
    return found


def _bytes(region: Region, number: int) -> int:
    """Bytes of a value in memory."""
    sizes = (region.sizes[axis] for axis in region.depends[number])
    return math.prod(sizes) * DTYPE_BYTES[region.exprs[number].dtype]


def _stages(region: Region) -> dict[int, int]:
    """Kernel of Inductor, by its number in their order, that each value is computed in: a reduction
    over other axes than one that it waits for is in a later one."""
    found = dict[int, tuple[int, frozenset[AxisList]]]()
    for number in region.live:
        expr = region.exprs[number]
        below = [found[arg] for arg in expr.args]
        stage = max((each for each, _ in below), default=0)
        axes = frozenset[AxisList]().union(*(axes for each, axes in below if each == stage))
        if expr.op in ("reduce", "scan"):
            stage += not axes <= {expr.axes}
            axes = frozenset([expr.axes])
        found[number] = stage, axes
    return {number: stage for number, (stage, _) in found.items()}


def _narrow(region: Region) -> bool:
    """Whether no large tensor is as wide as float32."""
    tensors = [*region.inputs, *(output.tensor for output in region.outputs)]
    most = max(tensor.numel for tensor in tensors)
    return all(tensor.dtype not in FLOATS for tensor in tensors if tensor.numel == most)


def _blocked(flow: Dataflow, border: Boundary) -> tuple[int, int, int]:
    """Bytes that an opaque op keeps from being fused away, those of tensors that are in memory only
    for it, and the number of launches that stay."""
    inside, tensors = set(border.members), flow.annotated.tensors
    neighbours: set[int] = set()
    moved = kept = 0
    for ref in border.inputs:
        maker = flow.position[flow.base(ref).node]
        if _inlined(flow, maker) and not any(flow.beyond[i] >> maker & 1 for i in inside):
            neighbours.add(maker)
            alone = _only_for(flow, flow.base(ref), inside)
            moved += tensors[ref].bytes * (1 + alone)
            kept += tensors[ref].bytes * alone
    for ref in border.outputs:
        users = {use for use in flow.uses(ref) if use not in inside}
        fused = {use for use in users if use >= 0 and _joins(flow, use, inside)}
        neighbours |= fused
        moved += tensors[ref].bytes * (len(fused) + (users == fused))
        kept += tensors[ref].bytes * (users == fused)
    sizes = {tensors[ref].numel for ref in border.outputs}
    beside = {ref for ref in border.inputs if _read_beside(flow, ref, inside, sizes)}
    moved += sum(tensors[ref].bytes for ref in beside)
    return moved, kept, len(neighbours) + bool(beside)


def _read_beside(flow: Dataflow, ref: Ref, inside: set[int], sizes: set[int]) -> bool:
    """Whether Inductor could read an operand of a region once for the region, whose results have
    these sizes, and for a launch beside it: neither waits for the other, and the launch makes as
    many elements."""
    return any(
        use >= 0
        and use not in inside
        and _inlined(flow, use)
        and not any(flow.above[use] >> i & 1 or flow.above[i] >> use & 1 for i in inside)
        and any(out is not None and out.numel in sizes for out in flow.nodes[use].outputs)
        for use in flow.uses(flow.base(ref))
    )


def _laid_out_anew(flow: Dataflow, border: Boundary) -> Iterator[Ref]:
    """Yield the operands that a convolution makes, and the results that one reads, with nothing but
    launches between that Inductor fuses: each has another layout there."""
    made = ((ref, flow.base(ref), False) for ref in border.inputs)
    read = ((ref, ref, True) for ref in border.outputs)
    for ref, start, forward in (*made, *read):
        if _meets_convolution(flow, start, forward=forward):
            yield ref


def _meets_convolution(flow: Dataflow, start: Ref, *, forward: bool) -> bool:
    """Whether a convolution makes a tensor, or reads it with `forward`, with nothing but launches
    between that Inductor fuses and tensors that may have their channels last."""
    todo, seen = [start], set[Ref]()
    while todo:
        ref = todo.pop()
        if ref in seen or len(flow.annotated.tensors[ref].shape) not in CHANNELS_LAST:
            continue
        seen.add(ref)
        near = [use for use in flow.uses(ref) if use >= 0] if forward else [flow.position[ref.node]]
        if any(_is_convolution(flow, number) for number in near):
            return True
        for node in (flow.nodes[number] for number in near if _inlined(flow, number)):
            made = (Ref(node.name, number) for number, out in enumerate(node.outputs) if out)
            todo += made if forward else node.refs()
    return False


def _is_convolution(flow: Dataflow, number: int) -> bool:
    node = flow.nodes[number]
    return node.kind == "call" and flow.annotated.costs[node.name].pattern == "convolution"


def _joins(flow: Dataflow, use: int, inside: set[int]) -> bool:
    """Whether Inductor could put a reader of the region's results into the region's kernel. A
    reader that also waits for a matmul of these results cannot join."""
    return _inlined(flow, use, JOINED) and not any(flow.beyond[use] >> i & 1 for i in inside)


def _only_for(flow: Dataflow, ref: Ref, inside: set[int]) -> bool:
    """Whether a tensor is read only by `inside` and by launches that Inductor fuses with
    its maker."""
    return all(
        use in inside or (use >= 0 and _inlined(flow, use, JOINED)) for use in flow.uses(ref)
    )


def _inlined(flow: Dataflow, number: int, patterns: frozenset[str] = INLINED) -> bool:
    cost = flow.annotated.costs[flow.nodes[number].name]
    return cost.memory_bound and (cost.pattern in patterns or not cost.modelled)
