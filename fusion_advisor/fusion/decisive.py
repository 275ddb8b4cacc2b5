"""Values that decide something: a comparison, a rounding to whole numbers, an index.

Where the last bit of a value decides a whole element, a kernel has to round as eager does: each
result where eager stores it, and up to there by operations that round once (`Primitive.exact`).
Then a fused decision is eager's. What a library function or a sum gives has other last bits than
eager's; behind a store of 16 bits those are below what eager itself rounds off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import FLOATS, Node
from fusion_advisor.ops import REGISTRY
from fusion_advisor.region.builder import FLOAT_DTYPES, NARROW_FLOATS
from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.primitives import PRIMITIVES

_ONCE = frozenset({"load", "const", "place", "extent", "size", "round", "cast"})
"""Expressions beside primitives that round once or not at all."""
_EXTREMES = ("max", "min", "argmax", "argmin")


@dataclass(frozen=True)
class Decisive:
    """`feeds` are pairs of launches, of which the first makes a floating operand of the second, a
    discontinuous op; `nodes` are all that such operands are made from within the set."""

    feeds: tuple[tuple[int, int], ...]
    nodes: frozenset[int]

    def flips(self, flow: Dataflow, made: Mapping[int, Sequence[Expr]]) -> Iterator[str]:
        """Values of `feeds` that are rounded otherwise than eager's. `made` has the expressions of
        each launch."""

        @cache
        def same(number: int) -> bool:
            if flow.nodes[number].out.dtype in NARROW_FLOATS:
                return True  # as eager stores it
            before = (maker for maker in _makers(flow, number) if maker in self.nodes)
            return all(map(_once, made.get(number, ()))) and all(map(same, before))

        for maker, launch in self.feeds:
            if not same(maker):
                yield f"{flow.nodes[maker].name} feeds {flow.nodes[launch].name}"


def decisive_nodes(flow: Dataflow, members: Sequence[int]) -> Decisive:
    """The decisive values of some launches and the views between them."""
    inside = {number for number in members if not flow.is_view(number)}
    feeds = tuple(
        (maker, launch)
        for launch in sorted(inside)
        if _decides(flow.nodes[launch])
        for maker in _makers(flow, launch)
        if maker in inside
    )
    found, open_ = set[int](), [maker for maker, _ in feeds]
    while open_:
        number = open_.pop()
        if number not in found:
            found.add(number)
            open_ += [maker for maker in _makers(flow, number) if maker in inside]
    return Decisive(feeds, frozenset(found))


def _makers(flow: Dataflow, number: int) -> Iterator[int]:
    """Launches that make the floating operands of a node."""
    for ref in flow.operands[number]:
        if flow.annotated.tensors[ref].dtype in FLOAT_DTYPES:
            yield flow.position[flow.base(ref).node]


def _decides(node: Node) -> bool:
    """Whether a small change of an operand may change a result by a step. `x == inf` does not:
    rounding does not change its answer, short of an overflow that eager has too."""
    op = REGISTRY.get(node.op)
    if op is None or not (op.discrete or node.out.dtype not in FLOAT_DTYPES):
        return False
    other = node.args[1] if len(node.args) > 1 else None
    compares = node.op in ("aten.eq.Scalar", "aten.ne.Scalar")
    return not (compares and isinstance(other, float) and math.isinf(other))


def _once(expr: Expr) -> bool:
    if expr.op == "reduce":
        return expr.monoid in _EXTREMES
    return (
        expr.dtype not in FLOATS
        or expr.op in _ONCE
        or (expr.op in PRIMITIVES and PRIMITIVES[expr.op].exact)
    )
