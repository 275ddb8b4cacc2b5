"""A GPT of 12 layers as a decoder step: one token of each sequence, a cache of fixed length."""

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH, LENGTH, HIDDEN, HEADS, LAYERS, VOCABULARY = 16, 1024, 1024, 16, 12, 50304
DTYPE = torch.bfloat16


class Attention(nn.Module):
    """Attention of one new token over a cache [B, heads, LENGTH, width], written in place."""

    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, dtype=DTYPE)
        self.out = nn.Linear(HIDDEN, HIDDEN, dtype=DTYPE)
        shape = BATCH, HEADS, LENGTH, HIDDEN // HEADS
        self.register_buffer("keys", torch.zeros(shape, dtype=DTYPE), persistent=False)
        self.register_buffer("values", torch.zeros(shape, dtype=DTYPE), persistent=False)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        heads = (BATCH, 1, 3, HEADS, HIDDEN // HEADS)
        q, k, v = self.qkv(x).view(heads).permute(2, 0, 3, 1, 4)
        keys = self.keys.index_copy_(2, position, k)
        values = self.values.index_copy_(2, position, v)
        out = functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(out.transpose(1, 2).reshape(BATCH, 1, HIDDEN))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN, dtype=DTYPE)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(HIDDEN, dtype=DTYPE)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN, dtype=DTYPE)
        self.down = nn.Linear(4 * HIDDEN, HIDDEN, dtype=DTYPE)

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), position, mask)
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Model(nn.Module):
    """Token ids [B, 1] and their position [1] to logits [B, 1, vocabulary]."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, dtype=DTYPE)
        self.positions = nn.Embedding(LENGTH, HIDDEN, dtype=DTYPE)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN, dtype=DTYPE)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=DTYPE)
        self.register_buffer("places", torch.arange(LENGTH), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(position)
        mask = (self.places <= position)[None, None, None, :]
        for layer in self.layers:
            x = layer(x, position, mask)
        return self.head(self.norm(x))


def get_init_inputs() -> list[int]:
    return []


def get_inputs() -> list[Tensor]:
    return [torch.randint(0, VOCABULARY, (BATCH, 1)), torch.full((1,), 700)]
