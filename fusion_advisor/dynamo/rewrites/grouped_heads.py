"""Rewrite of attention whose keys and values are repeated for groups of heads: `enable_gqa` reads
them where they are."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fusion_advisor.dynamo.rewrites.attention import Attention, attentions, fused
from fusion_advisor.dynamo.rewrites.base import Asked, Taken
from fusion_advisor.dynamo.rewrites.nodes import alike, argument, called, undisturbed, value_of


def grouped_heads(asked: Asked) -> Iterator[Taken]:
    """Give attentions keys and values before their repetition, in place; yields those. Only where
    a fused kernel serves the call then: the plain one repeats them itself."""
    for attention in attentions(asked.module.graph):
        if attention.given.get("enable_gqa"):
            continue
        key, value = (_before_repetition(attention, name) for name in ("key", "value"))
        if key is None or value is None:
            continue
        query, repeated = attention.tensor("query"), attention.tensor("key")
        if query.dim() != repeated.dim() or not alike(query.shape[1:2], repeated.shape[1:2]):
            continue
        groups, given = (key.meta["example_value"], value.meta["example_value"]), attention.given
        if alike(groups[0].shape[1:2], groups[1].shape[1:2]) and fused(
            query, *groups, value_of(attention.mask),
            dropout=given.get("dropout_p") or 0.0, causal=bool(given.get("is_causal")),
        ):  # fmt: skip
            attention.change(key=key, value=value, enable_gqa=True)
            yield Taken("grouped-heads", attention.node, "its keys and values are repeated")


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
