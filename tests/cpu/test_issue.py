"""What the warps of emitted kernels issue, beside what the hardware counted (ncu, H200, Triton 3.6,
2026-11-23): `smsp__inst_executed` and `l1tex__data_pipe_lsu_wavefronts`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.perfmodel.blocked_layout import Spread, spread
from fusion_advisor.perfmodel.model import Work

from .launches import empty, of_kernels
from .regions import BESIDE

Function = Callable[..., object]
HALF = torch.bfloat16


def work_of(function: Function, *shapes: tuple[int, ...], dtype: torch.dtype = HALF) -> Work:
    """Of the one kernel that a function over inputs of these shapes becomes, where as many warps
    share rows across memory as when it was counted."""
    inputs = (empty(*shape, dtype=dtype) for shape in shapes)
    (work,) = of_kernels(function, *inputs, rules=BESIDE)
    return work


def heavy(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.tanh(torch.exp(-torch.erf(x)))) + torch.log1p(x * x)


@dataclass(frozen=True)
class Counted:
    """One kernel: of a function over inputs of these shapes, and what was counted of it."""

    name: str
    function: Function
    shapes: tuple[tuple[int, ...], ...]
    instructions: int
    wavefronts: int
    dtype: torch.dtype = torch.float32


COUNTED = [
    Counted("elements", heavy, ((1024, 1024),), 3031040, 36864, HALF),
    Counted("rows in one warp", lambda x: (x * x).mean(-1), ((131072, 128),), 4669440, 1443754),
    Counted(  # on an H100, 2026-11-25
        "across rows", lambda x: torch.softmax(torch.tanh(x), 1), ((16, 32, 24, 48, 48),),
        48605184, 32657024,
    ),
    Counted(
        "windows", lambda x: F.avg_pool2d(torch.sigmoid(x), 4), ((64, 64, 112, 112),),
        24184832, 8005785,
    ),
    Counted(
        "turned", lambda x, y: torch.relu(x.t() + y), ((128, 131072), (131072, 128)),
        8192000, 4064630,
    ),
    Counted("the least of some", lambda x: torch.min(x * 2, 1)[0], ((16, 8, 6, 32, 32),),
            121344, 29737),
]  # fmt: skip


@pytest.mark.parametrize("counted", COUNTED, ids=lambda counted: counted.name)
def test_what_was_counted(counted: Counted) -> None:
    work = work_of(counted.function, *counted.shapes, dtype=counted.dtype)
    assert work.instructions == pytest.approx(counted.instructions, rel=0.35)
    assert work.wavefronts == pytest.approx(counted.wavefronts, rel=0.2)


def test_of_a_persistent_kernel_each_turn_is_counted() -> None:
    """Sums down columns, and the few rows of what programs left: 12977696 instructions, and 2844494
    wavefronts."""
    works = of_kernels(lambda x: torch.relu(x).sum(0), empty(16384, 4096))
    assert [work.kind for work in works] == ["kernel.persistent", "kernel.row"]
    assert works[0].depth == 63
    assert sum(work.instructions for work in works) == pytest.approx(12977696, rel=0.35)
    assert sum(work.wavefronts for work in works) == pytest.approx(2844494, rel=0.3)


def test_warps_that_give_each_other_results_meet_in_the_banks_of_shared_memory() -> None:
    """Rows that lie side by side are the lanes' own; where vectors of eight have warps beside them,
    all lanes of a warp write to one bank, and read there."""

    def served(dtype: torch.dtype) -> int:
        return work_of(lambda x: x.amax(1) * 2, (12, 64, 8, 20, 20), dtype=dtype).wavefronts

    assert served(HALF) > served(torch.float32)


def test_rows_end_in_masks_that_take_instructions() -> None:
    def issued(columns: int) -> float:
        work = work_of(lambda x: (x * x).mean(-1), (65536, columns))
        return work.instructions / (65536 * columns)

    assert issued(1001) > 1.2 * issued(1024)


@pytest.mark.parametrize(
    ("tile", "held"),
    [
        ((1024, 1, 4, 4), Spread(4, 32, 1, 4, 1, 8, 1)),
        ((64, 64, 8, 4), Spread(8, 8, 4, 1, 4, 8, 4)),
        ((16, 2, 8, 4), Spread(1, 16, 2, 1, 4, 1, 1)),
        ((2048, 8, 4, 1), Spread(4, 32, 1, 1, 1, 64, 8)),
    ],
    ids=["a row", "a tile", "more lanes than places", "one warp"],
)
def test_how_a_tile_is_spread(tile: tuple[int, int, int, int], held: Spread) -> None:
    assert spread(*tile, 32) == held
