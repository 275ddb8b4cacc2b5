"""Modules whose groups are emitted with their backward, as one writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_loaded
from fusion_advisor.frontend.user_model import HostFakeMode, Loaded
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.workflows.analyze import emit_group
from fusion_advisor.workflows.pairs import Occurrences, WholePair, pair_of

RULES = load_rulebook(())
DTYPES = torch.bfloat16, torch.float32


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * h.to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    h = x.float()
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    return h.to(x.dtype) * weight + bias


def standardized(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def residual_rms_norm(x: Tensor, r: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    h = x + r
    return rms_norm(h, weight), h


def residual_layer_norm(
    x: Tensor, r: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor]:
    h = x + r
    return layer_norm(h, weight, bias), h


def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = q.chunk(2, -1)
    return q * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


def sliced_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = q.shape[-1] // 2
    turned = torch.cat((-q[..., half:], q[..., :half]), -1)
    return q * cos[:, None] + turned * sin[:, None]


def interleaved_rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-q[..., 1::2], q[..., ::2]), -1).flatten(-2)
    return q * cos[:, None] + turned * sin[:, None]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


def atanh(x: Tensor, r: Tensor) -> Tensor:
    """Its gradient subtracts from a constant tensor, which autograd makes in two steps."""
    return torch.atanh(x * r) * r


def sigmoid_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores * 0.5, targets) + F.huber_loss(scores, targets)


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores * 0.125 + mask, -1)


def softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.max(dim=-1, keepdim=True)[0])
    return e / e.sum(dim=-1, keepdim=True)


def z_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels and the square of the normalizer."""
    x = scores.float()
    normalizer = torch.logsumexp(x, -1)
    meant = x.gather(-1, targets[:, None])[:, 0]
    smoothed = normalizer - 0.9 * meant - 0.1 * x.mean(-1)
    return (smoothed + 1e-4 * normalizer.square()).mean()


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    x = scores.float()
    normalizer = torch.logsumexp(x, -1)
    loss = F.cross_entropy(x, targets, label_smoothing=0.1)
    return loss + 1e-4 * normalizer.square().mean()


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    """Rounded to eight bits; its gradient passes through as if it were not."""
    rounded = (x / scale).round().clamp(-127, 127) * scale
    return x + (rounded - x).detach()


def scaled_tanh(x: Tensor, scale: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Its one scale has a gradient of one dimension, which is a sum over all three."""
    return weight * torch.tanh(scale * x) + bias


def masked_distance(p: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Of rows with a label; the cut would keep the comparison, for it is smaller than labels."""
    return torch.where((labels != 3)[:, None], 0.5 * (p - q).abs(), 0.0).sum()


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    h = x.float().reshape(x.shape[0], 4, -1)
    h = h - h.mean(-1, keepdim=True)
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5)
    h = h.reshape(x.shape[0], x.shape[1], -1) * weight[:, None] + bias[:, None]
    return h.reshape(x.shape).to(x.dtype)


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """In float32 the scores are as large as what eager keeps, so that statistics are beyond it."""
    return F.cross_entropy(scores.float(), targets, label_smoothing=0.1)


def loss_of_few(scores: Tensor, targets: Tensor) -> Tensor:
    """Statistics of so short rows are too much to keep, and sums over all rows are not."""
    return F.cross_entropy(scores.float(), targets, label_smoothing=0.1)


def dropped(x: Tensor, r: Tensor) -> Tensor:
    return F.dropout(x, 0.1) + r


def gathered(x: Tensor, r: Tensor, places: Tensor) -> Tensor:
    """Several elements of each row, whose gradients meet where the places do."""
    return x.gather(-1, places) * r + r


Made = tuple[Callable[..., object], tuple[tuple[int, ...], ...], int]

MODELS: dict[str, Made] = {
    "rms_norm": (rms_norm, ((512, 1024), (1024,)), 2),
    "layer_norm": (layer_norm, ((512, 1024), (1024,), (1024,)), 3),
    "layer_norm_of_few_rows": (layer_norm, ((2, 8, 64), (64,), (64,)), 3),  # lanes could walk them
    "standardized": (standardized, ((512, 1024),), 1),
    "residual_rms_norm": (residual_rms_norm, ((512, 1024), (512, 1024), (1024,)), 3),
    "residual_layer_norm": (residual_layer_norm, ((512, 1024), (512, 1024), (1024,), (1024,)), 4),
    "rotary": (rotary, ((2, 8, 256, 64), (2, 256, 64), (2, 256, 64)), 1),
    "sliced_rotary": (sliced_rotary, ((2, 8, 256, 64), (2, 256, 64), (2, 256, 64)), 1),
    "interleaved_rotary": (interleaved_rotary, ((2, 8, 256, 64), (2, 256, 64), (2, 256, 64)), 1),
    "swiglu": (swiglu, ((512, 1000), (512, 1000)), 2),
    "geglu": (geglu, ((512, 1000), (512, 1000)), 2),
    "atanh": (atanh, ((512, 1000), (512, 1000)), 2),
    "sigmoid_loss": (sigmoid_loss, ((512, 1000), (512, 1000)), 1),
    "softmax": (softmax, ((2, 4, 200, 200), (2, 1, 200, 200)), 1),
    "softmax_by_hand": (softmax_by_hand, ((512, 1000),), 1),
    "z_loss": (z_loss, ((512, 2000), (512, 0)), 1),
    "cross_entropy": (cross_entropy, ((512, 2000), (512, 0)), 1),
    "scaled_tanh": (scaled_tanh, ((2, 64, 512), (1,), (512,), (512,)), 4),
    "masked_distance": (masked_distance, ((512, 1000), (512, 1000), (512, 0)), 1),
    "group_norm": (group_norm, ((2, 16, 512), (16,), (16,)), 3),
    "loss": (loss, ((512, 2000), (512, 0)), 1),
    "loss_of_few": (loss_of_few, ((4096, 50), (4096, 0)), 1),
    "quantized": (quantized, ((512, 1000), (1,)), 1),
}
"""Function, shapes of its inputs (a last dimension of 0: indices), and how many of the first
inputs require a gradient."""


class Called(nn.Module):
    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *given: Tensor) -> object:
        return self.call(*given)


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if shape[-1]:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2000, shape[:-1])


def pairs_of(
    call: Callable[..., object],
    shapes: tuple[tuple[int, ...], ...],
    trained: int,
    dtype: torch.dtype,
) -> list[WholePair | str]:
    """Each group of a function with its backward, or why there is none."""
    fake = HostFakeMode()
    inputs = [fake.from_tensor(made(shape, dtype)) for shape in shapes]
    for each in inputs[:trained]:
        each.requires_grad_()
    loaded = Loaded(Called(call).train(), tuple(inputs), {}, fake, "model")
    flow = dataflow(capture_loaded(loaded, Scenario(mode="train")), RULES.device("h200"))
    found: list[WholePair | str] = []
    for finding in fuse(flow, RULES).groups:
        kernel = emit_group(finding, RULES, full_size=False)
        assert not isinstance(kernel, str), kernel
        found.append(pair_of(Occurrences(finding.decision, finding.instances), kernel, RULES))
    return found


@cache
def pair(name: str, dtype: torch.dtype) -> WholePair:
    """The one group of a model, with its backward."""
    (found,) = pairs_of(*MODELS[name], dtype)
    assert not isinstance(found, str), found
    return found
