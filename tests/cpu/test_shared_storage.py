"""Views of one storage: what kernels read of it, each element once, and that they are seen to."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.inputs import build_inputs

from .checks import checked
from .regions import decided, flow_of, kernel_of

M, N = 24, 200
FULL = 4 * M * N
"""Bytes of a float32 matrix."""


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape or (M, N))


def chosen(a: torch.Tensor) -> torch.Tensor:
    return torch.where(a[:, :-2] > 0, a[:, 2:], a[:, 1:-1])


def differences(a: torch.Tensor) -> torch.Tensor:
    return (a[:, 1:] - a[:, :-1]).abs()


def rows_apart(a: torch.Tensor) -> torch.Tensor:
    return (a[1:] - a[:-1]).abs()


def pairs(a: torch.Tensor) -> torch.Tensor:
    return torch.exp(a[:, ::2] - a[:, 1::2])


def gated(a: torch.Tensor) -> torch.Tensor:
    gate, up = a.chunk(2, -1)
    return F.silu(gate) * up


def softmax_of_differences(a: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a[:, 1:] - a[:, :-1], -1)


def a_part_turned(a: torch.Tensor) -> torch.Tensor:
    return torch.exp(a[:, 50:150]) * a[:, :100].flip(1)


def looked_up(a: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return (F.embedding(places[:, 1:], a) - F.embedding(places[:, :-1], a)).abs()


READ: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "chosen": (chosen, FULL),
    "differences": (differences, FULL),
    "rows apart": (rows_apart, FULL),
    "pairs": (pairs, FULL),
    "gated": (gated, FULL),
    "softmax of differences": (softmax_of_differences, FULL),
    "a part turned": (a_part_turned, 4 * M * 150),
}
"""Functions of one matrix, and what their kernels read of it."""


@pytest.mark.parametrize("name", READ)
def test_a_kernel_reads_each_element_once(name: str, worker: Worker) -> None:
    """By the plan, and by the interpreter at every size that is checked."""
    function, read = READ[name]
    plan = decided(flow_of(function, x())).subject.plan
    assert plan is not None
    assert plan.bytes_read == read
    made = kernel_of(function, x())
    assert all(case.loaded_bytes is not None for case in made.cases)
    if len(made.inputs) > 1:
        assert all(len({tensor.storage for tensor in case.inputs}) == 1 for case in made.cases)
    (check,) = checked(worker, made, seeds=2)
    assert check.failure is None


def test_a_chosen_neighbour_is_worth_a_kernel() -> None:
    """Read 4 B and write 1, read 1 and 4 and write 4: 14 B an element in eager, 8 in one kernel."""
    decision = decided(flow_of(chosen, x(8192, 8192)))
    assert decision.unfused_bytes / decision.fused_bytes == pytest.approx(1.75, rel=1e-3)
    assert decision.accepted


def test_places_of_two_lookups_are_of_one_storage(worker: Worker) -> None:
    """Indices that overlap have values that suit both."""
    places = torch.zeros(40, 30, dtype=torch.int64)
    made = kernel_of(looked_up, x(50, 64), places)
    (check,) = checked(worker, made, seeds=2)
    assert check.failure is None


def test_inputs_of_one_storage_are_views_of_it() -> None:
    made = kernel_of(pairs, x())
    for case in made.cases:
        left, right = build_inputs(case, "normal", 0)
        assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        assert right.data_ptr() - left.data_ptr() == 4
        assert left.isfinite().all()
        assert right.isfinite().all()


@pytest.mark.parametrize("shape", [(6,), (4, 6), (1, 6, 1, 1), (4, 6, 1)])
def test_a_row_is_the_last_dimension_of_several_elements(shape: tuple[int, ...]) -> None:
    """A weight of channels, (6, 1, 1), is one row. As six rows of one element, some on either side
    of zero, its elements cancel in a mean of channels: eager's error is as large as the mean."""
    case = Case("own", (Tensor(shape, x(*shape).stride(), "float32"),))
    for distribution, dim in (("large", 1), ("across", 0)):
        (drawn,) = build_inputs(case, distribution, 3)
        above = (drawn > 0).movedim(shape.index(6), -1).reshape(-1, 6)
        assert (above == above.select(dim, 0).unsqueeze(dim)).all()
        assert above.shape[1 - dim] == 1 or above.any() > above.all()
