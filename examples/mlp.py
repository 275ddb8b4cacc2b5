"""A feed-forward block with GELU written out: nine of its twelve kernels become one.

The two matrix products are compute-bound and stay. The nine kernels between them pass every gate
as `gelu-tanh`, for which PyTorch has an op of its own. The residual addition has only a product for
a neighbour and stays alone.
"""

import torch
from torch import Tensor, nn

DTYPE = torch.bfloat16


def gelu(x: Tensor) -> Tensor:
    """GELU's tanh form, as papers print it."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


class Model(nn.Module):
    """x + down(gelu(up(x))) for x [B, T, H]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, dtype=DTYPE)
        self.down = nn.Linear(inner, hidden, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(x)))


def get_init_inputs() -> list[int]:
    return [2048, 8192]


def get_inputs() -> list[Tensor]:
    return [torch.randn(8, 1024, 2048, dtype=DTYPE)]
