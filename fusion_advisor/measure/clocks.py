"""Clocks for the time that a call keeps a GPU busy: cold L2, medians with quartiles, without the
host's overhead.

Each run is preceded by a write of a buffer several times the size of the L2, and lies between two
events. A batch of runs is queued behind a wait on the device that outlasts its queueing, so that
the launches follow each other as closely as the device takes them. The stream is the current one.
"""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fusion_advisor.measure.protocol import Timing, TimingRules
from fusion_advisor.support.kernel_fault import KernelFault


class Clock(Protocol):
    """Protocol of a clock: a GPU's, or the host's where there is no GPU and a way is only
    rehearsed."""

    device: str

    def time(self, call: Callable[[], Any], least_bytes: int) -> Timing: ...

    def turns(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]: ...

    def release(self) -> None: ...


class DeviceClock:
    """Clock of the GPU."""

    device = "cuda"

    def __init__(self, rules: TimingRules) -> None:
        self._rules = rules
        self._flush = torch.empty(rules.flush_bytes, dtype=torch.int8, device="cuda")
        self._cycles = 1e3 * torch.cuda.get_device_properties(0).clock_rate  # of kHz, a second

    def time(self, call: Callable[[], Any], least_bytes: int = 0) -> Timing:
        """Time one call. Raises KernelFault when the time is less than one read and write of
        `least_bytes` at the datasheet's bandwidth: then not all of the work was timed."""
        rules = self._rules
        call()
        hosts = self._host_seconds(call)
        first, _ = self._batch(call, 3, hosts)
        fitting = int(rules.spent_s / max(statistics.median(first), 1e-6))
        wanted = min(rules.most_runs, max(rules.least_runs, fitting))
        times: list[float] = []
        ahead = True
        while len(times) < wanted:
            some, queued = self._batch(call, min(rules.batch, wanted - len(times)), hosts)
            times += some
            ahead = ahead and queued
        low, middle, high = (1e6 * t for t in statistics.quantiles(times, n=4))
        refuse_too_fast(middle, least_bytes, rules)
        wall = 1e6 * self._wall_seconds(call, rules.least_runs)
        return Timing(middle, low, high, len(times), wall, ahead)

    def turns(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        """Microseconds of each call, the median of a batch in each round. Every round runs all
        calls, and every other round in reverse order: drift over time and effects of the previous
        call affect all calls alike."""
        for call in calls:
            call()
        hosts = [self._host_seconds(call) for call in calls]
        found: list[list[float]] = [[] for _ in calls]
        for number in range(rounds):
            order = range(len(calls))
            for place in reversed(order) if number % 2 else order:
                some, _ = self._batch(calls[place], self._rules.batch, hosts[place])
                found[place].append(1e6 * statistics.median(some))
        return found

    def release(self) -> None:
        """Return unused memory to the GPU."""
        gc.collect()
        torch.cuda.empty_cache()

    def _host_seconds(self, call: Callable[[], Any]) -> float:
        """Host seconds to launch a call, the device held back meanwhile."""
        torch.cuda.synchronize()
        self._hold(0.002)
        began = time.perf_counter()
        call()
        spent = time.perf_counter() - began
        torch.cuda.synchronize()
        return spent

    def _hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles))  # pyright: ignore[reportUnknownArgumentType]

    def _batch(
        self, call: Callable[[], Any], count: int, host_s: float
    ) -> tuple[list[float], bool]:
        """Seconds of each of some runs, and whether all runs were queued in time."""
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(count)
        ]
        self._hold(self._rules.ahead * count * (host_s + 5e-5))
        for start, end in pairs:
            self._flush.zero_()
            start.record()
            call()
            end.record()
        ahead = not pairs[0][0].query()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e-3 for start, end in pairs], ahead

    def _wall_seconds(self, call: Callable[[], Any], runs: int) -> float:
        """Median seconds from the call to its end, as a waiting caller sees it."""
        spent: list[float] = []
        for _ in range(runs):
            self._flush.zero_()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            torch.cuda.synchronize()
            spent.append(time.perf_counter() - began)
        return statistics.median(spent)


def refuse_too_fast(us: float, least_bytes: int, rules: TimingRules) -> None:
    """Raise KernelFault where a time is shorter than the datasheet's bandwidth allows for bytes
    that must move: the sign of a warm cache, or of work on another stream."""
    least_us = 1e6 * least_bytes / (rules.datasheet_bandwidth * rules.slack)
    if us < least_us:
        raise KernelFault(
            f"{us:.2f} us is less than the {least_us:.2f} us in which the datasheet's bandwidth "
            f"moves {least_bytes} B: a part of the work was not timed"
        )


class HostClock:
    """Clock of the host, for one run: no measurement of a GPU, and `bench` refuses to
    report it as one."""

    device = "cpu"

    def time(self, call: Callable[[], Any], least_bytes: int = 0) -> Timing:
        del least_bytes
        began = time.perf_counter()
        call()
        spent = 1e6 * (time.perf_counter() - began)
        return Timing(spent, spent, spent, 1, spent, True)

    def turns(self, calls: Sequence[Callable[[], Any]], rounds: int) -> list[list[float]]:
        return [[self.time(call).us for _ in range(rounds)] for call in calls]

    def release(self) -> None:
        """Leave what a run has left: on a host it is in nobody's way."""
