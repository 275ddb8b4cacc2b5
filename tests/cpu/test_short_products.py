"""Matrix products beside what could be fused with them: when one kernel for both would pay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.fusion.decide import decide
from fusion_advisor.fusion.findings import Finding, fuse
from fusion_advisor.fusion.gates.products import ShortestProduct, shortest_product
from fusion_advisor.fusion.route import fix
from fusion_advisor.rulebook.load import load_rulebook

from .regions import flow_of, launches

RULES = load_rulebook()


def x(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def found(model: Callable[..., object], *inputs: torch.Tensor) -> ShortestProduct:
    """The product of everything that a model launches."""
    flow = flow_of(model, *inputs)
    product = shortest_product(flow, launches(flow), RULES)
    assert product is not None
    return product


@pytest.mark.parametrize("contraction", [2048, 4096])
def test_a_pointwise_epilogue_is_345_by_the_contraction(contraction: int) -> None:
    """On an H200 (two bytes written and two read an element, beside 2 K FLOP). One kernel is 1.5
    times as fast as two where the product takes up to twice what goes."""
    product = found(lambda a, w: F.gelu(a @ w), x(4096, contraction), x(contraction, 16384))
    assert product.contraction == contraction
    assert product.removed_us / product.us == pytest.approx(345 / contraction, rel=0.1)
    assert product.pays_below == pytest.approx(2 * 345, rel=0.1)
    assert not product.pays


def test_a_short_contraction_pays() -> None:
    """65536 x 256 x 256: measured 26 us alone and 49 us with bias and ReLU, on an H200."""
    product = found(lambda a, w, b: torch.relu(a @ w + b), x(65536, 256), x(256, 256), x(256))
    assert product.contraction == 256
    assert product.pays


def test_a_convolution_sums_over_channels_and_window() -> None:
    product = found(lambda a, w: torch.relu(F.conv2d(a, w)), x(8, 32, 64, 64), x(64, 32, 3, 3))
    assert product.contraction == 32 * 9


def test_the_backward_of_a_convolution_has_no_one_contraction() -> None:
    def model(grad: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        given = None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (True, True, False)
        return torch.ops.aten.convolution_backward(grad, a, w, *given)[0].relu()

    flow = flow_of(model, x(8, 64, 62, 62), x(8, 32, 64, 64), x(64, 32, 3, 3))
    assert shortest_product(flow, launches(flow), RULES) is None


def test_what_is_no_product_and_what_is_nothing_else() -> None:
    for model in (lambda a: torch.relu(a) * 2.0, lambda a: a @ a):
        flow = flow_of(model, x(256, 256))
        assert shortest_product(flow, launches(flow), RULES) is None


def candidates(model: Callable[..., object], *inputs: torch.Tensor) -> dict[int, Finding]:
    """Rejected candidates by their number of launches."""
    every = fuse(flow_of(model, *inputs), RULES).candidates
    return {len(each.decision.subject.launches): each for each in every}


def test_a_short_product_between_long_ones_is_a_candidate_of_its_own() -> None:
    """244 FLOP a byte are over the ridge, and GELU costs as much again as the product."""

    def model(a: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(a @ v) @ w

    short = candidates(model, x(16384, 256), x(256, 8192), x(8192, 8192))
    assert short.keys() == {2, 3}
    said = fix(short[2].decision)
    assert said is not None
    assert said.gate == "no-schedule"
    assert "over a contraction of 256" in said.change
    assert fix(short[3].decision) is None  # of two products
    assert candidates(model, x(16384, 4096), x(4096, 8192), x(8192, 8192)).keys() == {3}


def test_a_product_takes_in_one_kernel_what_it_takes_alone() -> None:
    flow = flow_of(lambda a, w: F.silu(a @ w), x(4096, 8192), x(8192, 8192))
    decision = decide(flow, launches(flow), RULES)
    product = shortest_product(flow, launches(flow), RULES)
    assert product is not None
    assert decision.fused_us > product.us
    assert "pays below a contraction of" in next(
        gate.why for gate in decision.gates if gate.name == "compute-bound"
    )


def test_a_softmax_before_a_product_says_what_the_product_takes() -> None:
    flow = flow_of(lambda a, w: torch.softmax(a, -1) @ w, x(65536, 512), x(512, 64))
    gates = decide(flow, launches(flow), RULES).gates
    why = next(gate.why for gate in gates if gate.name == "feeds-matmul")
    assert "over a contraction of 512" in why
