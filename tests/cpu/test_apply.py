"""`fusion_advisor.apply`: what it places, says, leaves as it was and takes out again, with kernels
in Triton's interpreter."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.workflows.placed import Placed

from .spawned import run_program

ROOT = Path(__file__).resolve().parents[2]
Facts = dict[str, Any]

STACK = 7
"""The groups of `compiled_models.Stack`, each counted where it occurs."""


def ran(program: str, *words: str) -> str:
    """What one of the programs here prints."""
    path = f"{ROOT}{os.pathsep}{Path(__file__).parent}"
    return run_program(program, *words, folder=ROOT, PYTHONPATH=path)


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Facts]:
    """What each scenario of `applied_models` saw."""
    found: dict[str, Facts] = json.loads(ran("applied_models.py").splitlines()[-1])
    return found


def facts_of(scenarios: dict[str, Facts], name: str) -> Facts:
    assert "raised" not in scenarios[name], scenarios[name]["raised"]
    return scenarios[name]


def test_it_fills_as_calls_are_captured(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "without_examples")
    assert facts["before"] == {}
    assert sum(facts["after"].values()) == STACK
    assert facts["right"]
    assert facts["share"] == 1


def test_a_piece_that_is_captured_again_counts_once(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "without_examples")
    assert sum(facts["again"].values()) == STACK
    assert facts["said"].splitlines()[0] == (
        f"kernels in {STACK} places save {facts['saved']:.3g} µs of {facts['saved']:.3g} µs that "
        "analysis accepts (100 %)"
    )
    assert len(facts["said"].splitlines()) == 1 + len(facts["again"])


def test_examples_leave_nothing_behind(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "with_examples")
    assert sum(facts["kernels"].values()) >= STACK
    assert facts["drawn"]
    assert facts["state"]
    assert facts["training"]
    assert facts["gradients"]


def test_kernels_are_taken_out_again(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "taken_out_again") == {"placed": STACK, "ran": True, "runs": False}


def test_copies_and_pickles_are_the_plain_model(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "copies") == {
        "placed": STACK, "runs": True, "copied": False, "pickled": False, "type": ["Stack"] * 2,
    }  # fmt: skip


def test_of_a_function_the_result_runs_the_kernels(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "a_function") == {"kernels": {"mul_softmax_add": 1}, "right": True}


def test_each_model_has_its_own_outcomes(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "two_models")
    assert facts["first"] == {}
    assert sum(facts["second"].values()) == STACK


def test_it_says_why_nothing_runs(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "with_gradients")
    assert facts["kernels"] == {}
    assert facts["refused"]["graph 1"].startswith("gradients are required")
    assert facts["share"] == 0
    assert facts["has"]
    (said,) = facts["said"]
    assert said.startswith("fusion_advisor: no kernels run in a graph: gradients are required")


def test_a_model_that_raises_stays_as_it_is(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "a_model_that_raises")
    assert "length 31" in facts["said"]
    assert not facts["runs"]


def test_calls_of_the_release_before_work(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "as_it_was_called")
    (said,) = facts["said"]
    assert "torch.compile places the kernels now" in said
    assert sum(facts["kernels"].values()) == STACK


def test_a_dry_run_says_what_is_placed_then(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "dry_first")
    assert facts["dry"] == facts["placed"]
    assert sum(facts["dry"]["kernels"].values()) >= STACK
    assert facts["runs"] == [False, True]


def test_what_was_not_placed_is_said() -> None:
    done = Placed({"softmax": 2}, {"layer_norm": "draws random numbers"}, 30.0, 120.0)
    assert done.share == 0.25
    assert str(done).splitlines() == [
        "kernels in 2 places save 30 µs of 120 µs that analysis accepts (25 %)",
        "  softmax x2",
        "  not layer_norm: draws random numbers",
    ]


# -- transformers ----------------------------------------------------------------------------------


def placed(*families: str) -> dict[str, Facts]:
    """What `families` says of each family; of all without a name."""
    lines = [json.loads(line) for line in ran("families.py", *families).splitlines()]
    return {family: facts for line in lines for family, facts in line.items()}


def holds(facts: Facts) -> None:
    assert "raised" not in facts, facts["raised"]
    assert sum(facts["kernels"].values()) > 0
    assert facts["share"] > 0.99, facts["refused"]
    assert facts["off"] < 1e-5


def test_kernels_are_in_models_that_are_called_as_everyone_does() -> None:
    holds(placed("llama")["llama"])


@pytest.mark.deep
def test_a_cache_costs_no_kernel() -> None:
    """Without one, transformers makes a mask, too, and repeats heads: other pointwise ops."""
    found = placed("llama", "llama_without_cache")

    def named(facts: Facts) -> dict[str, int]:
        kernels = facts["kernels"].items()
        return {n: count for n, count in kernels if "norm" in n or n == "swiglu"}

    assert sum(named(found["llama"]).values()) == 2 + 1 + 1
    assert named(found["llama"]) == named(found["llama_without_cache"])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("cache", "graphs", "kernels", "fixed"), [("dynamic", 3, 7, []), ("static", 2, 9, [True] * 3)]
)
def test_generate_runs_kernels_with_either_cache(
    cache: str, graphs: int, kernels: int, fixed: list[bool]
) -> None:
    """The prompt is one graph, and one token another; a cache that grows has one more, for any
    length. A fixed cache gives back counters that the graph writes."""
    (found,) = placed(f"llama_generates_{cache}").values()
    assert "raised" not in found, found["raised"]
    assert found["same"]
    assert found["said"] == []
    assert found["graphs"] == graphs
    assert found["kernels"] >= kernels, "in each of them"
    assert found["plain"] == ["method"] * 3
    assert found["fixed"] == fixed, "else CUDA graphs leave it"


@pytest.mark.deep
def test_kernels_are_in_every_family() -> None:
    found = placed()
    assert len(found) == 24
    for facts in found.values():
        holds(facts)
