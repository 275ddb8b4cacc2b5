"""Lines of which runs take different branches, each run with a kernel of its own: one call asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .test_other_uses import uses

pytestmark = pytest.mark.usefixtures("ways")

HEAD = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer(kind) for kind in KINDS)

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    class Layer(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
            self.scale = nn.Parameter(torch.rand(1024))
            mask = torch.rand(32, 32) > 0.5 if "mask" in kind else None
            self.register_buffer("mask", mask, persistent=False)
            self.register_buffer("kept", None if mask is None else mask[0].float())
            self.cap = 5.0 if "cap" in kind else None
            self.flag, self.extra, self.dtype = "flag" in kind, [], torch.float32
            self.drop, self.share = nn.Dropout(0.0), 0.0
            self.shrink, self.words = nn.Hardshrink(), {}
"""
ATTENTION = """
        def weights(self, q, k):
            s = q @ k.mT * 0.125
            if self.cap is not None:
                s = torch.tanh(s / self.cap) * self.cap
            if self.mask is not None:
                s = s.masked_fill(self.mask, -1e4)
            s = s - s.amax(dim=-1, keepdim=True)
            e = torch.exp(s)
            return e / e.sum(dim=-1, keepdim=True)

        def forward(self, x):
            return self.weights(self.a(x), self.b(x)) @ x
"""


def body(kinds: tuple[str, ...], lines: str) -> str:
    return f"\n    KINDS = {kinds!r}\n{HEAD}{lines}"


def turned(file: Any) -> list[object]:
    """What layers of every kind give, whose kinds change afterwards, with gradients, too."""
    results = list[object]()
    for dtype in (torch.float32, torch.bfloat16):
        model, x = file.Model().to(dtype), torch.randn(2, 32, 1024).to(dtype)
        masks = [torch.rand(32, 32) > 0.5, None]
        for mask, cap, flag in ((masks[0], 3.0, True), (None, None, False), (masks[0], None, True)):
            with torch.no_grad():
                results.append(model(x))
            inputs = x.clone().requires_grad_()
            results.append(torch.autograd.grad(model(inputs).sum(), inputs)[0])
            layer = model.layers[0]
            layer.mask, layer.cap, layer.flag = mask, cap, flag
            layer.kept = None if mask is None else mask[0].to(dtype)
    return results


def test_every_branch_has_its_kernel(tmp_path: Path) -> None:
    kinds = ("plain", "mask", "plain", "mask")
    text = uses(tmp_path, body(kinds, ATTENTION), turned, "64, 32, 1024")
    assert text.count("def softmax") + text.count("softmax_or_eager(s, self") >= 2
    assert text.count("e = torch.exp(s)") == 1
    assert text.count("return fused\n") == 2


@pytest.mark.deep
def test_more_than_two_branches_ask_in_turn(tmp_path: Path) -> None:
    kinds = ("plain", "mask", "cap", "mask cap")
    text = uses(tmp_path, body(kinds, ATTENTION), turned, "64, 32, 1024")
    assert text.count("e = torch.exp(s)") == 1
    assert text.count("return fused\n") == 4


CALLED = """
        def scores(self, s):
            if self.cap is not None:
                s = torch.tanh(s / self.cap) * self.cap
            return s if self.mask is None else s.masked_fill(self.mask, -1e4)

        def forward(self, x):
            s = self.scores(self.a(x) @ self.b(x).mT * 0.125)
            return torch.softmax(s, -1) @ x
"""


def test_branches_of_a_function_that_the_lines_call(tmp_path: Path) -> None:
    kinds = ("plain", "mask", "cap", "mask cap")
    text = uses(tmp_path, body(kinds, CALLED), turned, "64, 32, 1024")
    assert text.count("s = scores(s * 0.125)") == 1
    assert text.count("return fused\n") == 4


def test_other_lines_are_another_edit(tmp_path: Path) -> None:
    lines = """
        def forward(self, x):
            h = torch.sigmoid(x)
            if self.flag:
                h = self.a(h)
            h = torch.tanh(h) * self.scale
            return h + self.b(x)
    """
    kinds = ("plain", "flag", "plain", "flag")
    text = uses(tmp_path, body(kinds, lines), turned, "64, 32, 1024")  # whose patch has to hold
    assert "if self.flag:" in text


ASKED = """
        def table(self):
            return self.scale.view(32, 32)

        def forward(self, x):
            s = torch.einsum("bid,bjd->bij", self.a(x), self.b(x)) * 0.125
            s = s + self.table()
            if self.mask is not None:
                s = s.masked_fill(self.mask.view(1, 32, 32), -1e4)
            p = torch.softmax(s, -1)
            return p @ x
"""


def test_a_view_of_a_branch_is_made_where_that_is_asked_for(tmp_path: Path) -> None:
    kinds = ("plain", "mask", "plain", "mask")
    text = uses(tmp_path, body(kinds, ASKED), turned, "64, 32, 1024")
    assert text.count("p = torch.softmax(s, -1)") == 0
    assert text.count("return torch.softmax(s, -1)") == 1
    assert text.count("return fused\n") == 2


def test_a_view_of_a_branch_behind_another(tmp_path: Path) -> None:
    more = """            if self.kept is not None:
                p = p * self.kept.view(1, 32, 1)
            return p @ x
"""
    lines = ASKED.replace("            return p @ x\n", more)
    text = uses(tmp_path, body(("mask", "mask"), lines), turned, "64, 32, 1024")
    assert "self.mask.view(1, 32, 32), self.kept.view(1, 32, 1)" in text


def flipped(file: Any) -> list[object]:
    """What layers of every kind give, as each of them becomes another kind."""
    results, x = list[object](), torch.randn(2, 32, 1024)
    model = file.Model()
    for flag, cap in ((True, None), (False, 3.0), (True, 3.0), (False, None)):
        with torch.no_grad():
            results.append(model(x))
        model.layers[0].flag, model.layers[-1].flag, model.layers[0].cap = flag, not flag, cap
    return results


TERNARY = """
        def act(self, h):
            return torch.tanh(h) * h if self.flag else F.gelu(h) + 0.1 * h

        def forward(self, x):
            return self.b(self.act(self.a(x)))
"""
EARLY = """
        def act(self, h):
            if self.flag:
                return torch.tanh(h) * h
            return F.gelu(h) + 0.1 * h

        def forward(self, x):
            return self.b(self.act(self.a(x)))
"""
NESTED = """
        def forward(self, x):
            h = self.a(x)
            y = (torch.tanh(h) * h if self.cap is None else torch.tanh(h / self.cap) + h) if (
                self.flag
            ) else F.gelu(h) + 0.1 * h
            return self.b(y)
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lines", [TERNARY, EARLY, NESTED], ids=["ternary", "early", "nested"])
def test_lines_that_a_run_does_not_come_to(tmp_path: Path, lines: str) -> None:
    text = uses(tmp_path, body(("flag", "plain", "flag cap"), lines), flipped, "64, 32, 1024")
    assert "F.gelu" not in text.split("class Layer")[1]
    assert "torch.tanh(h)" not in text.split("def forward(self, x):")[-1]


def test_lines_that_each_run_begins_are_not_passed_by(tmp_path: Path) -> None:
    lines = """
        def act(self, h):
            t = torch.tanh(h)
            return t * h if self.flag else t

        def forward(self, x):
            return self.b(self.act(self.a(torch.sigmoid(x) * x)))
    """
    text = uses(tmp_path, body(("flag", "plain"), lines), flipped, "64, 32, 1024")
    assert "t = torch.tanh(h)" in text


def test_a_loop_that_begins_with_an_if_on_one_line(tmp_path: Path) -> None:
    lines = """
        def forward(self, x):
            for turn in range(4):
                if turn == 3: break
                x = self.b(torch.tanh(x) * x * self.scale)
            return x
    """
    text = uses(tmp_path, body(("plain",), lines), flipped, "64, 32, 1024")
    assert "torch.tanh" not in text.split("class Layer")[1].split("def tanh")[0]
