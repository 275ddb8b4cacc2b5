"""Which launches only move a tensor's elements, and which of them another kind speaks of."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Model
from fusion_advisor.records import Ref, Tensor

_COPIES = frozenset(
    {"aten.clone.default", "aten.contiguous.default", "aten.copy_.default", "aten._to_copy.default"}
)
_ATTENTION = "aten.scaled_dot_product_attention.default"


def copies(model: Model) -> Iterator[tuple[int, Ref]]:
    """Launches that no kernel takes over, with the tensor that each copies."""
    for number in model.left:
        node = model.flow.nodes[number]
        refs = model.flow.operands[number]
        if node.op in _COPIES and refs and not _crosses(model, number):
            yield number, refs[-1]


def _crosses(model: Model, number: int) -> bool:
    """From or to another device: a transfer, no copy within HBM."""
    return dict(model.flow.nodes[number].kwargs).get("device") is not None


def same_dtype(model: Model, number: int, ref: Ref) -> bool:
    return model.flow.annotated.tensors[ref].dtype == model.flow.nodes[number].out.dtype


def repeats(tensor: Tensor) -> int:
    """How often an expanded tensor has each element."""
    return tensor.numel // tensor.addressed if tensor.addressed else 1


def attended(model: Model, number: int) -> list[int]:
    """The attentions that alone read what a launch makes, as keys or values; none where anybody
    else does."""
    flow = model.flow
    readers = list(flow.uses(Ref(flow.nodes[number].name)))
    if not readers or not all(i >= 0 and flow.nodes[i].op == _ATTENTION for i in readers):
        return []
    return readers


def repeated_head(model: Model, number: int, ref: Ref) -> bool:
    """Does a launch copy keys or values for the heads that share them?"""
    tensor = model.flow.annotated.tensors[ref]
    return repeats(tensor) > 1 and bool(attended(model, number))
