"""Values that decide a rounding, a comparison, an index or an integer within a kernel: as eager
rounds them, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fusion_advisor.region.exprs import Expr, Pool
from fusion_advisor.support.worker import Worker

from .regions import LOADED, decided, flow_of, interpreted, kernel_of
from .test_emit import checked, x

DECIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rounded": torch.round,
    "floor": torch.floor,
    "remainder": lambda a: torch.remainder(a, 0.75),
    "compared": lambda a: torch.where(a > 0.5, a, -a),
    "an integer": lambda a: a.to(torch.int8),
    "a place": lambda a: a.argmax(-1),
}


def refused(function: Callable[..., object], *inputs: torch.Tensor) -> str:
    """What the gate says of a function that it fails; empty where it holds."""
    gates = decided(flow_of(function, *inputs)).gates
    return next((g.why for g in gates if g.name == "discontinuous" and g.outcome == "fails"), "")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DECIDED)
def test_what_eager_stores_in_16_bits_decides_as_in_eager(name: str, worker: Worker) -> None:
    decides = DECIDED[name]
    narrow = x(9, 70, dtype=torch.bfloat16)
    assert refused(lambda a: decides(torch.tanh(a)), narrow) == ""
    assert checked(lambda a: decides(torch.tanh(a)), (narrow,), worker) is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DECIDED)
def test_operations_that_round_once_decide_as_in_eager(name: str, worker: Worker) -> None:
    decides = DECIDED[name]
    assert refused(lambda a, b: decides(a / b - a), x(9, 70), x(9, 70)) == ""
    assert checked(lambda a, b: decides(a / b - a), (x(9, 70), x(9, 70)), worker) is None


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a function": torch.exp,
    "a sum": lambda a: (a * 3.0).softmax(-1) * 5.0,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("made", FUNCTIONS)
@pytest.mark.parametrize("name", DECIDED)
def test_a_step_may_be_told_by_a_function_or_a_sum_and_a_place_may_not(
    name: str, made: str, worker: Worker
) -> None:
    """Two kernels would take it as one does; by the exact forms it is as near as eager's."""
    decides, makes = DECIDED[name], FUNCTIONS[made]

    def function(a: torch.Tensor) -> torch.Tensor:
        return decides(makes(a))

    if name == "a place":
        assert " feeds argmax" in refused(function, x(9, 70))
        return
    assert refused(function, x(9, 70)) == ""
    assert checked(function, (x(9, 70),), worker) is None
    text = kernel_of(function, x(9, 70)).text
    assert "libdevice.exp(" in text
    assert '"decided": 0.001' in text


def test_what_rounds_once_decides_nothing_otherwise() -> None:
    assert "decided" not in kernel_of(lambda a, b: torch.round(a / b), x(9, 70), x(9, 70)).text


def _share(a: torch.Tensor) -> torch.Tensor:
    """Zeros where a row holds nothing."""
    kept = (torch.exp(a) * 0.7).masked_fill(a < 1.0, -torch.inf)
    top = kept.max(-1, keepdim=True).values
    powers = torch.exp(kept - torch.where(torch.isinf(top), torch.zeros_like(top), top))
    return powers / (powers.sum(-1, keepdim=True) + 1e-9)


OF_RANGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "isinf": torch.isinf,
    "isposinf": torch.isposinf,
    "isneginf": torch.isneginf,
    "isnan": torch.isnan,
    "isfinite": torch.isfinite,
    "compared": lambda a: a == -torch.inf,
    "with itself": lambda a: a != a,
}


@pytest.mark.parametrize("asks", OF_RANGE)
def test_what_asks_for_infinity_or_nan_may_be_told_by_a_function(asks: str, worker: Worker) -> None:
    """Which no last bit tells."""

    def replaced(a: torch.Tensor) -> torch.Tensor:
        made = torch.log(a) * 3.0
        return torch.where(OF_RANGE[asks](made), 0.5, made)

    inputs = (x(9, 70).clamp(min=0),)
    assert refused(replaced, *inputs) == ""
    assert checked(replaced, inputs, worker) is None
    assert '"decided"' not in kernel_of(replaced, *inputs).text


def test_a_softmax_of_rows_that_may_hold_nothing_is_one_kernel(
    worker: Worker, tmp_path: Path
) -> None:
    assert refused(_share, x(300, 70)) == ""
    assert checked(_share, (x(300, 70),), worker) is None
    nothing = interpreted(
        kernel_of(_share, x(300, 70)),
        f"""{LOADED}
given = torch.full((3, 70), 0.5)
given[1, 5] = 2.0
found = module.k(given)
print(json.dumps([found[0].abs().max().item(), found[1, 5].item(), found.sum().item()]))
""",
        tmp_path,
    )
    assert nothing == [0.0, 1.0, 1.0]


def test_float16_overflows_as_in_eager(tmp_path: Path) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        made = a * 300
        return torch.where(torch.isinf(made), torch.zeros_like(made), made / 300)

    found = interpreted(
        kernel_of(function, x(9, 70, dtype=torch.float16)),
        f"""{LOADED}
given = torch.full((1, 70), 2.0, dtype=torch.float16)
given[0, 3] = 300.0
found = module.k(given)
print(json.dumps([found[0, 2].item(), found[0, 3].item()]))
""",
        tmp_path,
    )
    assert found == [2.0, 0.0]


def test_one_of_two_equal_values_that_picks_a_place_is_refused() -> None:
    """Though the region has one value for both."""

    def twice(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.exp(a) * 2, torch.exp(a).argmax(-1)

    assert refused(twice, x(30, 20)) == "exp_1 feeds argmax"


def test_a_product_that_is_taken_away_is_not_contracted() -> None:
    text = kernel_of(lambda a, b, c: torch.round(c + (-(a * b))), x(9, 70), x(9, 70), x(9, 70)).text
    assert "libdevice.mul_rn(" in text
    assert "mul_rn" not in kernel_of(lambda a, b: a * b + a, x(9, 70), x(9, 70)).text


def _shares_above(a: torch.Tensor) -> torch.Tensor:
    share = torch.softmax((a * 0.7).masked_fill(a > 1.0, -1e4), -1)
    return torch.where(share > 0.01, share, torch.zeros_like(share))


def test_what_a_sum_is_in_takes_the_fast_forms(worker: Worker) -> None:
    """Its last bits are its own, whatever is exact beside it; what is rounded before is exact."""
    narrow = x(300, 70, dtype=torch.bfloat16)
    text = kernel_of(_shares_above, narrow).text
    assert "tl.exp2(" in text
    assert "divided(" not in text
    assert "* 0.7).to(tl.bfloat16)" in text
    assert checked(_shares_above, (narrow,), worker) is None

    def part(a: torch.Tensor) -> torch.Tensor:
        return torch.round((a.float() / (1 + a.float().sum(-1, keepdim=True))).bfloat16())

    assert "divided(" not in kernel_of(part, narrow).text
    assert "div_rn(" in kernel_of(lambda a, b: torch.round(a / b), narrow, narrow).text


def test_a_choice_among_rounded_values_is_not_rounded_again() -> None:
    """A number that is chosen is rounded as eager rounds it: -1e4 is no bfloat16."""
    text = kernel_of(_shares_above, x(300, 70, dtype=torch.bfloat16)).text
    assert "tl.where(gt, -9984.0, " in text
    assert text.count(".to(tl.bfloat16)") == 2


def test_a_number_divides_as_in_eager(worker: Worker) -> None:
    """CUDA's kernel multiplies with the reciprocal: other bits than a division's, and fewer
    instructions."""
    text = kernel_of(lambda a: torch.round(a / 0.05), x(9, 70)).text
    assert "* 20.0" in text
    assert checked(lambda a: torch.round(a / 0.05), (x(9, 70),), worker) is None
    for zero in (0.0, -0.0):
        assert checked(lambda a, by=zero: a / by + a, (x(9, 70),), worker) is None


def test_what_eager_stores_in_16_bits_takes_the_short_forms(worker: Worker) -> None:
    """In a kernel with float32 results, too; what is float32 in eager takes the long ones."""

    def capped(a: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.tanh(a).float(), -1)

    narrow = x(300, 70, dtype=torch.bfloat16)
    text = kernel_of(capped, narrow).text
    assert "narrow_tanh(" in text
    assert "libdevice.exp(" in text
    assert "wide_tanh(" in kernel_of(capped, x(300, 70)).text
    assert checked(capped, (narrow,), worker) is None
    assert checked(capped, (x(300, 70),), worker) is None


def test_quotients_that_are_only_added_up_are_products(worker: Worker) -> None:
    def likeness(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return 1 - torch.cosine_similarity(a, b, dim=-1)

    inputs = x(300, 70), x(300, 70)
    assert "divided(" not in kernel_of(likeness, *inputs).text
    assert checked(likeness, inputs, worker) is None
    assert "divided(" in kernel_of(lambda a: a / a.norm(dim=-1, keepdim=True), inputs[0]).text


def test_what_is_stated_for_an_operand_does_not_change_how_its_user_is_made() -> None:
    pool = Pool()
    with pool.made(exactly=True):
        with pool.made(exactly=False):
            plain = pool.add(Expr("mul", (0, 0), "float32"))
        exact = pool.add(Expr("mul", (0, 0), "float32"))
    assert [pool.exprs[number].exact for number in (plain, exact)] == [False, True]


def test_only_a_product_that_is_rounded_is_kept_apart(worker: Worker) -> None:
    """One with a power of two is exact."""

    def scaled(by: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda a: torch.softmax(a * by, -1)

    for by, count in ((0.3, 1), (0.125, 0), (-2.0, 0)):
        assert kernel_of(scaled(by), x(9, 70)).text.count("mul_rn(") == count
        assert checked(scaled(by), (x(9, 70),), worker) is None
