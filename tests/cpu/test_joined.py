"""Joined values whose rows lie in one part each: a program makes the part that it is in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion_advisor.codegen.triton import Triton
from fusion_advisor.schedules.joined import searched
from fusion_advisor.support.worker import Worker
from fusion_advisor.tile.program import Block, Let, Literal, Name

from .regions import RULES, kernel_of
from .test_emit import Tensors, checked, x


def scaled(*tensors: torch.Tensor) -> torch.Tensor:
    """Joined along the channels, times what each channel has."""
    *parts, weight = tensors
    whole = torch.cat(parts, 1)
    return torch.relu(whole * weight.reshape(-1, *(1,) * (whole.dim() - 2)))


A, B = x(3, 8, 5, 20), x(3, 8, 5, 20)

APART: dict[str, tuple[Callable[..., object], Tensors]] = {
    "channels": (
        scaled, (x(3, 8, 5, 20), x(3, 4, 5, 20), x(3, 16, 5, 20), x(3, 4, 5, 20), x(32)),
    ),
    "parts of one size": (scaled, (*(x(2, 4, 9, 11) for _ in range(9)), x(36))),
    "parts that lie otherwise": (
        lambda a, b, w: scaled(a.transpose(0, 1), b[:, ::2], w),
        (x(8, 3, 5, 20), x(3, 16, 5, 20), x(16)),
    ),
    "parts of several types": (
        lambda a, b, w: scaled(a, b, w), (A.half(), B, x(16)),
    ),
    "parts that are made before": (
        lambda a, b, w: scaled(-a, torch.exp(b), w), (A, B, x(16)),
    ),
    "parts of two": (
        lambda a, b, w: scaled(a, b, w) + torch.cat((b, torch.sigmoid(a)), 1), (A, B, x(16)),
    ),
    "parts of a row's own numbers": (
        lambda a, b, v: torch.cat((a * v, b + v), 1).softmax(-1),
        (x(3, 8, 300), x(3, 8, 300), x(3, 8, 1)),
    ),
    "stacked": (lambda a, b: torch.stack((a, b), 1).softmax(-1) + 1, (x(6, 300), x(6, 300))),
    "one behind the other": (
        lambda a, b: torch.cat((-a, b)).softmax(-1), (x(6, 300), x(10, 300)),
    ),
    "joined twice": (
        lambda a, b, w: scaled(torch.cat((a, b), 1), b, w), (A, B, x(24)),
    ),
    "one part twice": (lambda a: torch.stack([a.flip(0)] * 2), (x(40, 777, dtype=torch.float16),)),
}  # fmt: skip

TOGETHER: dict[str, tuple[Callable[..., object], Tensors]] = {
    "rows of two parts in a program": (scaled, (x(3, 7, 5, 20), x(3, 9, 5, 20), x(16))),
    "along the row": (lambda a, b: torch.cat((a, b), 1).softmax(1), (x(6, 100), x(6, 200))),
    "a part of zeros": (
        lambda a: torch.cat((a, torch.zeros_like(a)), 1).softmax(-1), (x(3, 8, 300),),
    ),
    "a row's sum": (
        lambda a, b: torch.cat((a, b.softmax(-1)), 1) * 2, (x(3, 8, 300), x(3, 8, 300)),
    ),
}  # fmt: skip


def branches(function: Callable[..., object], *inputs: torch.Tensor) -> int:
    """Choices between parts in the first kernel."""
    text = kernel_of(function, *inputs, rules=RULES).text
    return text[text.index("# One program") : text.index("def k(")].count("    if ")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", APART)
def test_programs_make_the_part_that_they_are_in(name: str, worker: Worker) -> None:
    function, inputs = APART[name]
    assert branches(function, *inputs)
    assert checked(function, inputs, worker) is None


@pytest.mark.parametrize("name", TOGETHER)
def test_all_parts_are_made_where_programs_need_several(name: str, worker: Worker) -> None:
    function, inputs = TOGETHER[name]
    assert not branches(function, *inputs)
    assert checked(function, inputs, worker) is None


def test_a_part_is_found_by_halves() -> None:
    def found(*values: int) -> Block:
        return tuple(Let(("found",), Literal(str(value))) for value in values)

    place = Name("place")
    assert Triton().block(searched(place, [(0, found(1)), (3, found(2)), (5, found(3, 4))])) == [
        *("if place < 3:", "    found = 1", "elif place < 5:", "    found = 2", "else:"),
        *("    found = 3", "    found = 4"),
    ]
    lines = Triton().block(searched(place, [(n * n, found(n)) for n in range(70)]))
    assert max(len(line) - len(line.lstrip()) for line in lines) <= 4 * 7
    for at in (0, 1, 3, 4, 24, 25, 26, 4760, 4761, 9999):
        known = {"place": at}
        exec("\n".join(lines), known)
        assert known["found"] == min(int(at**0.5), 69)
