"""Calls that give several results, each with a part of a group: one launcher has all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .test_other_uses import uses
from .test_patch import asking, changed, made, run_on_numbers

pytestmark = pytest.mark.usefixtures("ways")

SHAPE = "16, 512, 64"

ROTATED = """
        def turned(x):
            a, b = x.chunk(2, -1)
            return torch.cat((-b, a), -1)

        def rotated(q, k, cos, sin):
            q_out = q * cos + turned(q) * sin
            k_out = k * cos + turned(k) * sin
            return q_out, k_out
"""
MODEL = """
        class Model(nn.Module):
            def __init__(self, width=64, heads=8, groups=2):
                super().__init__()
                self.width = width
                self.q = nn.Linear(64, heads * width)
                self.k = nn.Linear(64, groups * width)
                self.q_norm, self.k_norm = Norm(width), Norm(width)
                self.register_buffer("cos", torch.linspace(-1, 1, 512 * width).view(512, width))
                self.register_buffer("sin", torch.linspace(0, 1, 512 * width).view(512, width))

            def forward(self, x):
                cos, sin = self.cos[: x.size(1)], self.sin[: x.size(1)]
                q = self.q_norm(self.q(x).unflatten(-1, (-1, self.width))).transpose(1, 2)
                k = self.k_norm(self.k(x).unflatten(-1, (-1, self.width))).transpose(1, 2)
                q, k = rotated(q, k, cos, sin)
                return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
"""


def test_norms_before_a_function_that_rotates_both(tmp_path: Path) -> None:
    patch = made(tmp_path, ROTATED + MODEL, shape=SHAPE)
    text = changed(patch)
    assert "q, k = fused_model.rms_norm_rotary_embedding_or_eager(" in text
    assert "q = self.q(x).unflatten(-1, (-1, self.width))\n" in text
    assert "rotated(q" not in text.partition("class Model")[2]
    assert "return rotated(q, k, cos, sin)" in asking(patch)
    assert not [row for row in patch.left if "rotary" in row.computes]
    assert run_on_numbers(patch, tmp_path, patch.diff)[0] == {}


def test_a_method_that_norms_both_before_they_are_rotated(tmp_path: Path) -> None:
    body = ROTATED + MODEL.replace(
        "            def forward(self",
        """
            def normed(self, q, k):
                return self.q_norm(q), self.k_norm(k)

            def forward(self""",
    ).replace(
        """
                q = self.q_norm(self.q(x).unflatten(-1, (-1, self.width))).transpose(1, 2)
                k = self.k_norm(self.k(x).unflatten(-1, (-1, self.width))).transpose(1, 2)
                q, k = rotated(q, k, cos, sin)""",
        """
                q = self.q(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
                k = self.k(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
                q, k = self.normed(q, k)
                q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin""",
    )
    patch = made(tmp_path, body, shape=SHAPE)
    text = changed(patch)
    assert "q, k = fused_model.rms_norm_rotary_embedding_or_eager(" in text
    assert "self.normed(q" not in text
    assert "q, k = normed(q, k)" in asking(patch)
    assert run_on_numbers(patch, tmp_path, patch.diff)[0] == {}


def test_results_in_another_order_keep_their_names(tmp_path: Path) -> None:
    body = ROTATED.replace("return q_out, k_out", "return k_out, q_out")
    body += MODEL.replace("q, k = rotated(", "k, q = rotated(")

    def use(file: Any) -> list[object]:
        torch.manual_seed(1)
        return [file.Model()(torch.randn(2, 24, 64))]

    uses(tmp_path, body, use, shape=SHAPE)


def test_groups_that_the_source_has_alone_stay_apart(tmp_path: Path) -> None:
    """Where nothing but the rotation is fused, each of its lines has a kernel."""
    body = ROTATED + MODEL.replace("Norm(width), Norm(width)", "nn.Identity(), nn.Identity()")
    text = changed(made(tmp_path, body, shape=SHAPE))
    assert "q_out = fused_model.rotary_embedding" in text
    assert "k_out = fused_model.rotary_embedding" in text


def test_uses_of_a_call_that_went(tmp_path: Path) -> None:
    """Other heads, lengths and dtypes; another function, a norm that is none, a hook, gradients."""

    def use(file: Any) -> list[object]:
        found = list[object]()

        def ran(model: Any, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            torch.manual_seed(1)
            model = model.to(dtype)
            y = model(torch.randn(*shape, 64, dtype=dtype))
            y.float().sum().backward()
            found.extend([y, *(p.grad for p in model.parameters())])

        ran(file.Model(), 2, 24)
        ran(file.Model(), 1, 1, dtype=torch.bfloat16)
        ran(file.Model(width=32, heads=4, groups=1), 3, 5)
        hooked, plain = file.Model(), file.Model()
        hooked.q_norm.register_forward_hook(lambda module, given, y: y * 2)
        plain.k_norm = torch.nn.Identity()
        ran(hooked, 2, 3)
        ran(plain, 2, 3)
        try:
            file.Model()(torch.randn(2, 513, 64))
        except RuntimeError as error:
            found.append(type(error))
        return found

    text = uses(tmp_path, ROTATED + MODEL, use, shape=SHAPE, resized=True)
    assert "q, k = fused_model.rms_norm_rotary_embedding_or_eager(" in text
