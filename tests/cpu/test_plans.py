"""How regions are laid out: what a program takes, and what is refused as it would lose time."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.fusion.findings import fuse
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules.base import Plan, Step
from fusion_advisor.schedules.row_walks import row_walks
from fusion_advisor.support.worker import Worker

from .evaluating import expressed_whole, meaning
from .regions import RULES, decided, flow_of, kernel_of, why_not
from .test_emit import Tensors, checked, x


def plans_of(function: Callable[..., object], *inputs: torch.Tensor) -> tuple[Plan, ...]:
    """The plans of everything that a function launches, best first."""
    planned = decided(flow_of(function, *inputs)).subject.planned
    assert planned is not None
    return planned.plans


def best(function: Callable[..., object], *inputs: torch.Tensor) -> Plan:
    decision = decided(flow_of(function, *inputs))
    assert decision.subject.plan is not None, why_not(decision)
    return decision.subject.plan


def rows(step: Step) -> int:
    return prod(group.size for group in step.outer)


# -- axes that reductions bind ---------------------------------------------------------------------


def stacked_pairs(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rows that are normalised, and the pairs of their neighbours, rotated and stacked."""
    a = a * a.square().mean(-1, keepdim=True).rsqrt()
    left, right = a[..., ::2], a[..., 1::2]
    return torch.stack((left * b - right, right * b + left), -1)


AS_ROWS: dict[str, tuple[Callable[..., object], Tensors, int]] = {
    "before pairs are stacked": (stacked_pairs, (x(6, 96), x(6, 48)), 6),
    "a mean, beside another tensor": (
        lambda a, b: a.mean(1, keepdim=True) + b, (x(6, 600), x(6, 600)), 6,
    ),
    "two means": (
        lambda a, b, c: a.mean(1, keepdim=True) * b.amax(1, keepdim=True) + c,
        (x(6, 600), x(6, 600), x(6, 600)), 6,
    ),
    "one after the other": (
        lambda a, b: (a - a.amax(1, keepdim=True)).exp().sum(1, keepdim=True) + b,
        (x(6, 600), x(6, 600)), 6,
    ),
    "two axes": (
        lambda a, b: a.sum((1, 2), keepdim=True) + b, (x(6, 30, 40), x(6, 30, 40)), 6,
    ),
    "turned": (
        lambda a, b: a.t().mean(1, keepdim=True) + b, (x(600, 6), x(6, 600)), 6,
    ),
    "of a part": (
        lambda a, b: a[:, 3:603].mean(1, keepdim=True) + b, (x(6, 700), x(6, 600)), 6,
    ),
    "of two tensors, one behind the other": (
        lambda a, b, c: torch.cat((a, b), 1).mean(1, keepdim=True) + c,
        (x(6, 350), x(6, 250), x(6, 600)), 6,
    ),
    "of rows that indices pick": (
        lambda a, i, b: a[i].mean(1, keepdim=True) + b,
        (x(9, 600), torch.zeros(6, dtype=torch.int64), x(6, 600)), 6,
    ),
    "of windows": (
        lambda a, b: torch.nn.functional.max_pool1d(a, 2).mean(1, keepdim=True) + b,
        (x(6, 1200), x(6, 600)), 6,
    ),
}  # fmt: skip
"""Each with the rows that it has, however many results a row has."""

OTHERWISE: dict[str, tuple[Callable[..., object], Tensors]] = {
    "columns of a square": (
        lambda a, b: (a.sum(0) + a.sum(1)) * b, (x(600, 600), x(600)),
    ),
    "a scan before it": (
        lambda a, b: a.cumsum(1).amax(1, keepdim=True) + b, (x(6, 600), x(6, 600)),
    ),
    "a mean that meets the column": (
        lambda a, b: (a[:, :, None] * b[:, None, :]).mean(1) + b, (x(3, 40), x(3, 40)),
    ),
    "one of two axes as large": (
        lambda a, b: a.mean((1, 2), keepdim=True) + b, (x(6, 40, 30), x(6, 7, 30)),
    ),
    "two dimensions that have its size together": (
        lambda a, b: a.sum(1) + b, (x(6, 32), x(4, 8, 6)),
    ),
    "one axis, reduced in part": (
        lambda a, b: a.view(6, 20, 30).amax(2).mean(1, keepdim=True) + b,
        (x(6, 600), x(6, 600)),
    ),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", AS_ROWS)
def test_a_reduction_runs_along_the_results_rows(name: str, worker: Worker) -> None:
    function, inputs, count = AS_ROWS[name]
    (step,) = best(function, *inputs).steps
    assert rows(step) == count
    assert checked(function, inputs, worker) is None


@pytest.mark.parametrize("name", OTHERWISE)
def test_no_axis_is_renamed_into_another_value(name: str, worker: Worker) -> None:
    failure = checked(*OTHERWISE[name], worker)
    assert failure is None or failure.startswith("refused: ")


# -- rows that are walked again for each result ----------------------------------------------------


def beside_wider(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.mean(1, keepdim=True) + b


def test_rows_are_not_walked_for_each_result() -> None:
    """A mean over 4096 beside 8192 columns: the row's own kernel first, then the columns."""
    planned = decided(flow_of(beside_wider, x(512, 4096), x(512, 8192))).subject.planned
    assert planned is not None
    assert [plan.schedule for plan in planned.plans] == ["split"]
    *_, last = planned.plans[0].steps
    assert not last.region.reduced
    again = 512 * 4096 * 8192 - 512 * 8192
    why = f"rows would be walked again for each result: {again:.2g} elements"
    assert [r.gate for r in planned.refusals if r.why == why] == ["parallel-pattern"] * 2


def test_no_lane_walks_a_row_behind_its_neighbours() -> None:
    """Rows of 140 bytes each, of which the L1 would keep none until it was walked: 23 ms for what
    eager does in 11."""

    def loss(a: torch.Tensor) -> torch.Tensor:
        return a.square().sum(1).sqrt().mean()

    def walked(columns: int) -> bool:
        plans = plans_of(loss, x(1 << 20, columns))
        return any(step.serial for plan in plans for step in plan.steps)

    assert walked(10)
    assert not walked(35)


@pytest.mark.parametrize(
    ("dtype", "columns", "schedule"),
    [
        (torch.bfloat16, 17, "flat"),
        (torch.bfloat16, 31, "flat"),
        (torch.bfloat16, 33, "row"),
        (torch.bfloat16, 18, "row"),
        (torch.float32, 17, "flat"),
        (torch.float32, 19, "row"),
        (torch.float32, 24, "row"),
    ],
)
def test_a_lane_walks_a_short_row_whose_elements_come_one_by_one(
    dtype: torch.dtype, columns: int, schedule: str
) -> None:
    rows = torch.empty(1 << 19, columns, dtype=dtype)
    plan = best(lambda a: (a * 0.5).logsumexp(-1), rows)
    assert plan.schedule == schedule


def weighed_channels(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """A map's channels by their norms over the mean of these."""
    return a * (g / (g.mean(1, keepdim=True) + 1e-6)) + a


def test_what_many_results_have_in_common_is_made_before_them(worker: Worker) -> None:
    """One kernel would load and divide each channel's norm again for each pixel."""
    large = x(64, 96, 60, 60), x(64, 96, 1, 1)
    chosen = best(weighed_channels, *large)
    assert [step.schedule for step in chosen.steps] == ["row", "flat"]
    assert best(weighed_channels, x(2, 96, 20, 20), x(2, 96, 1, 1)).schedule == "row"
    assert checked(weighed_channels, (x(3, 24, 9, 11), x(3, 24, 1, 1)), worker, _shared()) is None


def _shared() -> Rulebook:
    """Whatever results have in common is made before them."""
    gate = RULES.gate("parallel-pattern")
    none = gate.number("walked_with").model_copy(update={"value": 0.0})
    changed = gate.model_copy(update={"limits": {**gate.limits, "walked_with": none}})
    return RULES.model_copy(update={"gates": {**RULES.gates, gate.name: changed}})


def test_few_elements_may_be_walked_again() -> None:
    assert best(beside_wider, x(3, 40), x(3, 50)).schedule == "row"


def test_two_kernels_make_what_one_would_walk_again(worker: Worker) -> None:
    inputs = x(3, 700), x(3, 900)
    assert checked(beside_wider, inputs, worker, _walking_once()) is None


def _walking_once() -> Rulebook:
    """Nothing may be walked again."""
    gate = RULES.gate("parallel-pattern")
    none = gate.number("walked_again").model_copy(update={"value": 0.0})
    changed = gate.model_copy(update={"limits": {**gate.limits, "walked_again": none}})
    return RULES.model_copy(update={"gates": {**RULES.gates, gate.name: changed}})


# -- which plan comes first ------------------------------------------------------------------------


def pooled_sum(a: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.max_pool3d(a, 3).sum(1)


def test_plans_that_fill_the_device_come_first() -> None:
    """Few results that are much work each: rows of channels, before a lane for each result."""
    found = plans_of(pooled_sum, x(16, 64, 30, 30, 30))
    assert [plan.schedule for plan in found] == ["row", "blocked", "flat"]
    first, _, last = (plan.steps[0] for plan in found)
    assert first.moved == last.moved
    assert first.lanes > 132 * 2048 > last.lanes


def test_a_thread_that_walks_a_row_by_itself_asks_for_little_at_a_time() -> None:
    """Sums of 32 x 9728 rows of 64 sigmoids, us on an H200: 45 by a lane for each, 30 in rows."""
    found = plans_of(lambda a: a.sigmoid().sum(1), x(32, 64, 9728))
    assert [plan.schedule for plan in found][:1] == ["row"]
    assert found[-1].schedule == "flat"


def test_small_work_fills_no_device() -> None:
    """The catalogue's order holds where a launch takes longer than the work."""
    assert best(pooled_sum, x(1, 64, 30, 30, 30)).schedule == "flat"


@pytest.mark.parametrize(("results", "block"), [(1000, 128), (50_000, 256), (1_000_000, 512)])
def test_a_flat_program_takes_fewer_results_where_there_are_few(results: int, block: int) -> None:
    found = plans_of(lambda a: a.relu().amax(1), x(1, 8, results))
    assert [p.steps[0].block for p in found if p.schedule == "flat"] == [block]
    (pointwise,) = best(lambda a: a.relu() + 1, x(results)).steps
    assert pointwise.block == 1024


def test_a_flat_program_may_have_fewer_elements_than_threads() -> None:
    block = RULES.schedules.flat.block.model_copy(update={"value": 64.0})
    flat = RULES.schedules.flat.model_copy(update={"block": block})
    schedules = RULES.schedules.model_copy(update={"flat": flat})
    rules = RULES.model_copy(update={"schedules": schedules})
    for function in (lambda a: a.relu() + 1, lambda a: a.relu().amax(1)):
        planned = decided(flow_of(function, x(4, 8, 5000)), rules).subject.planned
        assert planned is not None
        assert [p.steps[0].block for p in planned.plans if p.schedule == "flat"] == [64]


def test_lanes_that_walk_places_have_few_elements() -> None:
    (walking,) = best(lambda a: a.amin(2).softmax(1), x(128, 24, 22, 900)).steps
    assert (walking.rows * walking.block) // (walking.warps * 32) == 8


def test_no_program_has_more_threads_than_a_block() -> None:
    """The norm of everything: the results lie along one row of 2**29."""
    function = lambda a: a / a.norm()  # noqa: E731
    assert all(step.warps <= 32 for p in plans_of(function, x(2**29)) for step in p.steps)


def test_places_of_a_walk_are_reckoned_within_it(worker: Worker) -> None:
    """Windows within windows across the row: their index hangs on what a lane walks alone."""

    def pooled_rows(a: torch.Tensor) -> torch.Tensor:
        pooled = torch.nn.functional.max_pool1d(a.transpose(1, 2), 2)
        return torch.nn.functional.max_pool1d(pooled, 3).softmax(1)

    for number, plan in enumerate(plans_of(pooled_rows, x(150, 12, 70))):
        failure = checked(pooled_rows, (x(150, 12, 70),), worker, plan=number)
        assert failure is None, plan.schedule


# -- rows of channels and their pixels -------------------------------------------------------------


def scaled_norm(a: torch.Tensor, s: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.group_norm(a * s[:, None], 2, w, b).relu()


def wide(*shape: int) -> torch.Tensor:
    return x(*shape, dtype=torch.float64)


def padded_norm(a: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    """A mask along the pixels alone, and rows that lie apart."""
    return torch.nn.functional.group_norm(a[:, :, :9211] * m, 2)


CHANNELS: dict[str, tuple[Callable[..., object], Tensors, set[str]]] = {
    "many rows": (
        scaled_norm, (x(80, 6, 9212), x(6), x(6), x(6)), {"row", "cooperative", "blocked"},
    ),
    "few rows": (
        scaled_norm, (x(1, 8, 9212), x(8), x(8), x(8)), {"cooperative", "split"},
    ),
    "pixels of their own": (
        padded_norm, (x(80, 6, 9216), x(9211)), {"row", "cooperative", "blocked"},
    ),
    "joined rows": (
        lambda a: torch.nn.functional.group_norm(a[:, :, :9211] * 2, 2), (x(80, 6, 9216),),
        {"row", "cooperative", "blocked"},
    ),
    "behind zeros": (
        lambda a: torch.nn.functional.group_norm(F.pad(a, (212, 0)) * 2, 2), (x(80, 6, 9000),),
        {"row", "cooperative", "blocked"},
    ),
    "float64": (
        scaled_norm, (wide(1, 6, 9212), *[wide(6)] * 3), {"split"},
    ),
    "float64, many rows": (
        scaled_norm, (wide(80, 6, 9212), *[wide(6)] * 3), {"blocked"},
    ),
    "walked twice": (
        scaled_norm, (wide(80, 6, 92120), *[wide(6)] * 3), {"split", "blocked"},
    ),
    "short channels": (
        scaled_norm, (x(1, 480, 150), x(480), x(480), x(480)), {"cooperative", "split"},
    ),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", CHANNELS)
def test_rows_of_channels(name: str, worker: Worker) -> None:
    """Every plan is right, and none divides in each lane where channels are long."""
    function, inputs, schedules = CHANNELS[name]
    found = plans_of(function, *inputs)
    assert {plan.schedule for plan in found} == schedules
    for number, plan in enumerate(found):
        assert checked(function, inputs, worker, plan=number) is None, plan.schedule


def test_rows_shared_by_most_of_the_device_are_walked_twice() -> None:
    """Where no other row's programs load while those of one wait."""
    double = lambda a: (a * 2).softmax(-1)  # noqa: E731
    long, longer = (plans_of(double, x(512, columns)) for columns in (262_144, 524_288))
    assert [plan.schedule for plan in long] == ["cooperative", "split", "blocked"]
    assert [plan.schedule for plan in longer] == ["split", "blocked"]
    assert best(double, x(1, 524_288)).schedule == "cooperative"


def test_a_part_of_three_operands_has_a_power_of_two_of_warps() -> None:
    """Triton takes no other number; six bytes of each place are kept, and parts are powers."""
    narrow = [x(2, 960, 48, 48, dtype=torch.float16) for _ in range(3)]
    plan = best(lambda a, b, c: torch.nn.functional.group_norm(a + b + c, 32), *narrow)
    assert [(plan.schedule, step.warps) for step in plan.steps] == [("cooperative", 4)]


@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 2, 100_000)])
def test_a_mean_that_is_kept_is_as_exact_in_parts(shape: tuple[int, ...], worker: Worker) -> None:
    """Of what a training step keeps of a norm for its backward pass. The elements of a row are far
    from their mean, which is near zero: what they are summed about must not decide how exact it
    is."""

    def kept(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance, mean = torch.var_mean(y, (1, 2), correction=0)
        return mean, torch.rsqrt(variance + 1e-5)

    plans = [plan.schedule for plan in plans_of(kept, x(*shape))]
    assert checked(kept, (x(*shape),), worker, plan=plans.index("split")) is None


def test_a_mean_is_as_exact_as_the_sum_that_it_comes_from() -> None:
    """The mean of the deviations from a first one is added to that: from one with more digits than
    the numbers have all would be rounded alike, by up to half of their last place, 3e-8 here."""

    def kept(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.var_mean(y, 1)

    drawn = torch.randn(256, 6144, generator=torch.Generator().manual_seed(0))
    flow = flow_of(kept, drawn)
    found = expressed_whole(flow)
    _, mean = meaning(flow, found, (drawn,)).values()
    assert (mean.double() - drawn.double().mean(1)).abs().max() < 8e-9


# -- windows that are cut off at the rim -----------------------------------------------------------


def unshifted(windows: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Windows [B * 9, 16, C] laid side by side, their rim of padding cut off, and a norm."""
    side = windows.relu().view(-1, 3, 3, 4, 4, windows.shape[-1]).permute(0, 1, 3, 2, 4, 5)
    image = side.reshape(-1, 12, 12, windows.shape[-1])[:, 2:-1, 2:-1]
    return torch.nn.functional.layer_norm(a + image, w.shape, w)


def test_windows_that_are_cut_off_serve_every_batch(worker: Worker) -> None:
    """Places of a window are cut off together along both of its dimensions: what is read is no
    product of what is read along each. The number of windows follows the batch."""
    inputs = (x(2 * 9, 16, 32), x(2, 9, 9, 32), x(32))
    assert checked(unshifted, inputs, worker) is None
    assert "(n0 * 9, 16, n" in kernel_of(unshifted, *inputs).text
    assert best(unshifted, *inputs).bytes_read == 4 * (2 * 2 * 9 * 9 * 32 + 32)


@pytest.mark.deep
def test_windows_of_rows_that_are_spread_are_cut_off(worker: Worker) -> None:
    spread = x(2 * 9, 1, 32).expand(-1, 16, -1)
    assert checked(unshifted, (spread, x(2, 9, 9, 32), x(32)), worker) is None


def test_group_norm_scales_what_has_lost_its_mean(worker: Worker) -> None:
    """With an infinite weight too, as CUDA's kernel does where a channel is one place; a CPU's
    takes the mean off later, and gets NaN."""

    def normed(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.group_norm(y, 16, weight, bias))

    assert checked(normed, (x(40, 512), x(512), x(512)), worker) is None


def test_batch_norm_scales_what_has_lost_its_mean(worker: Worker) -> None:
    """By the statistics that it is given; with an infinite weight, too."""

    def normed(y: torch.Tensor, mean: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.nn.functional.batch_norm(y, mean, mean.exp(), weight, mean))

    assert checked(normed, (x(40, 512), x(512), x(512)), worker) is None


# -- rows that are rotated by halves or by pairs, behind their norm --------------------------------


def rotated_norm(a: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
    left, right = F.rms_norm(a, (48,), w).chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def rotated_pairs(a: torch.Tensor, w: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
    normed = F.rms_norm(a, (48,), w)
    left, right = normed[..., ::2], normed[..., 1::2]
    turned = torch.stack((left * cos - right * sin, right * cos + left * sin), -1)
    return turned.flatten(-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("function", [rotated_norm, rotated_pairs])
def test_a_norm_and_the_rotation_behind_it_are_one_kernel(
    function: Callable[..., object], worker: Worker
) -> None:
    inputs = (x(2, 3, 70, 48), x(48), x(70, 24), x(70, 24))
    assert best(function, *inputs).schedule == "row"
    assert checked(function, inputs, worker) is None


# -- sums over all rows of what hangs on each row's reductions -------------------------------------


def divergence(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    logs = F.log_softmax(a, -1), F.log_softmax(b, -1)
    return F.kl_div(*logs, log_target=True, reduction="sum")


@pytest.mark.parametrize(("rows", "schedule"), [(12, "split + row"), (300, "blocked + row")])
def test_a_sum_over_long_rows_goes_by_rows(rows: int, schedule: str, worker: Worker) -> None:
    inputs = (x(rows, 20000), x(rows, 20000))
    assert best(divergence, *inputs).schedule == schedule
    if rows < 100:  # the interpreter takes its time
        assert checked(divergence, inputs, worker) is None


# -- results that an early walk over a row stores --------------------------------------------------


def added_norm(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """A sum that is a result, and its norm."""
    y = a + b
    return y, y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def rounded_norm(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """The norm of a sum, of which the rounded one is a result: that does not stand for it."""
    y, norm = added_norm(a, b)
    return y.half(), norm


def furthest(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """A difference, and the largest of each row."""
    y = a - b
    return y, y.abs().amax(-1)


EARLY: dict[str, tuple[Callable[..., Tensors], tuple[int, int, int]]] = {
    "read back": (added_norm, (2, 2, 1)),
    "of fewer digits": (rounded_norm, (2, 2, 0)),
    "in the only walk": (furthest, (1, 1, 0)),
}
"""Walks over a row, loads of the transposed operand and of results, or of what stands for them."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EARLY)
def test_results_are_stored_as_soon_as_they_are_made(name: str, worker: Worker) -> None:
    function, (walks, turned, back) = EARLY[name]
    inputs = (x(1200, 600), x(600, 1200).t())
    (number,) = (n for n, p in enumerate(plans_of(function, *inputs)) if p.schedule == "blocked")
    step = plans_of(function, *inputs)[number].steps[0]
    found = row_walks(step.region, step.along)
    assert (len(found), sum(len(walk.back) for walk in found)) == (walks, back)
    loads = step.region.all("load")
    across = next(
        n for n, a in zip(loads, step.loads, strict=True) if a.strides[min(step.along)] > 1
    )
    assert sum(across in walk.made for walk in found) == turned - back
    assert checked(function, inputs, worker, plan=number) is None


def distance(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """The sum of all differences' sizes, and their signs."""
    apart = a - b
    return apart.abs().sum(), apart.sign()


def with_shares(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    y = a + b
    return y, y.softmax(-1)


def turned_sum(a: torch.Tensor, b: torch.Tensor) -> Tensors:
    """The other result lies across the rows."""
    y = a + b
    return y.sum(-1), y.mT.contiguous()


BY_PARTS: dict[str, tuple[Callable[..., Tensors], list[int]]] = {
    "signs": (distance, [2, 1]),
    "the operand of a softmax": (with_shares, [3, 2, 1]),
    "across the rows": (turned_sum, [1, 1, 1]),
}
"""Results of each kernel of a region in parts of rows, partial ones among them."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", BY_PARTS)
def test_parts_of_rows_leave_the_results_that_wait_for_nothing(name: str, worker: Worker) -> None:
    function, results = BY_PARTS[name]
    inputs = (x(5, 40000), x(5, 40000))
    (number,) = (n for n, p in enumerate(plans_of(function, *inputs)) if p.schedule == "split")
    steps = plans_of(function, *inputs)[number].steps
    assert [len(step.region.outputs) for step in steps] == results
    assert checked(function, inputs, worker, plan=number) is None


# -- arguments of an operator ----------------------------------------------------------------------


@pytest.mark.parametrize(("count", "why"), [(64, None), (65, "65 arguments; an operator of tor")])
def test_a_kernel_has_no_more_arguments_than_an_operator(
    count: int, why: str | None, worker: Worker
) -> None:
    """Its file is an operator, which is defined as it is imported."""
    found = checked(lambda *each: sum(each), tuple(x(3, 7) for _ in range(count)), worker)
    assert found is None if why is None else found and found.startswith(f"refused: {why}")


# -- numbers of rows, and reductions that wait for each other --------------------------------------


def scaled_and_moved(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c


def gated(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b.sigmoid()


@pytest.mark.parametrize(
    ("function", "columns", "schedule"),
    [
        (scaled_and_moved, 1000, "tiled"),
        (scaled_and_moved, 4096, "tiled"),
        (scaled_and_moved, 700, "flat"),
        (gated, 1000, "flat"),
    ],
)
def test_two_numbers_of_a_row_are_loaded_once_where_lanes_are_busy(
    function: Callable[..., object], columns: int, schedule: str, worker: Worker
) -> None:
    inputs = (x(40, columns), x(40, 1), x(40, 1))
    assert best(function, *inputs).schedule == schedule
    assert checked(function, inputs, worker) is None


def in_two_layouts(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a * 2, a.transpose(1, 2).contiguous()


def test_two_layouts_are_written_from_a_tile(worker: Worker) -> None:
    """Lanes along one result would write a sector each of the other: 2012 us on an H200 where eager
    takes 983."""
    a = x(5, 44, 60)
    assert best(in_two_layouts, a).schedule == "tiled"
    assert checked(in_two_layouts, (a,), worker) is None


@pytest.mark.parametrize(("columns", "schedule"), [(8192, "row"), (20000, "split")])
def test_long_rows_are_parted_where_reductions_follow_one_another(
    columns: int, schedule: str
) -> None:
    """Of one reduction, or with a result along the rows, each is held by one program."""
    wide = x(400, columns)
    assert best(lambda a: a.logsumexp(-1), wide).schedule == schedule
    assert best(lambda a: a.square().mean(-1), wide).schedule == "row"
    assert best(lambda a: a.softmax(-1), wide).schedule == "row"


def squared_loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b) ** 2).mean(-1)


@pytest.mark.parametrize(
    ("function", "schedule"),
    [
        (squared_loss, "blocked"),
        (lambda a, b: F.softplus(a - b).mean(-1), "split"),
        (lambda a, b: (a - b).logsumexp(-1), "split"),
    ],
)  # fmt: skip
def test_one_kernel_walks_rows_that_are_too_long_to_be_held(
    function: Callable[..., object], schedule: str
) -> None:
    """Where arithmetic takes long, or reductions follow one another, parts of rows are as fast."""
    rows = torch.empty(272, 47360)
    assert best(function, rows, rows.clone()).schedule == schedule


@pytest.mark.parametrize(
    ("function", "size", "passing"),
    [
        (squared_loss, (800, 8192), True),
        (squared_loss, (272, 47360), True),
        (squared_loss, (3200, 16384), False),  # more than the L2 holds five times
        (lambda a, b: (a - b).logsumexp(-1), (800, 8192), True),
        (lambda a, b: (a - b).softmax(-1), (800, 8192), False),
        (lambda a, b: (a - b).sum((0, 2)), (64, 48, 4096), False),  # in parts of rows
        (lambda a, b: (a - b).sum(-1), (64, 48, 4096), True),
        (lambda a, b: (a * b).sum(0), (800, 8192), False),  # neighbours share lines
    ],
)
def test_lines_of_rows_that_are_reduced_pass_through_the_l2(
    function: Callable[..., object], size: tuple[int, ...], passing: bool
) -> None:
    step, *later = best(function, torch.empty(size), torch.empty(size)).steps
    assert [step.passes(load) for load in step.loads] == [passing] * 2
    assert not any(other.passes(load) for other in later for load in other.loads)


def test_what_programs_share_stays_in_the_l2() -> None:
    step = best(lambda a, w: (a * w).sum(-1), torch.empty(800, 8192), torch.empty(8192)).steps[0]
    assert {load.name: step.passes(load) for load in step.loads} == {"in0": True, "in1": False}


# -- runs of elements that share a place -----------------------------------------------------------


def biased(a: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.relu(a + bias)


BIASED: dict[str, tuple[Tensors, str]] = {
    "over channels of many pixels": ((x(6, 5, 37, 41), x(5, 1, 1)), "tiled"),
    "over channels of few pixels": ((x(600, 5, 11, 13), x(5, 1, 1)), "tiled"),
    "over channels of pixels that come several at a time": ((x(6, 5, 36, 40), x(5, 1, 1)), "flat"),
    "over rows": ((x(30, 1025), x(30, 1)), "flat"),
    "over samples and over channels": ((x(6, 5, 1100), x(6, 5, 1)), "flat"),
    "over long rows' columns": ((x(30, 1100), x(1100)), "flat"),
    "over short rows' columns": ((x(300, 110), x(110)), "flat"),
    "that varies along the run, too": ((x(6, 5, 7, 1101), x(5, 1, 1101)), "tiled"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BIASED)
def test_what_a_run_shares_is_added_to_all_of_it(name: str, worker: Worker) -> None:
    inputs, schedule = BIASED[name]
    assert best(biased, *inputs).schedule == schedule
    assert checked(biased, inputs, worker) is None


def test_division_by_a_number_is_multiplication(worker: Worker) -> None:
    """As in CUDA's kernel; no work at all where it is one."""

    def divided(a: torch.Tensor) -> torch.Tensor:
        return torch.floor((a / 1.0).relu() * 1.0 / 0.125) + (a / -4.0) / 3.0 + a / 2.0**127

    text = kernel_of(divided, x(40, 33)).text
    body = text[text.index("def k_kernel") : text.index("def k(")]
    assert "divided(" not in body
    assert "* 0.3333333333333333" in body
    assert "* 8.0" in body
    assert "* -0.25" in body
    assert "1.0\n" not in body
    assert checked(divided, (x(40, 33),), worker) is None


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_share_is_as_exact_as_what_is_stored_of_it(stored: torch.dtype, worker: Worker) -> None:
    """Beside a loss in float32: of which nothing else of the row is made."""

    def shares(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = a.float()
        e = torch.exp(wide - wide.amax(-1, keepdim=True))
        total = e.sum(-1, keepdim=True)
        return total.log(), (e / total - 0.5).to(stored)

    inputs = (x(40, 300).to(torch.bfloat16),)
    text = kernel_of(shares, *inputs).text
    assert ("share_of(" in text) == (stored is torch.float32)
    assert "libdevice.log(" in text
    assert checked(shares, inputs, worker) is None


def test_rows_that_share_a_program_multiply_for_their_means() -> None:
    """With the reciprocal of how many there are, which all of them have."""
    normed = lambda a: (a - a.mean(-1, keepdim=True)).relu()  # noqa: E731
    assert "* tl.div_rn(1.0, cols * 1.0)" in kernel_of(normed, x(5000, 64)).text
    assert "tl.div_rn(mean_sum, cols * 1.0)" in kernel_of(normed, x(50, 4096)).text


# -- how much of it a program takes ----------------------------------------------------------------


def test_chunks_of_a_scan_are_as_short_as_rows_are_many() -> None:
    """What follows in a row waits for them, so many short ones are on their way."""
    scan = lambda a: a.cumsum(-1) * 2  # noqa: E731
    for count, length, chunk in ((256, 131_072, 4096), (1024, 65_536, 4096), (8192, 32_768, 2048)):
        plan = best(scan, x(count, length))
        assert (plan.schedule, plan.steps[0].block) == ("blocked", chunk)
        assert plan.steps[0].warps == chunk // 512
    assert best(scan, x(8192, 8192)).schedule == "row"


def test_chunks_of_several_tensors_have_more_threads() -> None:
    """And of four-byte ones no stages."""
    apart = lambda a, b: (a - b).abs().sum()  # noqa: E731
    one = best(lambda a: a.abs().sum(), x(2**26)).steps[0]
    two = best(apart, x(2**26), x(2**26)).steps[0]
    narrow = best(apart, *[x(2**26).bfloat16() for _ in range(2)]).steps[0]
    assert (one.block, one.warps, one.stages) == (4096, 2, 3)
    assert (two.block, two.warps, two.stages) == (4096, 8, 1)
    assert (narrow.block, narrow.warps, narrow.stages) == (4096, 4, 3)


def test_parts_with_long_functions_have_few_elements_a_thread() -> None:
    """Their chunks are not staged."""
    loss = lambda a, b: torch.nn.functional.kl_div(a.log(), b, reduction="sum")  # noqa: E731
    inputs = x(4096, 8192), x(4096, 8192)
    step = best(loss, *inputs).steps[0]
    assert (step.block, step.warps, step.stages) == (4096, 16, 1)
    for function in (torch.nn.functional.gelu, torch.sigmoid):
        assert best(lambda a, f=function: f(a).mean(), x(2**26)).steps[0].warps == 8
    three = best(lambda a, b, c: (a + b * c).abs().sum(), *[x(2**26) for _ in range(3)]).steps[0]
    assert (three.block, three.warps) == (4096, 8)


def weighted_norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(a * 2, (a.shape[-1],), w, b)


def test_rows_that_no_program_can_hold_are_shared() -> None:
    def schedule(columns: int) -> str:
        return best(weighted_norm, x(2048, columns), x(columns), x(columns)).schedule

    assert [schedule(columns) for columns in (16_000, 32_768, 40_000, 40_001)] == [
        *["row"] * 2,
        *["cooperative"] * 2,
    ]
    assert best(lambda a: (a * 2).softmax(-1), x(2048, 20_000)).schedule == "row"


def test_what_only_goes_into_a_reduction_takes_no_place_on_chip() -> None:
    """A program keeps the row for the result; squares go from lane to lane as they are made."""

    def normed(a: torch.Tensor) -> torch.Tensor:
        wide = a.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(a.dtype)

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * (b - (a * b).sum(-1, keepdim=True))

    narrow = best(normed, x(2048, 24_000, dtype=torch.bfloat16)).steps[0]
    assert (narrow.schedule, narrow.on_chip_bytes) == ("row", 4 * 24_576)
    two = best(both, x(2048, 12_000), x(2048, 12_000)).steps[0]
    assert (two.schedule, two.on_chip_bytes) == ("row", 2 * 4 * 12_288)


def test_few_bytes_on_their_way_want_other_programs_beside() -> None:
    """Programs of fewer warps stand beside each other; rows of more bytes keep their warps."""

    def warps(columns: int, dtype: torch.dtype) -> int:
        plan = best(lambda a: (a * 2).softmax(-1), x(2048, columns, dtype=dtype))
        assert plan.schedule == "row"
        return plan.steps[0].warps

    lengths = (4096, 8192, 12_000, 16_384, 17_000, 22_720)
    assert [warps(each, torch.bfloat16) for each in lengths] == [8, 8, 8, 16, 16, 8]
    assert [warps(each, torch.float32) for each in lengths] == [8, 16, 16, 16, 16, 16]


# -- places that lanes walk more than once ---------------------------------------------------------


def pooled_softmax(a: torch.Tensor) -> torch.Tensor:
    return torch.softmax(torch.nn.functional.max_pool3d(a, 2), 1).amax(1)


def squared_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return ((a - b.mT) ** 2).mean()


def test_numbers_of_tensors_that_lie_across_each_other_are_made_of_squares() -> None:
    """A walk along one's memory would be a walk across the other's."""
    long = torch.empty(4099, 2053, dtype=torch.bfloat16)
    plan = best(squared_difference, long, torch.empty(2053, 4099, dtype=torch.bfloat16))
    first, second = plan.steps
    assert (plan.schedule, first.rows, rows(first)) == ("squares", 64, 2053)
    assert (first.programs, second.length) == (first.parts and first.parts.size,) * 2
    assert best(squared_difference, long, long.mT + 1).schedule == "split"


SQUARES: dict[str, tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = {
    "difference": (squared_difference, (x(65, 4099), x(4099, 65))),
    "several": (
        lambda a, b: ((a * b.t()).amax(), (a + b.t()).exp().sum()),
        (x(65, 4099), x(4099, 65)),
    ),
    "batch": (squared_difference, (x(3, 70, 210), x(3, 210, 70))),
    "beside": (
        lambda a, b, c, d: ((a * c + b.t()) * d[:, None]).abs().sum(),
        (x(130, 99), x(99, 130), x(99), x(130)),
    ),
    "stored": (lambda a, b: (a * b.t(), (a * b.t()).sum()), (x(130, 99), x(99, 130))),
    "clipped": (lambda a, b: a * (a - b.t()).square().sum().rsqrt(), (x(130, 99), x(99, 130))),
    "twice": (
        lambda a, b: ((a * b.t() / (a * b.t()).abs().amax()) ** 2).sum(),
        (x(130, 99), x(99, 130)),
    ),
    "channels last": (
        lambda a, b: (a * b).sum(),
        (x(4, 24, 9, 8), x(4, 24, 9, 8).contiguous(memory_format=torch.channels_last)),
    ),
    "bfloat16": (
        lambda a, b: (a.float() - b.t().float()).abs().amax(),
        (x(130, 99, dtype=torch.bfloat16), x(99, 130, dtype=torch.bfloat16)),
    ),
    "follows a maximum": (
        lambda a, b: (a + b.t()).flatten().logsumexp(0),
        (x(130, 99), x(99, 130)),
    ),
    "integers": (
        lambda a, b: (a + b.t()).sum(),
        (x(130, 99).to(torch.int32), x(99, 130).to(torch.int32)),
    ),
}  # fmt: skip
"""Numbers of tensors that lie across each other, of which a plan in squares is checked."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SQUARES)
def test_squares_give_what_eager_gives(name: str, worker: Worker) -> None:
    function, inputs = SQUARES[name]
    plans = plans_of(function, *inputs)
    (number,) = (n for n, plan in enumerate(plans) if plan.schedule == "squares")
    assert checked(function, inputs, worker, plan=number) is None


REFUSED: dict[str, tuple[Callable[..., object], str]] = {
    "rows": (lambda a, b: (a - b.mT).sum((1, 2)), "squares are combined to one number alone"),
    "a mean": (
        lambda a, b: (a - b.mT).var(),
        "a square is no stretch of a row, whose elements are counted",
    ),
    "one way": (lambda a, b: (a - a * 2).sum(), "all that it reduces lies one way"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_squares_refuse(name: str) -> None:
    function, why = REFUSED[name]
    planned = decided(flow_of(function, x(3, 130, 99), x(3, 99, 130))).subject.planned
    assert planned is not None
    assert why in [refusal.why for refusal in planned.refusals]


def test_what_lanes_read_again_is_counted() -> None:
    """A lane that walks channels has no room for their windows, which it makes three times over;
    what does not fit into the L2 meanwhile is fetched again, and a row over the channels is
    preferred."""
    large, small = x(128, 16, 32, 64, 64), x(1, 16, 4, 16, 16)
    for inputs, times in ((large, 3), (small, 1)):
        found = plans_of(pooled_softmax, inputs)
        (flat,) = (plan for plan in found if plan.schedule == "flat")
        assert flat.bytes_read == times * inputs.numel() * inputs.itemsize
    row = best(pooled_softmax, large)
    assert row.schedule == "row"
    assert row.bytes_read == large.numel() * large.itemsize


def test_a_row_of_one_value_is_no_piece_of_a_row(worker: Worker) -> None:
    expanded = torch.empty(1, 1).expand(9, 6000)
    row = best(lambda a: (a + a).amax(1), expanded)
    assert row.steps[0].rest == 0
    assert checked(lambda a: (a + a).amax(1), (expanded,), worker) is None


@pytest.mark.parametrize(("steps", "refused"), [(191, False), (192, True)])
def test_no_kernel_compiles_for_minutes(steps: int, refused: bool) -> None:
    """A recurrence that is written out, each of whose states is a result."""

    def states(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        state, found = a, list[torch.Tensor]()
        for step in range(1, steps + 1):
            state = state * 0.5 + step
            found.append(state)
        return tuple(found)

    planned = decided(flow_of(states, torch.empty(1 << 20, device="meta"))).subject.planned
    assert planned is not None
    assert bool(planned.plans) != refused
    if refused:
        (refusal,) = planned.refusals
        assert refusal.why == "193 loads and stores would compile for minutes; 192 at most"


@pytest.mark.deep
def test_a_norm_and_the_rotation_of_its_pairs_are_one_kernel(worker: Worker) -> None:
    """The norm's axis is split into the pairs that the result's dimension has."""

    def rotated(a: torch.Tensor, weight: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(a, weight.shape, weight)
        even, odd = normed[..., ::2], normed[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()
        return torch.stack(turned, -1).flatten(-2)

    inputs = x(5, 30, 24), x(24), x(30, 12)
    assert [plan.schedule for plan in plans_of(rotated, *inputs)][:1] == ["row"]
    assert checked(rotated, inputs, worker) is None


def test_a_reduction_alone_is_a_group_where_eager_is_slow() -> None:
    """Eager reads a group norm twice, and with one block for each group of a sample; not a layer
    norm."""
    images = torch.empty(31, 256, 112, 72, dtype=torch.bfloat16, device="meta")

    def groups(function: Callable[..., torch.Tensor], *shape: int) -> list[int]:
        flow = flow_of(lambda a: function(a, *shape), images)
        return [len(found.decision.subject.launches) for found in fuse(flow, RULES).groups]

    assert groups(torch.nn.functional.group_norm, 1) == [1]
    assert groups(lambda a: torch.nn.functional.layer_norm(a, (112, 72))) == []


# -- operands that lie across each other -----------------------------------------------------------


def scaled(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rows of `a`, which lie across those of `b`, reduced and then multiplied."""
    return torch.softmax(a.mT, -1) * b


def summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Rows that both are needed for."""
    return torch.softmax(a.mT + b, -1)


def far(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def schedules_for(function: Callable[..., object], *inputs: torch.Tensor) -> list[str]:
    planned = decided(flow_of(function, *inputs)).subject.planned
    assert planned is not None
    return [step.schedule for step in planned.plans[0].steps]


def test_torn_rows_are_reduced_before_what_lies_across_them_is_read() -> None:
    """Lines of 9726 floats begin between sectors; nothing is lost where the L2 holds them."""
    torn, whole = far(8, 832, 9726), far(8, 832, 9728)
    assert schedules_for(scaled, torn, far(8, 9726, 832)) == ["blocked", "row", "tiled"]
    assert schedules_for(scaled, whole, far(8, 9728, 832)) == ["row"]
    assert schedules_for(scaled, far(8, 832, 726), far(8, 726, 832)) == ["row"], "in the L2"
    assert schedules_for(summed, torn, far(8, 9726, 832)) == ["row"], "read together in any case"
    short = far(128, 2038277), far(2038277, 128)
    assert schedules_for(scaled, *short) == ["row"], "32 neighbours lose little"
    last = best(scaled, torn, far(8, 9726, 832)).steps[-1]
    assert min(last.rows, last.block) >= 32, "a tile of lines either way"


@pytest.mark.parametrize(
    ("shape", "dtype", "kernels"),
    [
        ((8192, 20000), torch.bfloat16, ["blocked"]),
        ((1500, 20000), torch.float32, ["blocked"]),
        ((8192, 12288), torch.bfloat16, ["blocked", "row"]),
        ((8192, 768), torch.float32, ["blocked", "row"]),
    ],
    ids=["many", "no longer held", "few, in parts", "very few"],
)
def test_rows_across_memory_are_reduced_in_lines(
    shape: tuple[int, int], dtype: torch.dtype, kernels: list[str]
) -> None:
    """On an H200 sums of 1344 bfloat16 rows of 27968 columns take 79 us in tiles of 16, 31 so."""
    plan = best(sum_and_largest, torch.empty(shape, dtype=dtype))
    assert ([step.schedule for step in plan.steps], plan.steps[0].rows) == (kernels, 64)


def sum_and_largest(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return a.float().sum(0), a.float().amax(0)


def test_little_memory_is_worth_no_second_kernel() -> None:
    assert best(sum_and_largest, x(2000, 896, dtype=torch.bfloat16)).launches == 1


@pytest.mark.parametrize(("length", "schedule"), [(300, "row"), (4000, "blocked")])
def test_short_rows_across_memory_are_held_where_a_walk_rescales(
    length: int, schedule: str
) -> None:
    plan = best(lambda a: (a * 2).logsumexp(0), torch.empty(length, 16000))
    assert plan.schedule == schedule


def test_few_warps_share_a_tile_whose_elements_change_lanes() -> None:
    """Half of those that 64 registers a thread would ask for."""
    (step,) = best(scaled, far(64, 4096, 512), far(64, 512, 4096)).steps
    assert (step.rows * step.block, step.warps) == (8 * 4096, 16)


# -- results along other axes than the rows --------------------------------------------------------


def padded(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x.softmax(-1), (3, 40))


@pytest.mark.parametrize(
    ("shape", "kernels"),
    [((300, 600), ["row", "flat"]), ((300, 9000), ["row", "flat"]),
     ((40, 600), ["row", "row", "flat"]), ((300, 140000), ["row", "row", "flat"])],
)  # fmt: skip
def test_rows_that_fit_are_reduced_whole_before_results_that_lie_otherwise(
    shape: tuple[int, int], kernels: list[str]
) -> None:
    """Parts of rows are combined by a kernel more: where rows are few, or do not fit."""
    assert [step.schedule for step in best(padded, x(*shape)).steps] == kernels


@pytest.mark.parametrize("columns", [60, 600, 1025])
def test_rows_that_are_reduced_whole_are_right(columns: int, worker: Worker) -> None:
    plans = [plan.schedule for plan in plans_of(padded, x(140, columns))]
    assert checked(padded, (x(140, columns),), worker, plan=plans.index("split")) is None
