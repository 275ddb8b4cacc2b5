"""What decides how long launches take: read off eager's operators and off plans."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.perfmodel.instruction_count import Program
from fusion_advisor.perfmodel.model import Work
from fusion_advisor.rulebook.devices import LINE_BYTES

from .launches import eager_of, empty, of_eager, of_kernels
from .regions import H200, decided, flow_of


def served_per_line(work: Work) -> float:
    return work.wavefronts * LINE_BYTES / work.bytes


@pytest.mark.parametrize(
    ("function", "shape", "least", "most"),
    [
        (lambda a: torch.tanh(a) * 2, (1024, 1024), 0.9, 1.1),
        (lambda a: torch.tanh(a) * 2, (1023, 1023), 3.5, 4.5),
        (lambda a: F.avg_pool2d(torch.tanh(a), 4), (16, 64, 128, 128), 3.5, 4.5),
        (lambda a: torch.softmax(a * 2, -1), (1024, 4096), 1.2, 3.5),
    ],
    ids=["whole vectors", "an end that is no vector", "windows apart", "rows and their reductions"],
)
def test_what_the_l1_serves_for_each_line(
    function: Callable[..., object], shape: tuple[int, ...], least: float, most: float
) -> None:
    (work,) = of_kernels(function, empty(*shape))
    assert least < served_per_line(work) < most


def test_what_several_tensors_have_in_common_is_found_in_the_l2() -> None:
    def steps(a: torch.Tensor) -> torch.Tensor:
        return torch.exp(a[:, 1:] - a[:, :-1])

    (work,) = of_kernels(steps, empty(64, 128))
    asked = 2 * 4 * 64 * 127
    assert (work.bytes_read, work.resident) == (asked, asked - 4 * 64 * 128)


def test_eager_converts_types_by_a_slower_kernel() -> None:
    a, b = empty(64, 64), empty(64, 64, dtype=torch.bfloat16)
    assert of_eager(lambda a, b: a * b, a, b).kind == "eager.cast"
    assert of_eager(lambda a, b: torch.where(a > 0, a, b), a, a).kind == "eager.stream"


@pytest.mark.parametrize(("channels", "warps", "rounds"), [(256, 1, 1), (8192, 16, 2)])
def test_short_rows_have_a_warp(channels: int, warps: int, rounds: int) -> None:
    work = of_eager(lambda a: F.group_norm(a, 8), empty(512, channels))
    assert (work.programs, work.warps, work.depth) == (512 * 8, warps, rounds)


@pytest.mark.parametrize(("length", "odd"), [(1024, False), (1023, True)])
def test_rows_that_are_no_whole_vectors_are_known(length: int, odd: bool) -> None:
    assert of_eager(lambda a: F.layer_norm(a, (length,)), empty(64, length)).unaligned == odd


@pytest.mark.parametrize(
    ("rows", "length", "dim", "blocks", "rounds", "last"),
    [
        (512, 4096, 1, 32, 32, 0),
        (512, 16384, 1, 512, 8, 0),
        (4, 1 << 22, 1, 528, 16, 1),
        (256, 8192, 0, 64, 16, 0),
        (131072, 128, 0, 2048, 4, 512),
    ],
    ids=["a warp each", "a block each", "several blocks each", "columns", "blocks share columns"],
)
def test_how_a_reduction_spreads(
    rows: int, length: int, dim: int, blocks: int, rounds: int, last: int
) -> None:
    work = of_eager(lambda a: a.mean(dim), empty(rows, length))
    assert (work.programs, work.depth, work.last) == (blocks, rounds, last)
    assert work.launches == (2 if last else 1)


@pytest.mark.parametrize(
    ("function", "shape", "rounds", "near"),
    [
        (lambda a: a.cumsum(1), (16, 1024, 256), 1024, 0),
        (lambda a: a.cumsum(-1), (64, 4096), 16, 0),
        (lambda a: F.avg_pool2d(a, 4), (16, 64, 128, 128), 4, 16),
        (lambda a: torch.softmax(a, 1), (16, 64, 56, 56), 192, 0),
        (lambda a: torch.softmax(a, -1), (32, 65536), 48, 0),
        (lambda a: F.layer_norm(a, (65536,)), (32, 65536), 256, 0),
    ],
    ids=["columns summed up", "rows summed up", "windows", "channels", "long rows", "a norm"],
)
def test_how_often_eager_waits_for_loads(
    function: Callable[..., object], shape: tuple[int, ...], rounds: int, near: int
) -> None:
    work = of_eager(function, empty(*shape))
    assert (work.depth, work.near) == (rounds, near)


@pytest.mark.parametrize(
    ("function", "shapes", "blocks", "warps"),
    [
        (torch.relu, [(1024, 1024)], 1024, 4),
        (torch.add, [(1024, 1024), (1024,)], 4096, 4),
        (lambda a: a.to(torch.bfloat16) * 2, [(1024, 1024)], 1024, 4),
        (lambda a: a[:, :512].exp(), [(1024, 1024)], 2048, 4),
        (lambda a: torch.softmax(a, -1), [(1024, 64)], 128, 4),
        (lambda a: torch.softmax(a, -1), [(1024, 512)], 256, 4),
        (lambda a: a.roll(3, 1), [(1024, 1024)], 2048, 16),
    ],
    ids=[
        "vectors",
        "addresses",
        "narrowed",
        "halves",
        "two rows a warp",
        "a row a warp",
        "rolled",
    ],
)
def test_how_eager_walks_elements(
    function: Callable[..., object], shapes: list[tuple[int, ...]], blocks: int, warps: int
) -> None:
    work = of_eager(function, *(empty(*shape) for shape in shapes))
    assert (work.programs, work.warps) == (blocks, warps)


@pytest.mark.parametrize(("width", "blocks", "warps"), [(16, 4096, 1), (8192, 32768, 8)])
def test_rows_that_are_taken_have_blocks_of_their_own(width: int, blocks: int, warps: int) -> None:
    work = of_eager(F.embedding, empty(64, 64, dtype=torch.int64), empty(32, width))
    assert (work.programs, work.warps) == (blocks, warps)


def test_an_expanded_operand_is_not_transposed() -> None:
    column, whole = empty(1024, 1), empty(1024, 1024)
    assert of_eager(lambda a, b: a / b.expand(a.shape), whole, column).kind == "eager.broadcast"
    transposed = of_eager(lambda a, b: a + b.t(), whole, whole)
    assert (transposed.kind, transposed.scattered) == ("eager.transposed", 1024 * 1024)


def test_a_norm_copies_what_is_not_contiguous() -> None:
    def normed_of(turned: bool) -> Work:
        return of_eager(
            lambda a: F.layer_norm(a.transpose(1, 2) if turned else a, (64,)), empty(8, 64, 64)
        )

    assert normed_of(turned=False).launches + 1 == normed_of(turned=True).launches
    assert normed_of(turned=True).scattered == 8 * 64 * 64


def test_each_dimension_of_a_roll_is_a_pass() -> None:
    once, twice = (
        of_eager(lambda a, d=dims: a.roll([1] * len(d), d), empty(64, 64)) for dims in ([0], [0, 1])
    )
    assert (twice.launches, twice.bytes) == (2 * once.launches, 2 * once.bytes)


def test_what_copies_first_launches_twice() -> None:
    mask = empty(64, 64, dtype=torch.bool)
    assert of_eager(lambda a, m: a.masked_fill(m, 0.0), empty(64, 64), mask).launches == 2
    assert of_eager(lambda a: torch.relu(a), empty(64, 64)).launches == 1


def normed(a: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(a * 2, a.shape[-1:])


@pytest.mark.parametrize(
    ("function", "shape", "chained"),
    [
        (lambda a: torch.softmax(a * 2, -1), (1024, 1024), 2),
        (normed, (512, 1024), 3),
        (lambda a: normed(a).mean(1), (300, 49, 768), 3 * 49),
        (lambda a: (a * 2).amax(1).softmax(-1), (300, 49, 768), 2),
        (lambda a: torch.tanh(a) * 2, (1024, 1024), 0),
    ],
    ids=["a maximum, then a sum", "two means, then a variance", "at each place", "after", "none"],
)
def test_reductions_one_after_the_other(
    function: Callable[..., object], shape: tuple[int, ...], chained: int
) -> None:
    (work,) = of_kernels(function, empty(*shape))
    assert work.chained == chained


@pytest.mark.parametrize(
    ("function", "shapes", "divides"),
    [
        (lambda a, b: torch.tanh(a) + b, [(512, 512), (512, 512)], False),
        (lambda a, b: torch.tanh(a) + b, [(4096, 24), (24,)], True),
        (lambda a: torch.softmax(torch.tanh(a), -1), [(512, 512)], False),
    ],
    ids=["all alike", "a bias", "rows"],
)
def test_lanes_divide_to_find_their_places(
    function: Callable[..., object], shapes: list[tuple[int, ...]], divides: bool
) -> None:
    plan = decided(flow_of(function, *(empty(*shape) for shape in shapes))).subject.plan
    assert plan is not None
    (step,) = plan.steps
    program = Program(step, H200.warp_size)
    assert (program.divided > 0) == divides


def test_a_store_of_elements_apart_takes_a_sector_each() -> None:
    def both(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.tanh(a)
        return made, made.permute(2, 0, 1).contiguous()

    (work,) = of_kernels(both, empty(512, 512, 16))
    assert work.scattered == 512 * 512 * 16
    (alone,) = of_kernels(lambda a: torch.tanh(a) * 2, empty(512, 512, 16))
    assert alone.scattered == 0


def test_a_multiprocessor_holds_so_many_blocks() -> None:
    (work,) = of_kernels(lambda a: torch.softmax(a * 2, -1), empty(1 << 16, 60))
    at_most = H200.multiprocessor.count.count * H200.multiprocessor.blocks.count
    assert work.at_once <= at_most
    assert of_eager(lambda a: F.group_norm(a, 8), empty(512, 256)).at_once == at_most


def test_a_reduction_of_one_element_is_no_norm() -> None:
    work = of_eager(lambda a: a.mean(1, True), empty(1 << 20, 1))
    assert work.kind == "eager.column"
    assert 0 < work.programs < 1 << 14
    assert of_eager(lambda a: torch.softmax(a, 1), empty(1 << 20, 1)).kind == "eager.normal"


@pytest.mark.parametrize(
    ("columns", "name", "rounds"),
    [
        (2048, "softmax_warp", 1),
        (2049, "softmax_held", 3),
        (9216, "softmax_held", 9),
        (9280, "softmax", 3),
    ],
)
def test_softmax_has_a_kernel_for_each_length(columns: int, name: str, rounds: int) -> None:
    for work in (
        of_eager(lambda a: torch.softmax(a, -1), empty(512, columns)),
        of_eager(lambda a: torch.softmax(a, 1), empty(512, columns, 1)),
    ):
        assert (work.op, work.depth) == (name, rounds)


def test_narrow_elements_are_read_by_kernels_of_their_own() -> None:
    bf16 = torch.bfloat16
    assert of_eager(torch.tanh, empty(1024, 1024)).op == ""
    assert of_eager(torch.tanh, empty(1024, 1024, dtype=bf16)).op == "stream_narrow"
    # A condition is narrow, what it chooses from is not.
    chosen = of_eager(torch.where, empty(1024, dtype=torch.bool), empty(1024), empty(1024))
    assert chosen.op == ""
    (work,) = of_kernels(lambda a: torch.tanh(a) * 2, empty(1024, 1024, dtype=bf16))
    assert (work.kind, work.op) == ("kernel.flat", "flat_narrow")


@pytest.mark.parametrize(("rows", "share"), [(2048, 1.0), (8192, 0.0)])
def test_what_a_launch_leaves_in_the_l2(rows: int, share: float) -> None:
    """A launch that reads and writes 16 MiB leaves what it wrote; one of 64 MiB nothing."""
    _, second = eager_of(decided(flow_of(lambda a: torch.tanh(torch.exp(a)), empty(rows, 1024))))
    assert second.resident == share * second.bytes_read


def test_what_all_lanes_of_a_row_share_is_walked_once() -> None:
    """The weights of a row's two parts are the same for all of its columns: to sum them is no work
    of each lane's."""

    def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * (w / w.sum(-1, keepdim=True))[..., None]).sum(-2)
        return y * torch.rsqrt((y * y).mean(-1, keepdim=True))

    (work,) = of_kernels(mixed, empty(512, 2, 4096), empty(512, 2))
    assert work.kind == "kernel.serial_row"
    assert work.depth == 2
