"""Ways to keep less for backward: what forward saves and backward can make again.

A copy in a wider float is cast again from the narrower tensor, which is kept in its place. The
result of pointwise work (an activation, a product of gates) is computed again where all that it is
made of is kept anyway, or is made of that by pointwise work: no other tensor is kept for it. The
mask of a dropout is drawn again, for seed and offset give the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from fusion_advisor.cost.annotate import Annotated
from fusion_advisor.ir.graph import Node, Ref, Tensor
from fusion_advisor.ops import REGISTRY

AHEAD = ("forward", "loss")
"""Phases that run before backward."""


@dataclass(frozen=True, slots=True)
class LeanerWay:
    """Way to keep less: the bytes saved, and the microseconds that backward takes longer for it."""

    action: str
    saved_bytes: int
    extra_us: float


def leaner_ways(
    annotated: Annotated, made_by: Mapping[int, Node], kept: Mapping[int, int]
) -> dict[int, LeanerWay]:
    """Ways by the storage that need not be kept; `made_by` has the node that makes each storage, in
    the order of the graph, `kept` the bytes of all that forward keeps. All of them together save
    what each says: none needs what another one leaves out. What forward writes into later is not
    made again, and what the model returns is there anyway."""
    graph = annotated.graph
    ahead = (node for node in graph.nodes if node.phase in AHEAD)
    written = {s for node in ahead for s in node.mutates if made_by.get(s) is not node}
    makers = {storage: node for storage, node in made_by.items() if storage not in written}
    returned = {annotated.tensors[ref].storage for ref in graph.outputs if ref in annotated.tensors}
    found: dict[int, LeanerWay] = {}
    again = _Again(annotated, makers, kept.keys())
    for storage, node in makers.items():
        if storage not in kept or storage in returned or node.kind != "call":
            continue
        way = _cast_again(annotated, node, kept) or again.way(storage, kept[storage])
        if way:
            found[storage] = way
    return found


def narrower(annotated: Annotated, node: Node) -> Tensor | None:
    """The 16-bit float that a node copies into a wider one; None for any other node."""
    ref = next(node.refs(), None)
    before = annotated.tensors.get(ref) if ref else None
    if node.op != "aten._to_copy.default" or before is None or not before.dtype.endswith("float16"):
        return None
    return before if node.out.itemsize > before.itemsize else None


def _cast_again(annotated: Annotated, node: Node, kept: Mapping[int, int]) -> LeanerWay | None:
    """Cast of a narrower float, done again in backward: the narrower tensor is kept in place of the
    copy, or is kept anyway."""
    before = narrower(annotated, node)
    if before is None:
        return None
    saved = node.out.bytes - (0 if before.storage in kept else before.bytes)
    if saved <= 0:
        return None
    again = annotated.costs[node.name].time_us
    return LeanerWay(f"keep it in {before.dtype}, cast again in backward", saved, again)


@dataclass(frozen=True)
class _Again:
    """Search for what backward can compute again; `kept` are the storages that forward keeps."""

    annotated: Annotated
    makers: Mapping[int, Node]
    kept: Set[int]
    known: dict[int, float | None] = field(default_factory=dict[int, float | None])

    def way(self, storage: int, size: int) -> LeanerWay | None:
        node = self.makers[storage]
        if self._pattern(node) == "random":
            result = node.outputs[0]
            if result is None or result.storage == storage:  # what is dropped from is needed there
                return None
            action = "draw it again in backward, from the same seed and offset"
            return LeanerWay(action, size, self._us(node))
        us = self._made_us(storage)
        return None if us is None else LeanerWay("compute it again in backward", size, us)

    def _made_us(self, storage: int) -> float | None:
        """Microseconds to make a storage again by pointwise work; None where something else would
        have to be kept for it."""
        if storage not in self.known:
            self.known[storage] = None
            node = self.makers.get(storage)
            if node and self._pattern(node) == "pointwise":
                parts = [self._there_us(ref) for ref in node.refs()]
                us = [part for part in parts if part is not None]
                if parts and len(us) == len(parts):
                    self.known[storage] = self._us(node) + sum(us)
        return self.known[storage]

    def _there_us(self, ref: Ref) -> float | None:
        """Microseconds until an operand is there again; 0 where backward has it anyway."""
        tensor = self.annotated.tensors.get(ref)
        if tensor is None or tensor.storage not in self.makers:
            return None
        storage = tensor.storage
        if self.makers[storage].kind != "call" or storage in self.kept:
            return 0.0
        return self._made_us(storage)

    def _pattern(self, node: Node) -> str:
        op = REGISTRY.get(node.op) if node.kind == "call" else None
        return op.pattern if op else ""

    def _us(self, node: Node) -> float:
        return self.annotated.costs[node.name].time_us
