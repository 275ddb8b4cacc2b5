"""Reports of models that are written down as graphs, and so need no torch."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.graph import Graph, Node, Ref, Source, Tensor
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.report.assemble import assemble
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.load import load_rulebook

SIZE = 2048
LAYER = ("mm", "cos", "exp", "unknown", "sin", "clone")
"""A layer's launches, each of what the one before gives; the matrix product takes a weight, too."""


def layered(count: int, module: str = "layers") -> Report:
    """A model of `count` equal layers: in each a group of two, an op that is not modelled and a
    candidate that saves too little."""
    nodes = (*_given(), *(node for i in range(count) for node in _layer(i, module)))
    rulebook = load_rulebook()
    graph = Graph(nodes, (Ref(nodes[-1].name),), source="model.py")
    flow = dataflow(graph, rulebook.device("h200"))
    found = fuse(flow, rulebook)
    return assemble(flow, found, {}, Scenario(), ("device=h200",), rulebook)


def _given() -> Iterator[Node]:
    for number, name in enumerate(("x", "weight")):
        yield Node(name, "input", "input", outputs=(_tensor(number),))


def _layer(layer: int, module: str) -> Iterator[Node]:
    last = f"clone_{layer - 1}" if layer else "x"
    for i, op in enumerate(LAYER):
        name = f"{op}_{layer}"
        args = (Ref(last), Ref("weight")) if op == "mm" else (Ref(last),)
        yield Node(
            name, f"aten.{op}.default", args=args,
            outputs=(_tensor(2 + layer * len(LAYER) + i),), module=f"{module}.{layer}.{op}",
            source=Source("/elsewhere/model.py", i + 1),
        )  # fmt: skip
        last = name


def _tensor(number: int) -> Tensor:
    return Tensor((SIZE, SIZE), (SIZE, 1), "float32", storage=number)
