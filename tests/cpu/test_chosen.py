"""Conditional expressions whose branches may compute nothing: what a patch asks of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_alternatives import body, turned
from .test_other_uses import uses

pytestmark = pytest.mark.usefixtures("ways")

CALLED = """
        def pick(self, s, t):
            {lines}
            return torch.tanh(s) * self.scale + t

        def forward(self, x):
            return self.pick(self.a(x), self.b(x)) * self.scale
"""
OWN = """
        def forward(self, x):
            s, t = self.a(x), self.b(x)
            {lines}
            return torch.tanh(s) * self.scale + t
"""
ALIAS = OWN.replace("self.scale + t", "self.scale + y")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("around", "lines", "asked"),
    [
        (CALLED, "s = s if self.cap is None else s * self.cap", "or cap is not None"),
        (CALLED, "s = (s if self.cap is None else s * self.cap) * 2.0", "or cap is not None"),
        (CALLED, "s = torch.sigmoid(t if self.flag else s)", "or flag"),
        (CALLED, "s = (torch.sin if self.flag else torch.cos)(s)", ""),
        (CALLED, "s = getattr(s, 'sin' if self.flag else 'cos')()", ""),
        (CALLED, "act = torch.sin if self.flag else torch.cos; s = act(s)", "or flag"),
        (CALLED, "s, _ = [u if not self.flag else u * 2 for u in (s, t)]", "or flag"),
        (CALLED, "s = (self.flag and (s * 2.0,) or (s,))[0]", ""),
        (CALLED, "c = self.cap or 2.0; s = s * c", "or cap"),
        (CALLED, "if self.flag: s = s + 1.0", "or flag"),
        (CALLED, "if not self.flag: s = s * 2.0", "or flag"),
        (CALLED, "s = self.drop(s)", "or drop.p != 0.0"),
        (CALLED, "s = F.dropout(s, self.share, self.flag)", "or flag"),
        (CALLED, "s = self.shrink(s)", "or shrink.lambd != 0.5"),
        (CALLED, "s = F.gelu(s, **self.words)", ""),
        (ALIAS, "y = s; s = s if self.cap is None else s * self.cap", "is not"),
        (CALLED, "s = s.to(self.dtype)", "or dtype is not torch.float32"),
        (CALLED, "s = sum(self.extra, s)", "or extra != []"),
        (CALLED, "s = next((f(s) for f in self.extra), s)", "or extra != []"),
        (CALLED, "s = torch.stack([s, *self.extra]).sum(0)", "or extra != []"),
        (OWN, "s = (s if self.cap is None else s * self.cap) * 2.0", "if self.cap is not None"),
        (OWN, "s = torch.sigmoid(t if self.flag else s) * s", "if self.flag"),
    ],
)
def test_a_branch_that_computes_nothing_is_asked_for(
    tmp_path: Path, around: str, lines: str, asked: str
) -> None:
    text = uses(tmp_path, body(("plain",), around.format(lines=lines)), turned, "64, 32, 1024")
    functions = text[text.index("Written by") :] if "Written by" in text else ""
    if asked:
        assert asked in functions, text
    else:
        assert lines in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "lines",
    [
        "s = (s, t)[self.flag]",
        "both = [s, s * 2.0]; s = both[self.flag]",
        "both = [s, t]; both.reverse() if self.flag else None; s = both[0]",
    ],
)
def test_an_index_that_may_change_keeps_its_line(tmp_path: Path, lines: str) -> None:
    text = uses(tmp_path, body(("plain",), CALLED.format(lines=lines)), turned, "64, 32, 1024")
    assert lines in text
    assert "return fused_model.tanh_mul_add(s, self.scale, t)" in text


def test_a_choice_that_turns_out_either_way(tmp_path: Path) -> None:
    lines = "s, t = [u if n else u * 2.0 for n, u in enumerate((s, t))]"
    text = uses(tmp_path, body(("plain",), CALLED.format(lines=lines)), turned, "64, 32, 1024")
    assert lines in text
    assert "return fused_model.tanh_mul_add(s, self.scale, t)" in text


def test_cases_of_a_called_function_stay(tmp_path: Path) -> None:
    lines = """match self.share:
                case 0.0:
                    s = torch.sin(s)
                    s = s * 2.0
                case _:
                    s = s + 1.0"""
    text = uses(tmp_path, body(("plain",), CALLED.format(lines=lines)), turned, "64, 32, 1024")
    assert "match self.share:" in text
    assert "return fused_model.tanh_mul_add(s, self.scale, t)" in text
