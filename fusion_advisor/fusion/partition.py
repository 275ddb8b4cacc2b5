"""Search over partitions of one component, on bit sets; free of ops and tensors.

A partition cuts a component's launches into disjoint sets whose quotient graph is acyclic. A set of
several launches must be connected and pass the judge. The search minimises the sum of the sets'
times. Up to `exact` launches the search is exact: every connected set is judged and the best
packing found. Beyond `exact` launches, or with more than `most_sets` such sets, it is a heuristic,
and its distance to a lower bound is reported: more launches are first gathered greedily into sets,
and a piece that is still too large to search is halved in the launches' order until it is not. What
it finds is then packed anew with sets that the caller offers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fusion_advisor.cost.dataflow import bits


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic around one launch: tensors that it reads, and tensors that it writes with their
    readers inside the component. Microseconds at the device's bandwidth."""

    reads: tuple[tuple[int, float], ...]
    """Number of each tensor and the time to read it."""
    writes: tuple[tuple[int, float, int, bool], ...]
    """Number of each tensor, the time to write it, its readers in the component, whether
    others read it."""


@dataclass(frozen=True)
class Component:
    """Component to cut. Positions are topological; `above[i]` is everything that must run before i,
    `apart[i]` the positions that can never share a kernel with i, `near[i]` the positions that i is
    connected to."""

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


def contracted(component: Component, units: Sequence[int], alone_us: Sequence[float]) -> Component:
    """A component whose positions are sets of another's, in their order: what is in one can only be
    cut together. `alone_us` are the times of the sets."""
    unit_of = {i: number for number, mask in enumerate(units) for i in bits(mask)}

    def among(mask: int, own: int) -> int:
        found = 0
        for i in bits(mask):
            found |= 1 << unit_of[i]
        return found & ~(1 << own)

    def joined(masks: Sequence[int], number: int) -> int:
        whole = 0
        for i in bits(units[number]):
            whole |= masks[i]
        return among(whole, number)

    traffic: list[Traffic] = []
    for number, mask in enumerate(units):
        rows = [component.traffic[i] for i in bits(mask)]
        written = {tensor for row in rows for tensor, *_ in row.writes}
        reads = {tensor: us for row in rows for tensor, us in row.reads if tensor not in written}
        writes = [
            (tensor, us, among(readers, number), outside)
            for row in rows
            for tensor, us, readers, outside in row.writes
        ]
        left = tuple(write for write in writes if write[2] or write[3])
        traffic.append(Traffic(tuple(reads.items()), left))
    every = range(len(units))
    above: list[int] = []
    for number in every:  # what a part of a set waits for, all that wait for the set do
        own = joined(component.above, number)
        above.append(own)
        for before in bits(own):
            above[number] |= above[before]
    return Component(
        above=above,
        apart=[joined(component.apart, number) for number in every],
        near=[joined(component.near, number) for number in every],
        alone_us=alone_us,
        traffic=traffic,
        launch_us=component.launch_us,
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer of the judge on a set: its fused time if accepted; `hopeless` when no larger set can
    be accepted either."""

    accepted: bool
    hopeless: bool
    time_us: float


Judge = Callable[[int], Verdict]


@dataclass(frozen=True)
class Partition:
    """Chosen sets of several launches, the total time, and its lower bound."""

    sets: tuple[int, ...]
    time_us: float
    bound_us: float
    exact: bool

    @property
    def gap(self) -> float:
        """Share by which the time may exceed the optimum; 0 when exact."""
        return 0.0 if self.exact or not self.bound_us else self.time_us / self.bound_us - 1.0


def partition(
    component: Component,
    judge: Judge,
    exact: int,
    most_sets: int,
    offered: Iterable[int] = (),
) -> Partition:
    """Cut a component into the sets of least total time. `offered` are sets that a search which is
    not exact may miss."""
    memo: dict[int, Verdict] = {}

    def judged(mask: int) -> Verdict:
        found = memo.get(mask)
        if found is None:
            found = memo[mask] = judge(mask)
        return found

    whole = component.everything
    if component.count > 1 and connected(component, whole) and compatible(component, whole):
        verdict = judged(whole)
        if verdict.accepted and verdict.time_us <= sum(component.alone_us):
            return Partition((whole,), verdict.time_us, verdict.time_us, True)
    saves: dict[int, float] = {}
    complete = component.count <= exact
    for piece in (whole,) if complete else _greedy(component, judged):
        if piece != whole and judged(piece).accepted:
            saves[piece] = _alone_us(component, piece) - judged(piece).time_us
        else:
            found = _cut(component, piece, judged, exact, most_sets)
            saves |= found.saves
            complete &= found.complete
    if not complete and (more := _saving(component, offered, judged)):
        saves |= more
        saves = {mask: saves[mask] for mask in _best_packing(component, whole, saves)}
    time = sum(component.alone_us) - sum(saves.values())
    if complete:
        return Partition(tuple(sorted(saves)), time, time, True)
    bound = least_us(component, whole, whole)
    return Partition(tuple(sorted(saves)), time, bound, False)


def _saving(component: Component, masks: Iterable[int], judge: Judge) -> dict[int, float]:
    """Savings of those of some sets that are accepted and save something."""
    saves: dict[int, float] = {}
    for mask in masks:
        if mask & (mask - 1) and connected(component, mask) and compatible(component, mask):
            verdict = judge(mask)
            saved = _alone_us(component, mask) - verdict.time_us
            if verdict.accepted and saved > 0:
                saves[mask] = saved
    return saves


def connected(component: Component, mask: int) -> bool:
    """Whether the set is connected through its own launches."""
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
    """Whether every pair of the set can share a kernel, and no path leaves the set and returns."""
    above_all = 0
    for i in bits(mask):
        if component.apart[i] & mask:
            return False
        above_all |= component.above[i]
    between = above_all & component.everything & ~mask
    return not any(component.above[i] & mask for i in bits(between))


def cycle(component: Component, sets: Sequence[int]) -> tuple[int, ...]:
    """Sets of several launches that wait for each other; empty when there are none."""
    covered = 0
    for mask in sets:
        covered |= mask
    blocks = [*sets, *(1 << i for i in bits(component.everything & ~covered))]
    waiting = {mask: _above(component, mask) & ~mask for mask in blocks}
    done = ~component.everything
    while waiting:
        ready = [mask for mask, needs in waiting.items() if not needs & ~done]
        if not ready:
            return tuple(mask for mask in waiting if mask & (mask - 1))
        for mask in ready:
            done |= mask
            del waiting[mask]
    return ()


def _above(component: Component, mask: int) -> int:
    total = 0
    for i in bits(mask):
        total |= component.above[i]
    return total & component.everything


def least_us(component: Component, mask: int, decided: int) -> float:
    """Lower bound on the time of any set that contains `mask`, once `decided` are assigned: the
    set's reads from outside, and its writes for readers elsewhere."""
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


@dataclass(frozen=True)
class _ChosenSets:
    """Chosen sets, each with the time that it saves; whether the choice is optimal."""

    saves: dict[int, float]
    complete: bool


def _cut(component: Component, piece: int, judge: Judge, exact: int, most_sets: int) -> _ChosenSets:
    """Best packing of the accepted sets within a convex piece (no path leaves and enters it again).
    A piece with too many sets is packed from the sets that were judged, in it and in its halves."""
    small = piece.bit_count() <= max(exact, 1)
    known = _accepted_sets(component, piece, judge, most_sets) if small else _ChosenSets({}, False)
    saves = dict(known.saves)
    if not known.complete:
        for half in _halves(piece):
            saves |= _cut(component, half, judge, exact, most_sets).saves
    if small:
        chosen = _best_packing(component, piece, saves)
        saves = {mask: saves[mask] for mask in chosen}
    return _ChosenSets(saves, known.complete)


def _halves(piece: int) -> tuple[int, int]:
    """First half of the launches, and the rest."""
    numbers = list(bits(piece))
    first = sum(1 << number for number in numbers[: len(numbers) // 2])
    return first, piece & ~first


def _alone_us(component: Component, mask: int) -> float:
    return sum(component.alone_us[i] for i in bits(mask))


def _accepted_sets(component: Component, piece: int, judge: Judge, most_sets: int) -> _ChosenSets:
    """Accepted connected sets within a piece, those of few launches first; incomplete where there
    are more than `most_sets` to judge. A hopeless set is not grown. A set that a path leaves and
    enters again cannot share a kernel, and is grown to hold that path."""
    saves: dict[int, float] = {}
    seen = {1 << i for i in bits(piece)}
    judged = 0
    frontier = sorted(seen)
    while frontier:
        grown: list[int] = []
        for mask in frontier:
            for number in bits(_neighbours(component, mask) & piece):
                larger = _closed(component, mask | 1 << number)
                if larger in seen or any(component.apart[i] & larger for i in bits(larger)):
                    continue
                if judged == most_sets:
                    return _ChosenSets(saves, False)
                seen.add(larger)
                judged += 1
                verdict = judge(larger)
                if not verdict.hopeless:
                    grown.append(larger)
                saved = _alone_us(component, larger) - verdict.time_us
                if verdict.accepted and saved > 0 and connected(component, larger):
                    saves[larger] = saved
        frontier = grown
    return _ChosenSets(saves, True)


def _closed(component: Component, mask: int) -> int:
    """Set with every launch that lies between two of its launches."""
    above = _above(component, mask) & ~mask
    return mask | sum(1 << i for i in bits(above) if component.above[i] & mask)


def _neighbours(component: Component, mask: int) -> int:
    around = 0
    for i in bits(mask):
        around |= component.near[i]
    return around & ~mask


def _best_packing(component: Component, piece: int, saves: dict[int, float]) -> tuple[int, ...]:
    """Disjoint sets of a piece that save most and close no cycle. A packing that closes one is
    branched on: each branch gives one of the cycle's sets up, so the first without a cycle is the
    best."""
    queue = [_packing(piece, saves, frozenset())]
    branches = {frozenset[int]()}
    forbidden = [frozenset[int]()]
    while True:
        best = max(range(len(queue)), key=lambda n: queue[n][0])
        _, sets = queue.pop(best)
        without = forbidden.pop(best)
        stuck = cycle(component, sets)
        if not stuck:
            return sets
        for mask in stuck:
            fewer = without | {mask}
            if fewer not in branches:
                branches.add(fewer)
                queue.append(_packing(piece, saves, fewer))
                forbidden.append(fewer)


def _packing(
    piece: int, saves: dict[int, float], without: frozenset[int]
) -> tuple[float, tuple[int, ...]]:
    """Largest saving of disjoint sets, cycles ignored, and the sets."""
    lowest: dict[int, list[int]] = {}
    for mask in saves:
        if mask not in without:
            lowest.setdefault(mask & -mask, []).append(mask)
    first = sum(lowest)
    memo: dict[int, tuple[float, tuple[int, ...]]] = {}

    def best(remaining: int) -> tuple[float, tuple[int, ...]]:
        one = remaining & first & -(remaining & first)
        if not one:
            return 0.0, ()
        remaining &= -one  # no set begins with what is before it
        found = memo.get(remaining)
        if found is None:
            found = best(remaining ^ one)
            for mask in lowest.get(one, ()):
                if mask & ~remaining == 0:
                    rest, sets = best(remaining ^ mask)
                    if rest + saves[mask] > found[0] + 1e-9:
                        found = (rest + saves[mask], (mask, *sets))
            memo[remaining] = found
        return found

    return best(piece)


def _greedy(component: Component, judge: Judge) -> tuple[int, ...]:
    """Sets of several launches, grown in topological order, each launch joining the set where it
    saves most; the judge may not accept them."""
    growing = _Growing(component)
    for number in range(component.count):
        one, decided = 1 << number, (1 << (number + 1)) - 1
        options: list[tuple[float, int]] = []
        for k, mask in enumerate(growing.sets):
            if not mask & component.near[number] or not growing.may_join(number, k):
                continue
            grown = mask | one
            if judge(grown).hopeless:
                continue
            saved = (
                least_us(component, mask, decided)
                + component.alone_us[number]
                - least_us(component, grown, decided)
            )
            options.append((saved, k))
        gain, k = max(options, default=(0.0, -1))
        growing.place(number, k if gain > 0 else -1)
    return tuple(mask for mask in growing.sets if mask & (mask - 1))


class _Growing:
    """Sets that grow one launch at a time in topological order, with the launches before each, so
    that a cycle is seen before it is closed."""

    def __init__(self, component: Component) -> None:
        self._component = component
        self.sets: list[int] = []
        self._before: list[int] = []

    def may_join(self, number: int, k: int) -> bool:
        """Whether nothing bars the launch from set k, and no set between them waits for set k."""
        mask = self.sets[k]
        if self._component.apart[number] & mask:
            return False
        direct = self._component.above[number]
        return not any(
            other & direct and self._before[n] & mask for n, other in enumerate(self.sets) if n != k
        )

    def place(self, number: int, k: int) -> None:
        """Put the launch into set k, or into a set of its own when k is negative."""
        if k < 0:
            k = len(self.sets)
            self.sets.append(0)
            self._before.append(0)
        for n, other in enumerate(self.sets):
            if n != k and other & self._component.above[number]:
                self._before[k] |= other | self._before[n]
        self.sets[k] |= 1 << number
        for n in range(len(self.sets)):
            if self._before[n] & self.sets[k]:
                self._before[n] |= self._before[k] | self.sets[k]
