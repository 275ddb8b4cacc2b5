"""What Inductor makes of a graph is told by our own nodes: it compiles for real, on the CPU."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.codegen.eager_reference import reference_order
from fusion_advisor.codegen.emit import emit, written
from fusion_advisor.ir.graph import Graph
from fusion_advisor.measure import inductor_coverage
from fusion_advisor.measure.child import group, model
from fusion_advisor.measure.clocks import HostClock
from fusion_advisor.measure.driver import timing_rules
from fusion_advisor.measure.inductor_coverage import lines_of, watched
from fusion_advisor.measure.protocol import (
    COMPILED,
    KERNEL_COMPILED,
    Apart,
    GroupJob,
    InductorRun,
    Measurement,
    ModelJob,
    Replacement,
)
from fusion_advisor.report.schema import GroupRow
from fusion_advisor.shipped.load import load_module
from fusion_advisor.workflows.inductor_overlap import overlapping_kernels
from fusion_advisor.workflows.recommend import way_row

from .regions import H200, RULES, decided, flow_of

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="Inductor's CPU code needs g++")
TIMING = timing_rules(RULES, H200)


class Block(torch.nn.Module):
    """A table, a norm, a product, a softmax that it feeds, and a sum across: several kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(self.norm(self.table(tokens)))
        p = torch.softmax(h.sin(), -1)
        return p.sum(0), h.max(-1)[0]


@pytest.fixture(scope="module")
def block() -> Graph:
    return flow_of(Block(), torch.randint(0, 11, (3, 5))).annotated.graph


@pytest.fixture(scope="module")
def compiled(block: Graph, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    job = ModelJob(COMPILED[0], block, (), TIMING)
    with torch.no_grad():
        return model(job, tmp_path_factory.mktemp("model"), HostClock())


def test_every_launch_of_a_replayed_model_is_in_a_kernel(
    block: Graph, compiled: Measurement
) -> None:
    seen = compiled.inductor
    assert seen is not None
    assert not seen.unknown
    names = [node.name for node in block.nodes]
    covered = [name for _, nodes in seen.kernels for name in nodes]
    launches = {"embedding", "layer_norm", "linear", "sin", "softmax", "sum_1", "max_1"}
    assert launches <= set(covered) <= set(names)
    for _, nodes in seen.kernels:
        assert list(nodes) == sorted(nodes, key=names.index)
    by_kernel = {nodes: kernel for kernel, nodes in seen.kernels}
    assert by_kernel[("linear",)].endswith("addmm")
    assert next(n for n in by_kernel if "layer_norm" in n) == ("embedding", "layer_norm")


def test_what_is_not_fused_is_told_by_nodes_and_reason(compiled: Measurement) -> None:
    seen = compiled.inductor
    assert seen is not None
    assert seen.apart
    for pair in seen.apart:
        assert pair.first
        assert pair.second
        assert pair.why
        assert "%" not in pair.why


def test_a_group_is_told_by_its_lines(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        z = torch.exp(x - x.max(-1, keepdim=True)[0])
        return z / z.sum(-1, keepdim=True)

    flow = flow_of(function, torch.randn(8, 32))
    decision = decided(flow)
    expressed = decision.subject.expressed
    assert expressed is not None
    nodes = tuple(flow.nodes[i].name for i in reference_order(flow, expressed))
    assert len(nodes) >= 5
    kernel = emit(flow, decision, "softmax", RULES)
    job = GroupJob("g1", COMPILED[0], kernel, 0, TIMING, nodes=nodes)
    module = load_module(kernel.text, tmp_path)
    assert set(lines_of(module.reference, nodes).values()) == set(nodes)
    with torch.no_grad():
        found = group(job, module, HostClock()).inductor
    assert found is not None
    assert {name for _, covered in found.kernels for name in covered} == set(nodes)


def test_an_edited_file_is_timed_and_not_told(tmp_path: Path) -> None:
    flow = flow_of(lambda x: x.sin().cos(), torch.randn(8, 32))
    kernel = emit(flow, decided(flow), "pair", RULES)
    text = kernel.text.replace("    return cos\n", "    cos = cos.clone()\n    return cos\n")
    assert text != kernel.text
    job = GroupJob("g1", COMPILED[0], kernel, 0, TIMING, nodes=("sin", "cos"))
    with torch.no_grad():
        found = group(job, load_module(text, tmp_path), HostClock())
    assert found.timing
    assert found.inductor
    assert found.inductor.unknown.startswith("not known")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.nn.functional.dropout(torch.nn.functional.gelu(x), 0.1),
        lambda x: x.unbind(1)[0].sin() + x.max(1)[0].squeeze(),
        lambda x: torch.cat([x, x.sin()], 1).chunk(2, 1)[1].add_(1),
    ],
    ids=["random", "several results", "views"],
)
def test_every_line_of_a_reference_is_a_node(function: Any, tmp_path: Path) -> None:
    flow = flow_of(function, torch.randn(8, 32), mode="train")
    decision = decided(flow)
    expressed = decision.subject.expressed
    assert expressed is not None
    nodes = [flow.nodes[i].name for i in reference_order(flow, expressed)]
    kernel = emit(flow, decision, "kernel", RULES)
    titles = written(flow, decision, "kernel", RULES).titles
    lines = lines_of(load_module(kernel.text, tmp_path).reference, nodes)
    assert len(nodes) > 1
    text = kernel.text.splitlines()
    for (_, line), node in lines.items():
        assert text[line - 1].strip().startswith(f"{titles[node]} = ")
    assert list(lines.values()) == nodes


def test_emitted_kernels_stand_inside_a_compiled_model(block: Graph, tmp_path: Path) -> None:
    """torch.compile does not look into them, and sees what shape they make."""
    text = "import torch\n\n\ndef fused(x):\n    return torch.softmax(x.sin(), -1)\n"
    softmax = next(node for node in block.nodes if node.name == "softmax")
    sin = next(node for node in block.nodes if node.name == "sin")
    taken = next(iter(sin.refs()))
    members = (sin.name, softmax.name)
    replaced = Replacement(
        text, "fused", ((taken.node, taken.output),), ((softmax.name, 0),), members
    )
    rest = tuple(node for node in block.nodes if node.name not in members)
    job = ModelJob(
        KERNEL_COMPILED, block, (replaced,), TIMING,
        replace(block, nodes=rest), (block.nodes.index(sin),),
    )  # fmt: skip
    with torch.no_grad():
        found = model(job, tmp_path, HostClock())
    assert found.error is not None
    assert found.error < 1e-5
    assert found.inductor is not None
    (covered,) = (
        nodes for kernel, nodes in found.inductor.kernels if "fusion_advisor_bench" in kernel
    )
    assert "softmax" in covered
    assert not any("sin" in nodes for _, nodes in found.inductor.kernels)


def test_a_function_with_other_lines_has_no_owners() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)
        return torch.cos(y)

    assert list(lines_of(function, ["sin"]).values()) == ["sin"]
    assert lines_of(function, ["sin", "cos"]) == {}


def test_records_of_another_inductor_are_said_to_be_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(*_: Any) -> InductorRun:
        raise AttributeError("no such record")

    monkeypatch.setattr(inductor_coverage, "_made", other)
    torch.compiler.reset()
    with torch.no_grad(), watched({}) as found:
        torch.compile(lambda x: x.sin() + 1)(torch.randn(7))
    assert [one.kernels for one in found] == [()]
    assert "no such record" in found[0].unknown


def test_kernels_of_the_model_stand_beside_the_groups() -> None:
    seen = InductorRun(
        (("k0", ("a", "b")), ("k1", ("c", "z")), ("k2", ("y",))),
        (Apart(("a",), ("c",), "why"), Apart(("a",), ("z",), "another")),
    )
    row = way_row(Measurement("model", "compile", inductor=seen), 0, 1.0)
    one = GroupRow.model_construct(instances=[["a", "b", "c"], ["d", "e", "f"]])
    kernels, apart = overlapping_kernels(one, [row])
    assert [(k.kernel, k.inside, k.outside) for k in kernels] == [
        ("k0", ["a", "b"], []),
        ("k1", ["c"], ["z"]),
    ]
    assert [pair.why for pair in apart] == ["why"]
    assert overlapping_kernels(one, []) == ([], [])
