"""What Inductor's Triton kernels cover is told by our nodes, alone and around emitted kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.emit import emit
from fusion_advisor.fusion.decide import decide
from fusion_advisor.measure.child import model
from fusion_advisor.measure.clocks import DeviceClock
from fusion_advisor.measure.driver import BenchSubject, in_place, model_job, timing_rules
from fusion_advisor.measure.protocol import COMPILED, KERNEL_COMPILED, Way

from ..cpu.regions import H200, RULES, flow_of

pytestmark = pytest.mark.gpu
TIMING = timing_rules(RULES, H200)


class Block(torch.nn.Module):
    """A product between two chains."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = torch.softmax(x.sin(), -1) @ weight
        return torch.nn.functional.layer_norm(y.cos(), (256,)) + 1


@pytest.mark.parametrize("way", [COMPILED[0], KERNEL_COMPILED], ids=lambda way: way.name)
def test_every_launch_is_in_a_kernel(way: Way, tmp_path: Path) -> None:
    with torch.no_grad():
        flow = flow_of(Block(), torch.randn(1024, 512), torch.randn(512, 256))
        places = {node.name: number for number, node in enumerate(flow.nodes)}
        launches = (places["sin"], places["softmax"])
        decision = decide(flow, launches, RULES)
        kernel = emit(flow, decision, "sin_softmax", RULES, full_size=True)
        subject = BenchSubject("g1", "chain", decision, kernel, (launches,))
        emitted = way is KERNEL_COMPILED
        replaced = tuple(in_place(flow, [subject], RULES)) if emitted else ()
        job = model_job(flow, replaced, way, TIMING)
        found = model(job, tmp_path, DeviceClock(TIMING))
    assert found.timing is not None
    assert found.inductor is not None
    assert not found.inductor.unknown
    kernels = found.inductor.kernels
    covered = {name for _, nodes in kernels for name in nodes}
    assert {node.name for node in flow.nodes if "mm" in node.op} <= covered
    assert {"softmax", "cos", "layer_norm", "add"} <= covered
    assert any(kernel.startswith("triton_") and "layer_norm" in nodes for kernel, nodes in kernels)
    if emitted:
        assert found.error is not None
        assert found.error < 1e-3
        assert "sin" not in covered
        assert any("fusion_advisor_bench" in name for name, _ in kernels)
    else:
        assert "sin" in covered
