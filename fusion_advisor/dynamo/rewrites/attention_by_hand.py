"""Rewrite of attention that is written out, two products joined by a softmax over what the second
contracts: as `scaled_dot_product_attention`, which keeps the scores on chip.

The steps between the products are read one by one, from the softmax up: conversions, masks, a
scale. What is masked has to be needless as `needless_masks` proves it, since a row that is hidden
wholly is NaN by hand and zero there. Weights or scores that anything else reads stay.
"""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusion_advisor.dynamo.rewrites.attention import Attention, fused
from fusion_advisor.dynamo.rewrites.base import Asked, Taken
from fusion_advisor.dynamo.rewrites.needless_masks import needless
from fusion_advisor.dynamo.rewrites.nodes import (
    alike,
    argument,
    called,
    number_of,
    take_out_dead,
    undisturbed,
    value_of,
)

_CASTS = ("to", "float", "half", "bfloat16", "type_as", "contiguous")
_TIMES = ("mul", "mul_", "imul", "multiply")
_OVER = ("div", "div_", "truediv", "itruediv", "true_divide")
_PLUS = ("add", "add_", "iadd")
_FILLED = ("masked_fill", "masked_fill_")
_PRODUCTS = ("matmul", "bmm")


@dataclass
class _Steps:
    """Steps between a product and the softmax of its scores."""

    product: torch.fx.Node
    scale: list[tuple[str, Any]] = field(default_factory=list[tuple[str, Any]])
    """Factors and divisors, `*` or `/` each."""
    added: list[Any] = field(default_factory=list[Any])
    filled: list[tuple[Any, float, bool]] = field(default_factory=list[tuple[Any, float, bool]])
    """Conditions with the number that is there where each is as the last says."""


@dataclass(frozen=True)
class _Product:
    """A product of two tensors: the dimensions of each in the order batch, rows, columns."""

    left: torch.fx.Node
    right: torch.fx.Node
    left_order: tuple[int, ...]
    right_order: tuple[int, ...]
    result_order: tuple[int, ...]
    """Dimensions of the result from those of batch, rows, columns."""


def attention_by_hand(asked: Asked) -> Iterator[Taken]:
    """Call one operator for attention that is written out, in place; yields the calls."""
    placed: list[tuple[torch.fx.Node, torch.fx.Node, Attention]] = []
    for softmax in list(asked.module.graph.nodes):
        if not called(softmax, "softmax") or not _over_last(softmax):
            continue
        scores = _steps(argument(softmax, 0, "input"))
        end = _read_by_a_product(softmax)
        if scores is None or end is None:
            continue
        if (made := _placed(scores, end)) is not None:
            placed.append((end, *made))
    masked = [attention for *_, attention in placed if attention.mask is not None]
    proven = {each.attention.node for each in needless(asked, masked)}
    for end, result, attention in placed:
        if attention.mask is None or attention.node in proven:
            end.replace_all_uses_with(result)
            yield Taken("attention-by-hand", attention.node, "two products joined by a softmax")
    take_out_dead(asked.module.graph, asked.unread)


# -- what is written out ---------------------------------------------------------------------------


def _over_last(softmax: torch.fx.Node) -> bool:
    """Whether a softmax is over the last dimension of scores, in their dtype or a wider one."""
    given = argument(softmax, 0, "input")
    scores = value_of(given)
    if scores is None or "out" in softmax.kwargs or not _widens(given, softmax):
        return False
    return scores.dim() >= 3 and argument(softmax, 1, "dim") in (-1, scores.dim() - 1)


def _steps(node: Any) -> _Steps | None:
    """The steps from scores up to their product; None where one is not understood, or anything else
    reads what is between."""
    steps = _Steps(node)
    while isinstance(node, torch.fx.Node) and len(node.users) == 1 and "out" not in node.kwargs:
        if called(node, *_PRODUCTS, "einsum"):
            steps.product = node
            return steps
        first = argument(node, 0, "input")
        if called(node, *_CASTS):
            if not _widens(first, node):
                return None
            node = first
        elif called(node, *_TIMES, *_OVER) and (factor := number_of(node)) is not None:
            steps.scale.append(("*" if called(node, *_TIMES) else "/", factor))
            other = node.args[1]
            node = first if value_of(first) is not None else other
        elif steps.scale:
            return None  # a mask is scaled, too
        elif called(node, *_PLUS) and len(node.args) == 2 and not node.kwargs:
            chain = [each for each in node.args if _leads_to_a_product(each)]
            if len(chain) != 1:
                return None
            (mask,) = [each for each in node.args if each is not chain[0]]
            if value_of(mask) is None:
                return None
            steps.added.append(mask)
            node = chain[0]
        elif called(node, *_FILLED):
            number = argument(node, 2, "value")
            if not _hides(number, node):
                return None
            steps.filled.append((argument(node, 1, "mask"), float(number), True))
            node = first
        elif called(node, "where"):
            number = argument(node, 2, "other")
            if not _hides(number, node):
                return None
            steps.filled.append((argument(node, 0, "condition"), float(number), False))
            node = argument(node, 1, "input")
        else:
            return None
    return None


def _hides(number: Any, node: torch.fx.Node) -> bool:
    """Whether a number in place of a score hides its place: what is filled in is not added."""
    value = value_of(node)
    if value is None or not isinstance(number, int | float) or not _floats(node):
        return False
    return number <= torch.finfo(value.dtype).min


def _widens(source: Any, node: torch.fx.Node) -> bool:
    """Whether a conversion keeps every number, so that nothing overflows there alone."""
    old, new = value_of(source), value_of(node)
    if old is None or new is None or not (_floats(source) and _floats(node)):
        return False
    return old.dtype == new.dtype or old.dtype.itemsize < new.dtype.itemsize


def _floats(node: Any) -> bool:
    value = value_of(node)
    return value is not None and value.dtype.is_floating_point


def _leads_to_a_product(node: Any) -> bool:
    """Whether a node is a product of scores, behind steps that keep its shape."""
    while isinstance(node, torch.fx.Node):
        if called(node, *_PRODUCTS, "einsum"):
            return True
        if not called(node, *_CASTS, *_TIMES, *_OVER, *_FILLED):
            return False
        node = argument(node, 0, "input")
    return False


def _read_by_a_product(softmax: torch.fx.Node) -> torch.fx.Node | None:
    """The product that alone reads the weights, behind conversions and dropout that is off."""
    node = softmax
    while len(node.users) == 1:
        (user,) = node.users
        if "out" in user.kwargs:
            return None
        if called(user, *_PRODUCTS, "einsum"):
            return user if _operands(user)[:1] == [node] else None
        off = called(user, "dropout") and (
            argument(user, 2, "training") is False or argument(user, 1, "p") == 0
        )
        same = argument(user, 0, "input") is node
        if not same or not (off or (called(user, *_CASTS) and _floats(user))):
            return None
        node = user
    return None


def _operands(product: torch.fx.Node) -> list[Any]:
    given = list(product.args)
    if called(product, "einsum"):
        given = given[1:]
        if len(given) == 1 and isinstance(given[0], list | tuple):
            given = list(given[0])
    return given


# -- the call --------------------------------------------------------------------------------------


def _placed(scores: _Steps, end: torch.fx.Node) -> tuple[torch.fx.Node, Attention] | None:
    """Call of attention beside what is written out, and its result as `end` lies; None where the
    operands are not as attention takes them."""
    first, second = _product(scores.product), _product(end)
    if first is None or second is None or first.result_order != tuple(range(len(first.left_order))):
        return None
    if second.left_order != tuple(range(len(second.left_order))):
        return None  # rows and columns of the weights, as the softmax leaves them
    tensors = [value_of(each) for each in (first.left, first.right, second.right)]
    query, key, value = (
        None if tensor is None else tensor.permute(order)
        for tensor, order in zip(
            tensors, (first.left_order, first.right_order, second.right_order), strict=True
        )
    )
    if query is None or key is None or value is None:
        return None
    made = value_of(end)
    # The right operand of a product is [..., columns, rows] of what attention takes as keys.
    key = key.transpose(-2, -1)
    fits = (
        made is not None
        and query.dtype == key.dtype == value.dtype == made.dtype
        and query.dim() == key.dim() == value.dim()
        and query.dim() in (3, 4)
        and alike(query.shape[:-2], key.shape[:-2])
        and alike(query.shape[:-2], value.shape[:-2])
        and alike([query.shape[-1], key.shape[-2]], [key.shape[-1], value.shape[-2]])
    )
    if fits and made is not None:
        whole = [*query.shape[:-1], value.shape[-1]]
        fits = alike([whole[d] for d in second.result_order], made.shape)
    masks = [*scores.added, *(condition for condition, *_ in scores.filled)]
    made_at = [each for each in masks if isinstance(each, torch.fx.Node)]
    if not undisturbed(scores.product, end, [first.left, first.right, *made_at]) or not all(
        undisturbed(each, end, [each]) for each in made_at
    ):
        return None  # read at another time, or with other gradients, than they are by hand
    lifted = query.dim() == 3
    if not fits or not fused(*(t[:, None] if lifted else t for t in (query, key, value))):
        return None
    return _written(scores, end, (first, second), (query, key, value), lifted=lifted)


def _written(
    scores: _Steps,
    end: torch.fx.Node,
    products: tuple[_Product, _Product],
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    lifted: bool,
) -> tuple[torch.fx.Node, Attention]:
    graph, (first, second) = end.graph, products
    with graph.inserting_before(end):

        def method(name: str, of: torch.fx.Node, *given: Any) -> torch.fx.Node:
            node = graph.call_method(name, (of, *given))
            node.meta = dict(end.meta)
            node.meta["example_value"] = getattr(of.meta["example_value"], name)(*given)
            return node

        def ordered(node: torch.fx.Node, order: Sequence[int]) -> torch.fx.Node:
            return (
                node if list(order) == list(range(len(order))) else method("permute", node, *order)
            )

        swapped = [*range(len(first.right_order) - 2), -1, -2]
        operands = [
            ordered(first.left, first.left_order),
            ordered(first.right, [first.right_order[d] for d in swapped]),
            ordered(second.right, second.right_order),
        ]
        mask = _mask(scores, tensors[0].dtype, end)
        if lifted:
            operands = [method("unsqueeze", each, 1) for each in operands]
            if mask is not None and mask.meta["example_value"].dim() > 2:
                mask = method("unsqueeze", mask, 1)
        scale = _scale(scores, end)
        given = {"attn_mask": mask, "scale": scale}
        called_node = graph.call_function(
            torch.nn.functional.scaled_dot_product_attention, tuple(operands), given
        )
        called_node.meta = dict(end.meta)
        query, value = operands[0].meta["example_value"], operands[2].meta["example_value"]
        called_node.meta["example_value"] = query.new_empty((*query.shape[:-1], value.shape[-1]))
        result = method("squeeze", called_node, 1) if lifted else called_node
        result = ordered(result, second.result_order)
        if not _takes_any_strides(end):
            result = method("contiguous", result)  # as a product lies
    names = dict(zip(("query", "key", "value"), operands, strict=True))
    return result, Attention(called_node, {**names, **given})


def _mask(scores: _Steps, dtype: torch.dtype, end: torch.fx.Node) -> torch.fx.Node | None:
    """One mask that is added for all that are added or filled in; None for none. It stands behind
    what it is made of, where masks are traced up to."""
    fake, order = end.meta["example_value"].fake_mode, list(end.graph.nodes)
    inputs = [node for node in order if node.op == "placeholder"]

    def function(target: Any, *given: Any) -> torch.fx.Node:
        nodes = [each for each in given if isinstance(each, torch.fx.Node)]
        last = max((*inputs[-1:], *nodes), key=order.index)
        with end.graph.inserting_after(last):
            node = end.graph.call_function(target, given)
        order.insert(order.index(last) + 1, node)
        node.meta = dict(end.meta)
        values = [value_of(each) if isinstance(each, torch.fx.Node) else each for each in given]
        with fake:
            node.meta["example_value"] = target(*values)
        return node

    parts = list(scores.added)
    for condition, number, when in scores.filled:
        pair = (number, 0.0) if when else (0.0, number)
        parts.append(function(torch.where, condition, *pair))
    mask: torch.fx.Node | None = None
    for part in parts:
        mask = part if mask is None else function(torch.add, mask, part)
    return None if mask is None else function(torch.Tensor.to, mask, dtype)


def _scale(scores: _Steps, end: torch.fx.Node) -> Any:
    """The product of all factors; a node where one of them is known at run time alone."""
    scale: Any = 1.0
    for sign, factor in scores.scale:
        join = operator.mul if sign == "*" else operator.truediv
        if isinstance(factor, torch.fx.Node) or isinstance(scale, torch.fx.Node):
            given = scale, factor
            scale = end.graph.call_function(join, given)
            numbers = [
                each.meta["example_value"] if isinstance(each, torch.fx.Node) else each
                for each in given
            ]
            scale.meta["example_value"] = join(*numbers)
        else:
            scale = join(scale, factor)
    return scale


def _takes_any_strides(end: torch.fx.Node) -> bool:
    """Whether whoever reads a product gives the same however it lies: one reader alone, for views
    share memory."""
    if len(end.users) != 1:
        return False
    (user,) = end.users
    if called(user, "transpose", "permute", "swapaxes"):
        return _takes_any_strides(user)
    return called(user, "reshape", "contiguous", "flatten", "linear", "matmul")


def _product(node: torch.fx.Node) -> _Product | None:
    """A product as left and right operand; None for sizes or letters of another form."""
    operands = _operands(node)
    if len(operands) != 2 or any(value_of(each) is None for each in operands):
        return None
    left, right = operands
    ranks = [value_of(each).dim() for each in operands]  # pyright: ignore[reportOptionalMemberAccess]
    if not called(node, "einsum"):
        order = tuple(range(ranks[0]))
        return _Product(left, right, order, order, order) if ranks[0] == ranks[1] else None
    given, _, made = str(node.args[0]).replace(" ", "").partition("->")
    letters = given.split(",")
    if len(letters) != 2 or not made or "." in given:
        return None
    one, other = letters
    batch = [each for each in made if each in one and each in other]
    rows = [each for each in one if each in made and each not in other]
    columns = [each for each in other if each in made and each not in one]
    summed = [each for each in one if each in other and each not in made]
    whole = len(one) == len(other) == len(made) == len(batch) + 2
    if not whole or not len(rows) == len(columns) == len(summed) == 1:
        return None
    return _Product(
        left, right,
        tuple(one.index(each) for each in (*batch, *rows, *summed)),
        tuple(other.index(each) for each in (*batch, *summed, *columns)),
        tuple((*batch, *rows, *columns).index(each) for each in made),
    )  # fmt: skip
