"""Matrix products, convolutions, attention and recurrent cells: counted, never fused here.

FLOPs equal `torch.utils.flop_counter` (a multiply-add is 2).
"""

from __future__ import annotations

import math

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ir.graph import Ref, Tensor
from fusion_advisor.ops.attention import ATTENTION_BACKWARDS
from fusion_advisor.ops.registry import Call, formula
from fusion_advisor.ops.windows import Windows


def _product(a: Tensor, b: Tensor) -> int:
    """FLOPs of [..., M, K] × [..., K, N]."""
    return 2 * a.numel * b.shape[-1]


formula(
    "matmul",
    "aten.mm.default",
    "aten.bmm.default",
    "aten._scaled_mm.default",
    "aten._int_mm.default",
    flops=lambda call: _product(call.operand(0), call.operand(1)),
    unit="tensor",
)
formula(
    "matmul",
    "aten.addmm.default",
    "aten.baddbmm.default",
    "aten._addmm_activation.default",
    "aten.addmm_.default",
    "aten.baddbmm_.default",
    flops=lambda call: _product(call.operand(1), call.operand(2)),
    unit="tensor",
)
formula(
    "matmul",
    "aten.mv.default",
    "aten.dot.default",
    "aten.vdot.default",
    flops=lambda call: 2 * call.operand(0).numel,
    unit="cuda",
)
formula("matmul", "aten.addmv.default", flops=lambda call: 2 * call.operand(1).numel, unit="cuda")
formula(
    "matmul",
    "aten.linear.default",
    "aten.matmul.default",
    flops=lambda call: (
        2
        * call.operand(0).numel
        * (call.out.numel // max(1, math.prod(call.operand(0).shape[:-1])))
    ),
    unit="tensor",
)


def _grouped(call: Call) -> int:
    """FLOPs of a grouped product: each row meets the matrix of one group."""
    a, b = call.operand(0), call.operand(1)
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if len(a.shape) == 3 else 1)


formula("matmul", "aten._grouped_mm.default", flops=_grouped, unit="tensor")


def _convolution(call: Call) -> int:
    """FLOPs as flop_counter has them: 2 · batch · output positions · weight elements (input
    positions when transposed)."""
    x, weight = call.operand(0), call.operand(1)
    transposed = bool(call.arg(6, "transposed", False))
    positions = math.prod((x if transposed else call.out).shape[2:])
    return 2 * x.shape[0] * positions * weight.numel


def _windows(call: Call) -> tuple[int, int]:
    """HBM bytes: the positions of the input that some window touches; all, when transposed."""
    x, weight, out = call.operand(0), call.operand(1), call.out
    rest = addressed_bytes(call.operands[1:])
    if call.arg(6, "transposed", False):
        return x.bytes + rest, out.bytes
    windows = Windows.laid(
        x.shape[2:], out.shape[2:], weight.shape[2:], call.arg(3), call.arg(4), call.arg(5)
    )
    return x.shape[0] * x.shape[1] * windows.touched * x.itemsize + rest, out.bytes


formula(
    "convolution",
    "aten.convolution.default",
    "aten._convolution.default",
    flops=_convolution,
    traffic=_windows,
    unit="tensor",
)
formula(
    "convolution",
    "aten.cudnn_convolution.default",
    flops=_convolution,
    unit="tensor",
)


def _convolution_backward(call: Call) -> int:
    """FLOPs of the products that are asked for: the gradient of the input, and of the weight, each
    as many as the convolution itself."""
    grad, x, weight = (call.operand(i) for i in range(3))
    transposed = bool(call.arg(7, "transposed", False))
    positions = math.prod((x if transposed else grad).shape[2:])
    wanted = call.arg(10, "output_mask", (True, True, True))
    products = sum(map(bool, wanted[:2])) if isinstance(wanted, tuple) else 2
    return products * 2 * x.shape[0] * positions * weight.numel


formula(
    "convolution",
    "aten.convolution_backward.default",
    flops=_convolution_backward,
    unit="tensor",
)


def _attention(call: Call) -> int:
    """FLOPs of two products: [B, H, S, E] × [E, T] and [S, T] × [T, Ev]; a mask saves none."""
    query, key, value = (call.operand(i) for i in range(3))
    batch = math.prod(query.shape[:-2])
    rows, columns = query.shape[-2], key.shape[-2]
    return 2 * batch * rows * columns * (query.shape[-1] + value.shape[-1])


formula(
    "attention",
    "aten.scaled_dot_product_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    flops=_attention,
    unit="tensor",
)


def _attention_backward(call: Call) -> int:
    """FLOPs of five products: the scores once more, and the gradients of weights, values, queries
    and keys. The first operand is the gradient of the result."""
    query, key, value = (call.operand(i) for i in range(1, 4))
    batch = math.prod(query.shape[:-2])
    rows, columns = query.shape[-2], key.shape[-2]
    return 2 * batch * rows * columns * (3 * query.shape[-1] + 2 * value.shape[-1])


formula("attention", *ATTENTION_BACKWARDS, flops=_attention_backward, unit="tensor")


def _recurrent(call: Call) -> int:
    """FLOPs of every matrix of the cell once a step: weights are the two-dimensional parameters."""
    x = call.operand(0)
    steps = math.prod(x.shape[:-1])
    weights = call.arg(2, "params", ())
    found = [
        call.tensors[w]
        for w in (weights if isinstance(weights, tuple) else ())
        if isinstance(w, Ref) and w in call.tensors
    ]
    return 2 * steps * sum(w.numel for w in found if len(w.shape) == 2)


formula(
    "recurrent",
    "aten.gru.input",
    "aten.lstm.input",
    "aten.rnn_tanh.input",
    "aten.rnn_relu.input",
    "aten._cudnn_rnn.default",
    flops=_recurrent,
    unit="tensor",
)
