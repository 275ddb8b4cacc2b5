"""Conditional expressions whose branches may compute nothing: what a patch asks of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch

from .test_alternatives import body, turned
from .test_other_uses import uses
from .test_patch import asking, changed, made

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


def test_a_function_that_a_condition_chooses_is_asked_for_as_a_whole(tmp_path: Path) -> None:
    """`a if b else c.__code__` would ask `a` alone."""
    patch = made(
        tmp_path,
        """
        def soft(a, b):
            return torch.tanh(a * b) * 2.0

        def hard(a, b):
            return (a * b).clamp(-1, 1) * 2.0

        class Model(nn.Module):
            def __init__(self, kind="soft"):
                super().__init__()
                self.kind = kind

            def gated(self, a, b):
                chosen = soft if self.kind == "soft" else hard
                return chosen(a, b)

            def forward(self, x):
                return self.gated(x + 1.0, x) + x
        """,
    )
    assert "(soft if kind == 'soft' else hard).__code__.co_qualname != 'soft'" in asking(patch)
    for asked in ast.walk(ast.parse(asking(patch))):
        if isinstance(asked, ast.BoolOp):
            assert not any(isinstance(each, ast.IfExp) for each in asked.values)


def test_a_class_with_the_name_of_what_it_inherits_from(tmp_path: Path) -> None:
    patch = made(
        tmp_path,
        """
        class LayerNorm(nn.LayerNorm):
            def forward(self, x):
                return super().forward(x.float()).to(x.dtype)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = LayerNorm(1024)

            def forward(self, x):
                return self.norm(x * 2 + x)
        """,
    )
    assert "LayerNorm.forward" in asking(patch)


def test_a_function_of_torch_that_a_class_holds_is_asked_for(tmp_path: Path) -> None:
    """A class that inherits from it may hold another one."""
    patch = made(
        tmp_path,
        """
        class Gated(nn.Module):
            act = staticmethod(F.silu)

            def forward(self, gate, value):
                return self.act(gate) * value

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.gated = Gated()

            def forward(self, x):
                return self.gated(x, x * 2)
        """,
    )
    assert "is not torch.nn.functional.silu" in asking(patch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("held", "computed"),
    [
        ("functools.partial(F.leaky_relu, negative_slope=0.2)", "self.fn(x + 1.0) * 2.0"),
        ("functools.partial(leaky, slope=0.2)", "self.fn(x + 1.0) * 2.0"),
        ("operator.mul", "self.fn(torch.tanh(x), x)"),
        ("operator.mul", "combined(x, x * 2.0, self.fn)"),
        ("torch.Tensor.tanh", "self.fn(x) * x"),
        ("nn.SiLU().forward", "self.fn(x + 1.0) * 2.0"),
        ("Slope(0.2)", "self.fn(x + 1.0) * 2.0"),
    ],
)
def test_a_function_that_cannot_be_asked_for_keeps_its_call(
    tmp_path: Path, held: str, computed: str
) -> None:
    """Another one may be held there: of a function of a library, a method of torch's or a partial
    no condition tells which it is."""
    patch = made(
        tmp_path,
        f"""
        import functools
        import operator

        def leaky(x, slope=0.1):
            return torch.where(x > 0, x, x * slope)

        def combined(a, b, op):
            return op(torch.tanh(a), b)

        class Slope:
            def __init__(self, slope):
                self.slope = slope

            def __call__(self, x):
                return torch.where(x > 0, x, x * self.slope)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.fn = {held}

            def forward(self, x):
                return {computed}
        """,
    )
    kept = "combined(x, x * 2.0, self.fn)" if "combined" in computed else "self.fn("
    assert kept in (changed(patch) if patch.diff else computed)
    why = "(which function is called in|whether .* is called cannot be asked)"
    left = [*patch.unplaced.values(), *patch.patch.refused.values()]
    assert any(re.search(why, each) for each in left), left


FUNCTIONS = """
        def chosen(kind):
            if kind == "tanh":
                def act(x):
                    return torch.tanh(x) * 2.0
            else:
                def act(x):
                    return torch.sigmoid(x) * 3.0
            return act
"""
CLASSES = """
        def chosen(kind):
            if kind == "tanh":
                class Act(nn.Module):
                    def forward(self, x):
                        return torch.tanh(x) * 2.0
            else:
                class Act(nn.Module):
                    def forward(self, x):
                        return torch.sigmoid(x) * 3.0
            return Act()
"""


@pytest.mark.parametrize("several", [FUNCTIONS, CLASSES], ids=["functions", "classes"])
def test_one_of_several_of_a_name_keeps_its_call(tmp_path: Path, several: str) -> None:
    """Each branch of a function may define one, which no condition tells from the others."""
    rest = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.act = chosen("tanh")

            def forward(self, x):
                return self.act(x) + x * 2.0
    """
    patch = made(tmp_path, several + rest)
    assert not patch.diff or "self.act(x)" in changed(patch)
    left = [*patch.unplaced.values(), *patch.patch.refused.values()]
    assert any("cannot be asked" in each for each in left), left


def test_what_a_method_of_another_class_reads_is_read_behind_which_one_it_is(
    tmp_path: Path,
) -> None:
    """A class beside it has a method of that name which reads something else."""
    text = uses(
        tmp_path,
        """
        class Base(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                return self.gate(self.lin(x), x) + x

        class Plain(Base):
            def gate(self, h, x):
                return h - x

        class Model(Base):
            def __init__(self):
                super().__init__()
                self.act, self.alpha = nn.SiLU(), 0.7

            def gate(self, h, x):
                return self.act(h) * x * self.alpha
        """,
        lambda file: [each()(torch.ones(2, 3, 1024)) for each in (file.Model, file.Plain)],
    )
    assert "_or_eager(self.lin(x), x, self)" in text


def test_each_method_that_a_class_overrides_has_a_kernel(tmp_path: Path) -> None:
    """One line of a base class runs several; a class of the caller's has another one still."""
    text = uses(
        tmp_path,
        """
        class Centred(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.rand(1024))
                self.bias = nn.Parameter(torch.rand(1024))

            def normalize(self, x):
                c = x - x.mean(-1, keepdim=True)
                return c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5)

            def forward(self, x):
                return self.normalize(x) * self.weight + self.bias

        class Scaled(Centred):
            def normalize(self, x):
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

        class Largest(Centred):
            def normalize(self, x):
                return x / x.abs().amax(-1, keepdim=True)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.lin, self.b = Centred(), nn.Linear(1024, 1024), Scaled()

            def forward(self, x):
                return self.b(self.lin(self.a(x)))
        """,
        lambda file: [each()(torch.rand(2, 3, 1024)) for each in (file.Model, file.Largest)],
    )
    assert "self.normalize(x) * self.weight" not in text[: text.index("Written by")]
    for name in ("Centred.normalize", "Scaled.normalize"):
        assert f".__code__.co_qualname != '{name}'" in text


def test_the_share_of_a_dropout_is_not_asked_beside_whether_it_trains(tmp_path: Path) -> None:
    """A model whose share is another one drops nothing in eval either."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, share=0.0):
                super().__init__()
                self.drop = nn.Dropout(share)

            def forward(self, x):
                return torch.tanh(self.drop(torch.sigmoid(x) * 2))
        """,
        everywhere=True,
    )
    assert "drop.training" in asking(patch)
    assert "drop.p" not in asking(patch)
