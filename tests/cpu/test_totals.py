"""What the totals promise: bounds that nothing exceeds, and what cannot run or was not run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.frontend.child import capture_here, capture_module
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.report.assemble import assemble
from fusion_advisor.report.formats import render
from fusion_advisor.report.schema import Report

from .regions import RULES, flow_of
from .sketches import Seeded, sketched

DRAWN = 300
PARTS = 6
SEED = 16
"""Bytes of the seed and the offset that a kernel reads where it draws, and eager does not."""


def report_of(flow: Dataflow, scenario: Scenario | None = None) -> Report:
    found = fuse(flow, RULES)
    return assemble(flow, found, {}, scenario or Scenario(), (), RULES)


def holds(report: Report) -> None:
    row = report.totals
    saved = row.hbm_bytes_unfused - row.hbm_bytes_fused
    draws = {node.name for node in report.nodes if node.parallelism == "random"}
    drawing = sum(bool(draws & {*each}) for group in report.groups for each in group.instances)
    assert -SEED * drawing <= saved <= row.saveable_bytes <= row.hbm_bytes_unfused
    assert row.predicted_speedup <= row.ceiling_speedup * (1 + 1e-9)


@pytest.mark.sampled(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_no_drawn_module_exceeds_its_bounds(part: int) -> None:
    saving = 0
    for seed in range(part, DRAWN, PARTS):
        sketch = sketched(Seeded(seed))
        if sketch.results:
            report = report_of(sketch.tape.flow(*sketch.results))
            holds(report)
            saving += bool(report.groups)
    assert saving > DRAWN / PARTS / 10


def half(x: Tensor, w: Tensor) -> Tensor:
    """Two groups that share what they read, on either side of a product."""
    a = torch.sigmoid(x) * 2.0
    return torch.softmax(a @ w, -1) + x.sin() * a


def turned(q: Tensor, k: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, which become one launch."""

    def one(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * c + torch.cat((-high, low), -1) * c

    return one(q), one(k)


def masked(x: Tensor, m: Tensor) -> Tensor:
    """A small tensor of which most is made anew."""
    hidden = torch.arange(x.shape[-1], device=x.device) > m[:, None]
    return x.masked_fill(hidden, -float("inf")).softmax(-1)


def r(*shape: int) -> Tensor:
    return torch.empty(*shape)


BOUND: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "half": (half, (r(2048, 1024), r(1024, 1024))),
    "turned": (turned, (r(2, 32, 1024, 128), r(2, 8, 1024, 128), r(1024, 128))),
    "masked": (masked, (r(4096, 1024), torch.zeros(4096, dtype=torch.int64))),
    "norm": (lambda x, w: F.layer_norm(x, (4096,), w) * 2.0, (r(2048, 4096), r(4096))),
}


@pytest.mark.parametrize("name", BOUND)
def test_bounds_hold(name: str) -> None:
    function, inputs = BOUND[name]
    holds(report_of(flow_of(function, *inputs)))


# -- what no fusion takes away ---------------------------------------------------------------------


def test_a_product_stays_even_where_memory_bounds_it() -> None:
    def step(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.silu(x @ w) * (x @ v)

    report = report_of(flow_of(step, r(1, 4096), r(4096, 14336), r(4096, 14336)))
    products = [node for node in report.nodes if "mm" in node.op]
    assert {node.bound for node in products} <= {"memory", "overhead"}
    stays = sum(node.time_us for node in products)
    assert report.totals.ceiling_speedup <= report.totals.time_us / stays


def test_what_has_a_product_between_takes_two_launches() -> None:
    def chain(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x.sin() + 1.0) @ w
        return x

    report = report_of(flow_of(chain, r(8, 16), r(16, 16)))
    products = sum(node.time_us for node in report.nodes if "mm" in node.op)
    least = report.totals.time_us / report.totals.ceiling_speedup
    assert least > products + 4.0


def test_inputs_are_read_and_results_written() -> None:
    report = report_of(flow_of(lambda x: x.sin().cos().tanh() + 1.0, r(8192, 8192)))
    least_us = report.totals.time_us / report.totals.ceiling_speedup
    moved = 2 * 4 * 8192 * 8192
    assert least_us >= moved / report.device.datasheet_bandwidth * 1e6


# -- what does not run -----------------------------------------------------------------------------


def test_with_gradients_the_totals_say_when_kernels_run() -> None:
    flow = flow_of(lambda x: x.sin().cos() + 1.0, r(2048, 2048))
    plain, training = report_of(flow), report_of(flow, Scenario(mode="train"))
    assert plain.totals.condition == ""
    said = "under torch.no_grad() alone: with gradients eager's own launches run"
    assert training.totals.condition == said
    assert report_of(flow, Scenario(mode="train", grad=False)).totals.condition == ""
    for form in ("text", "md"):
        first, _, _ = " ".join(render(training, form).split()).partition("saves")
        assert said.replace("()", r"()") in first.replace("\\", "")
        assert said not in render(plain, form)


class Seeing(nn.Module):
    """Text runs through a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.text = nn.ModuleDict({"words": nn.Embedding(16, 8), "unused": nn.Linear(8, 8)})
        self.out = nn.Linear(8, 16, bias=False)
        self.out.weight = self.text["words"].weight
        self.tied = nn.Linear(8, 16, bias=False)
        self.tied.weight = self.text["words"].weight
        self.act = nn.ReLU()

    def forward(self, tokens: Tensor, image: Tensor | None = None) -> Tensor:
        seen = self.text["words"](tokens)
        if image is not None:
            seen = seen + self.tower(image)
        return self.act(self.out(seen))


def test_parts_that_no_launch_reads_from_are_named() -> None:
    tokens, image = torch.zeros(4, 3, dtype=torch.int64), torch.randn(4, 3, 8)
    graph = capture_module(Seeing(), (tokens,))
    assert graph.not_run == ("tower", "text.unused")
    assert capture_module(Seeing(), (tokens, image)).not_run == ("text.unused",)
    assert capture_module(nn.Softmax(-1), (image,)).not_run == ()


def test_reports_say_what_was_not_run(tmp_path: Path) -> None:
    from fusion_advisor.cost.dataflow import dataflow

    from .regions import H200

    program = tmp_path / "seeing.pt2"
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    torch.export.save(torch.export.export(Seeing().eval(), (tokens,)), str(program))
    graph = capture_here(str(program))
    report = report_of(dataflow(graph, H200))
    assert report.not_run == ["tower", "text.unused"]
    for form in ("text", "md", "html"):
        assert "tower, text.unused: no launch reads from them" in render(report, form)


def test_an_empty_tensor_that_is_made_of_nothing_is_no_view() -> None:
    """A cache of a model that trains begins so: `torch.zeros(0)`, to which keys are added."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        kept = torch.cat([torch.zeros(0, 64), torch.sigmoid(x) * 2])
        return kept, torch.relu(x).square() + kept

    flow = flow_of(function, torch.randn(512, 64))
    (made,) = (i for i, node in enumerate(flow.nodes) if node.op == "aten.zeros.default")
    assert not flow.is_view(made)
    assert not flow.launches(made)
    assert flow.base(Ref(flow.nodes[made].name)) == Ref(flow.nodes[made].name)
    holds(report_of(flow))
