"""Operators as CUDA trains them: functions in place of those whose backward on a CPU is another.

Each is an operator with one kernel forward and one backward, and saves what CUDA's saves. On fake
tensors only shapes are computed.
"""
# torch.library and autograd are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false
# pyright: reportIncompatibleMethodOverride=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten

_LIBRARY = torch.library.Library("fusion_advisor_training", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float dropout, bool causal,"
    " float? scale, bool grouped) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask,"
    " Tensor out, Tensor logsumexp, bool trained, float dropout, bool causal, float? scale,"
    " bool grouped) -> (Tensor, Tensor, Tensor, Tensor?)"
)
_LIBRARY.define(
    "rms_norm(Tensor input, SymInt[] shape, Tensor? weight, float? eps) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "rms_norm_backward(Tensor grad, Tensor input, SymInt[] shape, Tensor rstd, Tensor? weight)"
    " -> (Tensor, Tensor?)"
)
_OPS = torch.ops.fusion_advisor_training

ATTENTION = _OPS.attention.default
ATTENTION_BACKWARD = _OPS.attention_backward.default
RMS_NORM = _OPS.rms_norm.default
RMS_NORM_BACKWARD = _OPS.rms_norm_backward.default


def widened(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which CUDA's kernels keep statistics."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@torch.library.register_fake("fusion_advisor_training::attention", lib=_LIBRARY)
def _attention(
    query: Any, key: Any, value: Any, mask: Any, dropout: Any, causal: Any, scale: Any, grouped: Any
) -> Any:
    """Result of attention, laid out as the query is, and the logsumexp of each row [B, H, S]."""
    out = torch.empty_like(query[..., :1].expand(*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32)


@torch.library.register_fake("fusion_advisor_training::attention_backward", lib=_LIBRARY)
def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, mask: Any, out: Any, logsumexp: Any, trained: bool,
    *_: Any,
) -> Any:  # fmt: skip
    """Gradients of the operands; of the mask where it is trained."""
    made = [torch.empty_like(each) for each in (query, key, value)]
    return (*made, mask.new_empty(mask.shape) if trained else None)


@torch.library.register_fake("fusion_advisor_training::rms_norm", lib=_LIBRARY)
def _rms_norm(x: Any, shape: Any, weight: Any, eps: Any) -> Any:
    rows = x.shape[: x.dim() - len(shape)]
    scale = x.new_empty((*rows, *(1,) * len(shape)), dtype=widened(x.dtype))
    return x.new_empty(x.shape), scale


@torch.library.register_fake("fusion_advisor_training::rms_norm_backward", lib=_LIBRARY)
def _rms_norm_backward(grad: Any, x: Any, shape: Any, scale: Any, weight: Any) -> Any:
    return torch.empty_like(x), None if weight is None else torch.empty_like(weight)


class _Attention(torch.autograd.Function):
    """Flash or memory-efficient attention: saves its operands, its result and the logsumexp."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, mask: Any, *options: Any) -> Any:
        out, logsumexp = ATTENTION(query, key, value, mask, *options)
        ctx.save_for_backward(query, key, value, mask, out, logsumexp)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        query, key, value, mask, out, logsumexp = ctx.saved_tensors
        trained = ctx.needs_input_grad[3]
        found = ATTENTION_BACKWARD(
            grad, query, key, value, mask, out, logsumexp, trained, *ctx.options
        )
        return (*found, *(None for _ in ctx.options))


class _RmsNorm(torch.autograd.Function):
    """RMSNorm as one kernel: saves its operands and the scale of each row."""

    @staticmethod
    def forward(ctx: Any, x: Any, shape: Any, weight: Any, eps: Any) -> Any:
        out, scale = RMS_NORM(x, shape, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        ctx.shape = shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, scale, weight = ctx.saved_tensors
        dx, dw = RMS_NORM_BACKWARD(grad, x, ctx.shape, scale, weight)
        return dx, None, dw, None


def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attention as CUDA trains it; by the unfused path where CUDA has no kernel for the operands. A
    mask that is trained has its gradient in the size of the scores, which autograd sums."""
    if attn_mask is not None and attn_mask.requires_grad:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    if query.dim() != 4 or query.dtype == torch.float64:
        return aten._scaled_dot_product_attention_math.default(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    return _Attention.apply(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """RMSNorm as CUDA trains it: one kernel where operands agree in dtype."""
    if weight is not None and weight.dtype != x.dtype:
        return aten.rms_norm.default(x, shape, weight, eps)
    return _RmsNorm.apply(x, shape, weight, eps)


def dropout(x: Any, p: float, train: bool) -> Any:
    """Dropout as CUDA trains it: one kernel that also writes the mask."""
    if not train or not 0 < p < 1:
        return aten.dropout.default(x, p, train)
    return aten.native_dropout.default(x, p, train)[0]


def launched_as(operator: Any, *operands: Any) -> Any:
    """Operator of ATen that CUDA launches for a function of this file; any other as it is. A mask
    keeps attention from the flash kernel, and so do wider floats."""
    if operator is RMS_NORM:
        return aten._fused_rms_norm.default
    if operator is not ATTENTION:
        return operator
    query, _, _, mask = operands[:4]
    flash = mask is None and query.dtype in (torch.float16, torch.bfloat16)
    if flash:
        return aten._scaled_dot_product_flash_attention.default
    return aten._scaled_dot_product_efficient_attention.default


AS_CUDA_TRAINS: dict[Any, Callable[..., Any]] = {
    aten.dropout.default: dropout,
    aten.rms_norm.default: rms_norm,
    aten.scaled_dot_product_attention.default: attention,
}
"""Functions in place of operators."""
