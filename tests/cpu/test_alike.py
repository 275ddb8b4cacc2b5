"""Parts of a concatenation that compute alike: the value stays what eager has, with fewer loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .evaluating import held_to_eager

X, Y = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
C, S = torch.randn(5, 4), torch.randn(5, 4)


def halves(x: Any, c: Any, s: Any) -> Any:
    a, b = x.exp().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def interleaved(x: Any, c: Any, s: Any) -> Any:
    x = x.exp()
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)


def rotated(x: Any) -> Any:
    a, b = x.exp().chunk(2, -1)
    return torch.cat((-b, a), -1) * 0.5


def thirds(x: Any) -> Any:
    a, b, c, d = x.exp().unbind(-1)[:4]
    return torch.stack((a.tanh(), b.tanh(), c.tanh()), -1) + d[..., None]


def apart(x: Any) -> Any:
    x = x.tanh()
    a, b, c = x[..., 0], x[..., 5], x[..., 1]
    return torch.stack((a, b, c), -1).exp()


def negative(x: Any) -> Any:
    x = x.tanh()
    a, b, c = x[..., 0], x[..., 1], x[..., 2]
    return torch.stack((-a, b, -c), -1).exp()


def of_two(x: Any, y: Any) -> Any:
    return torch.cat((torch.tanh(x), torch.tanh(y)), -1) * 2.0


def unlike(x: Any, y: Any) -> Any:
    return torch.cat((torch.tanh(x), torch.exp(y)), -1) * 2.0


def reduced(x: Any, y: Any) -> Any:
    return torch.cat((x.sum(-1, keepdim=True) + x, y.sum(-1, keepdim=True) + y), -1)


@pytest.mark.parametrize(
    ("function", "given", "loads"),
    [
        (halves, (X, C, S), 4),
        (interleaved, (X, C, S), 4),
        (rotated, (X,), 1),
        (thirds, (X,), 2),
        (apart, (X,), 3),
        (negative, (X,), 1),
        (of_two, (X, Y), 2),
        (unlike, (X, Y), 2),
        (reduced, (X, Y), 4),
    ],
)
def test_the_value_is_eager_s(
    function: Callable[..., Any], given: tuple[torch.Tensor, ...], loads: int
) -> None:
    region = held_to_eager(function, *given).region
    assert len([*region.all("load")]) == loads


def test_arithmetic_of_parts_is_done_once() -> None:
    region = held_to_eager(halves, X, C, S).region
    ops = [region.exprs[n].op for n in region.live if region.exprs[n].dtype == "float32"]
    assert ops.count("mul") == 2
    assert ops.count("add") == 1
    assert ops.count("sub") == 0
