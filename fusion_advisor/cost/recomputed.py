"""Checkpoints of a training step: what each one frees, what it keeps for that, and what backward
computes again.

A launch of backward that lies in a checkpoint computes again what forward dropped. What it makes,
and the backward of another operator reads, forward would have kept. What it reads of forward, and
no other launch of backward reads, is kept for the checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion_advisor.cost.annotate import Annotated
from fusion_advisor.cost.lifetimes import lifetimes
from fusion_advisor.ir.graph import Node, Ref


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """One call of a checkpoint: the first node of forward in it, the bytes that it frees and those
    that it keeps, and the nodes of backward that launch something again, with their time."""

    first: Node
    freed_bytes: int
    kept_bytes: int
    again: tuple[Node, ...]
    again_us: float


def again(node: Node) -> bool:
    """Whether a node of backward computes again what a checkpoint of the model dropped."""
    return node.phase == "backward" and node.checkpoint is not None


def checkpoints(annotated: Annotated) -> tuple[Checkpointed, ...]:
    """Checkpoints that backward has something to compute again for, in the order of forward."""
    nodes, costs = annotated.graph.nodes, annotated.costs
    first: dict[int, Node] = {}
    parts: dict[int, list[Node]] = {}
    for node in nodes:
        if node.checkpoint is not None and again(node):
            parts.setdefault(node.checkpoint, []).append(node)
        elif node.checkpoint is not None:
            first.setdefault(node.checkpoint, node)
    if not parts:
        return ()
    maker: dict[int, Node] = {}
    for node in nodes:
        for tensor in node.outputs:
            if tensor is not None:
                maker.setdefault(tensor.storage, node)
    own = _read(annotated, (n for n in nodes if n.phase == "backward" and n.checkpoint is None))
    lives = lifetimes(annotated.graph)
    found: list[Checkpointed] = []
    for number, part in sorted(parts.items()):
        launching = tuple(node for node in part if costs[node.name].launches)
        outputs = ((node, tensor) for node in part for tensor in node.outputs if tensor is not None)
        made = {tensor.storage for node, tensor in outputs if maker[tensor.storage] is node}
        kept = {
            storage
            for storage in _read(annotated, part) - own
            if maker[storage].kind == "call" and maker[storage].phase != "backward"
        }
        if launching:
            found.append(
                Checkpointed(
                    first[number], sum(lives[s].bytes for s in made & own),
                    sum(lives[s].bytes for s in kept), launching,
                    sum(costs[node.name].time_us for node in launching),
                )
            )  # fmt: skip
    return tuple(found)


def _read(annotated: Annotated, nodes: Iterable[Node]) -> set[int]:
    """Storages whose elements some nodes read."""
    refs: Iterable[Ref] = (
        ref for node in nodes if annotated.costs[node.name].bytes_read for ref in node.refs()
    )
    return {annotated.tensors[ref].storage for ref in refs if ref in annotated.tensors}
