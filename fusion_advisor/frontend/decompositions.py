"""Operators that fake tensors keep whole although CUDA runs them as several kernels.

Each function calls what ATen's own kernel calls, in its order (torch 2.13, aten/src/ATen/native:
ReduceOps.cpp for logsumexp, Loss.cpp and cuda/Loss.cpp for losses). `binary_cross_entropy` stays
whole, with the bytes of its two passes: alone, its first pass asserts inputs between 0 and 1.
`eager_dropout` keeps torch's own decomposition of dropout from launching what eager does not.
"""

# torch.ops is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

aten = torch.ops.aten
_NONE, _MEAN = 0, 1


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    """logsumexp as ATen's kernels compute it. ATen fills the maxima in place, through a view: here
    out of place, the same bytes. Its gradient does not go through the maxima, which cancel."""
    dims = list(dim) if isinstance(dim, (tuple, list)) else [dim]
    largest = aten.detach.default(aten.amax.default(x, dims, True))
    shift = largest.masked_fill(aten.eq.Scalar(largest.abs(), math.inf), 0)
    total = aten.sum.dim_IntList(aten.exp_.default(x - shift), dims, keepdim)
    return total.log_().add_(shift if keepdim else shift.squeeze(dims))


def _reduced(loss: Tensor, reduction: int) -> Tensor:
    if reduction == _NONE:
        return loss
    return aten.mean.default(loss) if reduction == _MEAN else aten.sum.default(loss)


def _mse_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    return _reduced(aten.mse_loss.default(x, target, _NONE), reduction)


def _smooth_l1_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, beta: float = 1.0) -> Tensor:
    return _reduced(aten.smooth_l1_loss.default(x, target, _NONE, beta), reduction)


def _huber_loss(x: Tensor, target: Tensor, reduction: int = _MEAN, delta: float = 1.0) -> Tensor:
    return _reduced(aten.huber_loss.default(x, target, _NONE, delta), reduction)


def _soft_margin_loss(x: Tensor, target: Tensor, reduction: int = _MEAN) -> Tensor:
    return _reduced(aten.neg.default(x).mul_(target).exp_().log1p_(), reduction)


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    return aten._to_copy.default(x, dtype=dtype)


def _multiplied_and_added(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    return aten.addcmul.default(z, x, y)


def _counted(length: int, *, start: int, step: int, **how: Any) -> Tensor:
    del how["requires_grad"]  # of whole numbers none is
    return aten.arange.start_step(start, start + step * length, step, **how)


COMPOSITES: dict[Any, Callable[..., Tensor]] = {
    aten.logsumexp.default: _logsumexp,
    aten.mse_loss.default: _mse_loss,
    aten.smooth_l1_loss.default: _smooth_l1_loss,
    aten.huber_loss.default: _huber_loss,
    aten.soft_margin_loss.default: _soft_margin_loss,
}


PRIMITIVES: dict[str, Callable[..., Tensor]] = {
    "prims.convert_element_type.default": _converted,
    "prims.fma.default": _multiplied_and_added,
    "prims.iota.default": _counted,
}
"""Calls of ATen for what Inductor's decompositions call instead, by name: not every release has
every one."""


@contextmanager
def eager_dropout() -> Generator[None, None, None]:
    """While active, dropout that is off gives its input, as ATen's kernel does. What torch's
    dispatcher in Python runs instead gives a copy, which eager never launches."""
    operator = aten.dropout.default
    kernels = {key: partial(_dropout, kernel) for key, kernel in operator.py_kernels.items()}
    with mock.patch.dict(operator.py_kernels, kernels):
        operator._dispatch_cache.clear()
        try:
            yield
        finally:
            operator._dispatch_cache.clear()


def _dropout(drawn: Callable[..., Tensor], x: Tensor, p: float, train: bool | None) -> Tensor:
    return drawn(x, p, train) if train and p else x
