"""What a lane walks place by place: which reductions are one, in what order their places are
visited, and how many results a program takes meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.region.region import Region
from fusion_advisor.support.worker import Worker

from .regions import PACKED, RULES, decided, flow_of, kernel_of
from .test_emit import Tensors, checked, x
from .test_plans import best, plans_of


def region_of(function: Callable[..., object], *inputs: torch.Tensor) -> Region:
    expressed = decided(flow_of(function, *inputs)).subject.expressed
    assert expressed is not None
    return expressed.region


def monoids(region: Region) -> list[str]:
    return sorted(region.exprs[number].monoid for number in region.all("reduce"))


# -- reductions over nothing but reductions --------------------------------------------------------

JOINED: dict[str, tuple[Callable[..., object], Tensors, list[str]]] = {
    "a maximum of maxima": (
        lambda a: F.max_pool2d(F.max_pool2d(a, 2), 3), (x(1, 3, 13, 20),), ["max"],
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


# -- the order of places ---------------------------------------------------------------------------


def loops(text: str) -> list[tuple[str, int]]:
    """The loops over places, outermost first: whether each is written out, and its places."""
    found = re.findall(r"for tap\w* in (tl\.static_range|range)\((\d+)\)", text)
    return [(walk, int(count)) for walk, count in found]


def test_what_shares_a_line_is_loaded_back_to_back(worker: Worker) -> None:
    """The six neighbouring pixels of a row in two rows, then the other rows."""

    def pools(a: torch.Tensor) -> torch.Tensor:
        return F.max_pool3d(F.max_pool3d(a, 2), 3)

    text = kernel_of(pools, x(64, 64, 60, 61, 62)).text
    assert loops(text) == [("range", 18), ("tl.static_range", 12)]
    (load,) = re.findall(r"tl\.load\((.*?),\n", text, re.DOTALL)
    assert re.findall(r"\btap\w*", load) == [
        *(f"tap_{n}" for n in range(3)),
        *(f"tap_3_{n}" for n in range(3)),
    ]
    small = x(6, 1, 6, 7, 14)  # of samples and channels a square case would have a thousand rows
    for plan in range(len(plans_of(pools, small))):
        assert checked(pools, (small,), worker, plan=plan) is None


def test_channels_last_are_walked_by_their_steps() -> None:
    """Rows of pixels are further apart than pixels, whatever their dimensions' order."""
    turned = x(2, 12, 10, 6).permute(0, 3, 2, 1)
    text = kernel_of(lambda a: F.max_pool2d(a, 2) * 2, turned).text
    assert loops(text) == [("tl.static_range", 4)]
    assert re.search(r"tap_1 \* \w+_stride_2\s+\+ tap_0 \* \w+_stride_3", text)


def test_sizes_of_windows_stand_in_the_kernel() -> None:
    """Nothing is divided by an argument, and the compiler sees how far windows are apart."""
    text = kernel_of(lambda a: F.avg_pool2d(a.exp(), 2), x(4, 3, 12, 18)).text
    body = text[text.index("def k_kernel") : text.index("def k(")]
    assert "index % 9" in body
    assert "n_1 * 2" in body
    assert not re.search(r"(//|%) \w*_size", body)


# -- how much a program takes ----------------------------------------------------------------------

WALKED: dict[str, tuple[Callable[..., object], Tensors, int]] = {
    "nothing": (lambda a: a.exp() * 2, (x(64, 32, 64, 64),), 1024),
    "16 bytes": (lambda a: F.avg_pool2d(a.exp(), 2), (x(64, 32, 64, 64),), 512),
    "half as wide": (
        lambda a: F.avg_pool2d(a.exp(), 2), (x(64, 32, 64, 64, dtype=torch.bfloat16),), 1024,
    ),
    "32 bytes": (lambda a: F.avg_pool3d(a.exp(), 2), (x(64, 32, 16, 32, 32),), 256),
    "64 bytes": (lambda a: F.avg_pool2d(a.exp(), 4), (x(64, 32, 64, 64),), 128),
    "of two tensors": (
        lambda a, b: F.avg_pool2d(a * b, 2), (x(64, 32, 64, 64), x(64, 32, 64, 64)), 256,
    ),
    "256 bytes": (lambda a: F.avg_pool2d(a.exp(), 8), (x(64, 32, 256, 256),), 128),
    "lines of their own": (lambda a: a.exp().amin(1), (x(64, 32, 128, 128),), 512),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKED)
def test_what_resident_threads_walk_stays_in_the_l1(name: str) -> None:
    function, inputs, block = WALKED[name]
    (step,) = best(function, *inputs).steps
    assert (step.schedule, step.block, step.warps) == ("flat", block, 4)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_lanes_that_read_every_second_element_have_fewer(step: int) -> None:
    """Each is an access of its own: 4 of bfloat16 took 0.75 of the time of 8."""
    values = x(4000, 600 * step, dtype=torch.bfloat16)[:, ::step]
    (kernel,) = best(lambda a: a.exp() * 2, values).steps
    each = kernel.block // (32 * kernel.warps)
    assert (kernel.schedule, each) == ("flat", 8 if step == 1 else 4)


def test_rows_whose_lanes_walk_have_tiles_of_their_own() -> None:
    def tile(function: Callable[..., object], *inputs: torch.Tensor) -> int:
        decision = decided(flow_of(function, *inputs), RULES)
        assert decision.subject.plan is not None
        (step,) = decision.subject.plan.steps
        assert step.schedule == "row"
        return step.rows * step.block

    assert tile(lambda a: F.max_pool3d(a, 2).softmax(1), x(64, 16, 16, 64, 64)) == 2048
    assert tile(lambda a: (a * 2).softmax(1), x(64, 16, 8, 32, 32)) == 512
