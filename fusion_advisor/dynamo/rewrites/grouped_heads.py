"""Rewrites of attention whose queries share keys and values by groups of heads: the shared ones are
read where they are, by `enable_gqa`, or with the queries of a group as rows of one head."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_advisor.dynamo.rewrites.attention import Attention, attentions, fused
from fusion_advisor.dynamo.rewrites.base import Asked, Taken
from fusion_advisor.dynamo.rewrites.nodes import (
    alike,
    argument,
    called,
    described,
    method,
    undisturbed,
    value_of,
)
from fusion_advisor.frontend.expansions import hint
from fusion_advisor.rulebook.schema import Rulebook


def grouped_heads(asked: Asked) -> Iterator[Taken]:
    """Give attentions the keys and values that groups of heads share, in place; yields those. Only
    where a fused kernel serves the call then: the plain one repeats them itself."""
    for attention in attentions(asked.module.graph):
        given = attention.given
        repeats = not given.get("enable_gqa")
        key = _before_repetition(attention, "key") if repeats else given["key"]
        value = _before_repetition(attention, "value") if repeats else given["value"]
        if key is None or value is None:
            continue
        query, keys, values = attention.tensor("query"), *map(described, (key, value))
        if not (query.dim() == keys.dim() == 4 and alike(keys.shape[1:2], values.shape[1:2])):
            continue
        if repeats and not alike(query.shape[1:2], attention.tensor("key").shape[1:2]):
            continue
        mask, dropout = value_of(attention.mask), given.get("dropout_p") or 0.0
        causal = bool(given.get("is_causal"))
        if mask is not None and not dropout and not causal and _is_one_row(query, keys, mask):
            served = fused(_as_rows(query, keys), keys, values, _mask_of_rows(mask, keys))
            if served and _worth(query, keys, values, asked.rulebook):
                _put_rows(attention, key, value)
                yield Taken("grouped-heads", attention.node, "its heads are rows of one query")
        elif repeats and fused(query, keys, values, mask, dropout=dropout, causal=causal):
            attention.change(key=key, value=value, enable_gqa=True)
            yield Taken("grouped-heads", attention.node, "its keys and values are repeated")


# -- one query -------------------------------------------------------------------------------------


def _is_one_row(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether there is one query a head, of heads whose number is known and that share keys, and
    the mask has one row, whatever the other sizes. With a mask torch has no kernel on a GPU that
    reads shared keys where they are."""
    heads: list[Any] = [key.shape[1], query.shape[1]]  # may be symbols
    shared = all(isinstance(each, int) for each in heads) and 0 < heads[0] < heads[1]
    one = (query.shape[-2], *mask.shape[-2:-1])
    return shared and all(statically_known_true(each == 1) for each in one)


def _worth(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rulebook: Rulebook) -> bool:
    """Whether copies cost more than the longer walk of fewer programs, at the sizes of this call:
    each is written once and read once, and what is shared is read for it."""
    place = [hint(each.numel() // each.shape[-2]) * each.element_size() for each in (key, value)]
    copies = 2 * query.shape[1] // key.shape[1]
    return sum(place) * copies >= rulebook.rewrites["grouped-heads"].limits["rows"].base


def _as_rows(query: Any, key: torch.Tensor) -> Any:
    """View of one query a head, [batch, heads, 1, width], as rows of the heads that share their
    keys: [batch, groups, heads a group, width]; of a tensor, or of a node in the graph."""
    return _call(_call(query, "unflatten", 1, (key.shape[1], -1)), "squeeze", 3)


def _mask_of_rows(mask: Any, key: torch.Tensor) -> Any:
    """The mask of `_as_rows`: as it is where it is the same for all heads."""
    sizes = (described(mask) if isinstance(mask, torch.fx.Node) else mask).shape
    if len(sizes) < 3 or statically_known_true(sizes[-3] == 1):
        return mask
    return _call(_call(mask, "unflatten", -3, (key.shape[1], -1)), "squeeze", -2)


def _call(of: Any, name: str, *given: Any) -> Any:
    return method(of, name, *given) if isinstance(of, torch.fx.Node) else getattr(of, name)(*given)


def _put_rows(attention: Attention, key: torch.fx.Node, value: torch.fx.Node) -> None:
    """Ask for the heads of a group as rows, and give the result the shape that it had."""
    node, groups = attention.node, described(key)
    with node.graph.inserting_before(node):
        query = _as_rows(attention.given["query"], groups)
        mask = _mask_of_rows(attention.mask, groups)
    attention.change(query=query, key=key, value=value, attn_mask=mask, enable_gqa=False)
    rows, width = described(query), described(value).shape[-1]
    node.meta = {**node.meta, "example_value": rows.new_empty((*rows.shape[:-1], width))}
    with node.graph.inserting_after(node):
        apart = method(node, "unsqueeze", 3)
    with node.graph.inserting_after(apart):
        result = method(apart, "flatten", 1, 2)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not apart)


# -- repetition ------------------------------------------------------------------------------------


def _before_repetition(attention: Attention, name: str) -> torch.fx.Node | None:
    """Node of [batch, groups, keys, width] that an argument [batch, heads, keys, width] repeats,
    each group for as many heads that follow each other; None where it is no repetition."""
    node = given = attention.given[name]
    if given.meta["example_value"].dim() != len(("batch", "heads", "keys", "width")):
        return None
    while called(node, "contiguous", "clone"):
        node = argument(node, 0, "input")
    if called(node, "repeat_interleave"):
        whole = argument(node, 0, "input")
        once = isinstance(argument(node, 1, "repeats"), int)
        same = once and argument(node, 2, "dim") in (1, -3) and value_of(whole) is not None
        return whole if same and undisturbed(node, attention.node, [whole, node, given]) else None
    if not called(node, "reshape", "view", "flatten"):
        return None
    spread = argument(node, 0, "input")
    if not called(spread, "expand"):
        return None
    apart = argument(spread, 0, "input")
    if not (called(apart, "unsqueeze", "view", "reshape") or _puts_in(apart)):
        return None
    whole = argument(apart, 0, "input")
    if not undisturbed(apart, attention.node, [whole, node, given]):
        return None
    values = [value_of(each) for each in (whole, apart, spread, node)]
    of_whole, of_apart, of_spread, of_node = ([] if v is None else [*v.shape] for v in values)
    if len(of_whole) != 4 or len(of_spread) != 5:
        return None
    batch, groups, keys, width = of_whole
    times = of_spread[2]
    same = (
        alike(of_apart, [batch, groups, 1, keys, width])
        and alike(of_spread, [batch, groups, times, keys, width])
        and alike(of_node, [batch, groups * times, keys, width])
    )
    return whole if same else None


def _puts_in(node: Any) -> bool:
    """Whether a node indexes with nothing but whole dimensions and new ones."""
    if not called(node, "getitem"):
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each is None or each is ... or each == slice(None) for each in index)
