"""The text of emitted kernels, one of each schedule, held to golden files; `--regen` rewrites
them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.schedules import SCHEDULES

from .generated import kernel

KERNELS = {
    "tiled": "tiled",
    "flat": "dropout_gelu",
    "cooperative": "shared_softmax",
    "row": "softmax",
    "carried": "mean_loss",
    "split": "split",
    "squares": "squares",
    "blocked": "blocked",
    "row + row": "row + row",
}
"""By schedule the function whose kernel shows most of it: draws, paired columns, ranks. A plan of
`row + row` is one with a finishing kernel."""
MADE_AS = re.compile(r"one (\w+) kernel|\d kernels \(([^)]+)\)")


def file_of(name: str) -> str:
    return f"{name.replace(' + ', '_')}.py"


@pytest.mark.parametrize("schedule", KERNELS)
def test_golden(schedule: str, golden: Callable[[str, str], None]) -> None:
    name = KERNELS[schedule]
    text = kernel(name).text
    golden(file_of(name), text)
    found = MADE_AS.search(text)
    assert found
    assert schedule in found.groups()


def test_every_schedule_has_one() -> None:
    names = {module.__name__.rpartition(".")[2] for module in SCHEDULES}
    assert names <= KERNELS.keys()
    files = {path.name for path in (Path(__file__).parent / "golden").glob("*.py")}
    assert files == {file_of(name) for name in KERNELS.values()}
