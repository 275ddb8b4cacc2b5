"""The runtime beside kernels, without a GPU: which calls take the plan of one before."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion_advisor.shipped import fused_runtime as host


class Launches:
    """A kernel, and what its launches were given."""

    def __init__(self) -> None:
        self.given: list[tuple[object, ...]] = []

    def start(self, *arguments: object) -> None:
        self.given.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """One whose launcher has been called with a tensor of 4 x 8, on the device that is current."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    monkeypatch.setattr(host, "plans", {})
    made, x, out = Launches(), torch.zeros(4, 8), torch.empty(4, 8)
    layout, plan = host.plan_of(made, x)
    assert plan is None
    host.remember(layout, (x,), (out,), [(made.start, (x, out), (4, 8))])
    return made


def test_a_call_of_the_same_layout_launches_with_its_own_pointers(kernel: Launches) -> None:
    for _ in range(2):
        x = torch.ones(4, 8)
        _, plan = host.plan_of(kernel, x)
        assert plan is not None
        result = host.do_again(plan, x)
        assert (result.shape, result.stride(), result.dtype) == ((4, 8), (8, 1), torch.float32)
        assert kernel.given.pop() == (x.data_ptr(), result.data_ptr(), 4, 8)


@pytest.mark.parametrize(
    "other",
    [
        lambda: torch.zeros(8, 4),
        lambda: torch.zeros(8, 4).t(),
        lambda: torch.zeros(4, 8, dtype=torch.float16),
        lambda: torch.zeros(4, 8, dtype=torch.int32),
        lambda: torch.zeros(33)[1:].view(4, 8),
        lambda: torch.zeros(4, 8, requires_grad=True),
    ],
    ids=["shape", "strides", "dtype", "integers", "alignment", "gradient"],
)
def test_a_call_of_another_layout_has_no_plan(
    kernel: Launches, other: Callable[[], torch.Tensor]
) -> None:
    assert host.plan_of(kernel, other())[1] is None


def test_another_kernel_has_no_plan(kernel: Launches) -> None:
    assert host.plan_of(Launches(), torch.zeros(4, 8))[1] is None


def test_one_tensor_for_two_is_no_plan(kernel: Launches) -> None:
    x, out = torch.zeros(4, 8), torch.empty(4, 8)
    layout, _ = host.plan_of(kernel, x, x)
    host.remember(layout, (x, x), (out,), [(kernel.start, (x, x, out), ())])
    assert host.plan_of(kernel, x, torch.zeros(4, 8))[1] is None


def test_scratch_is_made_anew_and_what_was_zero_is_zero(kernel: Launches) -> None:
    x, out = torch.zeros(16), torch.empty(16)
    scratch, words = torch.empty(3), torch.zeros(5, dtype=torch.int64)
    seen: list[tuple[int, ...]] = []
    layout, _ = host.plan_of(kernel, x)
    host.remember(
        layout, (x,), (out,), [(lambda *given: seen.append(given), (x, scratch, words, out), (7,))],
        scratch=(scratch,), zeroed=(words,),
    )  # fmt: skip
    _, plan = host.plan_of(kernel, x)
    result = host.do_again(plan, x)
    (given,) = seen
    assert (given[0], given[3], given[4]) == (x.data_ptr(), result.data_ptr(), 7)
    assert len({*given}) == len(given)
    assert not {given[1], given[2]} & {scratch.data_ptr(), words.data_ptr()}
