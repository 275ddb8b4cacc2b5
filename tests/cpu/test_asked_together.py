"""What a patch asks of numbers that differ between layers, of flags, of types, and of what changes
between the lines that asked it and the call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.shipped import fused_runtime

from .test_other_uses import drawn, uses

pytestmark = pytest.mark.usefixtures("ways")

LAYERS = """
    def power(h, w, n, m):
        return torch.tanh(h) ** (n - m) * w

    class Layer(nn.Module):
        def __init__(self, n=3, m=1, gate=True):
            super().__init__()
            self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)
            self.w, self.n, self.m, self.gate = nn.Parameter(torch.rand(1024)), n, m, gate
            self.step, self.seen, self.state = 0, [], {"i": 0}

        def forward(self, x):
            h = self.a(x)
            LINES
            return self.b(h)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Layer(3, 1), Layer(4, 2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
"""


def layers(file: Any, *given: tuple[object, ...]) -> list[object]:
    return [file.Layer(*each)(drawn()) for each in given]


def other_numbers(file: Any) -> list[object]:
    return [file.Model()(drawn()), *layers(file, (3, 1), (4, 1), (6, 2), (3, 2), (9, 1))]


def other_flags(file: Any) -> list[object]:
    return layers(file, (3, 1, True), (3, 1, False), (3, 1, 0.5), (3, 1, 2), (3, 1, 1))


def again(file: Any) -> list[object]:
    layer = file.Layer()
    return [layer(drawn()) for _ in range(4)]


CASES: dict[str, tuple[str, Callable[[Any], list[object]], str]] = {
    "rolls": ("h = torch.roll(torch.tanh(h), self.n - self.m, -1) * self.w", other_numbers, "n - "),
    "powers": ("h = torch.tanh(h) ** (self.n - self.m) * self.w", other_numbers, ""),
    "arguments": ("h = power(h, self.w, self.n, self.m)", other_numbers, ""),
    "flags": ("h = torch.tanh(h) * self.gate + h * self.w", other_flags, "gate is not True"),
    "steps": (
        """
            if self.step < 2:
                h = torch.tanh(h) * h * self.w
            self.step += 1
            h = x + h * torch.sigmoid(h)
        """,
        again, 'if self.step < 2:',
    ),
    "what was seen": (
        """
            if len(self.seen) < 2:
                h = torch.tanh(h) * h * self.w
            self.seen.append(1)
            h = x + h * torch.sigmoid(h)
        """,
        again, 'if len(self.seen) < 2:',
    ),
    "a state": (
        """
            if self.state["i"] < 2:
                h = torch.tanh(h) * h * self.w
            self.state["i"] += 1
            h = x + h * torch.sigmoid(h)
        """,
        again, 'if self.state["i"] < 2:',
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_asked_as_they_were_seen(name: str, tmp_path: Path) -> None:
    lines, use, said = CASES[name]
    text = uses(tmp_path, LAYERS.replace("LINES", lines.strip()), use, "64, 256, 1024")
    assert said in text
    if use is other_numbers:
        assert ") not in ((3, 1), (4, 2))" in text


def test_a_number_of_another_type_makes_other_integers(tmp_path: Path) -> None:
    body = """
    class Model(nn.Module):
        def __init__(self, k=3):
            super().__init__()
            self.k = k

        def forward(self, x):
            p = x.argsort(-1) * self.k + 1
            return p * p - 2
    """

    def use(file: Any) -> list[object]:
        return [file.Model(k)(drawn()) for k in (3, 3.0, 2)]

    assert "type(k) is not int" in uses(tmp_path, body, use, "64, 256, 1024")


def test_a_negative_bit_is_no_dtype_of_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_runtime, "interpreted", lambda: True)
    plain, negated = (each.imag for each in (torch.ones(4, 3) * 1j, (torch.ones(4, 3) * 1j).conj()))
    layouts = [fused_runtime.plan_of(print, each)[0] for each in (plain, negated)]
    why = [fused_runtime.serves("x", x, x.dtype, x.shape, x.stride()) for x in (plain, negated)]
    assert plain.stride() == negated.stride()
    assert layouts[0] != layouts[1]
    assert why == [None, "x lies negated in memory"]
