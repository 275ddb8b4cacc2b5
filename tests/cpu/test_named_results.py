"""Results that ops give several of, by the names that torch has for them: `x.max(-1).values`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .test_other_uses import drawn, uses

pytestmark = pytest.mark.usefixtures("ways")

HEAD = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

        def forward(self, x):
            x = self.a(x)
"""


def _used(file: Any) -> list[object]:
    model = file.Model().eval()
    return [each for x in (drawn(), drawn(1, 7, 1024)) for each in model(x)]


def test_a_named_result_is_a_part_of_a_group(tmp_path: Path) -> None:
    source = uses(
        tmp_path,
        f"""
    def shares(scores, valid):
        scores = scores.masked_fill(~valid, float("-inf"))
        top = scores.max(dim=-1, keepdim=True).values
        top = torch.where(torch.isinf(top), torch.zeros_like(top), top)
        e = torch.exp(scores - top)
        return e / (e.sum(dim=-1, keepdim=True) + 1e-9)
{HEAD}
            y = shares(x * 0.7, x > 0.3)
            return self.b(y), (y * 3.0).max(-1, keepdim=True).indices
        """,
        _used,
    )
    assert "y, indices_out = fused_model." in source
    assert "return self.b(y), indices_out" in source


def test_results_of_an_object_of_the_user_are_its_own(tmp_path: Path) -> None:
    source = uses(
        tmp_path,
        f"""
    class Held:
        def __init__(self, values, indices):
            self.values, self.indices = values, indices

    def doubled(x):
        return Held(x, x * 2.0)
{HEAD}
            s = torch.tanh(doubled(x).values) * doubled(x).indices
            return self.b(s), torch.sigmoid(s) * s
        """,
        _used,
    )
    assert "doubled(x).values" in source
