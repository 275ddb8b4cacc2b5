"""Steps of a trace: its kernels with the ops around each launch, cut and reduced to medians."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

from fusion_advisor.profile.trace import (
    DeviceEvent,
    EventKind,
    HostOp,
    ProfilerTrace,
    RuntimeCall,
    enclosing,
)

PHASES = ("forward", "backward", "optimizer")

_STEP = re.compile(r"ProfilerStep#\d+")
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
_WAITS = re.compile(r"Synchronize|^cudaMemcpy$|^cuMemcpy\w*(?<!Async)$")
"""Runtime calls in which the host waits for the GPU."""

_GENERATED = re.compile(r"^(triton_(?:poi|red|per|tem|for))_fused_.*")

_CLASSES = {
    "collective": r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter",
    "attention": r"flash|fmha|sdpa|attention",
    "convolution": r"conv|winograd|wgrad|dgrad|fprop|implicit",
    "recurrent": r"lstm|gru_|rnn",
    "matmul": r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|triton_tem|matmul|dot_kernel",
    "sort": r"sort|topk|searchsorted|histogram|bincount",
    "scan": r"scan|cumsum|cumprod",
    "random": r"dropout|distribution|philox|bernoulli|randperm",
    "scatter": r"scatter|index_copy|index_put|index_add|index_fill",
    "gather": r"gather|index|embedding",
    "copy": r"copy|catarray|transpose|memcpy",
    "reduction": r"reduce|norm|softmax|triton_red|triton_per|mean|nll_loss",
    "pointwise": r"elementwise|triton_poi|foreach|multi_tensor_apply",
}
"""Classes of kernels by their names, the first that fits, as the registry calls the patterns."""


@dataclass(slots=True)
class TracedKernel:
    """Kernel, copy or fill with its launch. `chain` are the ops around the launch, the outermost
    first; `launched` is None where no runtime call is recorded. `gap` is how long the GPU was idle
    before, us, and of that `host` how long the host had not launched yet; `waited` is the same,
    where the GPU ran empty because the host waited for it, else 0."""

    name: str
    kind: EventKind
    start: float
    us: float
    stream: object
    chain: tuple[HostOp, ...]
    launched: float | None
    graph: int
    phase: str
    frame: str = ""
    gap: float = 0.0
    host: float = 0.0
    waited: float = 0.0

    @property
    def end(self) -> float:
        return self.start + self.us

    @property
    def sort(self) -> str:
        """Class of the kernel: a pattern of the registry, `copy`, `fill`, `collective`, `other`."""
        if self.kind != "kernel":
            return "fill" if self.kind == "set" else "copy"
        return _class_of(self.name)


@cache
def _class_of(kernel: str) -> str:
    name = _GENERATED.sub(r"\1", kernel.lower())  # what is fused in it is no class
    return next((sort for sort, words in _CLASSES.items() if re.search(words, name)), "other")


@dataclass
class TracedStep:
    """One step: kernels in the order of their launches, each with the median over all steps that
    launch the same; `wall_us` is the time from the end of the step before, `busy_us` that in which
    some kernel ran. Of the rest, in `host_us` the host had not launched the next one, and in
    `waited_us` of that because it had waited for the GPU. `count` steps of `of` in the trace are
    alike."""

    kernels: list[TracedKernel]
    wall_us: float
    busy_us: float
    host_us: float
    waited_us: float
    count: int
    of: int
    left_out: list[str] = field(default_factory=list[str])

    @property
    def first(self) -> TracedKernel:
        """Kernel that begins first."""
        return min(self.kernels, key=lambda kernel: kernel.start)

    @property
    def idle_us(self) -> float:
        return max(self.wall_us - self.busy_us, 0.0)


def one_step(trace: ProfilerTrace, passes: Callable[[Iterable[TracedKernel]], float]) -> TracedStep:
    """Step of a trace, the median of those that launch the same kernels. `passes` says how many
    passes of the model some kernels are; it tells a step's repeats from a model's layers."""
    kernels = [*_kernels(trace)]
    marks = [op for op in trace.ops if _STEP.fullmatch(op.name)]
    outside = 0
    pieces = [kernels]
    if marks:
        marks.sort(key=lambda mark: mark.start)
        moments = [_moment(kernel) for kernel in kernels]
        ends = [(bisect_left(moments, m.start), bisect_left(moments, m.end)) for m in marks]
        pieces = [kernels[first:last] for first, last in ends]
        outside = len(kernels) - sum(map(len, pieces))
    found = [part for piece in pieces for part in _repeats(piece, passes)]
    step = _median([part for part in found if part])
    if not marks:
        outside = len(kernels) - sum(map(len, found))
    if outside:
        step.left_out.append(f"{outside} kernels outside of the steps")
    if step.count < step.of:
        step.left_out.append(f"{step.of - step.count} steps that launch other kernels")
    return step


def _moment(kernel: TracedKernel) -> float:
    return kernel.start if kernel.launched is None else kernel.launched


def _kernels(trace: ProfilerTrace) -> Iterator[TracedKernel]:
    """Yield the kernels of the busiest GPU in the order of their launches."""
    events = trace.on_one_device()
    by_id = {op.external: op for op in trace.ops if op.external >= 0}
    calls = [trace.calls.get(event.correlation) for event in events]
    moments = [_launch(event, call, by_id) for event, call in zip(events, calls, strict=True)]
    chains = enclosing(trace.ops, moments)
    frames = enclosing(trace.frames, moments) if trace.frames else [()] * len(events)
    waits = sorted(
        (call.start, call.end) for call in trace.calls.values() if _WAITS.search(call.name)
    )
    made: list[TracedKernel] = []
    busy_until = events[0].start if events else 0.0
    rows = zip(events, calls, chains, frames, strict=True)
    for event, call, chain, python in rows:
        launched = call.start if call else None
        in_graph = call is not None and "GraphLaunch" in call.name
        kernel = TracedKernel(
            event.name, event.kind, event.start, event.us, event.stream, chain, launched,
            event.correlation if in_graph else -1, _phase(chain),
            python[-1].name if python else "",
        )  # fmt: skip
        kernel.gap = max(event.start - busy_until, 0.0)
        if launched is not None:
            kernel.host = min(max(launched - busy_until, 0.0), kernel.gap)
            kernel.waited = kernel.host if _within_some(waits, busy_until) else 0.0
        busy_until = max(busy_until, event.end)
        made.append(kernel)
    yield from sorted(made, key=lambda kernel: (_moment(kernel), kernel.start))


def _launch(
    event: DeviceEvent, call: RuntimeCall | None, by_id: dict[int, HostOp]
) -> tuple[object, float]:
    """Thread and moment of a launch: the runtime call's, else those of the op with its id."""
    if call is not None:
        return call.thread, call.start
    op = by_id.get(event.external)
    return (op.thread, op.start) if op is not None else (None, event.start)


def _phase(chain: Sequence[HostOp]) -> str:
    for op in chain:
        if op.name.startswith(_BACKWARD):
            return "backward"
        if op.name.startswith(_OPTIMIZER):
            return "optimizer"
    return "forward"


def _within_some(spans: Sequence[tuple[float, float]], moment: float) -> bool:
    """Whether a moment lies in one of some sorted spans."""
    at = bisect_left(spans, (moment,)) - 1
    return at >= 0 and moment <= spans[at][1]


def _repeats(
    kernels: list[TracedKernel], passes: Callable[[Iterable[TracedKernel]], float]
) -> Iterator[list[TracedKernel]]:
    """Cut kernels into equal runs where they are the model's launches several times over."""
    if passes(kernels) < SEVERAL:
        yield kernels
        return
    names: dict[str, int] = {}
    marks = [names.setdefault(kernel.name, len(names)) for kernel in reversed(kernels)]
    same = _same(marks)
    period = next((p for p in range(1, len(marks)) if 2 * (p + same[p]) > len(marks)), 0)
    if 2 * period > len(marks) or not period:
        yield kernels
        return
    alike = passes(kernels[-period:]) or 1.0
    length = period * max(round(1 / alike), 1)
    covered = period + same[period]
    for begin in range(len(kernels) - covered // length * length, len(kernels), length):
        yield kernels[begin : begin + length]


SEVERAL = 1.5
"""Passes of the model from which on kernels are more than one."""


def _same(marks: Sequence[int]) -> list[int]:
    """Number of marks from the begin on that stand again at each place (the Z function)."""
    found = [0] * len(marks)
    begin = end = 0
    for place in range(1, len(marks)):
        count = min(end - place, found[place - begin]) if place < end else 0
        while place + count < len(marks) and marks[count] == marks[place + count]:
            count += 1
        found[place] = count
        if place + count > end:
            begin, end = place, place + count
    return found


def _median(steps: Sequence[list[TracedKernel]]) -> TracedStep:
    """Median of the commonest sort of step; of steps that all differ, the one of median time."""
    keys = [tuple((kernel.name, kernel.phase) for kernel in step) for step in steps]
    ends = [max(kernel.end for kernel in step) for step in steps]
    begins = [min(kernel.start - kernel.gap for kernel in step) for step in steps]
    walls = [end - begin for begin, end in zip(begins, ends, strict=True)]
    sort, count = Counter(keys).most_common(1)[0]
    chosen = [number for number, key in enumerate(keys) if key == sort]
    if count == 1:
        chosen = [sorted(range(len(steps)), key=lambda number: walls[number])[len(steps) // 2]]
        sort = keys[chosen[0]]
    timed = [number for number in chosen if number] or chosen  # nothing lies before the first
    merged = [
        _merged([steps[number][place] for number in chosen], [steps[n][place] for n in timed])
        for place in range(len(sort))
    ]

    def middle(time: Callable[[TracedKernel], float]) -> float:
        return median(sum(map(time, steps[number])) for number in timed)

    wall = median(walls[number] for number in timed)
    at_once = median(
        sum(kernel.us + kernel.gap for kernel in steps[number]) - walls[number] for number in timed
    )
    busy = min(max(sum(kernel.us for kernel in merged) - at_once, 0.0), wall)
    host, waited = middle(lambda kernel: kernel.host), middle(lambda kernel: kernel.waited)
    return TracedStep(merged, wall, busy, host, waited, len(chosen), len(steps))


def _merged(same: Sequence[TracedKernel], timed: Sequence[TracedKernel]) -> TracedKernel:
    """One kernel with the medians of its runs in several steps, of idle time in those that follow
    another; its place is that of the first."""
    first = same[0]
    return TracedKernel(
        first.name, first.kind, first.start, median(k.us for k in same), first.stream, first.chain,
        first.launched, first.graph, first.phase, first.frame, median(k.gap for k in timed),
        median(k.host for k in timed), median(k.waited for k in timed),
    )  # fmt: skip
