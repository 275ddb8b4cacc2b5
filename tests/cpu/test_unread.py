"""Results that nothing reads: eager makes them, and so does what a patch puts in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .test_other_uses import drawn, uses

pytestmark = pytest.mark.usefixtures("ways")

DROPPED = """
    class Trunk(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.mix = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

        def forward(self, x, state):
            state = self.mix(state).relu()
            return self.lin(x), state

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Trunk()

        def states(self, x):
            return self.trunk(x, x)[1]

        def forward(self, x):
            y, _ = self.trunk(x, x)
            return 0.5 * torch.tanh(y) + x
"""


def test_what_a_call_hands_on_and_its_caller_drops_stays(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model = file.Model()
        return [model(drawn()), model.states(drawn())]

    text = uses(tmp_path, DROPPED, use)
    assert "y, _ = self.trunk(x, x)" in text
    assert "fused_model.tanh_mul_add" in text


CARRIED = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin, self.decay = nn.Linear(1024, 1024), 0.5

        def forward(self, x, turns=3):
            state, outs = x, []
            for _ in range(turns):
                h = self.lin(state)
                outs.append(h)
                state = torch.tanh(state) * self.decay + h
            return torch.stack(outs)
"""


def test_the_last_turn_of_a_loop_makes_a_state_that_nothing_reads(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model = file.Model()
        return [model(drawn(), turns) for turns in (1, 2, 5)]

    text = uses(tmp_path, CARRIED, use)
    assert "state = fused_model.tanh_mul_add" in text
