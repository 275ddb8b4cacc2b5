"""Transformer blocks whose graph is no chain: one norm feeds attention and MLP, which meet again.

The norm is read by two products, the residual stream by the norm and by the end of the block. What
is fused is the norm, together with the two additions before it: their sum is stored once, for the
next block's end (`layer-norm`, FA601 says one). GELU is one kernel between two products and stays.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

DTYPE = torch.bfloat16


class LayerNorm(nn.Module):
    """Each row of x [..., H] to mean 0 and variance 1, then weight and bias."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=DTYPE))
        self.bias = nn.Parameter(torch.zeros(hidden, dtype=DTYPE))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        centred = h - h.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return (centred * torch.rsqrt(variance + self.eps)).to(DTYPE) * self.weight + self.bias


class Block(nn.Module):
    """Attention and MLP side by side, x [B, T, H]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False, dtype=DTYPE)
        self.out = nn.Linear(hidden, hidden, bias=False, dtype=DTYPE)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False, dtype=DTYPE)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, dtype=DTYPE)

    def attention(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x), approximate="tanh"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class Model(nn.Module):
    """Blocks and a last norm, x [B, T, H]."""

    def __init__(self, layers: int, hidden: int = 2048, heads: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = LayerNorm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def get_init_inputs() -> list[int]:
    return [2]


def get_inputs() -> list[Tensor]:
    return [torch.randn(8, 1024, 2048, dtype=DTYPE)]
