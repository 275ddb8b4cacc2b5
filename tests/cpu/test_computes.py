"""A group is called what it computes: all of it, in words, however it is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from .test_idiom import (
    cosines,
    findings,
    full,
    gelu_tanh,
    layer_norm,
    llama_norm,
    only,
    residual_norm,
    rms_norm,
    shifted_exp,
    softmax,
    spelled_swiglu,
    swiglu,
    vector,
)


def mish_residual_norm(x: Any, r: Any, g: Any) -> Any:
    return rms_norm(functional.mish(x) + r, g)


def spelled_mish_residual_norm(x: Any, r: Any, g: Any) -> Any:
    return layer_norm(x * torch.tanh(torch.log(1 + torch.exp(x))) + r, g, g)


def gated_norm(x: Any, g: Any) -> Any:
    y = rms_norm(x, g)
    return y * torch.sigmoid(y)


def gemma_norm(x: Any, g: Any) -> Any:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + g.float())).to(x.dtype)


def with_bias(x: Any, g: Any) -> Any:
    return functional.relu(x + g)


def turned_by_halves(x: Any, g: Any, h: Any) -> Any:
    left, right = x.chunk(2, -1)
    return x * g + torch.cat((-right, left), -1) * h


def gated_by_half(x: Any) -> Any:
    left, right = x.chunk(2, -1)
    return left * torch.sigmoid(right)


def mixed_halves(x: Any, r: Any, y: Any) -> Any:
    return x * y + r * y


def offset(x: Any, g: Any) -> Any:
    return g.int().cumsum(0) + x.int()


def narrowed(x: Any) -> Any:
    return x.half().float()


def six(x: Any) -> Any:
    return x.sin().cos().tan().exp().log().abs()


COLUMNS = vector().shape[0]
FULL = (full,)
CALLED: list[tuple[Callable[..., Any], str, tuple[Callable[..., torch.Tensor], ...]]] = [
    (softmax, "softmax", FULL),
    (shifted_exp, "exp + add + sum + div", FULL),
    (layer_norm, "LayerNorm", (full, vector, vector)),
    (rms_norm, "RMSNorm", (full, vector)),
    (llama_norm, "RMSNorm", (full, vector)),
    (gemma_norm, "RMSNorm", (full, vector)),
    (residual_norm, "residual + RMSNorm", (full, full, vector)),
    (mish_residual_norm, "mish + residual + RMSNorm", (full, full, vector)),
    (spelled_mish_residual_norm, "5 ops + residual + LayerNorm", (full, full, vector)),
    (gated_norm, "RMSNorm + SiLU", (full, vector)),
    (gelu_tanh, "GELU", FULL),
    (swiglu, "SwiGLU", (full, full)),
    (spelled_swiglu, "SwiGLU", (full, full)),
    (with_bias, "bias + ReLU", (full, vector)),
    (turned_by_halves, "rotary embedding", (full, vector, vector)),
    (mixed_halves, "mul + add", (full, full, full)),
    (gated_by_half, "sigmoid + mul", FULL),
    (offset, "cumsum + add", (full, vector)),
    (narrowed, "cast", FULL),
    (cosines, "cos", FULL),
    (six, "sin + cos + tan + 3 more", FULL),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("function", "called", "inputs"), CALLED, ids=[case[0].__name__ for case in CALLED]
)
def test_a_group_is_called_what_it_computes(
    function: Callable[..., Any],
    called: str,
    inputs: tuple[Callable[[torch.dtype], torch.Tensor], ...],
    dtype: torch.dtype,
) -> None:
    assert only(findings(function, *(make(dtype) for make in inputs))).computes == called


def test_a_candidate_with_a_product_is_called_by_all_of_it() -> None:
    def projected(x: Any, w: Any, r: Any, g: Any) -> Any:
        return residual_norm(x @ w, r, g)

    square = torch.empty(COLUMNS, COLUMNS, device="meta")
    found = findings(projected, full(), square, full(), vector())
    whole = next(row for row in found.candidates if row.pattern == "gemm-norm")
    assert whole.computes == "matrix product + residual + RMSNorm"


def test_one_row_is_called_as_many_are() -> None:
    """As in decode: a weight is a vector, and the row has as many elements."""

    def normed_and_turned(x: Any, r: Any, g: Any, c: Any, s: Any) -> Any:
        h = rms_norm(x + r, g)
        left, right = h.chunk(2, -1)
        return h * c + torch.cat((-right, left), -1) * s

    shapes = ((1, 1, 256), (1, 1, 256), (256,), (1, 256), (1, 256))
    inputs = (torch.empty(shape, device="meta") for shape in shapes)
    (finding,) = findings(normed_and_turned, *inputs).groups
    assert finding.computes == "residual + RMSNorm + rotary embedding"
