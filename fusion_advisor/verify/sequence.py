"""Graph with functions in place of some of its launches, in a valid order.

A function makes new tensors: what its launches wrote in place, it does not write. So every operand
of what remains is the tensor that it really reads, and reads and writes that remain keep eager's
order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace

import networkx as nx

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import Arg, Graph, Node, Ref


@dataclass(frozen=True)
class ReplacedNodes:
    """Nodes that a function computes, launches and the views between them, and the tensors that it
    takes."""

    members: Set[int]
    inputs: Sequence[Ref]


def graph_without(flow: Dataflow, groups: Sequence[ReplacedNodes]) -> tuple[Graph, tuple[int, ...]]:
    """Graph without the groups' launches, its nodes in the order that they run in then; and for
    each group the number of nodes before it."""
    group_of = {
        number: group
        for group, replaced in enumerate(groups)
        for number in replaced.members
        if flow.launches(number)
    }
    inputs = [{flow.position[ref.node] for ref in replaced.inputs} for replaced in groups]
    first = [min(n for n in replaced.members if flow.launches(n)) for replaced in groups]

    def waits(number: int) -> Iterator[int]:
        group = group_of.get(number)
        if group is None:
            yield from flow.before[number]
            return
        yield from inputs[group]
        operands = {flow.position[ref.node] for ref in flow.operands[number]}
        yield from operands - groups[group].members
        # The group writes nothing in place; it still reads behind the writes that remain.
        writes = (p for p in flow.before[number] if flow.nodes[p].mutates)
        yield from (p for p in writes if p not in group_of)

    def step(number: int) -> int:
        return -1 - group_of[number] if number in group_of else number

    needs: nx.DiGraph[int] = nx.DiGraph()
    for number in range(len(flow.nodes)):
        needs.add_node(step(number))
        needs.add_edges_from(
            (step(other), step(number)) for other in waits(number) if step(other) != step(number)
        )

    def place(step: int) -> int:
        return step if step >= 0 else first[-1 - step]

    kept: list[int] = []
    after = [0] * len(groups)
    for each in nx.lexicographical_topological_sort(needs, key=place):
        if each < 0:
            after[-1 - each] = len(kept)
        else:
            kept.append(each)
    graph = flow.annotated.graph
    nodes = tuple(_reading(flow, number) for number in kept)
    return replace(graph, nodes=nodes, outputs=flow.results), tuple(after)


def _reading(flow: Dataflow, number: int) -> Node:
    """Node with the tensors that it really reads as operands."""
    node, tensors = flow.nodes[number], flow.annotated.tensors
    resolved = iter(flow.operands[number])

    def read(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return next(resolved) if arg in tensors else arg
        return tuple(map(read, arg)) if isinstance(arg, tuple) else arg

    args = tuple(map(read, node.args))
    return replace(node, args=args, kwargs=tuple((key, read(arg)) for key, arg in node.kwargs))
