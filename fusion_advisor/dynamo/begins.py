"""Launches that a rewrite may begin with: a graph without any needs no look by Dynamo. Apart from
the rewrites, whose import takes longer than this."""

from __future__ import annotations

from fusion_advisor.ir.graph import Graph, Node, Ref, Tensor
from fusion_advisor.ops.attention import ATTENTION, mask_of

_PASSING = ("aten._to_copy.default", "aten.clone.default")
"""Copies that a rewrite sees through."""
_PRODUCTS = ("aten.mm.default", "aten.addmm.default")


def may_begin(graph: Graph, large: float) -> bool:
    """Whether a graph of launches has what a rewrite begins with: an attention whose mask may be
    needless or whose keys are repeated, a softmax before a product, a loss over logits of so many
    bytes, `large`."""
    launched = _Launched(graph)
    hides = {mask.node: mask.says for mask in graph.masks}
    for node in graph.nodes:
        if node.op == ATTENTION:
            masked = mask_of(node) is not None and hides.get(node.name) != "other"
            if masked or launched.repeats(list(node.refs())[1]):
                return True
        elif node.op == "aten.bmm.default":
            if launched.maker(next(node.refs())).op == "aten._softmax.default":
                return True
        elif node.op == "aten.nll_loss_forward.default":
            scores = launched.maker(next(node.refs()))
            if scores.op == "aten._log_softmax.default":
                product = launched.maker(next(scores.refs()))
                if product.op in _PRODUCTS and product.out.numel * product.out.itemsize >= large:
                    return True
    return False


class _Launched:
    """Launches of a graph by the memory that they make, whatever views look at it."""

    def __init__(self, graph: Graph) -> None:
        self._tensors: dict[Ref, Tensor] = {}
        self._makers: dict[int, Node] = {}
        for node in graph.nodes:
            for number, tensor in enumerate(node.outputs):
                if tensor is not None:
                    self._tensors[Ref(node.name, number)] = tensor
                    self._makers.setdefault(tensor.storage, node)

    def maker(self, ref: Ref) -> Node:
        """Launch that makes a tensor, seen through copies."""
        node = self._made(ref)
        while node.op in _PASSING:
            node = self._made(next(node.refs()))
        return node

    def repeats(self, ref: Ref) -> bool:
        """Whether a tensor is a copy of one that has each element several times."""
        node = self._made(ref)
        if node.op not in _PASSING:
            return False
        before = self._tensors[next(node.refs())]
        return before.addressed < before.numel

    def _made(self, ref: Ref) -> Node:
        return self._makers[self._tensors[ref].storage]
