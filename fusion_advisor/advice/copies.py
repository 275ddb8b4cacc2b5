"""Launches that only move the elements of a tensor, and which kind of advice covers each."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Model
from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.ops.attention import ATTENTION

_COPIES = frozenset(
    {"aten.clone.default", "aten.contiguous.default", "aten.copy_.default", "aten._to_copy.default"}
)


def copies(model: Model) -> Iterator[tuple[int, Ref]]:
    """Copies that no kernel replaces, each with the tensor that it copies."""
    for number in model.left:
        node = model.flow.nodes[number]
        refs = model.flow.operands[number]
        if node.op in _COPIES and refs and not _crosses(model, number):
            yield number, refs[-1]


def _crosses(model: Model, number: int) -> bool:
    """Whether a copy goes from or to another device: a transfer, no copy within HBM."""
    return dict(model.flow.nodes[number].kwargs).get("device") is not None


def same_dtype(model: Model, number: int, ref: Ref) -> bool:
    return model.flow.annotated.tensors[ref].dtype == model.flow.nodes[number].out.dtype


def repeats(tensor: Tensor) -> int:
    """How often an expanded tensor repeats each element."""
    return tensor.numel // tensor.addressed if tensor.addressed else 1


def needed(model: Model, number: int, ref: Ref) -> bool:
    """Whether a copy is needed: it, or the tensor that it copies, is written to later; it writes
    into an existing tensor; or its caller alone gets it, and may need the layout."""
    nodes = model.flow.nodes
    storages = {nodes[number].out.storage, model.flow.annotated.tensors[ref].storage}
    written = any(storages & set(node.mutates) for node in nodes[number:])
    return written or set(model.flow.uses(Ref(nodes[number].name))) <= {-1}


def sharing_heads(model: Model, number: int, ref: Ref) -> int:
    """The number of heads that share each copied head, where attention takes both keys and values
    from such copies; 1 for any other copy. The copied tensor is [batch, heads, sharing, length,
    width] with its third dimension expanded, which `enable_gqa=True` reads without a copy."""
    times = _third_expanded(model, ref)
    readers = list(model.flow.uses(Ref(model.flow.nodes[number].name)))
    if times == 1 or not readers:
        return 1
    taken = all(i >= 0 and _takes_shared(model, i, number, times) for i in readers)
    return times if taken else 1


def _third_expanded(model: Model, ref: Ref) -> int:
    tensor = model.flow.annotated.tensors[ref]
    places = enumerate(zip(tensor.shape, tensor.stride, strict=True))
    expanded = [dim for dim, (size, stride) in places if size > 1 and not stride]
    return tensor.shape[2] if len(tensor.shape) == 5 and expanded == [2] else 1


def _takes_shared(model: Model, reader: int, number: int, times: int) -> bool:
    """Whether a reader is an attention whose keys and values are such copies, this one included."""
    flow = model.flow
    if flow.nodes[reader].op != ATTENTION:
        return False
    bases: list[int] = []
    for ref in flow.operands[reader][1:3]:
        base = flow.position[flow.base(ref).node]
        five, four = flow.nodes[base].out.shape, flow.annotated.tensors[ref].shape
        copied = flow.nodes[base].op in _COPIES and _third_expanded(model, flow.operands[base][-1])
        if copied != times or four != (five[0], five[1] * five[2], *five[3:]):
            return False
        bases.append(base)
    others = {flow.position[flow.base(ref).node] for ref in flow.operands[reader][3:]}
    return number in bases and number not in others
