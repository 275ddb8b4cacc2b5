"""Rewrite of attention whose keys and values are repeated for groups of heads: `enable_gqa` reads
them where they are."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_advisor.dynamo.rewrites.attention import Attention, attentions
from fusion_advisor.dynamo.rewrites.base import Asked, Taken


_PLAIN = 0
"""Kernel `MATH` of torch.nn.attention.SDPBackend, which is no fused one."""


def grouped_heads(asked: Asked) -> Iterator[Taken]:
    """Give attentions keys and values before their repetition, in place; yields those. Only where
    a fused kernel serves the call then: the plain one repeats them itself."""
    for attention in attentions(asked.module.graph):
        if attention.given.get("enable_gqa"):
            continue
        key, value = (_before_repetition(attention, name) for name in ("key", "value"))
        if key is None or value is None:
            continue
        groups = (each.meta["example_value"].shape[1] for each in (key, value))
        if not statically_known_true(next(groups) == next(groups)):
            continue
        if _fused(attention, key.meta["example_value"], value.meta["example_value"]):
            attention.change(key=key, value=value, enable_gqa=True)
            yield Taken("grouped-heads", attention.node, "its keys and values are repeated")


def _fused(attention: Attention, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch chooses a fused kernel for grouped heads on a GPU; elsewhere nothing is
    chosen."""
    query, given = attention.tensor("query"), attention.given
    if not query.is_cuda:
        return True
    mask = attention.mask.meta["example_value"] if attention.mask is not None else None
    chosen = torch.ops.aten._fused_sdp_choice(
        query, key, value, mask, float(given.get("dropout_p") or 0.0),
        bool(given.get("is_causal")), scale=None, enable_gqa=True,
    )  # fmt: skip
    return chosen != _PLAIN


def _before_repetition(attention: Attention, name: str) -> torch.fx.Node | None:
    """Node of [batch, groups, keys, width] that an argument [batch, heads, keys, width] repeats,
    each group for as many heads that follow each other; None where it is no repetition."""
    node = attention.given[name]
    while _is(node, "contiguous", "clone"):
        node = node.args[0]
    if _is(node, "repeat_interleave"):
        whole = node.args[0]
        dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else None)
        times = node.kwargs.get("repeats", node.args[1] if len(node.args) > 1 else None)
        return whole if dim in (1, -3) and isinstance(times, int) else None
    if not _is(node, "reshape", "view", "flatten"):
        return None
    spread = node.args[0]
    if not _is(spread, "expand"):
        return None
    apart = spread.args[0]
    if not (_is(apart, "unsqueeze", "view", "reshape") or _puts_in(apart)):
        return None
    whole = apart.args[0]
    shapes = [_shape(each) for each in (whole, apart, spread, node)]
    if any(shape is None for shape in shapes):
        return None
    of_whole, of_apart, of_spread, of_node = (list(shape or ()) for shape in shapes)
    if len(of_whole) != 4 or len(of_spread) != 5:
        return None
    batch, groups, keys, width = of_whole
    times = of_spread[2]
    same = (
        _alike(of_apart, [batch, groups, 1, keys, width])
        and _alike(of_spread, [batch, groups, times, keys, width])
        and _alike(of_node, [batch, groups * times, keys, width])
    )
    return whole if same else None


def _puts_in(node: Any) -> bool:
    """Whether a node indexes with nothing but whole dimensions and new ones."""
    if not _is(node, "getitem"):
        return False
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(each is None or each is ... or each == slice(None) for each in index)


def _is(node: Any, *names: str) -> bool:
    """Whether a node calls a function or method of one of these names."""
    if not isinstance(node, torch.fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    named = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return named in names


def _shape(node: Any) -> Sequence[Any] | None:
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value.shape if isinstance(value, torch.Tensor) else None


def _alike(these: Sequence[Any], those: Sequence[Any]) -> bool:
    return len(these) == len(those) and all(
        statically_known_true(a == b) for a, b in zip(these, those, strict=True)
    )
