"""Tile programs of emitted kernels: their golden texts, one of each schedule, and what they mean
in NumPy, which is told without Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from fusion_advisor.tile.program import Block, Statement, TileFunction
from fusion_advisor.tile.text import Text

from .generated import FUNCTIONS, SCHEDULES
from .test_golden_kernels import KERNELS, file_of
from .tile_checks import Programs, fault, programs

ALL = [*FUNCTIONS, *SCHEDULES]
SHARED = [name for name in ALL if name.startswith("shared_")]


@pytest.mark.parametrize("schedule", KERNELS)
def test_golden(schedule: str, golden: Callable[[str, str], None]) -> None:
    name = KERNELS[schedule]
    text = "\n\n".join(map(Text().function, programs(name).file.functions))
    golden(file_of(name).replace(".py", ".tile"), text + "\n")


@pytest.mark.parametrize("name", ALL)
def test_a_program_computes_what_its_kernel_has_to(name: str) -> None:
    assert fault(programs(name)) == ""


@pytest.mark.parametrize("name", SHARED)
def test_programs_that_wait_for_each_other_come_to_the_same(name: str) -> None:
    assert programs(name).exchanges
    assert fault(programs(name), together=True) == ""


# --- what the interpreter finds ------------------------------------------------------------------


def changed(made: Programs, change: Callable[[Statement], Block]) -> list[TileFunction]:
    """The functions with other statements at their top."""
    return [
        replace(function, body=tuple(new for old in function.body for new in change(old)))
        for function in made.file.functions
    ]
