"""Node data goes by the names of the exported program, which Model Explorer shows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fusion_advisor.frontend.child import capture_here


class Small(nn.Module):
    """Ops of one launch, of several, and one inside a block that export keeps apart."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        with torch.no_grad():
            y = y * 2
        return nn.functional.cross_entropy(y, wanted)


def test_every_launch_names_its_node_of_the_program(tmp_path: Path) -> None:
    inputs = (torch.ones(16, 8), torch.zeros(16, dtype=torch.long))
    program = torch.export.export(Small(), inputs)
    torch.export.save(program, tmp_path / "small.pt2")
    graph = capture_here(str(tmp_path / "small.pt2"))
    shown = {node.name for node in program.graph.nodes if node.op == "call_function"}
    launched = {node.fx for node in graph.nodes if node.kind == "call"}
    assert launched <= shown
    assert {"linear", "relu", "cross_entropy_loss"} <= launched
    assert [n.fx for n in graph.nodes if "loss" in n.name] == ["cross_entropy_loss"] * 2
