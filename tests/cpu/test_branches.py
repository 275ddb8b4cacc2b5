"""Branches among the statements of a group: they go into the function beside the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from .test_other_uses import drawn, uses
from .test_patch import changed, made

pytestmark = pytest.mark.usefixtures("ways")


def body(forward: str, more: str = "") -> str:
    """A model of one block between products, called with what its block takes."""
    return f"""
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.gamma, self.use, self.seen = nn.Parameter(torch.rand(1024)), True, []
                self.norm = nn.LayerNorm(1024)
                self.wide = nn.Parameter(torch.rand(1024, 1024))
{more}
            def forward(self, x, h=None):
{forward}

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.block = nn.Linear(1024, 1024), nn.Linear(1024, 1024), Block()

            def forward(self, x):
                return self.block(self.a(x), self.b(x)) @ self.a.weight
    """


CASES = {
    "an operand that is optional": """
                if h is not None:
                    x = x + h
                a, b = x.chunk(2, dim=-1)
                y = torch.tanh(a) * torch.sigmoid(b)
                return torch.cat([y, y], -1)
    """,
    "a branch that did not run": """
                y = x * 0.5
                if h is None:
                    y = y + 3.0
                    self.seen.append(y)
                return F.softmax(y, -1)
    """,
    "attributes that one branch lacks": """
                if self.use:
                    x = x * self.gamma
                else:
                    x = x * self.missing
                return torch.tanh(x) + 1.0
    """,
    "an expression that may be left out": """
                y = torch.tanh(x) * (self.gamma if self.use else self.missing)
                return torch.sigmoid(y) * 2.0
    """,
    "a branch that makes the result": """
                y = x.pow(2) + 1e-3
                if self.use:
                    y = F.gelu(y) * 2.0
                return y
    """,
    "names of a branch's own": """
                if h is not None:
                    shift = h * 2.0
                    scale = shift.sigmoid()
                    x = x * scale + shift
                return torch.softmax(x, -1)
    """,
    "a name of a branch's own that is added to": """
                if h is not None:
                    shift = h * 2.0
                    shift = shift.sigmoid()
                    shift += 1.0
                    x = x + shift
                return torch.softmax(x, -1)
    """,
    "elif": """
                if self.use == "never":
                    x = x.relu()
                elif h is not None:
                    x = x + h
                else:
                    raise ValueError("no h")
                return torch.softmax(x * 2.0, -1)
    """,
    "an operand that a branch computes": """
                y = torch.tanh(x) * 2.0
                if h is not None:
                    y = y + h @ self.norm.weight.expand(1024, 1024)
                return torch.softmax(y, -1)
    """,
    "an operand that one of two branches computes": """
                y = self.norm(x) @ self.norm.weight.expand(1024, 1024) * 0.01
                if self.use is None:
                    y = y * 3.0
                elif h is not None:
                    if self.use:
                        y = y + (h @ self.norm.weight.expand(1024, 1024)).relu()
                return torch.softmax(y, -1)
    """,
    "a return behind it": """
                x = torch.tanh(x) + 1.0
                if self.use is None:
                    return x
                return x * 3.0
    """,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_each_branch_gives_what_the_original_gives(name: str, tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        found = list[object]()
        block = file.Block()
        block.missing = block.gamma * 3.0
        for block.use in (True, False, None, "never"):
            for h in (drawn(), None):
                try:
                    found += [block(drawn(), h), len(block.seen)]
                except ValueError as error:
                    found.append(str(error))
        return found

    text = uses(tmp_path, body(CASES[name]), use)
    assert "_or_eager(" in text
    source, _, functions = text.partition("Calls of kernels")
    assert "fusion-advisor: the" not in source
    assert functions.count("if ") >= 2 or "elif" in functions


def test_what_follows_a_return_does_not_come_before_it(tmp_path: Path) -> None:
    """A product that has no weight where the branch returns."""

    def use(file: Any) -> list[object]:
        found = list[object]()
        for use in (True, None):
            block = file.Block()
            block.use, block.wide = use, block.wide if use else None
            found.append(block(drawn()))
        return found

    uses(tmp_path, body(LEFT["is not reached where a branch leaves"]), use)


def test_a_branch_that_never_runs_needs_nothing(tmp_path: Path) -> None:
    """Neither an attribute that only it reads, nor an operand."""

    def use(file: Any) -> list[object]:
        block = file.Block()
        del block.gamma
        block.use, block.missing = False, torch.tensor(2.0)
        return [block(drawn())]

    uses(tmp_path, body(CASES["attributes that one branch lacks"]), use)


LEFT = {
    "leaves a branch": """
                y = torch.tanh(x) * 2.0
                if self.use is None:
                    return y
                y = y + 1.0
                return torch.sigmoid(y) @ self.norm.weight.expand(1024, 1024)
    """,
    "is not reached where a branch leaves": """
                y = torch.tanh(x) * 2.0
                if self.use is None:
                    return y
                g = x @ self.wide
                return y * torch.sigmoid(g)
    """,
    "is bound in a branch, and read behind it": """
                y = torch.tanh(x) * 2.0
                if self.use is None:
                    y, z = y + 1.0, y
                y = torch.sigmoid(y)
                if self.use is None:
                    y = y + z
                return y
    """,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("why", LEFT)
def test_what_a_function_cannot_do_for_its_caller_is_left(why: str, tmp_path: Path) -> None:
    patch = made(tmp_path, body(LEFT[why]), shape="8, 32, 1024")
    assert any(why in reason for reason in patch.unplaced.values()), patch.unplaced
    assert not patch.diff or "if self.use is None" in changed(patch)
