"""Reference results of a call: eager's, as CUDA rounds, and those of float64."""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._pytree import tree_map

from fusion_advisor.support.kernel_fault import KernelFault
from fusion_advisor.verify.stepping import LaunchMode, as_tuple, truth_of
from fusion_advisor.verify.tolerance import Tensors, Truth

_aten = torch.ops.aten
_HALF_TO_FLOAT = (_aten._softmax.default, _aten._log_softmax.default)
"""Ops that may widen half precision in CUDA's eager; a CPU's eager refuses."""


class Float64Mode(LaunchMode):
    """Run every operation in float64, whatever float dtype it names or would return."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _HALF_TO_FLOAT:
            args = (*args[:2], False)  # half_to_float: float64 is wide enough
        widened = tree_map(_widen, (args, kwargs or {}))
        if func in _BY_DEFINITION:
            return _BY_DEFINITION[func](*widened[0])
        if func is _aten._fused_rms_norm.default:
            return _rms_norm(*widened[0])
        if func is _aten.native_layer_norm.default:
            return _layer_norm(*widened[0])
        if func is _aten.native_group_norm.default:
            return _group_norm(*widened[0])
        if func is _aten.native_batch_norm.default and not widened[0][5]:
            return _batch_norm(*widened[0])
        return tree_map(_widen, func(*widened[0], **widened[1]))


def _rms_norm(x: Any, shape: Any, weight: Any, eps: float | None) -> Any:
    """RMS norm by its definition: CUDA's kernel takes moments, which an infinity turns into NaN for
    a whole row."""
    dims = tuple(range(-len(shape), 0))
    scale = torch.rsqrt(x.square().mean(dims, keepdim=True) + (eps or torch.finfo(x.dtype).eps))
    return x * scale if weight is None else x * scale * weight, scale


def _layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Layer norm by its definition. Of a row with an infinity, which has no mean, CUDA's kernels
    keep infinity or NaN as its mean, by the order in which their threads meet: here it is NaN."""
    dims = tuple(range(-len(shape), 0))
    mean = x.mean(dims, keepdim=True)
    mean = mean + (x - mean).mean(dims, keepdim=True)
    scale = torch.rsqrt((x - mean).square().mean(dims, keepdim=True) + eps)
    normal = (x - mean) * scale
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias, mean, scale


def _group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, area: int, groups: int, eps: float
) -> Any:
    """Group norm by its definition. A CPU's kernel always, and CUDA's unless a channel is one
    place, subtracts the mean after scaling, which an infinite weight turns into NaN."""
    grouped = x.reshape(batch, groups, -1)
    mean = grouped.mean(-1, keepdim=True)
    scale = torch.rsqrt((grouped - mean).square().mean(-1, keepdim=True) + eps)
    normal = ((grouped - mean) * scale).reshape(batch, channels, area)
    normal = normal if weight is None else normal * weight[:, None]
    normal = normal if bias is None else normal + bias[:, None]
    return normal.reshape(x.shape), mean[..., 0], scale[..., 0]


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float
) -> Any:
    """Batch norm with given statistics, by its definition, as CUDA's kernel computes it: a CPU's
    kernel subtracts the mean after scaling."""
    del training, momentum

    def by_channel(values: Any) -> Any:
        return values.reshape(-1, *(1,) * (x.dim() - 2))

    normal = (x - by_channel(mean)) * by_channel(torch.rsqrt(var + eps))
    normal = normal if weight is None else normal * by_channel(weight)
    normal = normal if bias is None else normal + by_channel(bias)
    return normal, x.new_empty(0), x.new_empty(0)


def _shrunk(grad: Any, x: Any, limit: float) -> Any:
    """Gradient of softshrink and of hardshrink, which torch does not decompose."""
    return torch.where((x >= -limit) & (x <= limit), 0, grad)


_BY_DEFINITION: dict[Any, Callable[..., Any]] = {
    **get_decompositions([_aten.elu_backward, _aten.hardswish_backward, _aten.hardtanh_backward]),
    **get_decompositions([_aten._softmax_backward_data]),
    _aten.hardshrink_backward.default: _shrunk,
    _aten.softshrink_backward.default: _shrunk,
}
"""Gradients where an operand is NaN or infinite: what CUDA's kernels compute is torch's
decomposition. A CPU's softmax has another formula; what its others do depends on whether the
element is in a whole vector."""


def _widen(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value if value.dtype == torch.float64 else value.double()
    return value


def _widen_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Copy of a tensor in float64, with the tensor's own strides."""
    if not tensor.is_floating_point():
        return tensor
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    wide = tensor.as_strided((size,), (1,), 0).double()
    return wide.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _AsCuda(LaunchMode):
    """Mode that makes a CPU's eager round as CUDA's kernels do. Prefix sums and products of float32
    run in float32: a CPU's run in float64, and their results would be more exact than any kernel. A
    softmax that widens half precision widens first. A division by a number is a product with its
    reciprocal. NaN and infinity have the gradients that CUDA gives them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _HALF_TO_FLOAT and args[2]:
            return func(args[0].float(), args[1], False)
        if func in _QUOTIENTS and isinstance(args[1], int | float):
            inverse = torch.tensor(args[1], dtype=torch.float64).reciprocal()
            return torch.mul(args[0], inverse.item())
        if func in _BY_DEFINITION:
            return _BY_DEFINITION[func](*args)
        combine = _SCANS.get(func)
        if combine and args[0].dtype == torch.float32 and args[0].dim() and not kwargs:
            x, dim = args
            return _scanned(x, dim, combine)
        return func(*args, **(kwargs or {}))


_QUOTIENTS = (_aten.div.Tensor, _aten.div.Scalar)
_SCANS = {
    _aten.cumsum.default: torch.add,
    _aten.cumprod.default: torch.mul,
    _aten.logcumsumexp.default: torch.logaddexp,
}


def _scanned(x: Any, dim: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine each element with all elements before it, twice as many with each step."""
    length, step = x.shape[dim], 1
    while step < length:
        before, after = x.narrow(dim, 0, length - step), x.narrow(dim, step, length - step)
        x = torch.cat((x.narrow(dim, 0, step), combine(before, after)), dim)
        step *= 2
    return x


def with_numbers(call: Callable[..., Any], numbers: Sequence[float]) -> Callable[..., Any]:
    """A call that is given numbers behind its tensors."""
    return (lambda *inputs: call(*inputs, *numbers)) if numbers else call


def truth(call: Callable[..., Any], inputs: Tensors) -> Truth:
    """Reference results of a call, which kernels are compared with."""

    def eagerly() -> Tensors:
        with nullcontext() if any(tensor.is_cuda for tensor in inputs) else _AsCuda():
            return as_tuple(call(*inputs))

    def exactly() -> Tensors:
        wide = [_widen_storage(tensor) for tensor in inputs]
        with Float64Mode():
            return as_tuple(call(*wide))

    return truth_of(eagerly, exactly)


def check_layouts(call: Callable[..., Any], inputs: Tensors, ours: Tensors) -> None:
    """Raise KernelFault where an output has other strides than the graph gives it at these
    sizes."""
    meta_inputs = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in inputs
    ]
    for index, (mine, theirs) in enumerate(zip(ours, as_tuple(call(*meta_inputs)), strict=True)):
        got, expected = (_strides_that_matter(tensor) for tensor in (mine, theirs))
        if mine.numel() and got != expected:
            raise KernelFault(f"output {index} has strides {got}, the graph says {expected}")


def _strides_that_matter(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
