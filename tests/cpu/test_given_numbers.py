"""Numbers that kernels are given: what ops hand on, and what a patch need not ask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.lower import boundary, lower_region
from fusion_advisor.ir.graph import GivenNumber
from fusion_advisor.ops.given import HANDED_ON
from fusion_advisor.shipped.load import load_module
from fusion_advisor.sourcepatch.trial import patched_copy
from fusion_advisor.workflows.patch import Patched

from .in_process import WAYS
from .regions import Tape, launches
from .test_registry import S, T, needs_data, recorded, samples_of
from .test_sizes import assert_same, loaded, made, reasons

pytestmark = pytest.mark.usefixtures("ways")

PLAIN = [name for name in HANDED_ON if "_." not in name]
X = T((5, 33))
OWN = {
    **{
        f"aten.{name}.{kind}": (S(X, 3.5),)
        for name in ("add", "sub", "mul", "div")
        for kind in ("Tensor", "Scalar")
    },
    "aten.masked_fill.Scalar": (S(X, T((5, 33), torch.bool), 0.5),),
}
"""Samples with a number, where those of the registry have none."""


def given(flow: Dataflow, name: str, factor: float) -> Dataflow | None:
    """A graph with the numbers of an op, so many times as large, as arguments; None without one."""
    nodes, found = list(flow.nodes), 0
    for at, node in enumerate(nodes):
        args = list(node.args)
        for place in HANDED_ON[name] if node.op == name else ():
            value = args[place] if place < len(args) else None
            if isinstance(value, int | float) and not isinstance(value, bool):
                args[place] = GivenNumber(factor * value, place, "number")
                found += 1
        nodes[at] = replace(node, args=tuple(args))
    graph = replace(flow.annotated.graph, nodes=tuple(nodes))
    put = replace(flow, annotated=replace(flow.annotated, graph=graph))
    return put if found else None


@pytest.mark.parametrize("name", PLAIN)
def test_an_op_hands_its_number_on(name: str) -> None:
    """The region is the same whatever the number is, and has it as an argument."""
    seen = 0
    for sample in OWN.get(name) or samples_of(name):
        if needs_data(sample) or len(sample.args) > HANDED_ON[name][-1] + 1:
            continue
        tape = Tape()
        flow = tape.flow(
            *recorded(tape, name, sample, torch.float32, lambda t: t.make(torch.float32))
        )
        regions = []
        for factor in (1.0, 3.0):
            put = given(flow, name, factor)
            if put is not None:
                regions.append(lower_region(put, boundary(put, launches(put))))
        if regions:
            assert regions[0].form == regions[1].form, f"{name} {sample.args}"
            assert regions[0].numbers, f"{name} {sample.args}"
            assert regions[0].numbers != regions[1].numbers
            seen += 1
    assert seen, f"no sample of {name} has a number"


BLOCKS = """
import math
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, cap, eps):
        super().__init__()
        self.cap, self.eps, self.width = cap, eps, width
        self.norm = nn.LayerNorm(width, eps=eps)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x):
        {body}


class Model(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.one, self.two = Block(width, 30.0, 1e-5), Block(width, 50.0, 1e-3)
        self.between = nn.Linear(width, width)

    def forward(self, x):
        return self.two(self.between(self.one(x)))


def get_inputs():
    return [torch.randn(4096, 256)]
"""
BODIES = {
    "an attribute, its reciprocal too": (
        "y = torch.tanh(x / self.cap) * self.cap; return y * self.weight",
        ("self.weight, self.cap)",),
    ),
    "one that a method reads of its module": (
        "return torch.tanh(self.norm(x)) * self.weight",
        (", norm.eps",),
    ),
    "what is reckoned with some": (
        "s = x.exp() * (1.0 / math.sqrt(self.cap)); return s.sigmoid() * self.weight",
        ("1.0 / math.sqrt(self.cap))",),
    ),
    "a name": (
        "scale = 2 * self.cap + 1; y = x.exp() * scale; return y.sigmoid() * self.weight",
        ("self.weight, scale)",),
    ),
    "a size": (
        "y = x.exp() / x.shape[0]; return y.sigmoid() * self.weight",
        ("x.size(0))",),
    ),
}


def blocks(body: str) -> str:
    return BLOCKS.replace("{body}", body.replace("; ", "\n        "))


QUICK = ("one that a method reads of its module", "what is reckoned with some")
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in BODIES]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Patched]]:
    """Folder of a model of blocks with a body, and its patch, which no test changes."""

    @cache
    def of(name: str, ways: str) -> tuple[Path, Patched]:
        folder = tmp_path_factory.mktemp(f"blocks-{ways.replace(' ', '-')}")
        return folder, made(folder, blocks(BODIES[name][0]))

    return lambda name: of(name, WAYS.get())


@pytest.mark.parametrize("name", CASES)
def test_blocks_that_hold_other_numbers_have_one_kernel(
    patched: Callable[[str], tuple[Path, Patched]], name: str
) -> None:
    folder, patch = patched(name)
    assert patch.patch.refused == {}, reasons(patch)
    assert {put.occurrences for put in patch.patch.puts} == {2}, reasons(patch)
    for text in BODIES[name][1]:
        assert text in patch.diff
    asking = [
        t for path, t in patch.patch.after.items() if path.name in ("or_eager.py", "model.py")
    ]
    assert not any("!=" in text for text in asking)
    assert_same(patch, folder, [(5, 256), (1, 256)])


@pytest.mark.parametrize("name", CASES)
def test_a_number_that_changes_later_reaches_the_kernel(
    patched: Callable[[str], tuple[Path, Patched]], name: str
) -> None:
    folder, patch = patched(name)
    x = torch.randn(3, 256)
    with patched_copy(patch.diff, patch.patch.after, folder.resolve()) as copy:
        models = [loaded(folder / "model.py"), loaded(copy / "model.py")]
        before = models[0](x)
        for model in models:
            for each in (model.one, model.two):
                each.cap, each.norm.eps = 0.5, 0.25
        with torch.no_grad():
            torch.testing.assert_close(models[0](x), models[1](x), rtol=0, atol=0)
    changes = "cap" in BODIES[name][0] or "norm" in BODIES[name][0]
    assert torch.equal(before, models[0](x)) != changes


OTHER = """class Other(nn.Module):
    cap = 30.0

    def forward(self, x):
        return x


class Block"""
ASKED = {
    "a literal of a call, with another number": (
        "return self.scaled(x.exp(), 2.0) + 1\n\n"
        "    def scaled(self, x, by):\n        return x * (by * self.cap)"
    ),
    "two modules by one name": (
        "m = self; y = torch.tanh(x * m.cap); m = self.other; return y * m.cap"
    ),
    "a name that is bound again, to as large a number": (
        "s = self.cap; y = torch.tanh(x * s); s = 2 * self.half; return y * s"
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("body", ASKED.values(), ids=ASKED)
def test_a_number_that_is_not_passed_is_asked(tmp_path: Path, body: str) -> None:
    """A call that has the number as a literal keeps the guard of what it is made of."""
    text = blocks(body).replace("self.cap, self", "self.half = cap / 2; self.cap, self")
    text = text.replace("super().__init__()", "super().__init__(); self.other = Other()", 1)
    text = text.replace("class Block", OTHER)
    text = text.replace("50.0, 1e-3", "30.0, 1e-5")
    patch = made(tmp_path, text)
    assert patch.diff, reasons(patch)
    x = torch.randn(3, 256)
    with patched_copy(patch.diff, patch.patch.after, tmp_path.resolve()) as copy:
        models = [loaded(tmp_path / "model.py"), loaded(copy / "model.py")]
        for model in models:
            model.one.cap, model.two.half, model.two.other.cap = 0.5, 0.25, 0.125
        with torch.no_grad():
            torch.testing.assert_close(models[0](x), models[1](x), rtol=0, atol=0)


DECIDES = {
    "one that chooses a way": (
        "y = x.exp() * self.cap; y = y + 1 if self.cap > 40 else y; return y.sigmoid()",
        "self.cap > 40",
    ),
    "one with a way of its own": ("return (x.exp() + 1) ** self.cap", ""),
}


@pytest.mark.parametrize(("body", "kept"), DECIDES.values(), ids=DECIDES)
def test_a_number_that_decides_something_is_asked(tmp_path: Path, body: str, kept: str) -> None:
    patch = made(tmp_path, blocks(body))
    if patch.diff:
        assert "!=" in patch.diff or kept in patch.diff
    assert_same(patch, tmp_path, [(5, 256), (1, 256)])


def test_a_plan_is_not_taken_again_for_another_number(tmp_path: Path) -> None:
    """Host: what was launched for a layout is kept with its numbers."""
    runtime = load_module((Path("fusion_advisor/shipped/fused_runtime.py")).read_text(), tmp_path)
    x = torch.ones(4)
    layouts = [runtime.plan_of(len, x, numbers=(n,))[0] for n in (0.5, 0.25, 0.5)]
    assert layouts[0] == layouts[2] != layouts[1]
    assert runtime.inverse(4.0) == 0.25
    assert runtime.inverse(0.0) == float("inf")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("bound", [1, 2])
def test_a_number_that_is_the_default_at_one_size_is_given(tmp_path: Path, bound: int) -> None:
    """torch leaves a default out of a call, so that a bound of 1 is no argument and one of 2 is."""
    text = f"""
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, width, bound):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.bounded = nn.Hardtanh(-bound, bound)

    def forward(self, x):
        return torch.sigmoid(self.bounded(self.linear(x)))


def get_inputs():
    return [torch.randn(4096, 256)]


def get_init_inputs():
    return [256, {bound}]
"""
    patch = made(tmp_path, text)
    assert len(patch.patch.puts) == 1, reasons(patch)
    assert "bounded.min_val, bounded.max_val)" in patch.diff
