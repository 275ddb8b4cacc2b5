"""Rewrite of attention whose mask hides nothing, or what comes after each place and nothing else:
without the mask, so that the flash kernel serves it.

What a mask is, is proven for every size that the graph serves, from the operators that make it: its
element as a function of batch, head, query and key. A mask that also hides padding is one of these
where there is no padding; the input that tells is then read once a call.
"""
# torch.fx and sympy carry Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv, statically_known_true

from fusion_advisor.dynamo.rewrites.attention import Attention, attentions, flops_before
from fusion_advisor.dynamo.rewrites.base import Asked, Taken
from fusion_advisor.dynamo.rewrites.conditions import Ones, Requirement
from fusion_advisor.dynamo.rewrites.elements import (
    Holds,
    Index,
    Read,
    Unproven,
    elements_of,
    evaluated,
    leaves,
    size,
    within,
)
from fusion_advisor.dynamo.rewrites.nodes import storage, switches, value_of, writes_into, written
from fusion_advisor.dynamo.rewrites.tables import Tables
from fusion_advisor.frontend.aot import as_fake, fake_mode, functional

_PLACES = ("batch", "head", "query", "key")
Hides = Literal["nothing", "later"]


def needless_masks(asked: Asked) -> Iterator[Taken]:
    """Take needless masks from the attentions of a graph, in place; yields those that were taken,
    each with its conditions."""
    masked = [each for each in attentions(asked.module.graph) if each.mask is not None]
    for each in needless(asked, masked):
        _take_mask(each.attention, each.hides)
        said = {"nothing": "hides nothing", "later": "is causal"}[each.hides]
        reads = any(condition.reads for condition in each.conditions)
        where = " where there is no padding, which is read once a call" if reads else ""
        why = f"its mask {said}{where}"
        yield Taken("needless-mask", each.attention.node, why, each.conditions)


@dataclass(frozen=True)
class Needless:
    """Attention whose mask hides nothing, or what comes later alone, under some conditions."""

    attention: Attention
    hides: Hides
    conditions: tuple[Requirement, ...]


def needless(asked: Asked, masked: Sequence[Attention]) -> list[Needless]:
    """Attentions of these whose masks are needless, and worth what it takes to know that."""
    if not masked:
        return []
    made, found = _Made(asked, masked), list[Needless]()
    reading: list[Needless] = []
    for attention in masked:
        try:
            hides, conditions = _hidden(made, attention)
        except Unproven:
            continue
        if _can_be_said(attention, hides) and (asked.conditions or not conditions):
            one = Needless(attention, hides, conditions)
            (reading if any(each.reads for each in conditions) else found).append(one)
    return found + reading if _worth_reading(asked, [each.attention for each in reading]) else found


def _worth_reading(asked: Asked, masked: Sequence[Attention]) -> bool:
    """Whether attentions without their masks save enough to read an input for it: not where one
    query at a time is answered. The host waits as long as it would without, less what the GPU works
    before the first attention of the graph."""
    if asked.read == "never" or not masked:
        return False
    limits = asked.rulebook.rewrites["needless-mask"].limits
    saved = sum(each.flops / limits["masked"].base for each in masked if each.many)
    cost = limits["read"].base
    if asked.read == "within":
        graph = asked.module.graph
        work = flops_before(next(attentions(graph)).node) / limits["products"].base
        cost = max(limits["read-within"].base, cost - work)
    return saved >= limits["worth"].value * cost


# -- what a mask hides -----------------------------------------------------------------------------


def _hidden(made: _Made, attention: Attention) -> tuple[Hides, tuple[Requirement, ...]]:
    """Decide what the mask of an attention hides, and under which conditions. Raises Unproven where
    the mask hides anything else than what comes later."""
    lengths = tuple(map(size, (*attention.leading, attention.queries, attention.keys)))
    place: Index = tuple(
        sympy.Symbol(name, integer=True, nonnegative=True) for name in _PLACES[-len(lengths) :]
    )
    elements = elements_of(made.mask(attention), made.tables)
    beside = zip(reversed(elements.sizes), reversed(lengths), strict=False)
    if len(elements.sizes) > len(lengths) or any(n not in (1, whole) for n, whole in beside):
        raise Unproven("it makes the scores larger")
    made.tables.read.clear()
    term = elements.at(within(elements.sizes, place))
    query, key = place[-2:]
    causal = Holds(query - key)
    known: dict[Holds | Read, torch.Tensor] = {}
    shown: dict[str, Requirement] = {}
    unsettled: list[Holds] = []
    for leaf in dict.fromkeys(leaves(term)):
        if isinstance(leaf, Read):
            if leaf.dtype.is_floating_point or any(query in i.free_symbols for i in leaf.index):
                raise Unproven(f"it depends on what {leaf.name} has")
            known[leaf] = torch.ones((), dtype=leaf.dtype)
            shown[leaf.name] = Ones(made.number[leaf.name], made.written)
        elif leaf not in (causal, causal.opposite):
            always = _always(leaf.value, place, lengths, made.sizes)
            never = _always(leaf.opposite.value, place, lengths, made.sizes)
            known[leaf] = torch.tensor(always)
            if not always and not never:
                unsettled.append(leaf)
    if len(unsettled) > made.comparisons:
        raise Unproven(f"it depends on {len(unsettled)} comparisons")
    seen: dict[bool, set[bool]] = {}
    for before, *outcome in product((True, False), repeat=1 + len(unsettled)):
        known |= dict(zip(unsettled, map(torch.tensor, outcome), strict=True))
        case = [causal, *unsettled]
        if not _possible(case, (before, *outcome)):
            continue
        known |= {causal: torch.tensor(before), causal.opposite: torch.tensor(not before)}
        seen.setdefault(before, set()).add(_shows(evaluated(term, known)))
    conditions = (*made.tables.read.values(), *shown.values())
    if seen == {True: {True}, False: {True}}:
        return "nothing", conditions
    if seen == {True: {True}, False: {False}}:
        return "later", conditions
    raise Unproven("it hides other places")


def _always(value: sympy.Expr, place: Index, lengths: Index, sizes: ShapeEnv | None) -> bool:
    """Whether a comparison holds at every place: its least value is not negative."""
    least = sympy.expand(value)
    for symbol, length in zip(place, lengths, strict=True):
        factor = sympy.diff(least, symbol)
        if not factor.is_Integer:
            return False
        least = least.subs(symbol, 0 if factor >= 0 else length - 1)
    if sizes is None or least.is_number:
        return bool(least.is_nonnegative)
    return statically_known_true(sizes.create_symboolnode(sympy.Ge(least, 0)))


def _possible(comparisons: Sequence[Holds], outcome: Sequence[bool]) -> bool:
    """Whether comparisons may come out like this together, as far as two of them tell: what is not
    negative has no negative sum."""
    together = [e if yes else e.opposite for e, yes in zip(comparisons, outcome, strict=True)]
    sums = (one.value + other.value for one, other in combinations(together, 2))
    return not any(each.is_number and each.is_negative for each in map(sympy.expand, sums))


def _shows(value: torch.Tensor) -> bool:
    """Whether an element of a mask shows its place. Raises Unproven for a number that changes how
    much a place weighs."""
    if value.dtype is torch.bool:
        return bool(value)
    if value == 0:
        return True
    if value <= torch.finfo(value.dtype).min:
        return False
    raise Unproven(f"it adds {float(value)}")


def _can_be_said(attention: Attention, hides: Hides) -> bool:
    """Whether `is_causal` says the same as the mask."""
    if attention.given.get("is_causal"):
        return False  # torch refuses both
    if hides == "nothing":
        return True
    return attention.scaled_up and statically_known_true(attention.queries <= attention.keys)


def _take_mask(attention: Attention, hides: Hides) -> None:
    """Take a needless mask from a call."""
    queries, keys = attention.queries, attention.keys
    if hides == "nothing" or statically_known_true(queries == keys):
        attention.change(attn_mask=None, is_causal=hides == "later")
        return
    # What comes after the last query is never seen, and the flash kernel wants as many keys.
    graph, seen = attention.node.graph, queries
    with graph.inserting_before(attention.node):
        if isinstance(queries, torch.SymInt):
            seen = graph.call_method("size", (attention.given["query"], -2))
            seen.meta["example_value"] = queries
        shorter: dict[str, Any] = {}
        for name in ("key", "value"):
            given = attention.given[name]
            cut: Any = (..., slice(None, seen), slice(None))
            shorter[name] = graph.call_function(operator.getitem, (given, cut))
            whole = given.meta["example_value"]
            shorter[name].meta = {**given.meta, "example_value": whole[..., :queries, :]}
    attention.change(attn_mask=None, is_causal=True, **shorter)


# -- how a mask is made ----------------------------------------------------------------------------


class _Made:
    """ATen graph of what makes masks: traced up to the last node that makes one, or writes into one
    before its first attention."""

    def __init__(self, asked: Asked, masked: Sequence[Attention]) -> None:
        order = {node: number for number, node in enumerate(asked.module.graph.nodes)}
        first: dict[torch.fx.Node, int] = {}
        for attention in masked:
            if attention.mask is not None:
                first.setdefault(attention.mask, order[attention.node])
        self._order = order
        self._writes: dict[torch.fx.Node, list[int]] = {}
        for mask in first:
            memory = {storage(mask)}
            after = (number for node, number in order.items() if writes_into(node, memory))
            self._writes[mask] = [order[mask], *after]
        self._whole = {
            mask: max(number for number in self._writes[mask] if number < first[mask])
            for mask in first
        }
        self._cut = max(self._whole.values())
        traced = _traced(asked, [node for node in order if order[node] <= self._cut], list(first))
        nodes = list(traced.graph.nodes)
        inputs = [node.name for node in nodes if node.op == "placeholder"]
        self.number = {name: number for number, name in enumerate(inputs)}
        self.tables = Tables(asked, inputs)
        self.written = _written_inputs(asked.module.graph)
        limits = asked.rulebook.rewrites["needless-mask"].limits
        self.comparisons = limits["comparisons"].count
        self._masks = dict(zip(first, nodes[-1].args[0], strict=True))
        values = (node.meta.get("val") for node in nodes)
        numbers = (value.node for value in values if isinstance(value, torch.SymInt))
        self.sizes: ShapeEnv | None = next((number.shape_env for number in numbers), None)

    def mask(self, attention: Attention) -> torch.fx.Node:
        """Node of an attention's mask. Raises Unproven where the mask is written into later than
        what was traced of it."""
        mask = attention.mask
        assert mask is not None
        until = max(self._cut + 1, self._order[attention.node])
        if any(self._whole[mask] < number < until for number in self._writes[mask]):
            raise Unproven("it is written into between attentions")
        return self._masks[mask]


def _written_inputs(graph: torch.fx.Graph) -> tuple[int, ...]:
    """Numbers of the inputs that a graph may write into."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    into = {storage(each) for node in graph.nodes for each in written(node)} - {None}
    return tuple(number for number, node in enumerate(inputs) if storage(node) in into)


def _traced(
    asked: Asked, nodes: Sequence[torch.fx.Node], wanted: Sequence[torch.fx.Node]
) -> torch.fx.GraphModule:
    """Trace those of the first nodes of a graph on fake tensors that some are made of, to ATen
    operators without writes."""
    part = torch.fx.Graph()
    copied: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in _needed(nodes, {*wanted}, asked.unread):
        copied[node] = part.node_copy(node, copied.__getitem__)
    part.output([copied[mask] for mask in wanted])
    run = torch.fx.Interpreter(torch.fx.GraphModule(asked.module, part)).run
    fake = fake_mode(asked.inputs)
    values = [as_fake(value, fake) for value in asked.inputs]
    grad = torch.set_grad_enabled(torch.is_grad_enabled())  # the part may end within `no_grad`
    with grad, fake, enable_python_dispatcher():
        return make_fx(functional(run))(*values)


def _needed(
    nodes: Sequence[torch.fx.Node], wanted: set[torch.fx.Node], unread: Collection[torch.fx.Node]
) -> list[torch.fx.Node]:
    """Nodes of the first ones of a graph that some are made of: what these read, what writes into
    that, what switches a mode, and what makes no tensor and is read by nothing, as the begin of a
    `torch.vmap`; and every input."""
    needed = {*wanted, *(each for each in unread if value_of(each) is None)}
    memory = {storage(each) for each in wanted}
    for node in reversed(nodes):
        if node in needed or switches(node) or writes_into(node, memory):
            needed.update((node, *node.all_input_nodes))
            memory.update(map(storage, node.all_input_nodes))
    return [node for node in nodes if node in needed or node.op == "placeholder"]
