"""Values that decide something: a comparison, a rounding to whole numbers, an index.

Where the last bit of a value decides a whole element, a kernel has to round as eager does: each
result where eager stores it, and up to there by its exact forms. Where these are operations that
round once (`Primitive.exact`) a fused decision is eager's. What a library function or a sum gives
may have another last bit than eager's, in one kernel as in two. A step that is taken one value
early is as near to the truth as eager's, and proven so (`verify.stepping`); a place, a truth or a
draw that flips is not told from a wrong one: it is refused. Behind a store of 16 bits other last
bits are below what eager itself rounds off: there, what a sum is in gains nothing by being exact.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import FLOATS, Node, Ref, Tensor
from fusion_advisor.ir.steps import steps
from fusion_advisor.ops import REGISTRY
from fusion_advisor.region.builder import FLOAT_DTYPES
from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.primitives import PRIMITIVES

_ONCE = frozenset({"load", "const", "given", "place", "extent", "size", "round", "cast"})
"""Expressions beside primitives that round once or not at all."""
_EXTREMES = ("max", "min", "argmax", "argmin")

_OF_RANGE = frozenset(f"aten.{name}.default" for name in ("isinf", "isnan", "isposinf", "isneginf"))


@dataclass(frozen=True)
class Decisive:
    """`feeds` are tensors that launches of the set make, each with a launch that it decides, a
    discontinuous op; `nodes` are all launches that those tensors are made by within the set."""

    feeds: tuple[tuple[Ref, int], ...]
    nodes: frozenset[int]

    def flips(
        self, flow: Dataflow, exprs: Sequence[Expr], values: Mapping[Ref, int]
    ) -> Iterator[str]:
        """Feeds of places, truths and draws that are rounded otherwise than eager's: something that
        they are made of, up to loads and to what is rounded as eager stores it, is no operation
        that rounds once. `values` are the numbers of the tensors' expressions."""
        for ref, launch in self._picks(flow):
            behind = _behind(exprs, values[ref])
            if not all(_once(exprs[number]) for number in behind):
                yield _named(flow, ref, launch)

    def may_differ(self, exprs: Sequence[Expr], values: Mapping[Ref, int]) -> bool:
        """Whether something that decides is made of what may have another last bit than eager's."""
        ends = {values[ref] for ref, _ in self.feeds}
        behind = set[int]().union(*(_behind(exprs, end, ("load",)) for end in ends))
        return not all(_once(exprs[number]) for number in behind)

    def in_words(self, flow: Dataflow) -> list[str]:
        """Every feed of a place, a truth or a draw."""
        return [_named(flow, ref, launch) for ref, launch in self._picks(flow)]

    def _picks(self, flow: Dataflow) -> list[tuple[Ref, int]]:
        picks = (each for each in self.feeds if not steps(flow.nodes[each[1]].op))
        return [(ref, launch) for ref, launch in picks if not _asks_range(flow.nodes[launch])]

    def loosened(self, exprs: Sequence[Expr], values: Mapping[Ref, int]) -> list[Expr]:
        """The expressions of a region, exact where that decides. What a sum is in, up to a rounding
        to 16 bits, has other last bits whatever is exact there: it takes the fast forms. `values`
        are the numbers of the tensors' expressions."""
        kept = set[int]().union(*(_behind(exprs, values[ref]) for ref, _ in self.feeds))
        loose = set[int]()
        for end in (expr.args[0] for expr in exprs if expr.op == "round"):
            span = _behind(exprs, end)
            (loose if any(_adds(exprs[number]) for number in span) else kept).update(span)
        loose -= kept
        return [replace(e, exact=e.exact and n not in loose) for n, e in enumerate(exprs)]


def roughened(exprs: Sequence[Expr], results: Collection[int]) -> list[Expr]:
    """The expressions of a region, rough where none of its float32 `results` is made of them, up to
    a rounding to 16 bits: no digit beyond those shows."""
    wide = set[int]().union(*(_behind(exprs, result) for result in results))
    return [
        replace(expr, rough=expr.rough or bool(PRIMITIVES[expr.op].precise))
        if n not in wide and expr.op in PRIMITIVES and expr.dtype == "float32" and not expr.exact
        else expr
        for n, expr in enumerate(exprs)
    ]


def _behind(
    exprs: Sequence[Expr], value: int, ends: Collection[str] = ("load", "round")
) -> set[int]:
    """A value and what it is made of, up to loads and to what is rounded as eager stores it."""
    found, waiting = set[int](), [value]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += () if exprs[number].op in ends else exprs[number].args
    return found


def _named(flow: Dataflow, ref: Ref, launch: int) -> str:
    return f"{flow.base(ref).node} feeds {flow.nodes[launch].name}"


def decisive_nodes(flow: Dataflow, members: Sequence[int]) -> Decisive:
    """The decisive values of some launches and the views between them."""
    inside = {number for number in members if not flow.is_view(number)}

    def made(launch: int) -> list[tuple[Ref, int]]:
        """Floating operands that the set makes, each with its maker."""
        floats = (r for r in flow.operands[launch] if _floats(flow.annotated.tensors[r]))
        makers = ((ref, flow.position[flow.base(ref).node]) for ref in floats)
        return [(ref, maker) for ref, maker in makers if maker in inside]

    feeds = [
        (ref, launch)
        for launch in sorted(inside)
        if _decides(flow.nodes[launch])
        for ref, _ in made(launch)
        # eager's float16 overflows where a kernel's float32 does not
        if flow.annotated.tensors[ref].dtype == "float16" or not _asks_range(flow.nodes[launch])
    ]
    found = set[int]()
    waiting = [flow.position[flow.base(ref).node] for ref, _ in feeds]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += [maker for _, maker in made(number)]
    return Decisive(tuple(feeds), frozenset(found))


def _floats(tensor: Tensor) -> bool:
    return tensor.dtype in FLOAT_DTYPES


def _decides(node: Node) -> bool:
    """Whether a small change of an operand may change a result by a step."""
    op = REGISTRY.get(node.op)
    return op is not None and any(node.outputs) and (op.discrete or not _floats(node.out))


def _asks_range(node: Node) -> bool:
    """Whether a launch asks of a value only if it is infinite or NaN, as `isinf`, `x == inf` and
    `x == x` do. Rounding does not change the answer, short of a value at the edge of its range."""
    if node.op in _OF_RANGE:
        return True
    if node.op in ("aten.eq.Tensor", "aten.ne.Tensor"):
        return node.args[0] == node.args[1]
    if node.op not in ("aten.eq.Scalar", "aten.ne.Scalar"):
        return False
    other = node.args[1]
    return isinstance(other, float) and math.isinf(other)


def _adds(expr: Expr) -> bool:
    return expr.op in ("reduce", "scan") and expr.monoid not in _EXTREMES


def _once(expr: Expr) -> bool:
    """Whether an expression rounds once at the most; what rounds is marked, so that no schedule
    takes a shorter form of it."""
    if expr.op == "reduce":
        return expr.monoid in _EXTREMES
    if expr.dtype not in FLOATS or expr.op in _ONCE:
        return True
    return expr.exact and PRIMITIVES[expr.op].exact
