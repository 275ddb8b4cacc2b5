"""Fingerprint of a set of nodes: a hash of the computation that survives renaming, moved lines and
more layers."""

from __future__ import annotations

import hashlib

from fusion_advisor.cost.annotate import element_set
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.lower import Boundary
from fusion_advisor.ir.graph import Arg, GivenNumber, Ref


def fingerprint(flow: Dataflow, border: Boundary) -> str:
    """Hash the members in order with sha256: op, constants, who reads whose result, and the layout
    of every tensor that crosses the border."""
    tensors = flow.annotated.tensors
    local = {number: place for place, number in enumerate(border.members)}
    outer: dict[object, int] = {}
    numbers: dict[object, int] = {}

    def tensor(ref: Ref) -> object:
        number = flow.position[ref.node]
        if number in local:
            return "in", local[number], ref.output
        seen = tensors[ref]
        place = outer.setdefault(element_set(seen), len(outer))
        return "out", place, seen.shape, seen.stride, seen.dtype

    def row(number: int) -> object:
        node = flow.nodes[number]
        operands = iter(flow.operands[number])

        def shown(arg: Arg) -> object:
            if isinstance(arg, Ref):
                return tensor(next(operands)) if arg in tensors else None
            if isinstance(arg, tuple):
                return tuple(shown(item) for item in arg)
            if isinstance(arg, GivenNumber):  # whatever it is
                return "given", numbers.setdefault(arg.key, len(numbers))
            return repr(arg)

        args = tuple(shown(arg) for arg in node.args)
        kwargs = tuple((name, shown(value)) for name, value in node.kwargs)
        layouts = tuple((t.shape, t.stride, t.dtype) if t else None for t in node.outputs)
        return node.op, args, kwargs, layouts

    rows = tuple(row(number) for number in border.members)
    left = tuple((local[flow.position[ref.node]], ref.output) for ref in border.outputs)
    return hashlib.sha256(repr((rows, left)).encode()).hexdigest()
