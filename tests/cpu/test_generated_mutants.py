"""The checker is checked on generated kernels: every mutant that differs is caught.

A few mutants of each kernel are drawn, evenly over the kinds; PER_KERNEL of them in the deep tests,
and with FUSION_ADVISOR_SLOW_TESTS in the environment all.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace

import pytest

from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import collect_check, submit_check

from .generated import FUNCTIONS, SCHEDULES, kernel
from .mutating import Mutant, all_mutants, mutants
from .regions import decided, flow_of

WANTED = 200
SLOW = "FUSION_ADVISOR_SLOW_TESTS" in os.environ
PER_KERNEL = 1000 if SLOW else 40
FEW = 2
PER_SCHEDULE = 1000 if SLOW else 12
"""Of kernels with long rows, which take longer, and of the equivalent ones."""
SEEDS = 5
KINDS = {
    "mask dropped", "mask widened", "tail lost", "one too many", "neutral element",
    "stride changed", "cast dropped", "cast narrowed", "missing store", "wrong axis",
    "other reduction", "operands swapped", "sign changed", "constant changed", "grid short",
    "wrong offset", "wrong tile", "NaN dropped",
}  # fmt: skip


def passing(worker: Worker, chosen: dict[str, list[Mutant]], seeds: int = SEEDS) -> list[str]:
    """The mutants that the checker lets pass."""
    pending = [
        (mutant, name, submit_check(worker, replace(kernel(name), text=mutant.text), seeds=seeds))
        for name, group in chosen.items()
        for mutant in group
    ]
    return [
        f"{name}: {mutant.kind}: {mutant.description}"
        for mutant, name, answer in pending
        if collect_check(kernel(name), answer).passed
    ]


def averages_out(name: str, mutant: Mutant) -> bool:
    """A known gap: the sums of the parts of a row, rounded to two bits each, are off in both
    directions, and the row's sum stays within what a row may be off."""
    return name == "shared_softmax" and mutant.kind == "result narrowed"


def stays_lowest(name: str, mutant: Mutant) -> bool:
    """Behind the row's end a sum of two loads is -inf when either is."""
    summed = name in ("middle_softmax", "dropped_attention")
    return summed and mutant.kind == "neutral element" and "float('-inf') →" in mutant.description


def only_shifts(name: str, mutant: Mutant) -> bool:
    """What a softmax of bfloat16 is shifted by is exact without a cast, and may lose a NaN, which
    its sum sees again; less the shift, its ends are float32 all the same."""
    casts = ("args_0.to(tl.float32)", "tl.load(args_0_ptr + row * cols + end")
    dropped = mutant.kind == "cast dropped" and any(c in mutant.description for c in casts)
    return name == "shared_softmax" and (dropped or mutant.kind == "NaN dropped")


def about_another(name: str, mutant: Mutant) -> bool:
    """Moments are taken about an element of the row, whichever it is: one load of it serves the
    parts and the whole."""
    moments = name in ("shared_layer_norm", "shared_group_norm")
    moved = mutant.kind in ("wrong offset", "stride changed")
    return moments and moved and "args_0_stride_row" in mutant.description


def stays_finer(name: str, mutant: Mutant) -> bool:
    """What the parts of a row make together in float64 may stay so; and what a mean loses where it
    is rounded, the rest of it takes back, of which a few bits do."""
    moments = name in ("shared_layer_norm", "shared_group_norm")
    made = re.search(r": value_part_\d+\.to\(tl\.float32\) → value_part_\d+$", mutant.description)
    rounded = re.search(r": value_part_1[23]\.to\(tl\.float32\)", mutant.description)
    taken_back = name == "shared_group_norm" and mutant.kind == "cast narrowed" and rounded
    return bool(taken_back) or (moments and mutant.kind == "cast dropped" and bool(made))


def none_left_out(name: str, mutant: Mutant) -> bool:
    """No class that is drawn says that its row is left out."""
    return (
        name == "mean_loss" and mutant.kind == "mask widened" and "row_mask &" in mutant.description
    )


def seen_by_the_sum(name: str, mutant: Mutant) -> bool:
    """What a softmax is shifted by may lose a NaN, which its sum sees again."""
    return name == "mean_loss" and mutant.kind == "NaN dropped"


def real(name: str) -> list[Mutant]:
    known = (
        averages_out, stays_lowest, only_shifts, about_another, stays_finer, none_left_out,
        seen_by_the_sum,
    )  # fmt: skip
    chosen = mutants(kernel(name), 0, PER_KERNEL)
    return [m for m in chosen if m.equivalent is None and not any(k(name, m) for k in known)]


def equivalent(name: str) -> list[Mutant]:
    return [m for m in all_mutants(kernel(name)) if m.equivalent is not None]


def test_the_unchanged_kernels_pass(worker: Worker) -> None:
    pending = {n: submit_check(worker, kernel(n), seeds=SEEDS) for n in FUNCTIONS}
    checks = [collect_check(kernel(n), answer) for n, answer in pending.items()]
    assert [check.failure for check in checks if not check.passed] == []


def test_enough_mutants_of_every_kind() -> None:
    kinds = Counter(mutant.kind for name in FUNCTIONS for mutant in real(name))
    assert kinds.total() >= WANTED
    assert set(kinds) >= KINDS, KINDS - set(kinds)


HALVES = [list(FUNCTIONS)[::2], list(FUNCTIONS)[1::2]]


def test_a_few_real_mutants_of_each_kernel_are_caught(worker: Worker) -> None:
    assert passing(worker, {name: real(name)[:FEW] for name in FUNCTIONS}) == []


@pytest.mark.deep
@pytest.mark.parametrize("names", HALVES, ids=["even", "odd"])
def test_every_real_mutant_is_caught(names: list[str], worker: Worker) -> None:
    assert passing(worker, {name: real(name) for name in names}) == []


@pytest.mark.deep
def test_equivalent_ones_are_few_and_pass(worker: Worker) -> None:
    chosen = {name: equivalent(name) for name in FUNCTIONS}
    total = sum(map(len, chosen.values()))
    assert total <= 0.2 * sum(len(all_mutants(kernel(name))) for name in FUNCTIONS)
    drawn = {name: group[:: -(-len(group) // PER_SCHEDULE) or 1] for name, group in chosen.items()}
    assert len(passing(worker, drawn, seeds=2)) == sum(map(len, drawn.values()))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_has_mutants_that_are_caught(name: str, worker: Worker) -> None:
    function, inputs = SCHEDULES[name]
    plan = decided(flow_of(function, *inputs)).subject.plan
    assert plan is not None
    assert plan.schedule == name
    chosen = [m for m in mutants(kernel(name), 0, PER_SCHEDULE) if m.equivalent is None]
    assert len(chosen) > 5
    assert passing(worker, {name: chosen[:FEW]}) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", SCHEDULES)
def test_more_mutants_of_every_schedule_are_caught(name: str, worker: Worker) -> None:
    chosen = [m for m in mutants(kernel(name), 0, PER_SCHEDULE) if m.equivalent is None]
    assert passing(worker, {name: chosen[FEW:]}) == []
