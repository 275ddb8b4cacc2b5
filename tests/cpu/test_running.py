"""The numbers that models are run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.ir.scenario import InputSpec, Scenario
from fusion_advisor.measure.protocol import RunJob, RunResult
from fusion_advisor.support.worker import Worker

from .checks import CRITERION

UNWRITTEN = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(64))
        self.register_buffer("chosen", torch.empty(4, dtype=torch.int64))

    def forward(self, x, index, scale):
        return (x * self.weight)[:, index + self.chosen] * scale


def get_inputs():
    for size in (64, 512, 4):  # what lies in the memory that is given away next
        stale = [torch.full((size,), 1e19) for _ in range(50)]
        del stale
    return [torch.empty(8, 64), torch.empty(4, dtype=torch.int64), torch.empty(1)]
"""


def test_memory_that_nothing_was_written_to_is_given_numbers(tmp_path: Path) -> None:
    """Whatever lay there: of squares that overflow every result is as good."""
    file = tmp_path / "model.py"
    file.write_text(UNWRITTEN)
    kept: list[Any] = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        job = RunJob(str(file), str(tmp_path / name), ((0, 0),), 1, CRITERION, Scenario())
        with Worker("fusion_advisor.sourcepatch.trial_child") as worker:
            ran = worker.submit(job, RunResult, 600.0).result()
        assert not ran.unfit
        (x, index, scale), _ = torch.load(tmp_path / name / "0.pt", weights_only=False)[0]
        weights = torch.load(tmp_path / name / "weights.pt", weights_only=False)
        for each in (x, weights["weight"], scale):
            assert each.isfinite().all()
            assert 0 < each.abs().max() < 10
        assert x.std() > 0.5
        assert not index.any()
        assert not weights["chosen"].any()
        kept.append((x, scale, weights["weight"]))
    assert all(map(torch.equal, *kept)), "and the same ones in every run"


SCALAR = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return {body}


def get_inputs():
    return [torch.randn(3, 33)]
"""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("body", "further", "wrong", "few"),
    [
        ("x.exp().mean()", 0, False, False),
        ("x.exp().mean() * (1 + 2**-22)", 0, True, True),
        ("x.exp().mean() * (1 + 2**-22)", 64, False, False),
        ("x.exp().mean() * 1.01", 4096, True, False),
    ],
)
def test_a_single_number_is_held_to_many_draws_of_eager(
    body: str, further: int, wrong: bool, few: bool, tmp_path: Path
) -> None:
    """Eager hits one number exactly by luck, and not all of many."""
    original, edited = tmp_path / "model.py", tmp_path / "copy" / "model.py"
    edited.parent.mkdir()
    original.write_text(SCALAR.format(body="x.exp().mean()"))
    edited.write_text(SCALAR.format(body=body))
    moved = str(tmp_path), str(edited.parent)
    found: list[RunResult] = []
    for file, tree in ((original, None), (edited, moved)):
        with Worker("fusion_advisor.sourcepatch.trial_child") as worker:
            job = RunJob(
                str(file),
                str(tmp_path),
                ((0, 0),),
                1,
                CRITERION,
                Scenario(),
                moved=tree,
                further=further,
            )
            found.append(worker.submit(job, RunResult, 600.0).result())
    first, second = found
    assert (first.unfit, first.wrong) == ("", "")
    assert (bool(second.wrong), second.few) == (wrong, few), second


ASKED = """
import torch


class Model(torch.nn.Module):
    def forward(self, x, ids, keep):
        return (x.exp() * keep[..., None])[ids]
"""


def test_inputs_that_the_scenario_alone_gives_have_numbers(tmp_path: Path) -> None:
    """A file without inputs runs on those that `--input` names, at the scenario's batch."""
    file = tmp_path / "model.py"
    file.write_text(ASKED)
    inputs = InputSpec("x", (4, 5, 8)), InputSpec("ids", (6,), "int64"), InputSpec("keep", (4, 5))
    scenario = Scenario(inputs=inputs, batch=7, dtype="float32")
    with Worker("fusion_advisor.sourcepatch.trial_child") as worker:
        job = RunJob(str(file), str(tmp_path), ((0, 3),), 1, CRITERION, scenario)
        ran = worker.submit(job, RunResult, 600.0).result()
    assert (ran.unfit, ran.wrong) == ("", "")
    (args, kwargs), *_ = torch.load(tmp_path / "0.pt", weights_only=False)
    assert not args
    assert {name: tuple(each.shape) for name, each in kwargs.items()} == {
        "x": (7, 3, 8),
        "ids": (6,),
        "keep": (7, 3),
    }
    assert kwargs["x"].std() > 0.5
    assert kwargs["keep"].std() > 0.5
