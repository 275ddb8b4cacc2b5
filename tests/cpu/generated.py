"""Plain PyTorch functions, each emitted as one kernel: for the golden files and the mutants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F

from fusion_advisor.ir.kernel import Kernel

from .regions import PACKED, SHARING, Group, emit, group_of


def _x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def softmax(x):
    m = x.max(dim=-1, keepdim=True)[0]
    e = torch.exp(x - m)
    return e / e.sum(dim=-1, keepdim=True)


def layer_norm(x, g, b):
    c = x - x.mean(-1, keepdim=True)
    v = (c * c).mean(-1, keepdim=True)
    return c * torch.rsqrt(v + 1e-5) * g + b


def residual_rms_norm(x, r, g):
    h = x + r
    v = h.float().pow(2).mean(-1, keepdim=True)
    return h, g * (h.float() * torch.rsqrt(v + 1e-6)).to(h.dtype)


def swiglu(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def middle_softmax(x, bias):
    return torch.softmax(x * 0.125 + bias, dim=1)


def broadcast(x, c, r, s):
    return torch.sigmoid(x * c + r) - s * x


def group_norm(x, g, b):
    return F.relu(F.group_norm(x, 3, g, b))


def biased(a: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(a + bias)


def paired_group_norm(x, g, b):
    return F.relu(F.group_norm(x, 2, g, b))


def below_peak(x):
    return x - 0.5 * x.amax(-1, keepdim=True)


def masked_count(ids, lengths):
    seen = (torch.arange(ids.shape[1]) < lengths[:, None]) & (ids != 0)
    return seen, seen.sum(1, keepdim=True), torch.where(seen, ids, -100)


def dropout_gelu(x):
    return F.dropout(F.gelu(x), 0.1, training=True)


def dropped_attention(scores, bias):
    return torch.native_dropout(torch.softmax(scores * 0.125 + bias, dim=-1), 0.2, True)


def halves_turned(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def hits(logits, labels):
    """Share of rows whose largest element is at the label: no gradient passes."""
    return ((logits * 2).argmax(-1) == labels).float().mean()


def rotated(q, cos, sin):
    return q * cos + halves_turned(q) * sin


FUNCTIONS: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "softmax": (softmax, (_x(64, 200),)),
    "layer_norm": (layer_norm, (_x(64, 200), _x(200), _x(200))),
    "residual_rms_norm": (
        residual_rms_norm,
        (
            _x(4, 16, 1024, dtype=torch.bfloat16),
            _x(4, 16, 1024, dtype=torch.bfloat16),
            _x(1024, dtype=torch.bfloat16),
        ),
    ),
    "shared_softmax": (softmax, (_x(40, 330, dtype=torch.bfloat16),)),
    "shared_layer_norm": (layer_norm, (_x(40, 300), _x(300), _x(300))),
    "shared_group_norm": (paired_group_norm, (_x(40, 4, 90), _x(4), _x(4))),
    "long_layer_norm": (layer_norm, (_x(40, 6000), _x(6000), _x(6000))),
    "swiglu": (swiglu, (_x(4, 64, 600, dtype=torch.bfloat16),)),
    "middle_softmax": (middle_softmax, (_x(6, 50, 40), _x(50, 1))),
    "broadcast": (broadcast, (_x(3, 8, 20, 30), _x(8, 1, 1), _x(30), _x(3, 1, 20, 1))),
    "long_runs": (biased, (_x(15, 1025), _x(15, 1))),
    "group_norm": (group_norm, (_x(6, 15, 5, 7), _x(15), _x(15))),
    "below_peak": (below_peak, (_x(40, 130),)),
    "masked_count": (
        masked_count, (_x(40, 90, dtype=torch.int64), _x(40, dtype=torch.int64)),
    ),
    "dropout_gelu": (dropout_gelu, (_x(64, 500, dtype=torch.bfloat16),)),
    "rotated": (rotated, (_x(2, 5, 40, 32), _x(40, 32), _x(40, 32))),
    "dropped_attention": (dropped_attention, (_x(8, 30, 96), _x(30, 96))),
    "mean_loss": (F.cross_entropy, (_x(150, 20), _x(150, dtype=torch.int64))),
}  # fmt: skip


def row_and_columns(grad, x, weight):
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
    normal, inner = x * scale, grad * weight
    return scale * (inner - normal * (inner * normal).mean(-1, keepdim=True)), (grad * normal).sum(
        0
    )


_BF16 = torch.bfloat16
SCHEDULES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "tiled": (lambda x, b: torch.tanh(x + b) * 2, (_x(7, 40, 333), _x(40, 1))),
    "carried": (row_and_columns, (_x(600, 96), _x(600, 96), _x(96))),
    "row + row": (lambda x: x.amax(-1).amin(), (_x(3000, 1300),)),
    "split": (lambda x: (x + 1).sum(-1), (_x(80, 200_000),)),
    "squares": (lambda x, y: (x - y.t()).exp().mean(), (_x(1900, 2051), _x(2051, 1900))),
    "many_squares": (lambda x, y: (x - y.t()).exp().mean(), (_x(2053, 4099), _x(4099, 2053))),
    "blocked": (lambda x: (x.float() * 2).cumsum(-1), (_x(4096, 100_000, dtype=_BF16),)),
}
"""A function for each schedule that FUNCTIONS do not reach, by the plan's name."""
OTHERS = {"hits": (hits, (_x(40, 300), _x(40, dtype=torch.int64)))}
"""Functions of which no mutants are made."""


@cache
def group(name: str) -> Group:
    function, inputs = (FUNCTIONS | SCHEDULES | OTHERS)[name]
    rules = SHARING if name.startswith("shared_") else PACKED
    return group_of(function, *inputs, name=name.replace(" + ", "_"), rules=rules)


@cache
def kernel(name: str) -> Kernel:
    return emit(*group(name))
