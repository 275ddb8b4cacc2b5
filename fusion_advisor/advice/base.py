"""The input and the output of a kind of advice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from fusion_advisor.cost.annotate import Cost
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.cost.leaner import narrower
from fusion_advisor.cost.lifetimes import SavedTensor, saved_tensors
from fusion_advisor.ir.graph import Node, Ref, Source, Tensor
from fusion_advisor.ops import Call
from fusion_advisor.rulebook.schema import Rulebook

MOST_TOLD = 3
"""Places of one sort that the evidence of a finding names, at most."""

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Advice:
    """A finding. `saved_us` is the time of one step that following it saves at most; None where
    nothing predicts it. `evidence` are the facts behind it. `mark` is equal for the same advice on
    a model with moved lines or more layers."""

    code: str
    message: str
    saved_us: float | None
    sources: tuple[Source, ...]
    evidence: tuple[str, ...] = ()
    mark: str = ""


@dataclass(frozen=True)
class QueueStep:
    """`idle_us`: what the GPU waits before each launch; `us`: from one step's begin to the next."""

    idle_us: Mapping[int, float]
    us: float


@dataclass(frozen=True)
class Model:
    """An annotated graph, with the launches that kernels of accepted groups replace; `queue` is a
    step as a profiler's trace has it."""

    flow: Dataflow
    grouped: frozenset[int]
    training: bool
    rulebook: Rulebook
    queue: QueueStep | None = None

    @cached_property
    def saved(self) -> tuple[tuple[int, SavedTensor], ...]:
        """Tensors that forward saves for backward, each with the position of the node that makes
        it."""
        saved = saved_tensors(self.flow.annotated)
        return tuple((self.flow.position[each.name], each) for each in saved)

    def widens(self, number: int) -> bool:
        """Whether a node is a copy of a 16-bit float in a wider one."""
        return narrower(self.flow.annotated, self.flow.nodes[number]) is not None

    @property
    def left(self) -> Iterator[int]:
        """Positions of the launches that no kernel replaces."""
        return (i for i in self.launches if i not in self.grouped)

    @property
    def launches(self) -> Iterator[int]:
        """Positions of all launches, in eager's order."""
        return (i for i in range(len(self.flow.nodes)) if self.flow.launches(i))

    def call(self, number: int) -> Call:
        """A node with its tensors."""
        return Call(self.flow.nodes[number], self.flow.annotated.tensors)

    def cost(self, number: int) -> Cost:
        return self.flow.annotated.costs[self.flow.nodes[number].name]

    def time_us(self, numbers: Iterable[int]) -> float:
        """Predicted microseconds of launches, one after the other."""
        return sum(self.cost(i).time_us for i in numbers)

    def bytes(self, numbers: Iterable[int]) -> int:
        """HBM bytes of launches."""
        return sum(self.cost(i).bytes for i in numbers)

    def sources(self, numbers: Iterable[int]) -> tuple[Source, ...]:
        """The source lines of launches, each once."""
        lines = (self.flow.nodes[i].source for i in numbers)
        return tuple(dict.fromkeys(line for line in lines if line))

    def origin(self, ref: Ref) -> Node:
        """The node whose result a chain of views looks at."""
        return self.flow.nodes[self.flow.position[self.flow.base(ref).node]]

    def multiplies(self, number: int) -> bool:
        """Whether a launch is a matrix product."""
        return self.cost(number).pattern == "matmul"


def by(numbers: Iterable[int], key: Callable[[int], K]) -> dict[K, list[int]]:
    """Nodes grouped by a key, in order."""
    found: dict[K, list[int]] = {}
    for number in numbers:
        found.setdefault(key(number), []).append(number)
    return found


def mark(code: str, *facts: object) -> str:
    """A short hash of facts."""
    return hashlib.sha256(repr((code, *facts)).encode()).hexdigest()


def layout(tensor: Tensor) -> str:
    """`8x128:bfloat16, strides 1x8`; the strides where elements are not in order."""
    sizes = "x".join(map(str, tensor.shape)) or "scalar"
    strides = "" if tensor.contiguous else f", strides {'x'.join(map(str, tensor.stride))}"
    return f"{sizes}:{tensor.dtype}{strides}"


def counted(numbers: list[int], what: str) -> str:
    """A count with its noun: `3 copies`, `1 copy`; `what` is the singular."""
    plural = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{len(numbers)} {what if len(numbers) == 1 else plural}"
