"""Operators alone, at sizes that a seed draws: what eager launches in models, and drawn modules
have seldom."""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F

Shape = tuple[int, ...]


def _images(draw: Random) -> Shape:
    side = draw.choice((7, 14, 28, 56, 63, 112))
    return draw.choice((8, 32, 64)), draw.choice((3, 32, 64, 96, 256)), side, side


def _rows(draw: Random) -> Shape:
    return int(2 ** draw.uniform(6, 15)), draw.choice((64, 77, 768, 1000, 1024, 4096, 4097, 32000))


def _tokens(draw: Random) -> Shape:
    return (
        draw.choice((1, 4, 16)),
        draw.choice((128, 512, 2048)),
        draw.choice((64, 768, 1000, 4096)),
    )


def _numbers(shape: Shape, most: int) -> torch.Tensor:
    return torch.randint(0, most, shape)


def _given_statistics(x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, x.new_zeros(x.shape[1]), x.new_ones(x.shape[1]))


def _norm_backward(x: torch.Tensor) -> Any:
    shape, weight = x.shape[-1:], x.new_ones(x.shape[-1])
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, weight, 1e-5)
    given = (x, x, shape, mean, rstd, weight, weight, [True, True, True])
    return torch.ops.aten.native_layer_norm_backward(*given)


def _softmax_backward(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._softmax_backward_data(x, x, -1, x.dtype)


OPERATORS: dict[str, tuple[Callable[[Random], Shape], Callable[[torch.Tensor], Any]]] = {
    "max_pool2d": (_images, lambda x: F.max_pool2d(x, 2)),
    "max_pool2d_wide": (_images, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "avg_pool2d": (_images, lambda x: F.avg_pool2d(x, 2)),
    "adaptive_pool": (_images, lambda x: F.adaptive_avg_pool2d(x, 1)),
    "batch_norm": (_images, _given_statistics),
    "batch_norm_training": (_images, lambda x: F.batch_norm(x, None, None, training=True)),
    "group_norm": (_images, lambda x: F.group_norm(x, 1)),
    "instance_norm": (_images, lambda x: F.instance_norm(x)),
    "interpolate": (_images, lambda x: F.interpolate(x, scale_factor=2.0)),
    "interpolate_bilinear": (_images, lambda x: F.interpolate(x, None, 2.0, "bilinear")),
    "pixel_unshuffle": (_images, lambda x: F.pixel_unshuffle(x[..., :6, :6], 2)),
    "pad": (_images, lambda x: F.pad(x, (1, 1, 1, 1))),
    "channels_last": (_images, lambda x: x.to(memory_format=torch.channels_last)),
    "channel_softmax": (_images, lambda x: x.softmax(1)),
    "channel_sums": (_images, lambda x: x.sum((0, 2, 3))),
    "spatial_means": (_images, lambda x: x.mean((2, 3))),
    "layer_norm": (_rows, lambda x: F.layer_norm(x, x.shape[-1:])),
    "rms_norm": (_rows, lambda x: F.rms_norm(x, x.shape[-1:])),
    "layer_norm_backward": (_rows, _norm_backward),
    "gelu_backward": (_rows, lambda x: torch.ops.aten.gelu_backward(x, x)),
    "softmax_backward": (_rows, _softmax_backward),
    "softmax": (_rows, lambda x: x.softmax(-1)),
    "log_softmax": (_rows, lambda x: x.log_softmax(-1)),
    "column_softmax": (_rows, lambda x: x.softmax(0)),
    "sum_all": (_rows, lambda x: x.sum()),
    "sum_rows": (_rows, lambda x: x.sum(-1)),
    "sum_columns": (_rows, lambda x: x.sum(0)),
    "mean_rows": (_rows, lambda x: x.mean(-1, keepdim=True)),
    "var_rows": (_rows, lambda x: x.var(-1)),
    "amax_rows": (_rows, lambda x: x.amax(-1)),
    "amax_columns": (_rows, lambda x: x.amax(0)),
    "argmax_rows": (_rows, lambda x: x.argmax(-1)),
    "norm_rows": (_rows, lambda x: torch.linalg.vector_norm(x, dim=-1)),
    "cumsum_rows": (_rows, lambda x: x.cumsum(-1)),
    "cumsum_columns": (_rows, lambda x: x.cumsum(0)),
    "cumprod": (_rows, lambda x: x.cumprod(-1)),
    "transposed": (_rows, lambda x: x.t().contiguous()),
    "halves": (_rows, lambda x: torch.cat((x[:, 1:], x), 1)),
    "concatenated": (_rows, lambda x: torch.cat((x, x), 0)),
    "stacked": (_rows, lambda x: torch.stack((x, x), -1)),
    "rolled": (_rows, lambda x: x.roll(3, -1)),
    "flipped": (_rows, lambda x: x.flip(-1)),
    "repeated": (_rows, lambda x: x.repeat_interleave(2, 0)),
    "masked": (_rows, lambda x: x.masked_fill(x > 0, 0.0)),
    "triangle": (_rows, lambda x: x.tril()),
    "chosen": (_rows, lambda x: torch.where(x > 0, x, 0.0)),
    "picked": (_rows, lambda x: x.gather(1, _numbers((x.shape[0], 1), 64).to(x.device))),
    "index_select": (_rows, lambda x: x.index_select(0, _numbers((x.shape[0],), 64).to(x.device))),
    "embedding": (_rows, lambda x: F.embedding(_numbers((4096,), 64).to(x.device), x)),
    "one_hot": (_rows, lambda x: F.one_hot(_numbers((x.shape[0],), 64).to(x.device), 64)),
    "topk": (_rows, lambda x: x.topk(8)),
    "sorted": (_rows, lambda x: x.sort(-1)),
    "heads": (_tokens, lambda x: x.unflatten(-1, (4, -1)).transpose(1, 2).contiguous()),
    "token_bias": (_tokens, lambda x: x + x[:1, :1]),
    "scaled_rows": (_tokens, lambda x: x * x[..., :1]),
    "half_columns": (_tokens, lambda x: x[..., ::2] * 2),
    "linear": (_tokens, lambda x: F.linear(x, x.new_ones(1024, x.shape[-1]))),
    "attention_scores": (_tokens, lambda x: x @ x.transpose(1, 2)),
}  # fmt: skip


def drawn(seed: str, number: int) -> tuple[str, torch.nn.Module, torch.Tensor]:
    """The name, the operator as a module, and its input, of one case; each operator is drawn as
    often as `number` goes around the list."""
    name = list(OPERATORS)[number % len(OPERATORS)]
    draw = Random(f"{seed} {number}")
    shape, function = OPERATORS[name]
    module = torch.nn.Module()
    module.forward = function
    dtype = draw.choice((torch.float32, torch.bfloat16))
    return f"operator_{seed}_{number:03d}_{name}", module, torch.empty(shape(draw), dtype=dtype)
