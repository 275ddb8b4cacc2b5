"""Grouping over a whole graph: what no component can see by itself."""

from __future__ import annotations

import networkx as nx
import pytest

from fusion_advisor.cost.dataflow import Dataflow, dataflow
from fusion_advisor.fusion.components import DecidedSet, Grouping
from fusion_advisor.fusion.decide import decide
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.graph import Graph, Node, Ref, Tensor
from fusion_advisor.rulebook.load import load_rulebook

SIZE = 2048
RULES = load_rulebook()


class Written:
    """A graph of square matrices, written launch by launch."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __call__(self, op: str, *args: Ref) -> Ref:
        tensor = Tensor((SIZE, SIZE), (SIZE, 1), "float32", storage=len(self.nodes))
        kind = "call" if args else "input"
        name = f"n{len(self.nodes)}"
        self.nodes.append(Node(name, op, kind, args=args, outputs=(tensor,)))
        return Ref(name)

    def storage(self, ref: Ref) -> int:
        return next(node.out.storage for node in self.nodes if node.name == ref.node)

    def chain(self, start: Ref, length: int) -> Ref:
        """So many launches, each of which takes the one before."""
        for _ in range(length):
            start = self("aten.exp.default", start)
        return start


def crossed(first: int, second: int) -> tuple[Dataflow, Grouping[DecidedSet]]:
    """Two chains, in the middle of each a matmul that the end of the other waits for.

    Each chain is convex and passes every gate. With both fused, neither kernel could start: each
    waits for a matmul that the other feeds.
    """
    graph = Written()
    x, y, weight = (graph("input") for _ in range(3))
    a, c = graph.chain(x, first), graph.chain(y, second)
    from_a, from_c = (graph("aten.mm.default", made, weight) for made in (a, c))
    b = graph.chain(graph("aten.add.Tensor", a, from_c), first)
    d = graph.chain(graph("aten.add.Tensor", c, from_a), second)
    flow = dataflow(Graph(tuple(graph.nodes), (b, d)), RULES.device("h200"))
    return flow, fuse(flow, RULES).grouping


def has_an_order(flow: Dataflow, blocks: list[tuple[int, ...]]) -> bool:
    """Whether the launches can run one after another with each block as one launch."""
    block_of = {i: n for n, block in enumerate(blocks) for i in block}
    quotient: nx.DiGraph[object] = nx.DiGraph()
    for i, before in enumerate(flow.before):
        here = block_of.get(i, f"alone {i}")
        edges = ((block_of.get(p, f"alone {p}"), here) for p in before)
        quotient.add_edges_from(edge for edge in edges if edge[0] != edge[1])
    return nx.is_directed_acyclic_graph(quotient)


@pytest.mark.parametrize(("first", "second"), [(3, 3), (3, 5), (5, 3)])
def test_sets_of_two_components_that_wait_for_each_other_are_not_both_fused(
    first: int, second: int
) -> None:
    flow, found = crossed(first, second)
    (kept,) = [place for each in found.groups for place in each.instances]
    assert len(kept) == 2 * max(first, second) + 1
    assert has_an_order(flow, [kept])
    assert found.gap > 0


def test_the_example_is_a_cycle_of_two_accepted_sets() -> None:
    flow, found = crossed(3, 5)
    (kept,) = [place for each in found.groups for place in each.instances]
    launches = {i for i, node in enumerate(flow.nodes) if flow.launches(i) and "mm" not in node.op}
    other = tuple(sorted(launches - {*kept}))
    assert decide(flow, other, RULES).accepted
    assert has_an_order(flow, [other])
    assert not has_an_order(flow, [kept, other])


def test_no_kernel_reads_a_tensor_both_before_and_after_it_is_written_in_place() -> None:
    """Of `a` there is one in memory: what reads it as it was runs before the write, what reads it
    as it is runs behind, and the write, which nothing fuses with, lies between."""
    graph = Written()
    x, index, source = (graph("input") for _ in range(3))
    a = graph("aten.exp.default", x)
    was = graph("aten.sin.default", a)
    own = Tensor((SIZE, SIZE), (SIZE, 1), "float32", storage=graph.storage(a))
    written = Node(
        "written", "aten.index_add_.default", args=(a, 0, index, source), outputs=(own,),
        mutates=(own.storage,),
    )  # fmt: skip
    graph.nodes.append(written)
    result = graph("aten.add.Tensor", was, graph("aten.cos.default", a))
    flow = dataflow(Graph(tuple(graph.nodes), (result,)), RULES.device("h200"))
    found = fuse(flow, RULES).grouping
    fused = [{flow.nodes[i].op for i in place} for each in found.groups for place in each.instances]
    assert {"aten.cos.default", "aten.add.Tensor"} in fused
    assert not any({"aten.sin.default", "aten.cos.default"} <= ops for ops in fused)
