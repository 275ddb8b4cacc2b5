"""Rows across contiguous memory, heads that are rotated, rows that share a program: how they are
laid out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from fusion_advisor.support.worker import Worker

from .regions import RULES, decided, flow_of, kernel_of
from .test_emit import checked, x
from .test_plans import best

# -- rows across contiguous memory -----------------------------------------------------------------


def across(a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(a.t(), weight.shape, weight)


@pytest.mark.parametrize(("tokens", "rows"), [(197, 2), (4000, 8)])
def test_few_rows_share_a_program_before_multiprocessors_have_none(tokens: int, rows: int) -> None:
    """Though a sector has eight of them."""
    plan = decided(flow_of(across, x(1024, tokens), x(1024)), RULES).subject.plan
    assert plan is not None
    assert plan.steps[0].rows == rows


def test_some_rows_of_a_sector_alone(worker: Worker) -> None:
    assert checked(across, (x(256, 99), x(256)), worker, RULES) is None


# -- heads of tokens -------------------------------------------------------------------------------


def rotated(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Heads of tokens, which lie token by token."""
    left, right = q.transpose(1, 2).chunk(2, -1)
    return q.transpose(1, 2) * cos + torch.cat((-right, left), -1) * cos


def tiled(heads: int, tokens: int = 24, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return x(1, tokens, heads, width), x(1, 1, tokens, width)


@pytest.mark.parametrize(
    ("heads", "width", "schedule"), [(32, 66, "tiled"), (9, 66, "tiled"), (9, 64, "flat")]
)
def test_heads_are_rotated_in_tiles_of_any_rows(
    heads: int, width: int, schedule: str, worker: Worker
) -> None:
    """But flat where their elements come several at a time."""
    inputs = tiled(heads, width=width)
    assert best(rotated, *inputs).schedule == schedule
    assert checked(rotated, inputs, worker) is None
    assert checked(turned, inputs, worker) is None


@pytest.mark.parametrize("step", [1, 2])
def test_a_quarter_of_each_head_is_turned(step: int, worker: Worker) -> None:
    def part(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        heads = q.transpose(1, 2)[..., ::step]
        return torch.cat((heads[..., :24] * cos, heads[..., 24:]), -1)

    assert checked(part, (x(1, 24, 32, 96 * step), x(1, 1, 24, 24)), worker) is None


def turned(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """The same, laid head by head."""
    return rotated(q, cos).contiguous()


@pytest.mark.parametrize("width", [48, 24, 10, 7])
def test_rows_that_16_does_not_divide_are_joined(width: int, worker: Worker) -> None:
    """Those of a quarter that is rotated, say, with the rest behind them."""

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat((a.transpose(1, 2).relu(), b.transpose(1, 2)), -1)

    inputs = (x(1, 24, 16, width), x(1, 24, 16, 96 - width))
    assert checked(joined, inputs, worker) is None


def softmax(a: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a * 0.125, -1)


@pytest.mark.parametrize(
    ("columns", "rows", "warps"),
    [(64, 8, 1), (96, 4, 1), (49, 8, 1), (77, 4, 1), (197, 2, 1), (599, 1, 1), (1000, 1, 2)],
)
def test_a_warp_has_two_kilobytes_of_rows_or_two_pieces_of_one(
    columns: int, rows: int, warps: int
) -> None:
    plan = best(softmax, torch.empty(200000, columns, device="meta"))
    assert (plan.steps[0].rows, plan.steps[0].warps) == (rows, warps)


@pytest.mark.parametrize(("pixels", "rows"), [(16384, 8), (262144, 32)])
def test_rows_across_memory_leave_programs_for_all_multiprocessors(pixels: int, rows: int) -> None:
    """At least eight each, as far as accesses fill sectors; and fill lines where there are more."""
    plan = best(lambda a: torch.softmax(a, 1), torch.empty(1, 64, pixels, device="meta"))
    assert plan.steps[0].rows == rows


def test_rows_do_not_pass_on_what_they_share() -> None:
    """A tile of the weights alone, one row high, would be laid out otherwise than the tile, and
    all be passed from the one to the other."""
    kernel = kernel_of(lambda a, w: F.layer_norm(a, (96,), w) * 2, x(4096, 96), x(96))
    assert "    col = wide(tl.arange(0, COLS), FAR)\n" in kernel.text
    assert "_ptr + col, mask=col_mask, other=0.0)" in kernel.text


def test_halves_that_begin_between_multiples_of_16(worker: Worker) -> None:
    """Those of the quarter of each head that is rotated, which a kernel takes each for itself."""

    def rotated(
        far: torch.Tensor, near: torch.Tensor, sin: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat((torch.cat((-far, near), -1) * sin, rest), -1)

    query = x(1, 24, 16, 288, dtype=torch.bfloat16).transpose(1, 2)
    sin = x(1, 1, 24, 24, dtype=torch.bfloat16)
    inputs = (query[..., 12:24], query[..., :12], sin, query[..., 24:96])
    assert checked(rotated, inputs, worker) is None


# -- rows across memory: what lanes have at once ---------------------------------------------------


def summed(a: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(a.t()).sum(-1)


@pytest.mark.parametrize(
    ("rows", "told"), [(8196, True), (8194, True), (8195, False), (8192, False)]
)
def test_vectors_across_rows_are_told(rows: int, told: bool, worker: Worker) -> None:
    """Of half of 16 bytes and more; Triton knows 16 itself."""
    assert ("ROWS_DIVISOR" in kernel_of(summed, x(700, rows)).text) == told
    assert checked(summed, (x(700, rows // 128),), worker) is None


@pytest.mark.parametrize(("dtype", "stages"), [(torch.float32, 3), (torch.bfloat16, 1)])
def test_chunks_are_on_their_way_where_accesses_are_wide(dtype: torch.dtype, stages: int) -> None:
    plan = best(summed, torch.empty(4000, 40962, device="meta", dtype=dtype))
    assert (plan.schedule, plan.steps[0].stages) == ("blocked", stages)


@pytest.mark.parametrize(("dim", "schedule"), [(0, "blocked"), (1, "row")])
def test_scans_across_memory_go_in_short_chunks(dim: int, schedule: str, worker: Worker) -> None:
    def scanned(a: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(a.relu(), dim) * 2

    assert best(scanned, torch.empty(4096, 8192, device="meta")).schedule == schedule
    assert checked(scanned, (x(70, 8192),), worker) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("shape", "dtype", "tile"),
    [
        ((4, 3200, 1024), torch.float32, (8, 128, 4)),
        ((4, 3200, 1024), torch.bfloat16, (16, 128, 8)),
        ((64, 3200, 1024), torch.float32, (64, 1, 1)),
    ],
    ids=["few", "few, 16 bits", "many"],
)
def test_few_scans_take_many_positions_at_once(
    shape: tuple[int, ...], dtype: torch.dtype, tile: tuple[int, int, int], worker: Worker
) -> None:
    """A program of few rows would wait for each position of a long combination."""

    def scanned(a: torch.Tensor) -> torch.Tensor:
        return torch.logcumsumexp(a, 1) * 2

    plan = decided(
        flow_of(scanned, torch.empty(shape, device="meta", dtype=dtype)), RULES
    ).subject.plan
    assert plan is not None
    (step,) = plan.steps
    assert (step.rows, step.block, step.warps) == tile
    assert checked(scanned, (x(2, 300, 70, dtype=dtype),), worker) is None


def test_the_combinations_of_a_scan_wait_for_each_other() -> None:
    """On an H200 4096 rows of 3200 across memory take 361 us, their sums 73."""

    def fused_us(scan: Callable[..., torch.Tensor]) -> float:
        inputs = torch.empty(8, 3200, 512, device="meta")
        return decided(flow_of(lambda a: scan(a, 1) * 2, inputs), RULES).fused_us

    assert fused_us(torch.logcumsumexp) > 4 * fused_us(torch.cumsum)


@pytest.mark.parametrize(("count", "block"), [(100003, 512), (100002, 512), (100004, 1024)])
def test_threads_have_few_elements_where_each_is_an_access(count: int, block: int) -> None:
    plan = best(lambda a: a.relu() + 1, torch.empty(count, device="meta"))
    assert plan.steps[0].block == block


@pytest.mark.parametrize(("rows", "told"), [(1288, True), (1296, False), (1287, False)])
def test_a_flat_kernel_is_told_what_divides_all_where_no_row_ends_with_a_vector(
    rows: int, told: bool
) -> None:
    """A last dimension of 137 holds no vectors, 1288 rows of it eight elements at a time. Of 16
    that divide a size the compiler knows."""

    def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.relu(a * b)

    text = kernel_of(chain, torch.empty(rows, 137).half(), torch.empty(137).half()).text
    assert ("DIVISOR=host.divisor(n0 * n1)" in text) == told
