"""Random regions through the real stages: whatever gets a plan must be right (see `sketches`).

FUSION_ADVISOR_SLOW_TESTS in the environment draws many more, anew each time; otherwise the draws
are the same in every run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from fusion_advisor.codegen.emit import emit
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import submit_check

from .regions import RULES
from .sketches import Seeded, planned, sketched

SLOW = "FUSION_ADVISOR_SLOW_TESTS" in os.environ
FEW, MANY = 40, 3000 if SLOW else 150
SEEDS = 2
Item = TypeVar("Item")


class Drawn:
    """Decisions that hypothesis takes, and can take back one by one."""

    def __init__(self, draw: Any) -> None:
        self._draw = draw

    def pick(self, among: Sequence[Item]) -> Item:
        return self._draw(st.sampled_from(among))

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        return self._draw(st.permutations(items))


def _right(worker: Worker, sketch: Any) -> None:
    note(sketch.text)
    for decision in planned(sketch):
        kernel = emit(decision.subject.flow, decision, "k", RULES)
        if not SLOW:
            kernel = replace(kernel, cases=kernel.cases[:2])
        check = submit_check(worker, kernel, seeds=SEEDS)()
        if not check.passed:
            note(kernel.text.split("def serves")[0])
        assert check.failure is None


def _drawn(examples: int) -> Any:
    """What runs a test on so many sketches."""
    drawn = given(sketch=st.composite(lambda draw: sketched(Drawn(draw)))())
    held = settings(
        max_examples=examples,
        deadline=None,
        derandomize=not SLOW,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: held(drawn(test))


@_drawn(FEW)
def test_what_has_a_plan_is_right(worker: Worker, sketch: Any) -> None:
    _right(worker, sketch)


@pytest.mark.deep
@_drawn(MANY)
def test_more_of_what_has_a_plan_is_right(worker: Worker, sketch: Any) -> None:
    _right(worker, sketch)


def test_every_schedule_is_drawn() -> None:
    """Among the first seeds: all but `persistent`, and plans of two
    plans, which are drawn once in thousands."""
    wanted = {"flat", "tiled", "row", "carried", "split", "blocked"}
    for seed in range(500):
        for decision in planned(sketched(Seeded(seed))):
            assert decision.subject.plan is not None
            wanted -= set(decision.subject.plan.schedule.split())
        if not wanted:
            return
    raise AssertionError(f"never drawn: {wanted}")
