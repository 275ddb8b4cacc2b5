"""Sums along a row that need no walk over it, or not one more: what is counted, and logarithms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.emit import emit
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.online import passes
from fusion_advisor.support.worker import Worker

from .checks import checked
from .evaluating import held_to_eager
from .regions import LOADED, RULES, decided, flow_of, interpreted, kernel_of
from .test_emit import Tensors, x

inf, nan = float("inf"), float("nan")


# -- terms that are alike but at one place ---------------------------------------------------------


def spiked(index: torch.Tensor, there: torch.Tensor, elsewhere: torch.Tensor) -> torch.Tensor:
    """Elements of one value, and of another one at the place that an index names."""
    places = torch.arange(SIZE, device=index.device)
    return torch.where(places == index[:, None], there[:, None], elsewhere[:, None])


def two_at(index: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    here = torch.arange(SIZE) == index[:, None]
    return torch.where(here, a, b) * torch.where(here, b, 1.0)


SIZE = 70
COUNTED: dict[str, Callable[..., torch.Tensor]] = {
    "as they are": lambda i, a, b: spiked(i, a, b).sum(-1),
    "the other way round": lambda i, a, b: torch.where(
        i[:, None] == torch.arange(SIZE), a[:, None], b[:, None]
    ).sum(-1),
    "of products": lambda i, a, b: (spiked(i, a, b) * b[:, None] - 2).exp().sum(-1),
    "of two such": lambda i, a, b: two_at(i, a[:, None], b[:, None]).sum(-1),
    "of truths": lambda i, a, b: (torch.arange(SIZE) == i[:, None]).float().mean(-1) * a + b,
}
WALKED: dict[str, Callable[..., torch.Tensor]] = {
    "two places": lambda i, a, b: (spiked(i, a, b) * spiked(i + 1, b, a)).sum(-1),
    "the places before one": lambda i, a, b: torch.where(
        torch.arange(SIZE) < i[:, None], a[:, None], b[:, None]
    ).sum(-1),
    "the position itself": lambda i, a, b: (spiked(i, a, b) * torch.arange(SIZE)).sum(-1),
}


def of_rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Places within, at both ends of, and outside of a row."""
    index = torch.tensor([0, 1, SIZE - 1, SIZE, SIZE + 1, -1, -100, 5, 6])
    generator = torch.Generator().manual_seed(3)
    there, elsewhere = (torch.rand(9, generator=generator) for _ in range(2))
    return index, there, elsewhere


@pytest.mark.parametrize("name", COUNTED)
def test_terms_that_are_alike_but_at_one_place_are_counted(name: str) -> None:
    found = held_to_eager(COUNTED[name], *of_rows())
    assert not found.region.reduced


@pytest.mark.parametrize("name", WALKED)
def test_other_terms_are_walked(name: str) -> None:
    found = held_to_eager(WALKED[name], *of_rows())
    assert found.region.reduced


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_infinite_term_counts_only_where_it_is(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SIZE", size)
    index = torch.tensor([0, 0, 0, 1, -1])
    there = torch.tensor([1.0, inf, 2.0, inf, 3.0])
    elsewhere = torch.tensor([inf, 1.0, nan, 2.0, -inf])
    held_to_eager(lambda i, a, b: spiked(i, a, b).sum(-1), index, there, elsewhere)


# -- logarithms that are taken out -----------------------------------------------------------------


def smoothed(a: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(a, -1).sum(-1)


def by_hand(a: torch.Tensor) -> torch.Tensor:
    return (a - torch.logsumexp(a, -1, keepdim=True)).mean(-1)


def turned(a: torch.Tensor) -> torch.Tensor:
    return (torch.logsumexp(a, -1, keepdim=True) - a).sum(-1)


def centred(a: torch.Tensor) -> torch.Tensor:
    return (a - a.amax(-1, keepdim=True)).sum(-1)


def of_another_row(a: torch.Tensor) -> torch.Tensor:
    return (a - a.exp().sum(0, keepdim=True).log()).sum(-1)


def weighted(a: torch.Tensor) -> torch.Tensor:
    """The logarithm is a factor of each term."""
    return (a * a.exp().sum(-1, keepdim=True).log()).sum(-1)


WALKS = {smoothed: 1, by_hand: 1, turned: 2, centred: 1, weighted: 2}
"""Walks over a row: `turned` subtracts the operand from what follows the maximum."""


def region_of(function: Callable[..., object], *inputs: torch.Tensor) -> Region:
    expressed = decided(flow_of(function, *inputs)).subject.expressed
    assert expressed is not None
    return expressed.region


@pytest.mark.parametrize("function", WALKS)
def test_a_sum_does_not_wait_for_a_logarithm(function: Callable[..., torch.Tensor]) -> None:
    region = region_of(function, *x_of(40, 300))
    (row,) = {region.exprs[n].axes for n in region.all("reduce")}
    assert len(passes(region, frozenset(row))) == WALKS[function]


def x_of(*shape: int) -> Tensors:
    return (x(*shape),)


def test_a_logarithm_of_other_axes_stays_in_the_terms() -> None:
    held_to_eager(of_another_row, torch.randn(5, 9))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(7, 9000), (300, 9000), (3, 70000)])
@pytest.mark.parametrize("function", [smoothed, by_hand, centred])
def test_every_plan_gives_what_float64_gives(
    function: Callable[..., torch.Tensor], shape: tuple[int, int], worker: Worker
) -> None:
    """Whole rows, chunks of them, and parts whose sums are moved to the maximum of all."""
    for schedule, kernel in by_schedule(function, *shape).items():
        (check,) = checked(worker, kernel, seeds=1)
        assert check.failure is None, schedule


def by_schedule(function: Callable[..., object], *shape: int) -> dict[str, Kernel]:
    """The kernel of each plan, by the plan's schedule."""
    flow = flow_of(function, *x_of(*shape))
    decision = decided(flow)
    planned = decision.subject.planned
    assert planned is not None
    found: dict[str, Kernel] = {}
    for number, plan in enumerate(planned.plans):
        one = replace(planned, plans=planned.plans[number:])
        subject = replace(decision.subject, planned=one)
        found[plan.schedule] = emit(flow, replace(decision, subject=subject), "sums", RULES)
    return found


@pytest.mark.parametrize(
    ("schedule", "right", "wrong"),
    [
        ("blocked", "(amax_safe - amax_grown_safe)", "0.0"),
        ("split", "tl.minimum(elements - col", "0 * tl.minimum(elements - col"),
    ],
)
def test_a_lost_growth_of_the_maximum_is_seen(
    schedule: str, right: str, wrong: str, worker: Worker
) -> None:
    kernel = by_schedule(centred, 300, 9000)[schedule]
    text = kernel.text.replace(right, wrong)
    assert text != kernel.text
    (check,) = checked(worker, replace(kernel, text=text), seeds=1)
    assert check.failure


SCRIPT = f"""{LOADED}
torch.manual_seed(0)
far, inf = float(sys.argv[2]), float("inf")
given = torch.randn(6, SIZE) + far
given[1, 3] = inf
given[2, : SIZE - 2] = -inf
given[3] = -inf
given[4, 5] = float("nan")
given[5] = torch.arange(SIZE) / 1000 + far
got, eager = module.k(given), module.reference(given)
exact = module.reference(given.double())
off = lambda a: ((a.double() - exact).abs() / exact.abs())[[0, 5]].max().item()
print(json.dumps([off(got), off(eager), [str(v) for v in got[1:5].tolist()],
                  [str(v) for v in eager[1:5].tolist()]]))
"""
"""Rows that are far from zero, endless, and that grow to their last element."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("far", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("function", [smoothed, centred])
@pytest.mark.parametrize("size", [300, 40000])
def test_rows_far_from_zero_and_endless_ones(
    size: int, function: Callable[..., torch.Tensor], far: float, tmp_path: Path
) -> None:
    kernel = kernel_of(function, *x_of(200 if size > 1000 else 6, size))
    script = SCRIPT.replace("SIZE", str(size)).replace("sys.argv[2]", repr(str(far)))
    error, eagers, ends, expected = interpreted(kernel, script, tmp_path)
    assert error <= 2 * eagers + 2**-22
    assert ends == expected
