"""Layers that a model repeats: stretches of the same nodes that follow each other."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fusion_advisor.report.schema import NodeRow

_CONTEXT = 4
"""Nodes in a row that have to repeat before a period is tried."""

_PERIODS = 64
"""Number of periods that are tried, the most frequent first."""


@dataclass(frozen=True)
class Repeat:
    """Repeat of `count` stretches of `length` nodes each; the first begins at `start`."""

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.count

    @property
    def hidden(self) -> int:
        """Nodes that need not be shown when the first stretch stands for all."""
        return self.length * (self.count - 1)


def repeats(nodes: Sequence[NodeRow]) -> list[Repeat]:
    """Find disjoint repeats in the graph's order. The one that hides most nodes is taken first."""
    kinds: dict[tuple[object, ...], int] = {}
    series = [kinds.setdefault(_kind(node), len(kinds)) for node in nodes]
    found = [repeat for period in _periods(series) for repeat in _runs(series, period)]
    found.sort(key=lambda repeat: (-repeat.hidden, repeat.length, repeat.start))
    taken: list[Repeat] = []
    free = [True] * len(nodes)
    for repeat in found:
        if all(free[repeat.start : repeat.end]):
            free[repeat.start : repeat.end] = [False] * (repeat.end - repeat.start)
            taken.append(repeat)
    return sorted(taken, key=lambda repeat: repeat.start)


def label(nodes: Sequence[NodeRow], repeat: Repeat) -> str:
    """Modules that the repeat covers, `layers.0 … layers.31`; empty where no name counts them."""
    first, second, last = (
        nodes[repeat.start + turn * repeat.length : repeat.start + (turn + 1) * repeat.length]
        for turn in (0, 1, repeat.count - 1)
    )
    for one, other, end in zip(first, second, last, strict=True):
        parts, others, ends = (row.module.split(".") for row in (one, other, end))
        for depth, (part, another) in enumerate(zip(parts, others, strict=False)):
            if part != another:
                return f"{'.'.join(parts[: depth + 1])} … {'.'.join(ends[: depth + 1])}"
    return ""


def _kind(node: NodeRow) -> tuple[object, ...]:
    """Key that is equal for nodes that do the same in two layers."""
    return node.op, tuple(node.shape), node.dtype, re.sub(r"\d+", "*", node.module)


def _periods(series: Sequence[int]) -> list[int]:
    """Distances at which the same few nodes repeat."""
    last: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for i in range(len(series) - _CONTEXT + 1):
        context = tuple(series[i : i + _CONTEXT])
        if context in last and i - last[context] >= _CONTEXT:
            distances[i - last[context]] += 1
        last[context] = i
    return [distance for distance, _ in distances.most_common(_PERIODS)]


def _runs(series: Sequence[int], period: int) -> Iterator[Repeat]:
    """Yield the longest stretches in which every node repeats a period later."""
    start = 0
    for i in range(len(series) - period + 1):
        if i + period < len(series) and series[i] == series[i + period]:
            continue
        count = (i - start) // period + 1
        if count > 1:
            yield Repeat(start, period, count)
        start = i + 1
