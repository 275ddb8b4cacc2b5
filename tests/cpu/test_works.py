"""What decides how long launches take: read off eager's operators and off plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.perfmodel.model import Work

from .launches import eager_of, empty, of_eager, of_kernels
from .regions import BESIDE, H200, RULES, decided, flow_of

HALF = torch.bfloat16


def test_what_several_tensors_have_in_common_is_found_in_the_l2() -> None:
    def steps(a: torch.Tensor) -> torch.Tensor:
        return torch.exp(a[:, 1:] - a[:, :-1])

    (work,) = of_kernels(steps, empty(64, 128))
    asked = 2 * 4 * 64 * 127
    assert (work.bytes_read, work.resident) == (asked, asked - 4 * 64 * 128)


def test_eager_converts_types_by_a_slower_kernel() -> None:
    a, b = empty(64, 64), empty(64, 64, dtype=HALF)
    assert of_eager(lambda a, b: a * b, a, b).kind == "cast"
    assert of_eager(lambda a, b: torch.where(a > 0, a, b), a, a).kind == "stream"
    assert of_eager(lambda a: a.to(torch.float8_e4m3fn), a).kind == "stream"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda a: a.sum(-1), "row"),
        (lambda a: a.sum(0), "column"),
        (lambda a: a.amax(-1), "extreme"),
        (lambda a: a.argmin(0), "extreme"),
        (lambda a: F.layer_norm(a, a.shape[-1:]), "layer"),
        (lambda a: F.group_norm(a, 8), "norm"),
        (lambda a: F.rms_norm(a, a.shape[-1:]), "rms"),
        (lambda a: a.log_softmax(-1), "softmax"),
        (lambda a: a.cumsum(-1), "scan"),
        (lambda a: a.mean(1, True).expand(a.shape) * a, "row"),
    ],
)
def test_kinds_of_reductions(function: Callable[..., object], kind: str) -> None:
    assert of_eager(function, empty(256, 1024)).kind == kind


@pytest.mark.parametrize(
    ("rows", "length", "dim", "blocks", "rounds", "launches"),
    [
        (512, 4096, 1, 32, 32, 1),
        (512, 16384, 1, 512, 8, 1),
        (4, 1 << 22, 1, 528, 16, 2),
        (256, 8192, 0, 64, 16, 1),
        (131072, 128, 0, 2048, 4, 2),
    ],
    ids=["a warp each", "a block each", "several blocks each", "columns", "blocks share columns"],
)
def test_how_a_reduction_spreads(
    rows: int, length: int, dim: int, blocks: int, rounds: int, launches: int
) -> None:
    work = of_eager(lambda a: a.mean(dim), empty(rows, length))
    assert (work.programs, work.depth, work.launches) == (blocks, rounds, launches)


@pytest.mark.parametrize(
    ("function", "shape", "blocks", "rounds"),
    [
        (lambda a: a.cumsum(1), (16, 1024, 256), 32, 1024),
        (lambda a: a.cumsum(1), (5282, 1984), 166, 3 * 62),
        (lambda a: a.cumsum(1), (64, 1984), 16, 3 * 8),
        (lambda a: a.cumsum(1), (60000, 72), 1875, 3 * 3),
        (lambda a: a.cumsum(1), (140000, 72), 140000, 3),
        (lambda a: a.logcumsumexp(1), (140000, 72), 140000, 6),
        (lambda a: torch.softmax(a, -1), (1024, 2048), 256, 1),
        (lambda a: torch.softmax(a, -1), (32, 65536), 32, 16),
        (lambda a: F.layer_norm(a, (65536,)), (32, 65536), 32, 256),
        (lambda a: F.layer_norm(a, (1023,)), (64, 1023), 64, 4),
        (lambda a: F.rms_norm(a, (65536,)), (32, 65536), 32, 128),
        (lambda a: F.rms_norm(a, (1023,)), (64, 1023), 64, 4),
    ],
    ids=[
        "columns summed up",
        "rows summed up",
        "few rows",
        "many rows",
        "so many that torch's difference wraps around",
        "with logarithms",
        "a row a warp",
        "long rows",
        "a norm",
        "rows of no whole vectors",
        "without a mean",
        "without a mean, no whole vectors",
    ],
)
def test_how_often_eager_waits_for_loads(
    function: Callable[..., object], shape: tuple[int, ...], blocks: int, rounds: int
) -> None:
    work = of_eager(function, empty(*shape))
    assert (work.programs, work.depth) == (blocks, rounds)


def test_a_pool_walks_every_place_of_its_windows() -> None:
    assert of_eager(lambda a: F.avg_pool2d(a, 4), empty(16, 64, 128, 128)).elements == 1 << 24
    assert of_eager(lambda a: F.interpolate(a, 64), empty(16, 64, 32)).elements == 1 << 16
    adaptive = of_eager(lambda a: F.adaptive_avg_pool2d(a, 7), empty(16, 64, 56, 56))
    assert adaptive.elements == 16 * 64 * 56 * 56


def test_parts_that_lie_between_each_other_are_written_one_by_one() -> None:
    a = empty(64, 64)
    assert of_eager(lambda a: torch.stack((a, a), -1), a).scattered == 2 * 64 * 64
    assert of_eager(lambda a: torch.stack((a, a), 0), a).scattered == 0
    pairs = empty(64, 2)  # as many parts as a row has elements
    assert of_eager(lambda a: torch.cat((a, a), 0), pairs).scattered == 0


def test_a_softmaxs_gradient_finds_its_product_in_the_l2() -> None:
    def gradient(grad: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten._softmax_backward_data(grad, shares, 1, torch.float32)

    small = of_eager(gradient, empty(1024, 1024), empty(1024, 1024))
    assert (small.scratch, small.resident) == (1 << 22, 2 << 22)
    assert of_eager(gradient, empty(65536, 1024), empty(65536, 1024)).resident == 0


def test_a_result_across_the_lanes_is_written_sector_by_sector() -> None:
    """A sum over each row of what is stored turned: on an H200 the kernel took 94 us, eager's two
    60."""

    def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        across = x.transpose(1, 2).contiguous()
        return across, across.sum((0, 1))

    x = empty(8, 768, 1024, dtype=torch.bfloat16)
    assert sum(work.scattered for work in of_kernels(turned, x, rules=RULES)) == x.numel()
    twice = of_kernels(lambda x: x.transpose(1, 2) * 2, x, rules=RULES)
    assert not any(work.scattered for work in twice)
    assert not decided(flow_of(turned, x), RULES).accepted


def test_an_expanded_operand_is_not_transposed() -> None:
    column, whole = empty(1024, 1), empty(1024, 1024)
    assert of_eager(lambda a, b: a / b.expand(a.shape), whole, column).kind == "broadcast"
    transposed = of_eager(lambda a, b: a + b.t(), whole, whole)
    assert (transposed.kind, transposed.scattered) == ("transposed", 1024 * 1024)


def test_a_norm_copies_what_is_not_contiguous() -> None:
    def normed_of(turned: bool) -> Work:
        return of_eager(
            lambda a: F.layer_norm(a.transpose(1, 2) if turned else a, (64,)), empty(8, 64, 64)
        )

    assert normed_of(turned=False).launches + 1 == normed_of(turned=True).launches
    assert normed_of(turned=True).scattered == 8 * 64 * 64


def test_what_copies_first_launches_twice() -> None:
    mask = empty(64, 64, dtype=torch.bool)
    assert of_eager(lambda a, m: a.masked_fill(m, 0.0), empty(64, 64), mask).launches == 2
    assert of_eager(lambda a: torch.relu(a), empty(64, 64)).launches == 1


def test_a_reduction_of_one_element_is_no_norm() -> None:
    work = of_eager(lambda a: a.mean(1, True), empty(1 << 20, 1))
    assert work.kind == "column"
    assert 0 < work.programs < 1 << 14
    assert of_eager(lambda a: torch.softmax(a, 1), empty(1 << 20, 1)).kind == "softmax"


def test_a_multiprocessor_holds_so_many_blocks() -> None:
    (work,) = of_kernels(lambda a: torch.softmax(a * 2, -1), empty(1 << 16, 60))
    at_most = H200.multiprocessor.count.count * H200.multiprocessor.blocks.count
    assert work.at_once <= at_most


@pytest.mark.parametrize(("rows", "share"), [(2048, 1.0), (8192, 0.0)])
def test_what_a_launch_leaves_in_the_l2(rows: int, share: float) -> None:
    """A launch that reads and writes 16 MiB leaves what it wrote; one of 64 MiB nothing."""
    _, second = eager_of(decided(flow_of(lambda a: torch.tanh(torch.exp(a)), empty(rows, 1024))))
    assert second.resident == share * second.bytes_read


def heavy_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.tanh(x), 1)


def heavy_pool(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(torch.sigmoid(x), 4)


def heavy(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(torch.tanh(torch.exp(-torch.erf(x)))) + torch.log1p(x * x)


@pytest.mark.parametrize(
    ("function", "shape", "dtype", "counted", "off"),
    [
        (heavy, (1024, 1024), HALF, 3031040, 0.15),
        (lambda x: (x * x).mean(-1), (131072, 128), torch.float32, 4669440, 0.15),
        (heavy_softmax, (16, 32, 24, 48, 48), torch.float32, 48605184, 0.15),
        (heavy_pool, (64, 64, 112, 112), torch.float32, 24184832, 0.75),
    ],
    ids=["elements", "rows in one warp", "across rows", "windows"],
)
def test_instructions_are_about_those_that_the_hardware_counts(
    function: Callable[..., object],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    counted: int,
    off: float,
) -> None:
    """`smsp__inst_executed` below ncu, on an H200 and an H100, Triton 3.6, 2026-11-23 and 25."""
    (work,) = of_kernels(function, empty(*shape, dtype=dtype), rules=BESIDE)
    times = H200.times
    found = times.primitive.value * work.primitives + times.step.value * work.steps
    found += times.request.value * work.requests
    assert found == pytest.approx(counted, rel=off)


def test_of_a_persistent_kernel_each_turn_is_counted() -> None:
    """Sums down columns, and the few rows of what programs left."""
    first, last = of_kernels(lambda x: torch.relu(x).sum(0), empty(16384, 4096))
    assert first.steps * H200.warp_size >= 16384 * 4096 > 100 * last.steps * H200.warp_size / 2


def test_tiles_that_are_copied_ahead_wait_together() -> None:
    """Two tiles of three are on their way while one is worked on: each would wait alone in a walk
    of rows that cannot be copied ahead."""

    def depth(columns: int) -> float:
        first, _ = of_kernels(lambda x: torch.relu(x).sum(0), empty(1 << 16, columns, dtype=HALF))
        return first.depth * first.programs * first.warps / columns

    assert depth(1024) < 0.7 * depth(1023)


def test_elements_of_no_whole_vectors_are_asked_for_one_by_one() -> None:
    def requests(columns: int) -> float:
        (work,) = of_kernels(lambda x: torch.tanh(x) * 2, empty(columns, columns))
        return work.requests

    assert requests(1023) > 3 * requests(1024)


def test_what_all_lanes_of_a_row_share_is_walked_once() -> None:
    """The weights of a row's two parts are the same for all of its columns: to sum them is no work
    of each lane's."""

    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * (w / w.sum(-1, keepdim=True))[..., None]).sum(-2)
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True))

    (work,) = of_kernels(mixed, empty(512, 2, 4096), empty(512, 2))
    assert work.steps * H200.warp_size < 4 * 512 * 2 * 4096
