"""Records of a trace: GPU kernels, the runtime calls that launched them, and the host's ops.

Times are microseconds on the trace's own clock, which host and GPU share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

Sizes = tuple[tuple[int, ...], ...]
"""Sizes of an op's tensors, scalars left out."""

EventKind = Literal["kernel", "copy", "set"]


@dataclass(slots=True)
class HostOp:
    """Interval of a host thread: an op as dispatched, or an annotation. `sizes` is None where none
    are recorded; `sequence` is the autograd sequence number, -1 where there is none."""

    name: str
    start: float
    end: float
    thread: object
    external: int = -1
    sizes: Sizes | None = None
    sequence: int = -1


@dataclass(slots=True)
class RuntimeCall:
    """Call of the CUDA runtime or driver; `external` is the id of the op around it."""

    name: str
    start: float
    end: float
    thread: object
    external: int = -1


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


@dataclass(slots=True)
class PythonFrame:
    """Interval of a Python function of the user's own: `model.py(54): forward`."""

    name: str
    start: float
    end: float
    thread: object


@dataclass
class ProfilerTrace:
    """Contents of a trace file. `devices` are the names of the GPUs, by their number."""

    file: str
    devices: dict[int, str] = field(default_factory=dict[int, str])
    events: list[DeviceEvent] = field(default_factory=list[DeviceEvent])
    calls: dict[int, RuntimeCall] = field(default_factory=dict[int, RuntimeCall])
    ops: list[HostOp] = field(default_factory=list[HostOp])
    frames: list[PythonFrame] = field(default_factory=list[PythonFrame])

    def on_one_device(self) -> tuple[int, list[DeviceEvent]]:
        """GPU that is busy longest, and its events in the order of their start."""
        busy: dict[int, float] = {}
        for event in self.events:
            busy[event.device] = busy.get(event.device, 0.0) + event.us
        device = max(busy, key=lambda number: busy[number])
        chosen = [event for event in self.events if event.device == device]
        return device, sorted(chosen, key=lambda event: event.start)


def enclosing(
    spans: Iterable[HostOp | PythonFrame], moments: Sequence[tuple[object, float]]
) -> list[tuple[HostOp | PythonFrame, ...]]:
    """Spans around each moment of a thread, the outermost first."""
    found: list[tuple[HostOp | PythonFrame, ...]] = [()] * len(moments)
    by_thread: dict[object, list[HostOp | PythonFrame]] = {}
    for span in spans:
        by_thread.setdefault(span.thread, []).append(span)
    asked: dict[object, list[int]] = {}
    for number, (thread, _) in enumerate(moments):
        asked.setdefault(thread, []).append(number)
    for thread, numbers in asked.items():
        spans_here = iter(sorted(by_thread.get(thread, ()), key=lambda s: (s.start, -s.end)))
        for number, around in _swept(
            spans_here, sorted(numbers, key=lambda n: moments[n][1]), moments
        ):
            found[number] = around
    return found


def _swept(
    spans: Iterator[HostOp | PythonFrame],
    numbers: Sequence[int],
    moments: Sequence[tuple[object, float]],
) -> Iterator[tuple[int, tuple[HostOp | PythonFrame, ...]]]:
    """Moments of one thread with the spans around each; both come in the order of time."""
    stack: list[HostOp | PythonFrame] = []
    following = next(spans, None)
    for number in numbers:
        moment = moments[number][1]
        while following is not None and following.start <= moment:
            while stack and stack[-1].end <= following.start:
                stack.pop()
            stack.append(following)
            following = next(spans, None)
        while stack and stack[-1].end <= moment:
            stack.pop()
        yield number, tuple(span for span in stack if span.end > moment)
