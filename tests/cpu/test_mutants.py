"""The checker is checked: every mutant that differs is caught, every other has its argument."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from zlib import crc32

import pytest

from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.verify.driver import checker, collect_check, submit_check

from .mutating import Mutant, all_mutants, mutants
from .sample_kernels import SAMPLES, add_rms_norm, layer_norm, softmax

WANTED = 200


def drawn(group: list[Mutant], one_in: int) -> list[Mutant]:
    """One in so many of each kind, by a hash of what they change; at least one."""
    kinds: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in sorted(group, key=lambda m: crc32(m.description.encode())):
        kinds[mutant.kind].append(mutant)
    return [m for kind in kinds.values() for m in kind[: -(-len(kind) // one_in)]]


def survivors(kernels: list[Kernel], chosen: list[list[Mutant]], seeds: int = 5) -> list[str]:
    """The mutants that pass, checked in two warm processes."""
    with checker("interpreter") as left, checker("interpreter") as right:
        pending = [
            (kernel, mutant, submit_check((left, right)[number % 2], mutated, seeds=seeds))
            for kernel, group in zip(kernels, chosen, strict=True)
            for number, mutant in enumerate(group)
            for mutated in (replace(kernel, text=mutant.text),)
        ]
        return [
            f"{kernel.name}: {mutant.kind}: {mutant.description}"
            for kernel, mutant, answer in pending
            if collect_check(kernel, answer).passed
        ]


ONE_IN = 8
"""Of the mutants, in the fast tests."""


@pytest.mark.parametrize("one_in", [ONE_IN, pytest.param(1, marks=pytest.mark.deep)])
def test_every_real_mutant_is_caught(one_in: int) -> None:
    kernels = [sample() for sample in SAMPLES]
    chosen = [[m for m in mutants(k, 0, 1000) if m.equivalent is None] for k in kernels]
    assert sum(map(len, chosen)) >= WANTED
    kinds = Counter(mutant.kind for group in chosen for mutant in group)
    assert {
        "mask dropped", "mask widened", "tail lost", "one too many", "neutral element",
        "stride changed", "stride swapped", "cast dropped", "cast narrowed", "missing store",
        "wrong axis", "other reduction", "operands swapped", "constant changed", "grid short",
        "wrong offset", "wrong tile",
    } <= set(kinds)  # fmt: skip
    assert survivors(kernels, [drawn(group, one_in) for group in chosen]) == []


@pytest.mark.deep
def test_the_arguments_are_few_and_right() -> None:
    kernels = [softmax(), add_rms_norm(), layer_norm()]
    equal = [[m for m in all_mutants(k) if m.equivalent] for k in kernels]
    assert sum(map(len, equal)) <= 0.2 * sum(len(all_mutants(k)) for k in kernels)
    assert len(survivors(kernels, equal, seeds=3)) == sum(map(len, equal))


def test_mutants_are_seeded_and_differ_from_the_text() -> None:
    kernel = softmax()
    assert mutants(kernel, 3, 20) == mutants(kernel, 3, 20)
    assert mutants(kernel, 3, 20) != mutants(kernel, 4, 20)
    texts = [mutant.text for mutant in all_mutants(kernel)]
    assert len(set(texts)) == len(texts)
    assert kernel.text not in texts
