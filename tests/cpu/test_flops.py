"""FLOPs of matrix products equal `torch.utils.flop_counter` on the same model, to the unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .regions import costs, flow_of

Tensors = tuple[torch.Tensor, ...]


def _counted(model: Callable[..., object], inputs: Tensors) -> int:
    """What torch counts in an eager run; the CPU's own attention kernels are not in its table."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as mode:
            model(*inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return mode.get_total_flops()


def _ours(model: Callable[..., object], inputs: Tensors) -> int:
    """What the launches that torch's counter knows cost by our formulas."""
    counted = ("matmul", "convolution", "attention")
    return sum(cost.flops for cost in costs(flow_of(model, *inputs)) if cost.pattern in counted)


def _r(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def _attend(**options: object) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)  # pyright: ignore


def _summed(equation: str) -> Callable[..., torch.Tensor]:
    return lambda *operands: torch.einsum(equation, *operands)


def _attention(heads: int, groups: int, rows: int, columns: int, width: int = 8) -> Tensors:
    return (
        _r(2, heads, rows, width),
        _r(2, groups, columns, width),
        _r(2, groups, columns, width),
    )


CASES: dict[str, tuple[Callable[..., object], Tensors]] = {
    "mm": (torch.mm, (_r(5, 7), _r(7, 3))),
    "addmm": (torch.addmm, (_r(3), _r(5, 7), _r(7, 3))),
    "bmm": (torch.bmm, (_r(4, 5, 7), _r(4, 7, 3))),
    "baddbmm": (torch.baddbmm, (_r(4, 5, 3), _r(4, 5, 7), _r(4, 7, 3))),
    "linear": (nn.Linear(7, 3), (_r(5, 7),)),
    "linear of a vector": (nn.Linear(7, 3), (_r(7),)),
    "linear of four dimensions": (nn.Linear(7, 3, bias=False), (_r(2, 3, 5, 7),)),
    "matmul of batches": (torch.matmul, (_r(2, 3, 5, 7), _r(2, 3, 7, 4))),
    "matmul, broadcast": (torch.matmul, (_r(2, 3, 5, 7), _r(7, 4))),
    "matmul, broadcast batch": (torch.matmul, (_r(2, 1, 5, 7), _r(3, 7, 4))),
    "transposed operand": (lambda a, b: a @ b.t(), (_r(5, 7), _r(3, 7))),
    "einsum": (_summed("bhid,bhjd->bhij"), (_r(2, 3, 5, 8), _r(2, 3, 4, 8))),
    "einsum over two": (_summed("bhd,hde->be"), (_r(4, 3, 5), _r(3, 5, 6))),
    "conv1d": (nn.Conv1d(4, 6, 3), (_r(2, 4, 17),)),
    "conv1d, causal": (nn.Conv1d(4, 4, 3, padding=2, groups=4), (_r(2, 4, 17),)),
    "conv2d": (nn.Conv2d(4, 6, 3), (_r(2, 4, 9, 11),)),
    "conv2d, stride and padding": (nn.Conv2d(4, 6, (3, 2), 2, padding=1), (_r(2, 4, 9, 11),)),
    "conv2d, groups": (nn.Conv2d(8, 12, 3, groups=4), (_r(2, 8, 9, 11),)),
    "conv2d, depthwise": (nn.Conv2d(8, 8, 3, groups=8), (_r(2, 8, 9, 11),)),
    "conv2d, dilated": (nn.Conv2d(4, 6, 3, dilation=2), (_r(2, 4, 9, 11),)),
    "conv2d, unbatched": (nn.Conv2d(4, 6, 3), (_r(4, 9, 11),)),
    "conv3d": (nn.Conv3d(2, 4, 3, stride=(1, 2, 1)), (_r(1, 2, 7, 8, 9),)),
    "transposed conv1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), (_r(2, 4, 9),)),
    "transposed conv2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1), (_r(2, 4, 9, 7),)),
    "transposed conv2d, groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), (_r(2, 4, 9, 7),)),
    "transposed conv3d": (nn.ConvTranspose3d(2, 4, 3, dilation=2), (_r(1, 2, 5, 6, 7),)),
    "attention": (_attend(), _attention(4, 4, 6, 10)),
    "attention, causal": (_attend(is_causal=True), _attention(4, 4, 10, 10)),
    "attention, grouped": (_attend(enable_gqa=True), _attention(8, 2, 6, 10)),
    "attention, grouped and causal": (
        _attend(is_causal=True, enable_gqa=True), _attention(8, 2, 10, 10),
    ),
    "attention by hand": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1) @ v,
        _attention(4, 4, 6, 10),
    ),
    "multi-head attention": (nn.MultiheadAttention(16, 4, batch_first=True), (_r(2, 5, 16),) * 3),
    "mlp": (nn.Sequential(nn.Linear(7, 32), nn.GELU(), nn.Linear(32, 7)), (_r(5, 7),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_flop_counter(name: str) -> None:
    model, inputs = CASES[name]
    if isinstance(model, nn.Module):
        model.eval()
    expected = _counted(model, inputs)
    assert expected > 0
    assert _ours(model, inputs) == expected
