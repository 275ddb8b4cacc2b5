"""Gradients: the ops that the backward pass launches."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ir.graph import Arg
from fusion_advisor.ops.registry import Call, formula, meaning_of, pointwise, reduction
from fusion_advisor.ops.views import parts
from fusion_advisor.region.builder import Builder, Scalar, Value

# -- of activations --------------------------------------------------------------------------------


@pointwise("aten.threshold_backward.default")
def threshold_backward(b: Builder, grad: Value, x: Value, limit: Scalar) -> Value:
    return b.apply("where", x <= limit, 0, grad)


@pointwise("aten.sigmoid_backward.default")
def sigmoid_backward(b: Builder, grad: Value, y: Value) -> Value:
    return grad * (1.0 - y) * y


@pointwise("aten.tanh_backward.default")
def tanh_backward(b: Builder, grad: Value, y: Value) -> Value:
    return grad * (1.0 - y * y)


@pointwise("aten.silu_backward.default")
def silu_backward(b: Builder, grad: Value, x: Value) -> Value:
    gate = b.apply("sigmoid", x)
    return grad * gate * (1.0 + x * (1.0 - gate))


@pointwise("aten.gelu_backward.default")
def gelu_backward(b: Builder, grad: Value, x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        scale = math.sqrt(2.0 / math.pi)
        t = b.apply("tanh", scale * (x + 0.044715 * (x * x * x)))
        slope = scale * (1.0 + 3.0 * 0.044715 * (x * x))
        return grad * (0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * slope)
    below = 0.5 * (1.0 + b.apply("erf", x * math.sqrt(0.5)))
    density = b.apply("exp", x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))
    return grad * (below + x * density)


@pointwise("aten.leaky_relu_backward.default")
def leaky_relu_backward(
    b: Builder, grad: Value, x: Value, slope: Scalar, is_result: bool = False
) -> Value:
    return b.apply("where", x > 0, grad, grad * slope)


@pointwise("aten._prelu_kernel_backward.default")
def prelu_backward(b: Builder, grad: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    """Gradients of the operand and, of each element, of the weight, which autograd adds up."""
    return b.apply("where", x > 0, grad, grad * weight), b.apply("where", x > 0, 0.0, grad * x)


@pointwise("aten.elu_backward.default")
def elu_backward(
    b: Builder,
    grad: Value,
    alpha: Scalar,
    scale: Scalar,
    input_scale: Scalar,
    is_result: bool,
    y: Value,
) -> Value:
    """Gradient of elu, celu and selu; `y` is the operand, or the result of an elu in place."""
    height = alpha * scale
    raised = y + height if is_result else b.apply("exp", y * input_scale) * height
    return b.apply("where", y <= 0, grad * input_scale * raised, grad * scale)


@pointwise("aten.hardtanh_backward.default")
def hardtanh_backward(b: Builder, grad: Value, x: Value, low: Scalar, high: Scalar) -> Value:
    return b.apply("where", b.apply("or", x <= low, x >= high), 0.0, grad)


@pointwise("aten.hardswish_backward.default")
def hardswish_backward(b: Builder, grad: Value, x: Value) -> Value:
    within = b.apply("where", x < 3.0, grad * (x / 3.0 + 0.5), grad)
    return b.apply("where", x <= -3.0, 0.0, within)


@pointwise("aten.hardshrink_backward.default", "aten.softshrink_backward.default")
def shrink_backward(b: Builder, grad: Value, x: Value, limit: Scalar) -> Value:
    return b.apply("where", b.apply("and", x >= -limit, x <= limit), 0.0, grad)


@meaning_of("pointwise", "aten.glu_backward.default")
def glu_backward(b: Builder, grad: Value, x: Value, dim: int) -> Value:
    half = x.shape[dim] // 2
    value, gate = parts(b, x, (half, half), dim)
    open = b.apply("sigmoid", gate)
    return b.cat([grad * open, grad * value * open * (1.0 - open)], dim)


_SIXTH = 0.1666666716337204
"""1 / 6 in single precision, as eager's kernel holds it."""


@pointwise("aten.hardsigmoid_backward.default")
def hardsigmoid_backward(b: Builder, grad: Value, x: Value) -> Value:
    return b.apply("where", b.apply("and", x > -3.0, x < 3.0), grad * _SIXTH, 0.0)


@pointwise("aten.softplus_backward.default")
def softplus_backward(b: Builder, grad: Value, x: Value, beta: Scalar, limit: Scalar) -> Value:
    raised = b.apply("exp", x * beta)
    return b.apply("where", x * beta > limit, grad, grad * raised / (raised + 1.0))


@pointwise("aten.native_dropout_backward.default")
def native_dropout_backward(b: Builder, grad: Value, mask: Value, scale: float) -> Value:
    return grad * mask * scale


# -- of softmax ------------------------------------------------------------------------------------


def _softmax_backward(call: Call) -> tuple[int, int]:
    """HBM bytes: a product of gradient and result is written first (native/cuda/SoftMax.cu), and
    read again with the result."""
    grad, y = call.operand(0), call.operand(1)
    product = y.numel * grad.itemsize
    return addressed_bytes((grad, y)) + product + y.bytes, product + call.out.bytes


@meaning_of(
    "reduction",
    "aten._softmax_backward_data.default",
    inputs="raw",
    traffic=_softmax_backward,
    launches=lambda call: 2,
)
def softmax_backward(b: Builder, grad: Value, y: Value, dim: int, dtype: Arg) -> Value:
    """Gradient of a softmax as CUDA has it, which differs from a CPU's at infinities."""
    product = grad * y
    return product - y * b.reduce("sum", product, (dim,), True)


@reduction("aten._log_softmax_backward_data.default")
def log_softmax_backward(b: Builder, grad: Value, y: Value, dim: int, dtype: Arg) -> Value:
    return grad - b.apply("exp", y) * b.reduce("sum", grad, (dim,), True)


# -- of normalisations -----------------------------------------------------------------------------

_LAST = {2: "{1}.shape[-{rank}:]"}


def _over_rows(b: Builder, x: Value, rank: int) -> Value:
    """The sum over all but the last dimensions."""
    rows = range(len(x.dims) - rank)
    return b.reduce("sum", x, tuple(rows)) if rows else x


@reduction("aten.native_layer_norm_backward.default", sizes=_LAST)
def layer_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    scale: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    rank = len(shape)
    dims = tuple(range(-rank, 0))
    if bias is not None:  # of its elements none is needed, but its size is the row's
        b.broadcast([x.dims, bias.dims])
    normal = (x - mean) * scale
    inner = grad if weight is None else grad * weight
    along = b.mean(inner, dims, True), b.mean(inner * normal, dims, True)
    return (
        scale * (inner - along[0] - normal * along[1]) if wanted[0] else None,
        _over_rows(b, grad * normal, rank) if wanted[1] else None,
        _over_rows(b, grad, rank) if wanted[2] else None,
    )


@reduction("aten._fused_rms_norm_backward.default", sizes=_LAST)
def rms_norm_backward(
    b: Builder,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    scale: Value,
    weight: Value | None,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None]:
    rank = len(shape)
    normal = x * scale
    inner = grad if weight is None else grad * weight
    along = b.mean(inner * normal, tuple(range(-rank, 0)), True)
    return (
        scale * (inner - normal * along) if wanted[0] else None,
        _over_rows(b, grad * normal, rank) if wanted[1] else None,
    )


def _eight_steps(call: Call) -> int:
    """FLOPs: eight of each element, of two sums and of the gradient that they go into."""
    return 8 * call.operand(0).numel


formula(
    "reduction",
    "aten.native_batch_norm_backward.default",
    "aten.native_group_norm_backward.default",
    flops=_eight_steps,
)

# -- of reads by index -----------------------------------------------------------------------------


def _embedding_backward(call: Call) -> tuple[int, int]:
    """HBM bytes: the table is filled with zeros, and the rows that were read are added to."""
    grad, indices = call.operand(0), call.operand(1)
    rows = min(grad.bytes, call.out.bytes)
    return grad.bytes + indices.bytes + rows, call.out.bytes + rows


formula(
    "scatter",
    "aten.embedding_dense_backward.default",
    flops=lambda call: call.operand(0).numel,
    traffic=_embedding_backward,
)


def _select_backward(call: Call) -> tuple[int, int]:
    """HBM bytes: zeros in the whole result, then a copy of the gradient into its place."""
    grad = call.operand(0)
    return grad.bytes, call.out.bytes + grad.bytes


formula(
    "pointwise",
    "aten.select_backward.default",
    traffic=_select_backward,
    launches=lambda call: 2,
)
