"""Records of a trace: GPU kernels, the runtime calls that launched them, and the host's ops.

Times are microseconds on the trace's own clock, which host and GPU share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

Sizes = tuple[tuple[int, ...], ...]
"""Sizes of an op's tensors, scalars left out."""

EventKind = Literal["kernel", "copy", "set"]


@dataclass(slots=True)
class HostOp:
    """Interval of a host thread: an op as dispatched, an annotation, or a Python function of the
    user's own (`model.py(54): forward`). `sizes` is None where none are recorded; `sequence` is the
    autograd sequence number, -1 where there is none."""

    name: str
    start: float
    end: float
    thread: object
    external: int = -1
    sizes: Sizes | None = None
    sequence: int = -1


@dataclass(slots=True)
class RuntimeCall:
    """Call of the CUDA runtime or driver."""

    name: str
    start: float
    end: float
    thread: object


@dataclass(slots=True)
class DeviceEvent:
    """Kernel, copy or fill on the GPU."""

    name: str
    kind: EventKind
    start: float
    us: float
    device: int
    stream: object
    correlation: int
    external: int = -1

    @property
    def end(self) -> float:
        return self.start + self.us


@dataclass
class ProfilerTrace:
    """Contents of a trace file. `devices` are the names of the GPUs, by their number."""

    file: str
    devices: dict[int, str] = field(default_factory=dict[int, str])
    events: list[DeviceEvent] = field(default_factory=list[DeviceEvent])
    calls: dict[int, RuntimeCall] = field(default_factory=dict[int, RuntimeCall])
    ops: list[HostOp] = field(default_factory=list[HostOp])
    frames: list[HostOp] = field(default_factory=list[HostOp])

    @cached_property
    def device(self) -> int:
        """GPU that is busy longest."""
        busy: dict[int, float] = {}
        for event in self.events:
            busy[event.device] = busy.get(event.device, 0.0) + event.us
        return max(busy, key=lambda number: busy[number])

    def on_one_device(self) -> list[DeviceEvent]:
        """Events of the GPU that is busy longest, in the order of their start."""
        chosen = [event for event in self.events if event.device == self.device]
        return sorted(chosen, key=lambda event: event.start)


def enclosing(
    spans: Iterable[HostOp], moments: Sequence[tuple[object, float]]
) -> list[tuple[HostOp, ...]]:
    """Spans around each moment of a thread, the outermost first."""
    found: list[tuple[HostOp, ...]] = [()] * len(moments)
    by_thread: dict[object, list[HostOp]] = {}
    for span in spans:
        by_thread.setdefault(span.thread, []).append(span)
    for here in by_thread.values():
        here.sort(key=lambda span: (-span.start, span.end))  # the next one is the last
    stacks: dict[object, list[HostOp]] = {thread: [] for thread in by_thread}
    for number in sorted(range(len(moments)), key=lambda number: moments[number][1]):
        thread, moment = moments[number]
        following, stack = by_thread.get(thread, []), stacks.get(thread, [])
        while following and following[-1].start <= moment:
            span = following.pop()
            while stack and stack[-1].end <= span.start:
                stack.pop()
            stack.append(span)
        while stack and stack[-1].end <= moment:
            stack.pop()
        found[number] = tuple(span for span in stack if span.end > moment)
    return found
