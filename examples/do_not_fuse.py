"""A feed-forward block that is already as it should be: the right answer is not to fuse.

GELU is one kernel, PyTorch's own, and stands between two matrix products; the residual addition
stands behind one. The products do 1365 FLOP a byte where an H200's ridge is 206: they do not wait
for memory, and every larger region contains one (FA101 compute-bound).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPE = torch.bfloat16


class Model(nn.Module):
    """x + down(gelu(up(x))) for x [B, T, H]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner, bias=False, dtype=DTYPE)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(x)))


def get_init_inputs() -> list[int]:
    return [2048, 8192]


def get_inputs() -> list[Tensor]:
    return [torch.randn(8, 1024, 2048, dtype=DTYPE)]
