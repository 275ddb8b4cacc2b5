"""The offline compile: resources as ptxas gives them, failures as one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fusion_advisor.verify import Worker, compile_offline, compiler

from .sample_kernels import SAMPLES, add_rms_norm, softmax


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with compiler() as worker:
        yield worker


def test_samples_compile_without_spills(worker: Worker) -> None:
    kernels = [sample() for sample in SAMPLES]
    for kernel, compiled in zip(kernels, compile_offline(kernels, 90, worker=worker), strict=True):
        assert compiled.failure is None, (kernel.name, compiled.failure)
        (resources,) = compiled.resources
        assert 16 <= resources.registers <= 255
        assert resources.spill_bytes == 0
        assert resources.triton
        assert resources.ptxas


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_other_devices(worker: Worker, capability: int) -> None:
    (compiled,) = compile_offline([add_rms_norm()], capability, worker=worker)
    assert compiled.failure is None


def test_spills_are_counted(worker: Worker) -> None:
    kernel = softmax()
    (launch,) = kernel.launches
    wide = replace(launch, constants=(("ROWS", 1), ("COLS", 32768)), num_warps=4)
    (compiled,) = compile_offline([replace(kernel, launches=(wide,))], 90, worker=worker)
    assert compiled.resources[0].spill_bytes > 0
    assert compiled.resources[0].registers == 255


def test_a_compile_error_is_one_line(worker: Worker) -> None:
    kernel = softmax()
    wrong = replace(kernel, text=kernel.text.replace("libdevice.exp(", "libdevice.nothing("))
    (compiled,) = compile_offline([wrong], 90, worker=worker)
    assert compiled.failure is not None
    assert "\n" not in compiled.failure
    assert "nothing" in compiled.failure


def test_an_unknown_launch_is_one_line(worker: Worker) -> None:
    kernel = softmax()
    (launch,) = kernel.launches
    (compiled,) = compile_offline(
        [replace(kernel, launches=(replace(launch, jit_name="gone"),))], 90, worker=worker
    )
    assert compiled.failure is not None
    assert "gone" in compiled.failure
