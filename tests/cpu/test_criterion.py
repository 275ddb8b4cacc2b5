"""The criterion: the one rule by which results are held to float64, at both sides of its limits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import pytest
import torch

from fusion_advisor.support.kernel_fault import KernelFault
from fusion_advisor.verify.stepping import as_tuple, truth_of
from fusion_advisor.verify.tolerance import TooFew, Truth, compare, ulp, ulps_of

from .checks import CRITERION

MANY = CRITERION.eager_elements


def truth(exact: torch.Tensor, eager_error: float = 0.0, dtype=torch.float32) -> Truth:
    """Float64's results, and eager's, which are off by so much in the first element."""
    eager = exact.clone()
    eager.view(-1)[0] += eager_error
    return Truth((eager.to(dtype),), (exact,))


def off(exact: torch.Tensor, error: float, dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    ours = exact.clone()
    ours.view(-1)[-1] += error
    return (ours.to(dtype),)


EXACT = torch.ones(MANY, dtype=torch.float64)


@pytest.mark.parametrize(("eager", "ulps"), [(0.0, 2), (2.0**-12, 2)])
def test_twice_eager_and_two_ulps_hold_and_one_more_does_not(eager: float, ulps: int) -> None:
    one = ulp(EXACT.max(), torch.float32)
    known = truth(EXACT, eager)
    allowed = CRITERION.factor * eager + ulps * one
    error = compare(off(EXACT, allowed), known, CRITERION)
    assert error.ours == error.tolerance == allowed
    assert error.eager == eager
    with pytest.raises(KernelFault, match=r"output 0\[4095\].*allowed"):
        compare(off(EXACT, allowed + one), known, CRITERION)


def test_long_sums_of_float32_have_four_ulps_and_other_results_two() -> None:
    just, beyond = CRITERION.long_sum, CRITERION.long_sum + 1
    assert [ulps_of(torch.float32, n, CRITERION) for n in (just, beyond)] == [2, 4]
    assert [ulps_of(torch.bfloat16, n, CRITERION) for n in (just, beyond)] == [2, 2]


def test_eager_is_drawn_further_where_a_draw_has_few_elements() -> None:
    few = torch.ones(16, dtype=torch.float64)
    error = 2.0**-18
    asked: list[int] = []

    def further() -> Iterator[Truth]:
        for number in range(10_000):
            asked.append(number)
            yield truth(few, error if number == 7 else 0.0)

    ours = off(few, 1.5 * error)
    with pytest.raises(TooFew):
        compare(ours, truth(few), CRITERION)
    assert compare(ours, truth(few), CRITERION, further=further()).eager == error
    assert len(asked) == 8  # as many as settle it

    asked.clear()
    with pytest.raises(KernelFault) as wrong:
        compare(off(few, 3 * error), truth(few), CRITERION, further=further())
    assert len(asked) == MANY // 16 - 1  # with the first draw so many elements
    assert not isinstance(wrong.value, TooFew)


@pytest.mark.parametrize("off_by", [1e-4, 1e-3, 1e-2])
def test_channels_weighed_by_their_mean_are_not_excused(off_by: float) -> None:
    def channels(seed: int) -> Truth:
        drawn = torch.Generator().manual_seed(seed)
        a, g = (torch.randn(shape, generator=drawn) for shape in ((3, 24, 9, 11), (3, 24, 1, 1)))

        def weighed(a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
            return a * (g / (g.mean(1, keepdim=True) + 1e-6)) + a

        return Truth((weighed(a, g),), (weighed(a.double(), g.double()),))

    known = channels(0)
    ours = (known.exact[0] * (1 + off_by)).float()
    with pytest.raises(KernelFault):
        compare((ours,), known, CRITERION, further=map(channels, range(1, 10_000)))


def test_an_empty_result_of_integers_stands_beside_others() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    known = Truth((empty, *truth(EXACT).eager), (empty, EXACT))
    with pytest.raises(KernelFault, match="output 1"):
        compare((empty, *off(EXACT, 1.0)), known, CRITERION)


def test_enough_elements_ask_for_no_other_draw() -> None:
    with pytest.raises(KernelFault):
        compare(off(EXACT, 1.0), truth(EXACT), CRITERION, further=repeat(truth(EXACT, 1.0)))


def test_the_furthest_output_is_reported_with_its_own_eager_error() -> None:
    small, large = EXACT * 1e-3, EXACT
    known = Truth(
        (*truth(small, 1e-9).eager, *truth(large, 2e-6).eager), (small, large)
    )  # of a small output a small error, of a large one a large error
    error = compare((*off(small, 1e-9), *off(large, 3e-6)), known, CRITERION)
    assert error.ours == pytest.approx(3e-6, rel=0.1)
    assert error.eager == pytest.approx(2e-6, rel=0.1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stands_where_it_should(value: float) -> None:
    exact = torch.tensor([1.0, value], dtype=torch.float64)
    known = Truth((exact.float(),), (exact,))
    assert compare((exact.float(),), known, CRITERION).ours == 0.0
    for wrong in ([value, value], [1.0, 2.0], [1.0, -value]):
        if wrong[1] == value or wrong[1] != wrong[1]:
            continue
        with pytest.raises(KernelFault, match="NaN or infinity"):
            compare((torch.tensor(wrong),), known, CRITERION)


def stepped(x: torch.Tensor) -> Truth:
    """Rounded cubes of roots: near a half eager's argument may be on either side."""

    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        cube = x.pow(1 / 3).pow(3)
        return as_tuple((torch.round(cube).to(torch.int32), cube > 2.0))

    return truth_of(lambda: call(x), lambda: call(x.double()))


def test_half_a_unit_of_float16_stands_for_what_eager_has_as_infinite() -> None:
    """A sum that eager keeps in float16, and then casts: the others are held to eager's error."""
    exact = torch.full((MANY,), 1e5, dtype=torch.float64)
    eager = exact.to(torch.float32)
    eager[-1] = torch.inf
    known, allowed = Truth((eager,), (exact,)), CRITERION.factor * 1e5 * 2.0**-11
    assert compare(off(exact, 0.9 * allowed), known, CRITERION).ours == 0.0
    with pytest.raises(KernelFault, match=r"output 0\[4095\].*allowed"):
        compare(off(exact, 1.1 * allowed), known, CRITERION)
    with pytest.raises(KernelFault, match=r"output 0\[0\].*allowed"):
        compare((exact.to(torch.float32) + 1.0,), known, CRITERION)


def test_integers_and_booleans_equal_float64s_but_within_eagers_error_of_a_step() -> None:
    x = torch.arange(1, MANY + 1, dtype=torch.float32) * 0.5
    known = stepped(x)
    exact = known.exact
    assert compare(tuple(e.to(o.dtype) for e, o in zip(exact, known.eager, strict=True)), known,
                   CRITERION).stepped == 0.0  # fmt: skip
    near = exact[0].clone().to(torch.int32)
    halves = torch.arange(0, MANY, 2)  # x.5: a step is within eager's error there
    near[halves[100]] += 1 if float(near[halves[100]]) < float(x[halves[100]]) else -1
    bools = exact[1].to(torch.bool)
    assert 0 < compare((near, bools), known, CRITERION).stepped <= 1 / MANY
    far = exact[0].clone().to(torch.int32)
    far[101] += 1  # a whole number: no step is near
    with pytest.raises(KernelFault, match=r"output 0\[101\]"):
        compare((far, bools), known, CRITERION)
    with pytest.raises(KernelFault, match="output 1"):
        compare((exact[0].to(torch.int32), ~bools), known, CRITERION)


def test_a_poisoned_byte_is_no_true() -> None:
    exact = torch.ones(3, dtype=torch.bool)
    poisoned = torch.full((3,), 0x7F, dtype=torch.uint8).view(torch.bool)
    with pytest.raises(KernelFault):
        compare((poisoned,), Truth((exact,), (exact,)), CRITERION)
