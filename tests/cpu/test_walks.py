"""What a lane walks place by place: which reductions are one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.region import Region
from fusion_advisor.workers import Worker

from .regions import PACKED, decided, flow_of
from .test_emit import Tensors, checked, x
from .test_plans import best


def region_of(function: Callable[..., object], *inputs: torch.Tensor) -> Region:
    expressed = decided(flow_of(function, *inputs)).subject.expressed
    assert expressed is not None
    return expressed.region


def monoids(region: Region) -> list[str]:
    return sorted(region.exprs[number].monoid for number in region.all("reduce"))


# -- reductions over nothing but reductions --------------------------------------------------------

JOINED: dict[str, tuple[Callable[..., object], Tensors, list[str]]] = {
    "a maximum of maxima": (
        lambda a: F.max_pool2d(F.max_pool2d(a, 2), 3), (x(2, 3, 13, 20),), ["max"],
    ),
    "three of them": (
        lambda a: F.max_pool1d(F.max_pool1d(F.max_pool1d(a, 2), 2), 2), (x(2, 3, 26),), ["max"],
    ),
    "overlapping windows": (
        lambda a: F.max_pool2d(F.max_pool2d(a, 3, 2), 3, 1), (x(1, 3, 9, 14),), ["max"],
    ),
    "padded windows": (
        lambda a: F.max_pool2d(F.max_pool2d(a, 3, 2, 1), 3, 2, 1), (x(1, 3, 9, 14),),
        ["max", "max"],
    ),
    "a sum of sums": (lambda a: a.sum(-1).sum(-1), (x(40, 5, 6),), ["sum"]),
    "a sum of rounded sums": (
        lambda a: a.sum(-1).half().sum(-1, dtype=torch.float32), (x(40, 5, 6),), ["sum", "sum"],
    ),
    "a mean of means": (
        lambda a: F.avg_pool2d(F.avg_pool2d(a, 2), 2), (x(2, 3, 12, 16),), ["sum", "sum"],
    ),
    "a maximum of minima": (lambda a: a.amin(-1).amax(-1), (x(40, 5, 6),), ["max", "min"]),
    "maxima that are a result, too": (
        lambda a: (a.amax(-1), a.amax(-1).amax(-1)), (x(40, 5, 6),), ["max", "max"],
    ),
    "maxima that are needed twice": (
        lambda a: a.amax(-1).amax(-1, keepdim=True) - a.amax(-1), (x(40, 5, 6),), ["max", "max"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", JOINED)
def test_reductions_over_reductions_are_one(name: str, worker: Worker) -> None:
    function, inputs, expected = JOINED[name]
    assert monoids(region_of(function, *inputs)) == expected
    if len(expected) == 1:
        assert checked(function, inputs, worker, PACKED) is None


def test_rows_are_what_lanes_cannot_walk(worker: Worker) -> None:
    """The windows have more places than a row has channels."""

    def pooled_shares(a: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(F.max_pool2d(a.softmax(1), 2), 2)

    (step,) = best(pooled_shares, x(3, 5, 9, 13)).steps
    assert (step.schedule, step.length) == ("row", 5)
    assert checked(pooled_shares, (x(3, 5, 9, 13),), worker, PACKED) is None
