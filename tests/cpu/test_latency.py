"""What kernels that are over soon are spared: waiting one thing after the other, and arithmetic
that only finds places."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fusion_advisor.schedules.base import Step
from fusion_advisor.sourcepatch.editing.inline import in_one
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import collect_check, submit_check

from .regions import H200, RULES, decided, flow_of, kernel_of
from .test_emit import checked, x
from .test_plans import best

HELD = H200.multiprocessor.count.count * H200.multiprocessor.threads.count
"""Threads that the device holds at once."""


def body_of(text: str) -> str:
    return text[text.index("def k_kernel") : text.index("def k(")]


# -- loads ahead of reductions ---------------------------------------------------------------------


def normed(a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(a + b, weight.shape, weight)


def summed(text: str) -> tuple[list[str], list[str]]:
    """The lines of a kernel before its first sum and behind it."""
    lines = body_of(text).splitlines()
    first = next(n for n, line in enumerate(lines) if "tl.sum" in line)
    return lines[:first], lines[first:]


def test_all_loads_are_ahead_where_all_programs_run_at_once(worker: Worker) -> None:
    shapes = (x(64, 1024), x(64, 1024), x(1024))
    before, behind = summed(kernel_of(normed, *shapes).text)
    assert sum("tl.load" in line for line in before) == 3
    assert not any("tl.load" in line for line in behind)
    assert checked(normed, shapes, worker) is None


def test_loads_are_where_they_are_used_where_programs_wait_beside_others() -> None:
    rows = HELD // 16  # of a warp or more each
    _, behind = summed(kernel_of(normed, x(rows, 1024), x(rows, 1024), x(1024)).text)
    assert any("tl.load(args_2_ptr" in line for line in behind)


def test_loads_stay_where_registers_do_not_hold_them() -> None:
    def scaled(a: torch.Tensor, *late: torch.Tensor) -> torch.Tensor:
        a = a / a.sum(-1, keepdim=True)
        for one in late:
            a = a * one + 1
        return a

    _, behind = summed(kernel_of(scaled, *(x(64, 8192) for _ in range(3))).text)
    assert not any("tl.load" in line for line in behind)
    _, behind = summed(kernel_of(scaled, *(x(64, 8192) for _ in range(20))).text)
    assert sum("tl.load" in line for line in behind) == 19


def test_what_waits_for_an_index_comes_after_what_does_not(worker: Worker) -> None:
    def embedded(ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(table[ids], weight.shape, weight)

    inputs = (torch.zeros(64, dtype=torch.int64), x(30, 256), x(256))
    text = body_of(kernel_of(embedded, *inputs).text)
    assert text.index("load(args_2_ptr") < text.index("args_1_ptr + ") < text.index("tl.sum")
    assert checked(embedded, inputs, worker) is None


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


# -- rows in planes --------------------------------------------------------------------------------


def rotated(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Heads of tokens, which lie token by token."""
    left, right = q.transpose(1, 2).chunk(2, -1)
    return q.transpose(1, 2) * cos + torch.cat((-right, left), -1) * cos


def tiled(heads: int, tokens: int = 24, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return x(1, tokens, heads, width), x(1, 1, tokens, width)


def one(function: object, inputs: tuple[torch.Tensor, ...]) -> Step:
    assert callable(function)
    (step,) = best(function, *inputs).steps
    return step


def test_no_lane_divides_for_the_row_of_a_whole_tile(worker: Worker) -> None:
    text = kernel_of(rotated, *tiled(32)).text
    assert "row_0, row_1 = rows_of_plane(row_1_size, ROWS, PLANES, FAR)" in text
    assert "// row_1_size" not in text
    assert checked(rotated, tiled(32), worker) is None


def test_more_planes_than_a_grid_has_lie_one_behind_the_other(worker: Worker) -> None:
    made = kernel_of(rotated, *tiled(32))
    text = in_one(made.text)
    assert text.count("65535") == 2
    made = replace(made, text=text.replace("65535", "5"))
    assert collect_check(made, submit_check(worker, made)).failure is None


def test_a_thread_has_more_where_all_programs_then_run_at_once() -> None:
    for tokens, warps in ((256, 4), (512, 2), (1024, 4)):
        step = one(turned, tiled(64, tokens, 128))
        assert (step.rows * step.block, step.warps) == (1024, warps)


def test_rows_that_are_no_whole_tiles_share_them(worker: Worker) -> None:
    assert not one(rotated, tiled(9)).in_planes
    assert checked(rotated, tiled(9), worker) is None


@pytest.mark.parametrize("step", [1, 2])
def test_what_planes_share_is_loaded_as_the_tile_is(step: int, worker: Worker) -> None:
    """By an index, too, but where Triton has another layout for elements that lie apart."""

    def part(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
        heads = q.transpose(1, 2)[..., ::step]
        return torch.cat((heads[..., :24] * cos, heads[..., 24:]), -1)

    inputs = (x(1, 24, 32, 96 * step), x(1, 1, 24, 24))
    text = kernel_of(part, *inputs).text
    (mask,) = re.findall(r"args_1_ptr \+ [^,]*,\s*mask=(\w+) & ", text)
    assert mask == ("mask" if step == 1 else "col_mask")
    assert checked(part, inputs, worker) is None


def turned(q: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """The same, laid head by head."""
    return rotated(q, cos).contiguous()


def test_results_that_the_l2_holds_are_put_in_order_there(worker: Worker) -> None:
    """Programs follow what is read; of more they follow what is written."""
    token, head = one(turned, tiled(32)).outer
    assert (token.size, head.size) == (24, 32)
    assert checked(turned, tiled(32), worker) is None
    head, token = one(turned, tiled(32, tokens=1 << 14)).outer
    assert (head.size, token.size) == (32, 1 << 14)


@pytest.mark.parametrize("width", [48, 24, 10, 7])
def test_rows_that_16_does_not_divide_are_read_in_vectors(width: int, worker: Worker) -> None:
    """Those of a quarter that is rotated, say, with the rest behind them."""

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat((a.transpose(1, 2).relu(), b.transpose(1, 2)), -1)

    inputs = (x(1, 24, 16, width), x(1, 24, 16, 96 - width))
    text = kernel_of(joined, *inputs).text
    assert ("APART=host.divisor(" in text) == (width in (24, 10))
    assert checked(joined, inputs, worker) is None


def softmax(a: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a * 0.125, -1)


@pytest.mark.parametrize(
    ("columns", "rows", "warps"),
    [(64, 16, 2), (96, 8, 2), (49, 8, 1), (77, 4, 1), (197, 2, 1), (1000, 2, 4)],
)
def test_rows_that_share_a_program_have_few_warps(columns: int, rows: int, warps: int) -> None:
    """Fewest where rows begin between whole vectors, so that warps would share them."""
    plan = best(softmax, torch.empty(200000, columns, device="meta"))
    assert (plan.steps[0].rows, plan.steps[0].warps) == (rows, warps)


@pytest.mark.parametrize(("pixels", "rows"), [(16384, 8), (262144, 64)])
def test_rows_across_memory_leave_programs_for_all_multiprocessors(pixels: int, rows: int) -> None:
    """At least eight each, as far as accesses fill sectors."""
    plan = best(lambda a: torch.softmax(a, 1), torch.empty(1, 64, pixels, device="meta"))
    assert plan.steps[0].rows == rows


def test_rows_do_not_pass_on_what_they_share() -> None:
    """A tile of the weights alone, one row high, would be laid out otherwise than the tile, and
    all be passed from the one to the other."""
    kernel = kernel_of(lambda a, w: F.layer_norm(a, (96,), w) * 2, x(4096, 96), x(96))
    assert "    col = wide(tl.arange(0, COLS), FAR)\n" in kernel.text
    assert "_ptr + col, mask=col_mask, other=0.0)" in kernel.text


def test_halves_that_begin_between_multiples_of_16_are_read_in_vectors(worker: Worker) -> None:
    """Those of the quarter of each head that is rotated, which a kernel takes each for itself."""

    def rotated(
        far: torch.Tensor, near: torch.Tensor, sin: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat((torch.cat((-far, near), -1) * sin, rest), -1)

    query = x(1, 24, 16, 288, dtype=torch.bfloat16).transpose(1, 2)
    sin = x(1, 1, 24, 24, dtype=torch.bfloat16)
    inputs = (query[..., 12:24], query[..., :12], sin, query[..., 24:96])
    text = kernel_of(rotated, *inputs).text
    assert re.findall(r"tl\.multiple_of\(\s*(\w+)_ptr[^,]*,\s*\[1, BEGUN\]", text) == ["args_0"]
    assert "BEGUN=host.divisor(host.beginning(args_0)|" in "".join(text.split())
    assert checked(rotated, inputs, worker) is None
