"""Sums of backward that are taken twice of one gradient."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, mark
from fusion_advisor.ir.graph import Ref

CODE = "same-sum"
_SUMS = frozenset({"aten.sum.dim_IntList", "aten.sum.default"})


def find(model: Model) -> Iterator[Advice]:
    """One for all sums whose result an earlier launch has: of the same elements over the same
    dimensions, as the gradients of two biases that are added."""
    nodes = model.flow.nodes
    written = {storage for i in model.launches for storage in nodes[i].mutates}
    sums = [i for i in model.launches if nodes[i].op in _SUMS and nodes[i].phase == "backward"]
    sums = [i for i in sums if model.call(i).operand(0).storage not in written]
    twice = [numbers for numbers in by(sums, lambda i: _key(model, i)).values() if numbers[1:]]
    again = sorted(i for numbers in twice for i in numbers[1:])
    if not again:
        return
    first = nodes[again[0]]
    yield Advice(
        CODE,
        f"{counted(again, 'sum')} of backward {'is' if len(again) == 1 else 'are'} taken of a"
        f" gradient that another sum has read ({model.bytes(again) / 1e6:.1f} MB): biases that are"
        " added have the same gradient; keep one of them, or let torch.compile take the sum once",
        model.time_us(again),
        model.sources(i for numbers in twice for i in numbers),
        (f"the first is {first.name}, as {nodes[twice[0][0]].name}",),
        mark(CODE, first.op),
    )


def _key(model: Model, number: int) -> Hashable:
    """Key of a sum: the elements that it reads, in their order, and its arguments."""
    node, read = model.flow.nodes[number], model.call(number).operand(0)
    arguments = tuple(each for each in node.args if not isinstance(each, Ref))
    layout = read.storage, read.offset, read.shape, read.stride, read.dtype
    return node.op, layout, arguments, node.kwargs, node.out.dtype
