"""Arguments as large as a dimension: a kernel serves that size alone, and what the argument makes
of another one is the reference's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.support.worker import Worker

from .checks import checked
from .regions import kernel_of

PINNED: dict[str, tuple[Callable[..., object], tuple[int, ...], tuple[int, ...]]] = {
    "groups of one channel": (lambda a: F.group_norm(a, 3) * 2, (7, 3, 7, 7), (1,)),
    "a pool to the size that is there": (
        lambda a: F.adaptive_max_pool2d(torch.exp(a), 4, return_indices=False) * 2,
        (7, 3, 4, 4),
        (2, 3),
    ),
    "a slice from the end that is all": (lambda a: torch.exp(a)[:, -8:] * 2, (7, 8), (1,)),
    "a part that is all": (lambda a: torch.exp(a).split(8, 1)[0] * 2, (7, 8), (1,)),
    "a shuffle of one channel each": (
        lambda a: F.channel_shuffle(torch.exp(a), 4) * 2,
        (7, 4, 5, 5),
        (1,),
    ),
}


@pytest.mark.parametrize("name", PINNED)
def test_an_argument_as_large_as_a_dimension(name: str) -> None:
    function, shape, dims = PINNED[name]
    made = kernel_of(function, torch.empty(shape))
    shapes = [case.inputs[0].shape for case in made.cases]
    assert all(each[d] == shape[d] for each in shapes for d in dims)
    assert any(each != shape for each in shapes), "the other dimensions are free"


FREE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a loss by labels": lambda a, i: F.cross_entropy(a * 2, i),
    "its labels with one that is ignored": lambda a, i: F.nll_loss(a.log_softmax(1), i),
    "log-probabilities of labels": lambda a, i: a.log_softmax(1).gather(1, i[:, None]) * 2,
}


@pytest.mark.parametrize("name", FREE)
def test_an_element_that_a_label_picks_pins_no_size(name: str, worker: Worker) -> None:
    made = kernel_of(FREE[name], torch.empty(70, 30), torch.randint(30, (70,)))
    shapes = [case.inputs[0].shape for case in made.cases]
    assert len({each[1] for each in shapes}) > 2
    assert all(case.ranges[1] == (0, case.inputs[0].shape[1]) for case in made.cases)
    (check,) = checked(worker, made, seeds=2)
    assert check.failure is None
