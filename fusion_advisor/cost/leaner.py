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


def leaner_ways(annotated: Annotated, kept: Mapping[int, int]) -> dict[int, LeanerWay]:
    """Ways by the storage that need not be kept; `kept` has the bytes of all that forward keeps.
    All of them together save what each says: none needs what another one leaves out. What the model
    returns is there anyway."""
    makers, graph = _makers(annotated), annotated.graph
    returned = {annotated.tensors[ref].storage for ref in graph.outputs if ref in annotated.tensors}
    found: dict[int, LeanerWay] = {}
    again = _Again(annotated, makers, kept.keys())
    for storage, node in makers.items():  # in the order of forward
        if storage not in kept or storage in returned or node.kind != "call":
            continue
        way = _cast_again(annotated, node, kept) or again.way(storage, kept[storage])
        if way:
            found[storage] = way
    return found


def _makers(annotated: Annotated) -> dict[int, Node]:
    """The node that makes each storage; of one that forward writes into later, none."""
    found: dict[int, Node] = {}
    written: set[int] = set()
    for node in annotated.graph.nodes:
        if node.phase in AHEAD:
            written.update(storage for storage in node.mutates if storage in found)
        for tensor in node.outputs:
            if tensor is not None:
                found.setdefault(tensor.storage, node)
    return {storage: node for storage, node in found.items() if storage not in written}


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
    saved = node.out.bytes - before.bytes * (before.storage not in kept) if before else 0
    if before is None or saved <= 0:
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
            drawn = len(node.outputs) > 1 and node.outputs[0] is not None
            if not drawn or node.out.storage == storage:  # what is dropped from is needed for that
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
