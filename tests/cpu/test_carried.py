"""One pass over rows, whose results are combined down all of them: what is carried, and refused."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.schedules.base import Step
from fusion_advisor.support.worker import Worker

from .regions import RULES, decided, flow_of, kernel_of, why_not
from .test_emit import Tensors, checked, x

BF16, INT = torch.bfloat16, torch.int64


def cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (1 - F.cosine_similarity(one, other, 1)).mean()


def every_monoid(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    norms = rows.square().sum(1).sqrt()
    return norms.sum(), norms.amax(), norms.amin(), (rows.amax(1) * 0.01 + 1).prod(), norms.mean()


def with_rows(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What lies along the rows, too."""
    ends = torch.logsumexp(rows, 1)
    return ends, ends.mean(), ends.max(), torch.softmax(rows, 1)


def with_columns(grad: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    scale = torch.rsqrt((rows * rows).mean(-1, keepdim=True) + 1e-6)
    return (grad * rows * scale).sum(0), (rows * scale).abs().amax(1).sum()


def test_few_programs_are_checked_with_few_rows() -> None:
    """A program that walks 200 000 rows adds up as no program of the graph's does: that its sums
    are off was the check's doing."""

    def turned(rows: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = torch.roll(rows, 5, 1) * others
        return product, product.sum((0, 1))

    kernel = kernel_of(turned, torch.randn(64, 600, 33), torch.randn(64, 600, 33))
    (walked,) = (case for case in kernel.cases if case.programs)
    assert prod(walked.inputs[0].shape[:2]) == 600


ONE_PASS: dict[str, tuple[Callable[..., object], Tensors]] = {
    "classes": (F.cross_entropy, (x(600, 64), x(600, dtype=INT))),
    "a few classes": (F.cross_entropy, (x(256, 10), x(256, dtype=INT))),
    "few rows": (F.cross_entropy, (x(59, 457), x(59, dtype=INT))),
    "classes in front of pixels": (F.cross_entropy, (x(3, 21, 17, 19), x(3, 17, 19, dtype=INT))),
    "smoothed classes": (
        lambda rows, classes: F.cross_entropy(rows, classes, label_smoothing=0.1),
        (x(600, 20), x(600, dtype=INT)),
    ),
    "shares of classes": (
        lambda rows, shares: -(F.log_softmax(rows, 1) * shares).sum(1).mean(),
        (x(600, 20), x(600, 20)),
    ),
    "a mean over everything besides": (
        lambda rows: (rows.logsumexp(1).mean(), rows.mean()), (x(600, 40),),
    ),
    "rows that begin anywhere": (cosine, (x(700, 35, dtype=BF16), x(700, 35, dtype=BF16))),
    "rows of two dimensions": (lambda rows: rows.square().sum(2).sqrt().mean(), (x(30, 31, 33),)),
    "every monoid": (every_monoid, (x(500, 40),)),
    "integers": (lambda rows: (rows.amax(1) - rows.amin(1)).sum(), (x(900, 33, dtype=INT),)),
    "places": (lambda rows: (rows.argmax(1), rows.argmax(1).amax()), (x(900, 33, dtype=INT),)),
    "what lies along the rows": (with_rows, (x(500, 40),)),
    "columns": (with_columns, (x(9000, 48), x(9000, 48))),
    "columns of odd rows": (with_columns, (x(3000, 41, dtype=BF16), x(3000, 41, dtype=BF16))),
}  # fmt: skip

REFUSED: dict[str, tuple[Callable[..., object], Tensors, str]] = {
    "rows that need what all give": (
        lambda rows: rows - rows.square().sum(1).sqrt().mean(),
        (x(900, 40),),
        "the rows need what the columns give",
    ),
    "no rows at all": (
        lambda numbers, columns: numbers.exp().mean() * columns,
        (x(900), x(40)),
        "nothing that is carried is made along a row",
    ),
    "the same in every row": (
        lambda one, other, number: (torch.cat((one, other)), number.expand(2).amin(0, True)),
        (x(2), x(2), x(1)),
        "what is carried is the same in every row",
    ),
    "a part of a row": (
        lambda rows, parts: ((rows + parts).amax((1, 2)).sum(), parts.sum(0)),
        (x(900, 8, 40), x(900, 8, 1)),
        "a column's result spans a part of a row",
    ),
}  # fmt: skip


def schedule(function: Callable[..., object], *inputs: torch.Tensor) -> str:
    plan = decided(flow_of(function, *inputs), RULES).subject.plan
    assert plan is not None
    return plan.schedule


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ONE_PASS)
def test_what_rows_give_is_combined_in_the_same_pass(name: str, worker: Worker) -> None:
    function, inputs = ONE_PASS[name]
    assert schedule(function, *inputs) == "carried"
    assert checked(function, inputs, worker) is None


def test_rows_that_begin_anywhere_are_walked_in_small_tiles_by_more_programs() -> None:
    """They cannot be copied ahead: of 989 elements in float16 large tiles took 1192 us for 414."""

    def walked(columns: int) -> Step:
        given = x(64000, columns, dtype=BF16), x(64000, columns, dtype=BF16)
        plan = decided(flow_of(with_columns, *given), RULES).subject.plan
        assert plan is not None
        assert plan.schedule == "carried"
        return plan.steps[0]

    odd, even = walked(411), walked(416)
    assert (odd.stages, even.stages) == (1, RULES.schedules.persistent.stages.count)
    assert odd.rows * odd.block < even.rows * even.block
    assert odd.programs > even.programs


def test_long_rows_give_little_which_goes_through_memory() -> None:
    assert schedule(F.cross_entropy, x(4000, 1000), x(4000, dtype=INT)) == "row + row"


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_carried_says_why(name: str) -> None:
    function, inputs, why = REFUSED[name]
    assert why in why_not(decided(flow_of(function, *inputs), RULES))
