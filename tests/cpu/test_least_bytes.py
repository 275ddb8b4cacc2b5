"""What every way of computing a group must move: no time is called too short for bytes that a
kernel may leave where they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion_advisor.region.region import Region

from .regions import decided, flow_of

A, B = torch.empty(64, 256), torch.empty(64, 256)


def region_of(function: Callable[..., object], *inputs: torch.Tensor) -> Region:
    plan = decided(flow_of(function, *inputs)).subject.plan
    assert plan is not None
    return plan.region


FEW: dict[str, tuple[Callable[..., object], set[int]]] = {
    "a sum": (lambda a, b: (a + b) * 2, set()),
    "one of two": (lambda a, b: torch.where(a > 0, b, 0.0) * 2, {1}),
    "either of two": (lambda a, b: torch.where(torch.arange(256) < 3, a, b).softmax(-1), {0, 1}),
    "a choice of what is read anyway": (lambda a, b: torch.where(a > b, a, b) * 2, set()),
    "a choice behind a choice": (
        lambda a, b: torch.where(torch.arange(256) < 3, torch.where(a > 0, b, 1.0), 0.0) * 2,
        {0, 1},
    ),
}


@pytest.mark.parametrize("name", FEW)
def test_inputs_that_a_kernel_may_leave(name: str) -> None:
    function, wanted = FEW[name]
    region = region_of(function, A, B)
    assert {*region.discarded} == wanted
