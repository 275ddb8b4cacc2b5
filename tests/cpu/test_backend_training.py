"""Training steps under `backend="fusion_advisor"`, with kernels in Triton's interpreter: both
passes have kernels, gradients are as near to float64's as eager's, and nothing more is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .spawned import facts_by

ROOT = Path(__file__).resolve().parents[2]
Facts = dict[str, Any]


QUICK = (
    "a_language_model", "through_inductor", "statistics_of_a_batch", "dropout", "what_is_saved",
    "a_fault_in_the_backward_pass", "an_inner_function",
)  # fmt: skip
LONG = ("a_block_that_is_computed_again", "sizes", "kernels_of_a_step_are_counted")


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Facts]:
    """What each quick scenario of `trained_models` saw, all in one process of their own."""
    return facts_by("trained_models.py", ROOT, QUICK, PYTHONPATH=str(ROOT))


@pytest.fixture(scope="module")
def long_scenarios() -> dict[str, Facts]:
    """What the others saw, which only the deep tests ask for."""
    return facts_by("trained_models.py", ROOT, LONG, PYTHONPATH=str(ROOT))


def facts_of(scenarios: dict[str, Facts], name: str) -> Facts:
    facts = scenarios[name]
    assert "raised" not in facts, facts.get("raised")
    return facts


def _near_in_both_passes(facts: Facts) -> None:
    assert facts["share"] <= 1
    assert facts["same"]
    assert facts["phases"] == ["forward", "backward"]
    assert all(facts["taken"]), facts["taken"]
    assert facts["why"] == ["", ""]


@pytest.mark.parametrize("name", ["a_language_model", "through_inductor", "statistics_of_a_batch"])
def test_gradients_are_as_near_as_eagers(scenarios: dict[str, Facts], name: str) -> None:
    _near_in_both_passes(facts_of(scenarios, name))


@pytest.mark.deep
@pytest.mark.parametrize("name", ["a_block_that_is_computed_again", "sizes"])
def test_gradients_of_longer_scenarios(long_scenarios: dict[str, Facts], name: str) -> None:
    _near_in_both_passes(facts_of(long_scenarios, name))


def test_a_call_of_several_launches_is_taken_apart(scenarios: dict[str, Facts]) -> None:
    """The gradient of an embedding scatters what it has masked, in one call of the graph; the mask
    belongs to what comes before."""
    assert facts_of(scenarios, "a_language_model")["left"] == []


def test_inductor_knows_the_operators_before_it_meets_them(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "through_inductor")["unknown"] == []


def test_running_statistics_are_written_once_a_step(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "statistics_of_a_batch")["mean"] < 1e-6


def test_what_is_dropped_has_no_gradient(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "dropout")
    assert facts["agrees"]
    assert 400 < facts["dropped"] < 600


def test_no_more_is_saved_for_the_backward_pass(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "what_is_saved")
    assert facts["ours taken"] > facts["theirs taken"] == 0
    assert facts["ours"] == facts["theirs"] > 0


def test_a_first_step_leaves_no_tensor_in_memory(scenarios: dict[str, Facts]) -> None:
    """An exception that is kept holds the frames of the step that compiled, with all in them."""
    assert facts_of(scenarios, "a_language_model")["kept"] == []


def test_a_fault_costs_one_pass_its_kernels(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "a_fault_in_the_backward_pass")
    assert facts["share"] <= 1
    forward, backward = facts["taken"]
    assert forward > backward == 0
    (warned,) = facts["warned"]
    assert "RuntimeError: the analysis is out; Inductor compiles the graph alone" in warned


def test_an_inner_function_gets_the_graph_as_it_is(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "an_inner_function")
    assert facts["share"] <= 1
    assert facts["why"] == [
        "gradients are required, and what `inner` does with a backward pass is not known"
    ]


@pytest.mark.deep
def test_apply_counts_both_passes(long_scenarios: dict[str, Facts]) -> None:
    facts = facts_of(long_scenarios, "kernels_of_a_step_are_counted")
    assert "residual_rms_norm_mul_erf" in facts["kernels"]
    assert len(facts["kernels"]) > 8
    assert facts["share"] > 0.8
