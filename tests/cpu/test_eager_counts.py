"""How eager's kernels spread and what their warps issue, beside what the hardware counted (ncu,
H200, torch 2.11, 2026-11-23): `launch__grid_size`, `launch__block_size`, warps that a
multiprocessor holds, `smsp__inst_executed`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.perfmodel.model import Work, instructions, launch_us

from .launches import empty, of_eager
from .regions import H200

HALF = torch.bfloat16


@dataclass(frozen=True)
class Counted:
    """One launch of eager's: of a function over inputs of these shapes, and what was counted of its
    largest kernel; the instructions are those of all that it launches."""

    name: str
    function: Callable[..., object]
    shapes: tuple[tuple[int, ...], ...]
    blocks: int
    warps: int
    held: int
    issued: int
    dtype: torch.dtype = torch.float32

    @property
    def work(self) -> Work:
        return of_eager(self.function, *(empty(*shape, dtype=self.dtype) for shape in self.shapes))


def normed(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, variance)


COUNTED = [
    Counted("a softmax in a warp", lambda x: x.softmax(-1), ((2048, 2048),), 512, 4, 24, 4808704),
    Counted(
        "a softmax across, of large blocks", lambda x: x.softmax(1), ((16, 32, 24, 48, 48),),
        162, 32, 32, 51869376,
    ),
    Counted(
        "a softmax across, of small blocks", lambda x: x.softmax(1), ((10922, 24, 16, 16),),
        792, 8, 48, 123808112,
    ),
    Counted(
        "the least of columns", lambda x: x.min(1), ((512, 64, 4096),), 16384, 4, 20, 115752960
    ),
    Counted("the most of rows", lambda x: x.max(-1), ((131072, 128),), 8192, 16, 64, 56492032),
    Counted(
        "channels that are neighbours", normed, ((1024, 8192), (8192,), (8192,)),
        1024, 16, 64, 4999072,
    ),
    Counted(
        "as many blocks below each other as there may be", normed, ((786432, 64), (64,), (64,)),
        256, 16, 64, 25154494, HALF,
    ),
    Counted(
        "channels of images", normed, ((1546, 64, 16, 16), (64,), (64,)), 98944, 2, 64, 28496556
    ),
    Counted(
        "windows of planes", lambda x: F.avg_pool2d(x, 11), ((13915, 72, 21, 21),),
        979, 32, 64, 35723778,
    ),
    Counted(
        "windows of small planes", lambda x: F.avg_pool3d(x, 2), ((221, 80, 29, 16, 16),),
        247520, 8, 40, 843548160,
    ),
    Counted(
        "the most of windows of volumes", lambda x: F.max_pool3d(x, 3, 2),
        ((255, 32, 8, 43, 43),), 73440, 8, 64, 395033760,
    ),
    Counted(
        "the most of windows", lambda x: F.max_pool2d(x, 3, 2, 1), ((16, 64, 56, 56),),
        3136, 8, 64, 11476992, HALF,
    ),
]  # fmt: skip


@pytest.mark.parametrize("counted", COUNTED, ids=lambda counted: counted.name)
def test_what_was_counted(counted: Counted) -> None:
    work = counted.work
    held = work.at_once / H200.sm_count * work.warps
    assert (work.programs, work.warps, held) == (counted.blocks, counted.warps, counted.held)
    assert instructions(work, H200) == pytest.approx(counted.issued, rel=0.2)


def test_lanes_beside_a_row_of_windows_issue_too_and_whole_warps_do_not() -> None:
    """Blocks lie over planes: a row of 8 windows keeps a warp busy, where there is none it ends."""

    def issued(high: int, wide: int) -> float:
        work = of_eager(lambda x: F.avg_pool3d(x, 2), empty(16, 16, 16, high, wide))
        return instructions(work, H200)

    assert issued(16, 16) == pytest.approx(issued(16, 64), rel=0.01)
    assert issued(16, 64) > 3 * issued(2, 64)


PIXELS = (6, 21, 600, 500)
"""Scores of the classes of pixels, of six images."""
REDUCED = [
    ("none", (5000, 30), (5, 32, 2, 1)),
    ("mean", (5000, 30), (1, 8, 40, 1)),
    ("sum", (5000, 30), (1, 8, 40, 1)),
    ("none", PIXELS, (1758, 32, 2, 1)),
    ("mean", PIXELS, (12, 32, 294, 4)),
    ("sum", PIXELS, (12, 32, 294, 3)),
]
"""Blocks, warps, rounds of loads and launches, as cuda/Loss.cu and NLLLoss2d.cu compute them."""


@pytest.mark.parametrize(("reduction", "shape", "launched"), REDUCED)
def test_a_loss_of_classes_spreads_by_its_reduction(
    reduction: str, shape: tuple[int, ...], launched: tuple[int, ...]
) -> None:
    classes = empty(shape[0], *shape[2:], dtype=torch.int64)
    work = of_eager(partial(F.nll_loss, reduction=reduction), empty(*shape), classes)
    assert (work.programs, work.warps, work.depth, work.launches) == launched


def test_a_kept_loss_of_many_rows_takes_less_than_a_reduced_one() -> None:
    rows, classes = empty(1 << 20, 32), empty(1 << 20, dtype=torch.int64)

    def us(reduction: str) -> float:
        return launch_us(of_eager(partial(F.nll_loss, reduction=reduction), rows, classes), H200)

    assert 10 * us("none") < us("mean")


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy]
)
def test_a_loss_that_keeps_its_elements_is_a_pointwise_kernel(loss: Callable[..., object]) -> None:
    inputs = empty(4096, 2048), empty(4096, 2048)
    kept = of_eager(partial(loss, reduction="none"), *inputs)
    plain = of_eager(torch.sub, *inputs)
    seen = [(w.kind, w.op, w.programs, w.warps) for w in (kept, plain)]
    assert seen[0] == seen[1]
    assert kept.instructions > plain.instructions


@pytest.mark.parametrize("width", [96, 2176, 2178])
def test_an_rms_norm_is_launched_as_a_layer_norm(width: int) -> None:
    """By one kernel, which has a block of 128 threads a row where rows are whole vectors, and by
    two where they are not (native/cuda/layer_norm_kernel.cu)."""

    def seen(norm: Callable[..., object]) -> tuple[object, ...]:
        work = of_eager(norm, empty(4736, width, dtype=HALF))
        return work.op, work.programs, work.warps, work.depth, work.launches

    shape = (width,)
    rms = seen(partial(F.rms_norm, normalized_shape=shape))
    assert rms == seen(partial(F.layer_norm, normalized_shape=shape))
    assert rms[1:3] == ((4736, 4) if width % 4 == 0 else (4736, 16))


WINDOWS: dict[str, tuple[Callable[[torch.Tensor], object], int, int]] = {
    "a pooling's": (lambda x: F.avg_pool2d(x, (4, 2)), 4, 8),
    "an adaptive pooling's": (lambda x: F.adaptive_avg_pool2d(x, (4, 8)), 16, 128),
    "the nearest place": (lambda x: F.interpolate(x, scale_factor=2), 1, 1),
    "places around": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 2, 4),
    "further places": (lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), 4, 16),
}


@pytest.mark.parametrize(("function", "rounds", "places"), WINDOWS.values(), ids=WINDOWS)
def test_a_result_is_made_of_its_window(
    function: Callable[[torch.Tensor], object], rounds: int, places: int
) -> None:
    """The second argument of a pooling is its window, of the others the size of the result."""
    work = of_eager(function, empty(16, 32, 64, 64))
    assert (work.depth, work.near) == (rounds, places)
