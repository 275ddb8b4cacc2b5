"""The numbers that models are run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fusion_advisor.kernels import from_json, to_json
from fusion_advisor.measurements import Ran, RunJob
from fusion_advisor.workers import Worker

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
        job = RunJob(str(file), str(tmp_path / name), ((0, 0),), 1, CRITERION)
        with Worker("fusion_advisor.running") as worker:
            ran = from_json(Ran, worker.submit(to_json(job), 600.0).result())
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
