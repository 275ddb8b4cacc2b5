"""The offline compile: resources as ptxas gives them, failures as one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import compiler

from .checks import compiled
from .regions import kernel_of
from .sample_kernels import SAMPLES, add_rms_norm, softmax


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with compiler() as worker:
        yield worker


def test_samples_compile_without_spills(worker: Worker) -> None:
    kernels = [sample() for sample in SAMPLES]
    for kernel, found in zip(kernels, compiled(worker, *kernels), strict=True):
        assert found.failure is None, (kernel.name, found.failure)
        (resources,) = found.resources
        assert 16 <= resources.registers <= 255
        assert resources.spill_bytes == 0
        assert resources.triton
        assert resources.ptxas


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_other_devices(worker: Worker, capability: int) -> None:
    (found,) = compiled(worker, add_rms_norm(), capability=capability)
    assert found.failure is None


SAME = torch.empty(1, 40, dtype=torch.int32).expand(300, 40)
ALONE = torch.empty(1, 1, dtype=torch.int32).expand(300, 1)
ALONG = torch.empty(5, 1, 1, dtype=torch.float64).expand(5, 4, 3)


@pytest.mark.parametrize(
    ("function", "rows"),
    [
        (lambda a: a.argmax(1).float() * 2, SAME),
        (lambda a: a.sum(1).float() * 2, SAME),
        (lambda a: a.argmax(0).float() * 2, ALONE),
        (lambda a: (a * F.silu(a).roll([0], [2])).mean(0) * 2, ALONG),
    ],
    ids=["extreme", "sum", "of one element", "rolled"],
)
def test_rows_that_are_the_same(
    function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, worker: Worker
) -> None:
    """Values of one row beside the places of all of them, which the interpreter combines and the
    compiler does not."""
    (found,) = compiled(worker, kernel_of(function, rows))
    assert found.failure is None


def test_spills_are_counted(worker: Worker) -> None:
    kernel = softmax()
    (launch,) = kernel.launches
    wide = replace(launch, constants=(("ROWS", 1), ("COLS", 32768)), num_warps=4)
    (found,) = compiled(worker, replace(kernel, launches=(wide,)))
    assert found.resources[0].spill_bytes > 0
    assert found.resources[0].registers == 255


def test_a_compile_error_is_one_line(worker: Worker) -> None:
    kernel = softmax()
    wrong = replace(kernel, text=kernel.text.replace("libdevice.exp(", "libdevice.nothing("))
    (found,) = compiled(worker, wrong)
    assert found.failure is not None
    assert "\n" not in found.failure
    assert "nothing" in found.failure


def test_an_unknown_launch_is_one_line(worker: Worker) -> None:
    kernel = softmax()
    (launch,) = kernel.launches
    (found,) = compiled(worker, replace(kernel, launches=(replace(launch, jit_name="gone"),)))
    assert found.failure is not None
    assert "gone" in found.failure
