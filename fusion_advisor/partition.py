"""The search over partitions of one component, on bit sets; it knows no ops and no tensors.

A partition cuts a component's launches into disjoint sets whose quotient graph is acyclic. A set of
several launches must be connected and pass the judge. The search minimises the sum of the sets'
times; up to `exact` launches it is branch and bound, beyond that a greedy agglomeration whose
distance to a lower bound is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fusion_advisor.dataflow import bits


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moves around one launch: tensors that it reads, and tensors that it writes with the
    launches inside the component that read them. Microseconds at the device's bandwidth."""

    reads: tuple[tuple[int, float], ...]
    """Each tensor's number and the time to read it."""
    writes: tuple[tuple[int, float, int, bool], ...]
    """Each tensor's number, the time to write it, its readers here, whether others read it."""


@dataclass(frozen=True)
class Component:
    """A component to cut up. Positions are topological; `above[i]` is everything that must run
    before i, `apart[i]` what can never share a kernel with i, `near[i]` what i is connected to."""

    above: Sequence[int]
    apart: Sequence[int]
    near: Sequence[int]
    alone_us: Sequence[float]
    traffic: Sequence[Traffic]
    launch_us: float

    @property
    def count(self) -> int:
        return len(self.above)

    @property
    def everything(self) -> int:
        return (1 << self.count) - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judge's answer on a set: its fused time if accepted; `hopeless` when no larger set that
    adds later launches can be accepted either."""

    accepted: bool
    hopeless: bool
    time_us: float


Judge = Callable[[int], Verdict]


@dataclass(frozen=True)
class Partition:
    """The chosen sets of several launches, the total time, and the bound that it was held to."""

    sets: tuple[int, ...]
    time_us: float
    bound_us: float
    exact: bool

    @property
    def gap(self) -> float:
        """Share by which the time may exceed the optimum; 0 when exact."""
        return 0.0 if self.exact or not self.bound_us else self.time_us / self.bound_us - 1.0


def partition(component: Component, judge: Judge, exact: int) -> Partition:
    """Cut a component into the sets of least total time."""
    memo: dict[int, Verdict] = {}

    def judged(mask: int) -> Verdict:
        found = memo.get(mask)
        if found is None:
            found = memo[mask] = judge(mask)
        return found

    whole = component.everything
    if component.count > 1 and joined(component, whole) and compatible(component, whole):
        verdict = judged(whole)
        if verdict.accepted and verdict.time_us <= sum(component.alone_us):
            return Partition((whole,), verdict.time_us, verdict.time_us, True)
    if component.count <= exact:
        return _Exact(component, judged).run()
    return _greedy(component, judged)


def joined(component: Component, mask: int) -> bool:
    """Is the set connected through its own launches?"""
    seen = mask & -mask
    frontier = seen
    while frontier:
        reach = 0
        for i in bits(frontier):
            reach |= component.near[i]
        frontier = reach & mask & ~seen
        seen |= frontier
    return seen == mask


def compatible(component: Component, mask: int) -> bool:
    """Can every pair of the set share a kernel, and does no path leave the set and return?"""
    above_all = 0
    for i in bits(mask):
        if component.apart[i] & mask:
            return False
        above_all |= component.above[i]
    between = above_all & component.everything & ~mask
    return not any(component.above[i] & mask for i in bits(between))


def acyclic(component: Component, sets: Sequence[int]) -> bool:
    """Is the quotient graph of disjoint sets (the rest being single launches) free of cycles?"""
    covered = 0
    for mask in sets:
        covered |= mask
    blocks = [*sets, *(1 << i for i in bits(component.everything & ~covered))]
    waiting = {number: _above(component, mask) & ~mask for number, mask in enumerate(blocks)}
    done = ~component.everything
    while waiting:
        ready = [n for n, needs in waiting.items() if not needs & ~done]
        if not ready:
            return False
        for number in ready:
            done |= blocks[number]
            del waiting[number]
    return True


def _above(component: Component, mask: int) -> int:
    total = 0
    for i in bits(mask):
        total |= component.above[i]
    return total & component.everything


def least_us(component: Component, mask: int, decided: int) -> float:
    """A lower bound on the time of any set that contains `mask`, once `decided` are assigned:
    what the set must read from outside, and what it must write for readers elsewhere."""
    produced = {tensor for i in bits(mask) for tensor, *_ in component.traffic[i].writes}
    read: dict[int, float] = {}
    total = component.launch_us
    elsewhere = decided & ~mask
    for i in bits(mask):
        for tensor, time in component.traffic[i].reads:
            if tensor not in produced:
                read[tensor] = time
        for _, time, readers, outside in component.traffic[i].writes:
            if outside or readers & elsewhere:
                total += time
    return total + sum(read.values())


@dataclass
class _Exact:
    """Branch and bound over assignments in topological order: each launch joins an open set or
    opens one. Joining is tried first, so a good bound is found at once."""

    component: Component
    judge: Judge
    best_us: float = field(init=False)
    best: tuple[int, ...] = ()
    later_us: list[float] = field(default_factory=list[float])

    def run(self) -> Partition:
        component = self.component
        self.best_us = sum(component.alone_us)
        must = [
            sum(time for _, time, _, outside in traffic.writes if outside)
            for traffic in component.traffic
        ]
        self.later_us = [sum(must[i:]) for i in range(component.count + 1)]
        self._assign(0, [], [])
        return Partition(self.best, self.best_us, self.best_us, True)

    def _assign(self, number: int, sets: list[int], costs: list[float]) -> None:
        component = self.component
        if sum(costs) + self.later_us[number] >= self.best_us - 1e-9:
            return
        if number == component.count:
            self._close(sets)
            return
        one, decided = 1 << number, (1 << (number + 1)) - 1
        for k in sorted(range(len(sets)), key=lambda k: not sets[k] & component.near[number]):
            if component.apart[number] & sets[k] or not self._may_join(number, k, sets):
                continue
            mask = sets[k] | one
            if joined(component, mask) and self.judge(mask).hopeless:
                continue
            grown = [*sets[:k], mask, *sets[k + 1 :]]
            self._assign(number + 1, grown, self._bounds(grown, decided))
        opened = [*sets, one]
        self._assign(number + 1, opened, self._bounds(opened, decided))

    def _bounds(self, sets: list[int], decided: int) -> list[float]:
        return [least_us(self.component, mask, decided) for mask in sets]

    def _may_join(self, number: int, k: int, sets: list[int]) -> bool:
        """No path from set k through another set to the launch: that would be a cycle, and later
        launches only add paths."""
        component = self.component
        direct = component.above[number]
        for other, mask in enumerate(sets):
            if other != k and mask & direct and _above(component, mask) & sets[k]:
                return False
        return True

    def _close(self, sets: list[int]) -> None:
        total = 0.0
        chosen: list[int] = []
        for mask in sets:
            if mask & (mask - 1) == 0:
                total += self.component.alone_us[mask.bit_length() - 1]
                continue
            if not joined(self.component, mask):
                return
            verdict = self.judge(mask)
            if not verdict.accepted:
                return
            total += verdict.time_us
            chosen.append(mask)
        if total < self.best_us - 1e-9 and acyclic(self.component, chosen):
            self.best_us, self.best = total, tuple(chosen)


def _greedy(component: Component, judge: Judge) -> Partition:
    """Grow sets in topological order, each launch joining the set where it saves most; then
    dissolve what the judge does not accept."""
    sets: list[int] = []
    for number in range(component.count):
        one, decided = 1 << number, (1 << (number + 1)) - 1
        options: list[tuple[float, int]] = []
        for k, mask in enumerate(sets):
            grown = mask | one
            if not mask & component.near[number] or not compatible(component, grown):
                continue
            if judge(grown).hopeless:
                continue
            if not acyclic(component, [*sets[:k], grown, *sets[k + 1 :]]):
                continue
            saved = (
                least_us(component, mask, decided)
                + component.alone_us[number]
                - least_us(component, grown, decided)
            )
            options.append((saved, k))
        gain, k = max(options, default=(0.0, -1))
        if k >= 0 and gain > 0:
            sets[k] |= one
        else:
            sets.append(one)
    chosen = tuple(mask for mask in sets if mask & (mask - 1) and judge(mask).accepted)
    covered = 0
    total = 0.0
    for mask in chosen:
        covered |= mask
        total += judge(mask).time_us
    total += sum(component.alone_us[i] for i in bits(component.everything & ~covered))
    bound = least_us(component, component.everything, component.everything)
    return Partition(chosen, total, bound, False)
