"""Rewrite of a cross-entropy whose logits are a product that nothing else reads: product and loss
in chunks of rows, so that the logits are never all in memory."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.dynamo.chunked_loss import OPERATOR
from fusion_advisor.dynamo.rewrites.base import Asked, Taken
from fusion_advisor.dynamo.rewrites.nodes import alike, argument, called, undisturbed, value_of
from fusion_advisor.frontend.expansions import hint

_NAME = "linear-cross-entropy"


@dataclass(frozen=True)
class _Loss:
    """A cross-entropy of class indices, with the logits and labels that it reads."""

    logits: torch.fx.Node
    target: torch.fx.Node
    ignored: int
    mean: bool
    smoothing: float


def linear_cross_entropy(asked: Asked) -> Iterator[Taken]:
    """Give cross-entropies and their products to one operator, in place; yields those. Only where
    the logits are large, as the rule says, and nothing but the loss reads them; where asked for."""
    if not asked.chunked_loss:
        return
    limits = asked.rulebook.rewrites[_NAME].limits
    chunk, most = limits["chunk"].count, limits["chunks"].count
    for node in list(asked.module.graph.nodes):
        loss = _loss(node)
        found = loss and _product(loss, node)
        if not loss or not found:
            continue
        hidden, product, cuts = found
        value, result = value_of(loss.logits), value_of(node)
        assert value is not None
        assert result is not None
        size = value_of(product)
        assert size is not None
        if hint(value.numel()) * size.element_size() < limits["least"].value * chunk:
            continue
        given = [hidden, argument(product, 1, "weight"), argument(product, 2, "bias")]
        needed = [result.requires_grad and _requires_grad(each) for each in given]
        graph = asked.module.graph
        with graph.inserting_before(node):
            rows = hidden
            for cut in cuts:
                rows = graph.call_function(operator.getitem, (rows, cut))
            rows = graph.call_method("flatten", (rows, 0, -2))
            made = graph.call_function(
                OPERATOR,
                (rows, *given[1:], loss.target, loss.ignored, loss.mean, loss.smoothing,
                 chunk, most, needed),
            )  # fmt: skip
            new = graph.call_function(operator.getitem, (made, 0))
            new = graph.call_method("to", (new, result.dtype))
        new.meta = {**node.meta}
        node.replace_all_uses_with(new)
        yield Taken(_NAME, new, "its logits are read by the loss alone")


def _requires_grad(node: Any) -> bool:
    value = value_of(node)
    return value is not None and value.requires_grad


def _loss(node: torch.fx.Node) -> _Loss | None:
    """Cross-entropy at a node; None where it is none, or one of another kind: with weights of
    classes, without a reduction, of probabilities."""
    if not called(node, "cross_entropy"):
        return None
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
    given: dict[str, Any] = dict(zip((*names, "label_smoothing"), node.args, strict=False))
    given |= node.kwargs
    reduction, ignored = given.get("reduction", "mean"), given.get("ignore_index", -100)
    smoothing = given.get("label_smoothing", 0.0)
    if any(given.get(each) is not None for each in ("weight", "size_average", "reduce")):
        return None
    logits, target = value_of(given["input"]), value_of(given["target"])
    if logits is None or target is None or logits.dim() != 2 or target.dim() != 1:
        return None
    plain = isinstance(ignored, int) and isinstance(smoothing, int | float)
    if not plain or reduction not in ("mean", "sum") or target.dtype is not torch.int64:
        return None
    mean, smooth = reduction == "mean", float(smoothing)
    return _Loss(given["input"], given["target"], ignored, mean, smooth)


def _product(
    loss: _Loss, reader: torch.fx.Node
) -> tuple[torch.fx.Node, torch.fx.Node, list[Any]] | None:
    """The operand [..., width] and the product [..., classes] that a loss is of, and how its rows
    are cut; None where the logits are something else, or are read by others, too."""
    node, last, cuts = loss.logits, reader, list[Any]()
    while not called(node, "linear"):
        value = value_of(node)
        if value is None or list(node.users) != [last]:
            return None
        inner = argument(node, 0, "input")
        before = value_of(inner)
        if before is None or not alike(before.shape[-1:], value.shape[-1:]):
            return None
        if called(node, "getitem"):
            index = node.args[1]
            if not _cuts_rows(index, before.dim()):
                return None
            cuts.insert(0, index)
        elif called(node, "view", "reshape", "flatten"):
            if cuts:
                return None  # of rows that lie otherwise
        elif called(node, "float", "to", "contiguous"):
            if value.dtype not in (before.dtype, torch.float32) or value.device != before.device:
                return None
        else:
            return None
        node, last = inner, node
    value, operand = value_of(node), argument(node, 0, "input")
    hidden, weight = value_of(operand), value_of(argument(node, 1, "weight"))
    if value is None or hidden is None or weight is None or list(node.users) != [last]:
        return None
    same = value.dtype is hidden.dtype is weight.dtype  # autocast would have made it another
    read = [operand, argument(node, 1, "weight"), argument(node, 2, "bias"), loss.target]
    if (
        not same
        or value.dtype not in (torch.bfloat16, torch.float32)
        or hidden.dim() < len(("rows", "width"))
        or not undisturbed(node, reader, [each for each in read if each is not None])
    ):
        return None
    return operand, node, cuts


def _cuts_rows(index: Any, dims: int) -> bool:
    """Whether an index takes parts of leading dimensions and the whole of the last."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(each is ... or isinstance(each, slice) for each in parts):
        return False
    return parts[-1] == slice(None) if len(parts) == dims or ... in parts[:-1] else ... not in parts
