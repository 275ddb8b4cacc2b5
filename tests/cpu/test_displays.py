"""Statements `a, b = c, d`, of which a part goes into a kernel: the rest stays as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .test_other_uses import drawn, uses

pytestmark = pytest.mark.usefixtures("ways")

CASES = {
    "of each a kernel": (
        """
                q, k = self.a(x), self.b(x)
                q, k = self.one(q), self.two(k)
                q = torch.tanh(q) * 2.0
                k = torch.sigmoid(k) * 0.5
                return self.a(q), self.b(k)
        """,
        ["_or_eager(q, self.one)", "_or_eager(k, self.two)"],
        ["q, k = self.one(q), self.two(k)", "q, k = q, k"],
    ),
    "one stays": (
        """
                q, k = self.a(x), self.b(x)
                q, k = self.one(q), k.sort(-1).values
                q = torch.tanh(q) * 2.0
                return self.a(q), self.b(k)
        """,
        ["        k = k.sort(-1).values", "_or_eager(q, self.one)"],
        [],
    ),
    "operands are computed there": (
        """
                q, k = self.one(self.a(x)), self.two(self.b(x))
                q = torch.tanh(q) * 2.0
                k = torch.sigmoid(k) * 0.5
                return self.a(q), self.b(k)
        """,
        ["q, k = self.a(x), self.b(x)", "_or_eager(q, self.one)"],
        [],
    ),
    "one display after the other": (
        """
                q, k = self.a(x), self.b(x)
                q, k = self.one(q), self.two(k)
                q, k = torch.tanh(q) * 2.0, torch.sigmoid(k) * 0.5
                return self.a(q), self.b(k)
        """,
        ["_or_eager(q, self.one)", "_or_eager(k, self.two)"],
        ["q, k = self.one(q), self.two(k)", "torch.tanh(q) * 2.0,"],
    ),
    "one display after the other, which change places": (
        """
                q, k = self.a(x), self.b(x)
                q, k = self.one(q), self.two(k)
                q, k = torch.tanh(k) * 2.0, torch.sigmoid(q) * 0.5
                return self.a(q), self.b(k)
        """,
        ["_or_eager(k, self.two)", "_or_eager(q, self.one)"],
        ["torch.tanh(k) * 2.0,"],
    ),
    "names that are new": (
        """
                h = self.a(x)
                q, k = self.one(h), h.sort(-1).values
                y = torch.tanh(q) * 2.0
                return self.a(y), self.b(k)
        """,
        ["q, k = None, h.sort(-1).values", "_or_eager(h, self.one)"],
        [],
    ),
    "they change places": (
        """
                q, k = self.a(x), self.b(x)
                q, k = self.one(k), self.two(q)
                q = torch.tanh(q) * 2.0
                k = torch.sigmoid(k) * 0.5
                return self.a(q), self.b(k)
        """,
        ["q, k = self.one(k), self.two(q)"],
        [],
    ),
    "they change places in one kernel": (
        """
                q, k = self.a(x), self.b(x)
                q, k = torch.tanh(k) * 0.5, torch.sigmoid(q) - 1.0
                return self.a(q * 2.0 + k * k)
        """,
        ["tanh_mul_sigmoid_sub(k, q)"],
        [],
    ),
    "one reads the name of the other": (
        """
                q, k = self.a(x), self.b(x)
                q, k = torch.tanh(k) * 0.5, torch.sigmoid(q) - 1.0 + torch.tanh(k) * 0.5
                return self.a(torch.relu(q) * 2.0), self.b(k)
        """,
        [],
        [],
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_what_is_left_of_a_display_is_what_it_was(name: str, tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        torch.manual_seed(1)
        model = file.Model()
        with torch.no_grad():
            for norm in (model.one, model.two):
                norm.weight.uniform_(0.5, 1.5)
        given = drawn(), drawn(1, 7, 1024)
        return [
            each for x in given for each in (lambda y: y if type(y) is tuple else (y,))(model(x))
        ]

    forward, there, gone = CASES[name]
    text = uses(
        tmp_path,
        f"""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
                self.one, self.two = nn.LayerNorm(1024), nn.LayerNorm(1024)

            def forward(self, x):
{forward}
        """,
        use,
    )
    source = text.partition("Calls of kernels")[0]
    assert all(each in source for each in there), source
    assert not any(each in source for each in gone), source
