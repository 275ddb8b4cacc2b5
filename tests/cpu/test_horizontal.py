"""Results over different iteration spaces, side by side in one launch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.components import DecidedSet, Grouping
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.support.worker import Worker

from .generated import rotated
from .regions import RULES, decided, flow_of, kernel_of, why_not
from .test_emit import Tensors, checked, x
from .test_plans import best

BF16 = torch.bfloat16
ROTATED = (x(2, 5, 40, 32), x(2, 3, 40, 32), x(40, 32), x(40, 32))


def grouped(
    function: Callable[..., object], *inputs: torch.Tensor
) -> tuple[Dataflow, Grouping[DecidedSet]]:
    flow = flow_of(function, *inputs)
    return flow, fuse(flow, RULES).grouping


# -- the plan --------------------------------------------------------------------------------------


def test_queries_and_keys_are_rotated_in_one_launch() -> None:
    plan = best(rotated, *ROTATED)
    assert plan.schedule == "horizontal"
    assert plan.launches == 1
    assert len(plan.steps) == 2
    assert plan.steps[0].moved > plan.steps[1].moved


def test_what_both_read_is_read_once() -> None:
    plan = best(rotated, *ROTATED)
    inputs = sum(tensor.numel() * tensor.element_size() for tensor in ROTATED)
    assert plan.bytes_read == inputs
    assert plan.met == sum(tensor.numel() * 4 for tensor in ROTATED[2:])


def test_what_the_l2_does_not_hold_is_read_twice() -> None:
    def scaled(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a * s, b * s

    shared = x(64, 1024, 1024)  # 256 MiB
    plan = best(scaled, x(3, 64, 1024, 1024), x(2, 64, 1024, 1024), shared)
    assert plan.schedule == "horizontal"
    assert plan.met == 0


def test_sines_stay_in_the_l2_while_large_results_go_through_it() -> None:
    shapes = ((4, 32, 4096, 128), (4, 8, 4096, 128), (4096, 128), (4096, 128))
    plan = best(rotated, *(x(*shape, dtype=BF16) for shape in shapes))
    assert [step.lasting for step in plan.steps] == [{"in1", "in2"}, {"in1", "in2"}]


def test_all_have_as_many_warps() -> None:
    def scaled(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return a.transpose(0, 1).contiguous() * s, b * s * 2

    plan = best(scaled, x(3000, 40), x(2, 40, 3000), x(3000))
    assert {step.schedule for step in plan.steps} == {"flat", "tiled"}
    assert len({step.warps for step in plan.steps}) == 1


def summed(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (a * s).sum(-1), b * s


def worked_out_once(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
    s = torch.exp(s)
    return a * s, b * s


@pytest.mark.parametrize(
    ("function", "why"),
    [(summed, "a result does not depend on every row"),
     (worked_out_once, "the results span different iteration spaces")],
)  # fmt: skip
def test_refused(function: Callable[..., object], why: str) -> None:
    decision = decided(flow_of(function, x(2, 40, 32), x(3, 40, 32), x(40, 32)))
    assert decision.subject.plan is None
    assert why in why_not(decision)


# -- the kernel ------------------------------------------------------------------------------------

SIDES: dict[str, tuple[Callable[..., object], Tensors]] = {
    "rotated": (rotated, ROTATED),
    "three": (
        lambda a, b, c, s: (a * s, b + s, c - s),
        (x(5, 7, 333), x(2, 7, 333), x(3, 2, 7, 333), x(7, 333)),
    ),
    "flat and transposed": (
        lambda a, b, s: (a.transpose(0, 1).contiguous() * s, b * s * 2),
        (x(300, 40), x(2, 40, 300), x(300)),
    ),
    "several results of a side": (
        lambda a, b, s: (a * s, a + s, b * s),
        (x(5, 77), x(3, 5, 77), x(77)),
    ),
    "narrow": (
        lambda a, b, s: (a * s, (b * s).to(torch.float32)),
        (x(5, 77, dtype=BF16), x(3, 5, 77, dtype=BF16), x(77, dtype=BF16)),
    ),
    "flipped beside itself": (
        lambda a, s: (torch.maximum(a, s), a.flip(1)), (x(1, 2, 5), x(3, 1, 1, 5)),
    ),
    "parts of one tensor": (
        lambda a, s: (a[:, :3] * s, a[:, 3:].exp() * s), (x(6, 10, 129), x(129)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SIDES)
def test_right(name: str, worker: Worker) -> None:
    function, inputs = SIDES[name]
    assert best(function, *inputs).schedule == "horizontal"
    assert checked(function, inputs, worker) is None


def test_an_odd_side_does_not_slow_the_other() -> None:
    """Each tells by itself whether its tiles are whole, and what divides its rows."""
    shapes = ((2, 8, 64, 128), (2, 3, 64, 128), (64, 128), (64, 128))
    text = kernel_of(rotated, *(x(*shape, dtype=BF16) for shape in shapes), rules=RULES).text
    assert "WHOLE_0=" in text
    assert "WHOLE_1=" in text


# -- which groups become one -----------------------------------------------------------------------


def test_two_rotations_become_one_group() -> None:
    _, found = grouped(rotated, *ROTATED)
    (both,) = found.groups
    assert both.decision.subject.plan is not None
    assert both.decision.subject.plan.schedule == "horizontal"


def test_layers_that_do_the_same_share_a_kernel() -> None:
    def two_layers(*tensors: torch.Tensor) -> list[torch.Tensor]:
        q, k, cos, sin, weight = tensors
        results: list[torch.Tensor] = []
        for _ in range(2):
            q, k = rotated(q, k, cos, sin)
            results.append(k)
            q, k = (one @ weight for one in (q, k))
        return [*results, q]

    _, found = grouped(two_layers, *ROTATED, x(32, 32))
    plans = [each.decision.subject.plan for each in found.groups]
    assert [plan.schedule for plan in plans if plan] == ["horizontal"]
    assert len(found.groups[0].instances) == 2


def waiting(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
    """The keys hang on a product of the rotated queries."""
    q, _ = rotated(q, q, cos, sin)
    return rotated(k + (q @ q.transpose(-1, -2)).sum(), k, cos, sin)[0], q


def strangers(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> object:
    """They read nothing in common."""
    return q.exp() * cos[None], k.exp() * sin[None]


@pytest.mark.parametrize("function", [waiting, strangers])
def test_others_stay_apart(function: Callable[..., object]) -> None:
    _, found = grouped(function, *ROTATED)
    plans = [each.decision.subject.plan for each in found.groups]
    assert len(plans) > 1
    assert "horizontal" not in [plan.schedule for plan in plans if plan]
