"""What kernels ask for, repeats included: as often as their plan, and not more."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.worker import Worker

from .checks import checked
from .generated import FUNCTIONS, SCHEDULES, kernel
from .regions import PACKED, SHARING, kernel_of
from .sample_kernels import masked_softmax, softmax, swiglu
from .spawned import run_script

EVERY = [*FUNCTIONS, *SCHEDULES]
BOUNDED = {
    "mean_loss": "a row whose class is left out loads none of it",
}
"""Kernels that ask for less than the plan says, and why."""

_COUNT = """
import json, sys
from pathlib import Path
from fusion_advisor.verify.inputs import build_inputs
from fusion_advisor.verify.launches import launch, limited
from fusion_advisor.shipped.load import load_module
from fusion_advisor.verify.interpreter import counting, install
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.support.codec import from_json

install()
found = []
for line in Path(sys.argv[1]).read_text().splitlines():
    kernel = from_json(Kernel, line)
    module = load_module(kernel.text, Path(sys.argv[1]).parent)
    found.append([])
    for case in kernel.cases:
        with counting() as traffic, limited(module, case.programs):
            launch(module, kernel.entry, build_inputs(case, "normal", 0))
        found[-1].append([traffic.loads, traffic.stores])
print(json.dumps(found))
"""


def counted(folder: Path, *kernels: Kernel) -> list[list[tuple[int, int]]]:
    """Loads and stores of each case of each kernel, as the interpreter counts them."""
    from fusion_advisor.support.codec import to_json

    file = folder / "kernels.jsonl"
    file.write_text("\n".join(map(to_json, kernels)))
    return [[(a, b) for a, b in cases] for cases in json.loads(run_script(_COUNT, str(file)))]


@pytest.mark.deep
def test_plans_say_how_often_elements_are_asked_for(tmp_path: Path) -> None:
    made = [
        replace(each, cases=tuple(case for case in each.cases if not case.costly))
        for each in map(kernel, EVERY)
    ]
    loose: set[str] = set()
    for name, each, seen in zip(EVERY, made, counted(tmp_path, *made), strict=True):
        for case, (loads, stores) in zip(each.cases, seen, strict=True):
            assert case.loads is not None
            assert stores == case.stores
            assert loads <= case.loads
            if loads < case.loads:
                loose.add(name)
    assert loose == set(BOUNDED)


def sums_of_windows(x: torch.Tensor) -> torch.Tensor:
    return F.avg_pool2d(x.exp(), 3, 2)


def shares(x: torch.Tensor) -> torch.Tensor:
    """Long rows in float64 are walked twice."""
    return torch.softmax(x.cos(), -1)


WALKED: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, Rulebook, int]] = {
    "windows": (sums_of_windows, torch.empty(4, 8, 41, 41), PACKED, 2),
    "two walks": (
        shares, torch.empty(2048, 200_000, dtype=torch.float64), PACKED, 2,
    ),
    "shared rows": (
        lambda x: torch.softmax(x, -1), torch.empty(40, 3000), SHARING, 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKED)
def test_walks_count(name: str, tmp_path: Path) -> None:
    """Windows ask for an element as often as they hold it, a second walk for each again, and so do
    both launches that programs which share rows take on the interpreter."""
    function, x, rules, times = WALKED[name]
    made = kernel_of(function, x, rules=rules)
    made = replace(made, cases=made.cases[:1])
    (((loads, stores),),) = counted(tmp_path, made)
    (case,) = made.cases
    assert (loads, stores) == (case.loads, case.stores)
    assert times <= loads / case.inputs[0].numel < times + 1


def twice(made: Kernel, what: str) -> Kernel:
    """A kernel that does once more what it first loads, or stores, under a mask."""
    lines = made.text.splitlines(keepends=True)
    start, end = next(
        (node.lineno - 1, node.end_lineno)
        for node in ast.walk(ast.parse(made.text))
        if isinstance(node, ast.Assign | ast.Expr)
        and f"tl.{what}(" in (text := ast.unparse(node))
        and "mask=" in text
    )
    return replace(made, text="".join([*lines[:start], *lines[start:end], *lines[start:]]))


@pytest.mark.parametrize("sample", [softmax, swiglu, masked_softmax])
@pytest.mark.parametrize("what", ["load", "store"])
def test_a_sample_that_does_it_twice_is_caught(
    sample: Callable[[], Kernel], what: str, worker: Worker
) -> None:
    once, again = sample(), twice(sample(), what)
    right, wrong = checked(worker, once, again, seeds=1)
    assert right.failure is None
    assert re.search(rf"{what}s \d+ elements, repeats included; the plan", wrong.failure or "")


@pytest.mark.parametrize("name", [name for name in EVERY if name not in BOUNDED])
def test_an_emitted_kernel_that_loads_twice_is_caught(name: str, worker: Worker) -> None:
    (check,) = checked(worker, twice(kernel(name), "load"), seeds=1)
    assert "repeats included; the plan" in (check.failure or "")
