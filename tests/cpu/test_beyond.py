"""What lanes behind a row's end are filled with: reductions that find their neutral element there
have no mask, others keep theirs, and either way kernels give what eager gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import collect_check, submit_check

from .regions import SHARING, kernel_of


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape)


def rms_norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def hidden(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x * 0.125).masked_fill(x > 1, float("-inf")), -1)


def layer_norm(x: torch.Tensor) -> torch.Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + 1e-5)


LOWEST, ZERO, HIGHEST = 'float("-inf")', "0.0", 'float("inf")'
CASES: dict[str, tuple[Callable[..., Any], str, int]] = {
    "maximum and powers": (lambda x: torch.softmax(x, -1), LOWEST, 0),
    "logsumexp": (lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1).log(), LOWEST, 0),
    "scaled and hidden": (hidden, LOWEST, 0),
    "squares": (rms_norm, ZERO, 0),
    "minimum": (lambda x: x - x.amin(-1, keepdim=True), HIGHEST, 0),
    "deviations": (layer_norm, ZERO, 1),
    "maximum and a plain sum": (lambda x: x - (x.amax(-1, True) + x.sum(-1, True)), ZERO, 1),
    "powers alone": (lambda x: x / x.exp().sum(-1, True), LOWEST, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_masks_are_few(name: str, worker: Worker) -> None:
    function, fill, masked = CASES[name]
    kernel = kernel_of(function, x(9, 1000), name="filled")
    body = kernel.text[kernel.text.index("def filled_kernel") : kernel.text.index("def filled(")]
    assert f"other={fill}" in body
    assert len(re.findall(r"tl\.where\(\s*(?:col_)?mask,", body)) == masked
    check = collect_check(kernel, submit_check(worker, kernel))
    assert check.failure is None


def test_programs_that_share_a_row_fill_it_once(worker: Worker) -> None:
    """The first exchange needs 0, the second would rather have -inf: it keeps its masks."""
    kernel = kernel_of(lambda x: torch.softmax(rms_norm(x), -1), x(40, 704), rules=SHARING)
    assert 'mask=col_mask, other=float("-inf")' not in kernel.text
    assert len(re.findall(r"tl\.where\(col_mask,", kernel.text)) == 2
    check = collect_check(kernel, submit_check(worker, kernel))
    assert check.failure is None
