"""Operator of a product and the cross-entropy of its results in chunks of rows: the logits of one
chunk are in memory at a time, in the forward pass and in the backward pass.

Gradients are computed with the loss, for the gradient of every logit follows from its row alone;
the backward pass multiplies them by the gradient of the loss. A chunk's losses are a few lines of
PyTorch, of which `torch.compile` makes kernels with this package's backend.
"""
# torch.library and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Optional

import torch
import torch.nn.functional as F

Chunk = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def losses(
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    ignored: int,
    smoothing: float,
    *,
    gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of a chunk, a float32 scalar, and its gradient by the logits [rows, classes], as wide as
    they are; both times `scale`, a float32 scalar. Without `gradients` the second is empty."""
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    powers = torch.exp(wide - top)
    total = powers.sum(-1, keepdim=True)
    kept = (target != ignored)[:, None]
    label = torch.where(kept, target[:, None], 0)
    known = 1 - smoothing
    loss = top + total.log() - known * wide.gather(1, label)
    if smoothing:
        loss = loss - smoothing * wide.mean(-1, keepdim=True)
    summed = torch.where(kept, loss, 0.0).sum() * scale
    if not gradients:
        return summed, logits.new_empty(0)
    hit = torch.arange(logits.shape[1], device=logits.device)[None, :] == label
    slope = powers / total - torch.where(hit, known, 0.0) - smoothing / logits.shape[1]
    return summed, torch.where(kept, slope * scale, 0.0).to(logits.dtype)


@cache
def _compiled() -> Chunk:
    from fusion_advisor.dynamo.backend import fusion_advisor  # which uses this module

    compiled: Any = torch.compile(losses, backend=fusion_advisor)
    return compiled


@torch.library.custom_op("fusion_advisor::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],  # noqa: UP045 the schema is inferred from it in torch 2.11
    target: torch.Tensor,
    ignored: int,
    mean: bool,
    smoothing: float,
    chunk_bytes: int,
    most: int,
    needed: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy of `hidden` [rows, width] times `weight` [classes, width] and `bias`, against
    `target` [rows]: the loss, a float32 scalar, and its gradients by the three, each empty where it
    is not `needed`. In chunks of at most `chunk_bytes` of logits, `most` chunks at most: each adds
    to the gradient of the weight, which is rounded every time."""
    rows, classes = hidden.shape[0], weight.shape[0]
    counted = (target != ignored).sum() if mean else target.new_ones(())
    scale = counted.float().reciprocal()
    loss = scale.new_zeros(())
    by_hidden, by_weight, by_bias = _empty(hidden, weight, bias, needed)
    wide_bias = by_bias.new_zeros(by_bias.shape, dtype=torch.float32)
    at_once = losses if hidden.device.type == "cpu" else _compiled()
    chunks = min(most, max(1, -(-rows * classes * hidden.element_size() // chunk_bytes)))
    step = max(1, -(-rows // chunks))
    for start in range(0, rows, step):
        part, labels = hidden[start : start + step], target[start : start + step]
        logits = F.linear(part, weight, bias)
        one, slope = at_once(
            logits, labels, scale, ignored, smoothing, gradients=any(needed)
        )  # fmt: skip
        del logits
        loss += one
        if needed[0]:
            torch.mm(slope, weight, out=by_hidden[start : start + step])
        if needed[1]:
            by_weight.addmm_(slope.t(), part, beta=1 if start else 0)
        if needed[2]:
            wide_bias += slope.sum(0, dtype=torch.float32)
        del slope  # before the next chunk makes its own
    return loss, by_hidden, by_weight, wide_bias.to(by_bias.dtype)


def _empty(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Memory for the gradients, none for those that are not needed."""
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if tensor is not None and want
        else hidden.new_empty(0)
        for tensor, want in zip((hidden, weight, bias), needed, strict=True)
    ]


@linear_cross_entropy.register_fake
def _fake(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, ...]:
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, *_empty(hidden, weight, bias, options[-1])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.needed = inputs[-1]
    ctx.save_for_backward(*output[1:])


def _backward(ctx: Any, by_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
    """Gradients by the operator's arguments, from the gradient by the loss, a scalar."""
    first = [
        (by_loss * saved).to(saved.dtype) if want else None
        for saved, want in zip(ctx.saved_tensors, ctx.needed, strict=True)
    ]
    return (*first, *(None,) * 7)


linear_cross_entropy.register_autograd(_backward, setup_context=_keep)

OPERATOR = torch.ops.fusion_advisor.linear_cross_entropy.default
