"""The checks are checked: mutants of tile programs and launches of generated kernels are found.

What a mutant computes is told by the NumPy meaning of tile programs, at the cases and by the
criterion of the checking child. A mutant that comes to the same has its argument in `EQUIVALENT`;
in the deep tests no other one lives, and some are printed and go through the child itself.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from zlib import crc32

import pytest

from fusion_advisor.codegen.emit import in_lines
from fusion_advisor.codegen.triton import Triton
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.support.worker import Worker
from fusion_advisor.tile.program import TileFunction
from fusion_advisor.verify.driver import submit_check

from .generated import FUNCTIONS, SCHEDULES
from .regions import RULES
from .tile_checks import fault, programs
from .tile_interpreter import Launched
from .tile_mutants import LaunchMutant, Mutant, launch_mutants, mutants

ALL = [*FUNCTIONS, *SCHEDULES]
FEW = 8
"""Mutants of each kernel in the fast tests, and of those that the checking child is given."""
MOST_DRAWN = 64
"""Elements of eager's results over which its error is taken: mutants of kernels that have one
result are judged by as many draws."""
KINDS = {
    "missing statement", "mask dropped", "mask widened", "tail lost", "one too many",
    "other filling", "term lost", "factor lost", "factor changed", "wrong offset", "stride changed",
    "wrong program", "choice lost", "other function", "operands swapped", "other reduction",
    "wrong axis", "part lost", "branch turned", "constant changed", "grid short",
    "number off by one", "numbers exchanged", "tensors exchanged", "tile halved", "divisor doubled",
}  # fmt: skip

# Kernel, kind and what of the description, as patterns; and the argument.
EQUIVALENT = [
    ("shared_.*", "one too many", r"STEP < 0",
     "it only says whether programs wait, which those of a launch at a time never do"),
    ("shared_(layer|group)_norm", ".*", r"args_0_stride|^row // 2|row_1 \* 2",
     "moments are taken about an element of the row, whichever it is"),
    ("shared_(layer|group)_norm", "operands swapped", r"value_part_[12] - value_part_[12]|_8",
     "a difference that is only ever squared"),
    ("shared_group_norm", ".*", r"value_part_12|value_part_13|group_norm_part",
     "the mean's remainder is taken back from the deviations, to within a rounding"),
    ("group_norm", ".*",
     r"^load\(args_0_ptr|args_0, 0.0\) over|^where\(col_mask, args_0"
     r"|group_norm_1_sum|^div.precise|^cols \* 1.0|^1\.0 / \(cols|^args_0 - group_norm_1_part",
     "the mean's remainder is taken back from the deviations, to within a rounding"),
    ("shared_softmax", "terms narrowed", "",
     "the sum of many rounded terms is off both ways, within 16 bits of the result"),
    ("shared_softmax", "choice lost", "m_parts == -inf",
     "a gap: no case has a part of a row that is -inf throughout"),
    ("shared_softmax", "choice lost", "-inf, nan",
     "where the row's maximum is -inf, every exponential is NaN by itself"),
    ("residual_rms_norm", "cast dropped", r"bfloat16\(\w+\)",
     "a rounding less is nearer to float64"),
    (".*", "choice lost", r"^where\(\w+_mask, (args_0|args_0_rest|pow_1|value_part\w*), 0\.0\)",
     "loads fill the lanes behind the row's end with what changes no sum"),
    ("rotated", "mask widened", "halves_turned_part",
     "the other half is read, too, and not chosen"),
    ("masked_count|mean_loss", "terms narrowed", "",
     "ones are exact in eight bits, and few enough are added"),
    ("masked_count|carried|blocked", "choice lost", "mask",
     "what the lanes behind the end hold is neutral already"),
    ("dropout_gelu", "constant changed", "0.70710",
     "less than a rounding of the largest result, by which the criterion measures"),
    ("dropout_gelu", "factor changed", "BLOCK",
     "random bits begin at a whole block, the same one for the programs of the cases"),
    ("drop.*", "other function", "_bits >=",
     "random bits equal the threshold once in 2**32 draws"),
    ("middle_softmax|dropped_attention", "other filling", "-inf",
     "a sum of two loads is -inf behind the row's end when either is"),
    ("residual_rms_norm", "tensors exchanged", "args_0_ptr, args_1_ptr", "they are added"),
    ("swiglu", "numbers exchanged", "stride", "both are views of one tensor, with its strides"),
    ("mean_loss|carried", "tile halved", "ROWS",
     "a program walks rows as far as programs are apart, whatever that is"),
    ("blocked", "tile halved", "COLS", "a program walks its row as far as a chunk is long"),
    ("many_squares", "tile halved", "results_kernel: COLS",
     "so does the program that combines what the squares leave"),
]  # fmt: skip


def known(name: str, mutant: Mutant | LaunchMutant) -> str:
    """The argument why a mutant need not be found; "" without one."""
    for kernels, kind, told, why in EQUIVALENT:
        here = re.fullmatch(kernels, name) and re.fullmatch(kind, mutant.kind)
        if here and re.search(told, mutant.told):
            return why
    return ""


@cache
def of_programs(name: str) -> tuple[tuple[int, Mutant], ...]:
    """The mutants of a kernel's functions, each once, with the number of its function; in an order
    that hangs on what they change."""
    found: dict[TileFunction, tuple[int, Mutant]] = {}
    for number, function in enumerate(programs(name).file.functions):
        for mutant in mutants(function):
            found.setdefault(mutant.function, (number, mutant))
    real = [each for each in found.values() if not known(name, each[1])]
    return tuple(sorted(real, key=lambda each: crc32(each[1].told.encode())))


def drawn(name: str) -> list[tuple[int, Mutant]]:
    """A few of them, in turn of each kind."""
    kinds: dict[str, list[tuple[int, Mutant]]] = defaultdict(list)
    for each in of_programs(name):
        kinds[each[1].kind].append(each)
    rounds = [each for n in range(FEW) for kind in kinds.values() for each in kind[n : n + 1]]
    return rounds[:FEW]


def with_function(name: str, number: int, other: TileFunction) -> list[TileFunction]:
    functions = [*programs(name).file.functions]
    functions[number] = other
    return functions


def lives(name: str, number: int, mutant: Mutant, seeds: int) -> bool:
    """Does nothing find a mutant?"""
    made, functions = programs(name), with_function(name, number, mutant.function)
    if _found(name, functions, seeds, together=False):
        return False
    if made.exchanges and _found(name, functions, seeds, together=True):
        return False
    # What nothing reads comes to the same where it is poison, too.
    return not mutant.unfilled or _found(name, with_function(name, number, mutant.unfilled), seeds)


def _found(name: str, functions: list[TileFunction], seeds: int, *, together: bool = False) -> bool:
    try:
        return bool(
            fault(programs(name), functions, seeds=seeds, together=together, elements=MOST_DRAWN)
        )
    except (ArithmeticError, IndexError, TypeError, ValueError):
        return True  # a program that means nothing


def surviving(name: str, chosen: Iterator[tuple[int, Mutant]], seeds: int) -> list[str]:
    return [f"{m.kind}: {m.told}" for number, m in chosen if lives(name, number, m, seeds)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ALL)
def test_a_few_mutants_of_each_kernel_are_found(name: str) -> None:
    assert surviving(name, iter(drawn(name)), 5) == []


@pytest.mark.deep
@pytest.mark.parametrize("name", ALL)
def test_every_mutant_is_found(name: str) -> None:
    """By as many draws as the checking child has."""
    assert surviving(name, iter(of_programs(name)), RULES.verify.seeds.count) == []


def test_there_are_mutants_of_every_kind_and_few_that_need_an_argument() -> None:
    made = [(n, m) for n in ALL for f in programs(n).file.functions for m in _all_of(f)]
    assert len(made) > 1500
    assert {mutant.kind for _, mutant in made} >= KINDS
    exempt = [known(name, mutant) for name, mutant in made]
    assert sum(map(bool, exempt)) < 0.1 * len(made)


def _all_of(function: TileFunction) -> Iterator[Mutant | LaunchMutant]:
    yield from mutants(function)
    yield from launch_mutants(function)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALL)
def test_every_mutant_of_a_launch_is_found(name: str) -> None:
    """Those that change some launch: grids have a dimension or three, say."""
    left: list[str] = []
    for function in programs(name).file.functions:
        for mutant in launch_mutants(function):
            changes = False

            def change(launched: str, given: Launched, mutant: LaunchMutant = mutant) -> Launched:
                nonlocal changes
                other = mutant.change(launched, given)
                changes |= other != given
                return other

            found = fault(programs(name), seeds=2, change=change, elements=MOST_DRAWN)
            if changes and not found and not known(name, mutant):
                left.append(f"{mutant.kind}: {mutant.told}")
    assert left == []


# --- the checking child --------------------------------------------------------------------------


def printed(name: str, number: int, mutant: Mutant) -> Kernel:
    """A kernel whose file has a mutant's function in the place of its own."""
    made = programs(name)
    functions = made.file.functions[number], mutant.function
    old, new = (in_lines(Triton().function(f)) for f in functions)
    assert old in made.kernel.text
    return replace(made.kernel, text=made.kernel.text.replace(old, new))


@pytest.mark.deep
def test_the_unchanged_kernels_pass(worker: Worker) -> None:
    pending = [submit_check(worker, programs(n).kernel) for n in FUNCTIONS]
    checks = [answer() for answer in pending]
    assert [check.failure for check in checks if not check.passed] == []


@pytest.mark.sampled(24)
@pytest.mark.parametrize("name", ALL)
def test_the_child_finds_what_the_programs_meaning_tells(name: str, worker: Worker) -> None:
    chosen = [(m, printed(name, number, m)) for number, m in drawn(name)]
    chosen = [(m, kernel) for m, kernel in chosen if m.kind != "other filling"]
    pending = [(m, submit_check(worker, kernel)) for m, kernel in chosen]
    checks = [(m, answer()) for m, answer in pending]
    assert [f"{m.kind}: {m.told}" for m, check in checks if check.passed] == []
