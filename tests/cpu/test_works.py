"""What decides how long launches take: read off eager's operators and off plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.device import LINE_BYTES
from fusion_advisor.predict import Work
from fusion_advisor.records import Tensor
from fusion_advisor.requests import seen_twice
from fusion_advisor.schedules.layout import Access
from fusion_advisor.works import eager_works, fused_works

from .regions import decided, flow_of


def of_kernels(function: Callable[..., object], *inputs: torch.Tensor) -> tuple[Work, ...]:
    return fused_works(decided(flow_of(function, *inputs)).subject)


def of_eager(function: Callable[..., object], *inputs: torch.Tensor) -> Work:
    return eager_works(decided(flow_of(function, *inputs)).subject)[0]


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def asked_per_line(work: Work) -> float:
    return work.lines * LINE_BYTES / work.bytes


@pytest.mark.parametrize(
    ("function", "shape", "least", "most"),
    [
        (lambda a: torch.tanh(a) * 2, (1024, 1024), 0.9, 1.1),
        (lambda a: torch.tanh(a) * 2, (1023, 1023), 3.5, 4.5),
        (lambda a: F.avg_pool2d(torch.tanh(a), 4), (16, 64, 128, 128), 3.5, 4.5),
        (lambda a: torch.softmax(a * 2, -1), (1024, 1024), 0.9, 1.1),
    ],
    ids=["whole vectors", "an end that is no vector", "windows apart", "rows"],
)
def test_the_lines_that_warps_ask_for(
    function: Callable[..., object], shape: tuple[int, ...], least: float, most: float
) -> None:
    (work,) = of_kernels(function, empty(*shape))
    assert least < asked_per_line(work) < most


def test_halves_of_what_is_read_are_read_once() -> None:
    def access(name: str, width: int, offset: int) -> Access:
        tensor = Tensor((64, width), (128, 1), "float32", storage=0, offset=offset)
        return Access(name, tensor, ((0,), (1,)), {0: 128, 1: 1})

    whole, left, right = access("whole", 128, 0), access("left", 64, 0), access("right", 64, 64)
    assert seen_twice((whole, left, right)) == whole.tensor.bytes
    assert seen_twice((left, right)) == 0
    assert seen_twice((access("apart", 64, 0), access("wider", 96, 32))) == 0


def test_eager_converts_types_by_a_slower_kernel() -> None:
    a, b = empty(64, 64), empty(64, 64, dtype=torch.bfloat16)
    assert of_eager(lambda a, b: a * b, a, b).kind == "eager.cast"
    assert of_eager(lambda a, b: torch.where(a > 0, a, b), a, a).kind == "eager.stream"


@pytest.mark.parametrize(("channels", "warps"), [(256, 1), (8192, 16)])
def test_short_rows_have_a_warp(channels: int, warps: int) -> None:
    work = of_eager(lambda a: F.group_norm(a, 8), empty(512, channels))
    assert (work.programs, work.warps, work.depth) == (512 * 8, warps, channels // 8)


@pytest.mark.parametrize(("length", "odd"), [(1024, False), (1023, True)])
def test_rows_that_are_no_whole_vectors_are_known(length: int, odd: bool) -> None:
    assert of_eager(lambda a: F.layer_norm(a, (length,)), empty(64, length)).unaligned == odd


@pytest.mark.parametrize(
    ("rows", "length", "blocks", "stages"),
    [(512, 4096, 32, 1), (512, 16384, 512, 1), (4, 1 << 22, 528, 2)],
    ids=["a warp each", "a block each", "several blocks each"],
)
def test_how_a_reduction_spreads(rows: int, length: int, blocks: int, stages: int) -> None:
    work = of_eager(lambda a: a.mean(-1), empty(rows, length))
    assert (work.programs, work.depth) == (blocks, stages)
