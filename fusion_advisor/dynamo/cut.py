"""Cut of a graph before the first attention whose mask padding decides: what comes before runs on
the GPU while the host waits to know whether there is padding.

The part before is the same for both answers, and each answer has a part behind it. What makes masks
alone goes behind the cut, into the part for all inputs, the only one that reads them.
"""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._guards import TracingContext

from fusion_advisor.dynamo.options import Inner
from fusion_advisor.dynamo.rewrites import Rewritten
from fusion_advisor.dynamo.rewrites.nodes import (
    called,
    from_where,
    made_of,
    storage,
    switches,
    writes_into,
    written,
)
from fusion_advisor.dynamo.two_graphs import Run
from fusion_advisor.frontend.aot import as_fake, fake_mode

_HELD = "placeholder", "get_attr"
"""Nodes that each part has for itself."""
_MAKING = ("tensor", "arange", "full", "zeros", "ones", "scalar_tensor")
_MOVING = ("to", "add", "sub", "mul", "unsqueeze", "expand", "view", "getitem")
"""Functions that make a tensor of numbers, and that make one of another; none draws numbers."""


@dataclass(frozen=True)
class TwoParts:
    """Graph in two parts: `before` gives some tensors from the inputs; a part behind gives the
    results of the graph from the inputs and these tensors. `behind` has the part for either answer:
    whether the conditions of the rewrites hold."""

    before: torch.fx.GraphModule
    behind: dict[bool, torch.fx.GraphModule]


def cut(
    module: torch.fx.GraphModule, rewritten: Rewritten, for_all: torch.fx.GraphModule
) -> TwoParts | None:
    """Cut a graph that was rewritten under a condition that is read, with the graph that serves all
    inputs, both made of `module`. None where the parts might do something else than the whole."""
    nodes = list(rewritten.module.graph.nodes)
    reading = {each.node for each in rewritten.taken if any(c.reads for c in each.conditions)}
    first = next(number for number, node in enumerate(nodes) if node in reading)
    before = [node for node in nodes[:first] if node.op not in _HELD]
    for node in nodes[first:]:  # a cut gives no tuples
        if node.target is operator.getitem and _lists(node.args[0]) and node.args[0] in before:
            before.append(node)
    names = {node.name for node in module.graph.nodes}  # a rewrite gives what it makes new ones
    shared = {node.name for node in before} & names
    behind = {
        True: [node for node in nodes if node.op not in _HELD and node not in before],
        False: [n for n in for_all.graph.nodes if n.op not in _HELD and n.name not in shared],
    }
    read = {each.name for part in behind.values() for node in part for each in node.all_input_nodes}
    constants = _constants(before, *behind.values())
    anew: list[torch.fx.Node] = []
    for node in reversed(before):  # a size or a constant is worked out in each part
        known = node in constants or isinstance(_value(node), torch.SymInt | torch.Size)
        if node.name in read and known:
            anew.insert(0, node)
            read.update(each.name for each in node.all_input_nodes)
    across = [node for node in before if node.name in read and node not in anew]
    if not across or not all(isinstance(_value(node), torch.Tensor) for node in across):
        return None
    if not _may_swap(for_all.graph, shared, before, behind[False]):
        return None
    memory = {storage(node) for node in across}
    if any(writes_into(node, memory) for part in behind.values() for node in part):
        return None
    parts = {True: rewritten.module, False: for_all}
    return TwoParts(
        _part(rewritten.module, before, (), across),
        {holds: _part(whole, [*anew, *behind[holds]], across) for holds, whole in parts.items()},
    )


def compiled_before(
    inputs: Sequence[Any], inner: Inner, compiled: Callable[[Inner], Run]
) -> tuple[Run, list[Any]]:
    """Compile the part before a cut by `compiled`, which hands a graph on to `inner`; returns the
    part, and what it gives for the inputs, on fake tensors laid out as they will be: a compiler
    lays results out by itself, and the part behind is compiled for that. The flag is the one that
    torch's DDPOptimizer sets, which compiles a graph in parts, too."""
    context = TracingContext.try_get()

    def telling(graph: torch.fx.GraphModule, given: Sequence[Any]) -> Run:
        if context is None:
            return inner(graph, given)
        context.fakify_first_call = True
        try:
            return inner(graph, given)
        finally:
            context.fakify_first_call = False

    run, fake = compiled(telling), fake_mode(inputs)
    with fake, patch.object(fake, "allow_non_fake_inputs", True):
        return run, list(run(*(as_fake(value, fake) for value in inputs)))


def _constants(
    before: Sequence[torch.fx.Node], *behind: Sequence[torch.fx.Node]
) -> set[torch.fx.Node]:
    """Tensors before a cut that are made of no input, and into which nothing writes. A compiler
    puts them into the kernels that read them. Handed across the cut, one on the CPU would need a
    kernel there, for which a compiler of C++ runs for most of a minute."""
    into = {storage(each) for part in (before, *behind) for node in part for each in written(node)}
    found = set[torch.fx.Node]()
    if None in into:
        return found
    for node in before:
        given = node.all_input_nodes
        plain = called(node, *_MOVING) if given else called(node, *_MAKING)
        if plain and found.issuperset(given) and storage(node) not in (*into, None):
            found.add(node)
    return found


def _value(node: torch.fx.Node) -> Any:
    return node.meta.get("example_value")


def _lists(node: Any) -> bool:
    """Whether a node gives several values."""
    return isinstance(node, torch.fx.Node) and isinstance(_value(node), tuple | list)


def _may_swap(
    graph: torch.fx.Graph,
    shared: Collection[str],
    before: Sequence[torch.fx.Node],
    behind: Sequence[torch.fx.Node],
) -> bool:
    """Whether nodes behind the cut of a graph that stand among those before it may as well run
    after them: what runs first writes into no input, with which others may share memory in a later
    call, and into nothing that the late ones read, nor they into what it touches; neither enters a
    state that the other runs in."""
    order = {node: number for number, node in enumerate(graph.nodes)}
    last = max((number for node, number in order.items() if node.name in shared), default=-1)
    late = [node for node in behind if order[node] < last]
    into, touched = set[int | None](), set[int | None]()
    for node in before:
        into.update(map(storage, written(node)))
        touched.update(map(storage, (node, *node.all_input_nodes)))
    given = {storage(node) for node in graph.nodes if node.op in _HELD}
    if None in into or into & given or any(map(_stands_alone, (*before, *late))):
        return False
    states = [number for node, number in order.items() if node.name in shared and switches(node)]
    return not any(
        switches(node)
        or (states and states[0] < order[node] < states[-1])
        or writes_into(node, touched - {None})
        or into.intersection(map(storage, node.all_input_nodes))
        for node in late
    )


def _stands_alone(node: torch.fx.Node) -> bool:
    """Whether nothing reads a node that makes no tensor and writes none: it is there for the state
    that it enters or leaves, as that of `torch.vmap`. Those of autocast and of gradients are
    known, and what torch counts of its own use."""
    known = switches(node) or called(node, "_log_api_usage_once")
    return not (node.users or written(node) or isinstance(_value(node), torch.Tensor) or known)


def _part(
    whole: torch.fx.GraphModule,
    nodes: Sequence[torch.fx.Node],
    across: Sequence[torch.fx.Node],
    results: Sequence[torch.fx.Node] = (),
) -> torch.fx.GraphModule:
    """Graph of some nodes, which takes all inputs and then what comes across the cut, and gives
    `results`; without any, the results of the whole."""
    graph = torch.fx.Graph()
    copies: dict[str, torch.fx.Node] = {}

    def copy(node: torch.fx.Node) -> torch.fx.Node:
        copies[node.name] = graph.node_copy(node, lambda each: copies[each.name])
        return copies[node.name]

    for node in whole.graph.find_nodes(op="placeholder"):
        from_where(copy(node), node)
    for node in across:
        given = copies[node.name] = graph.placeholder(node.name)
        given.meta = {"example_value": node.meta["example_value"]}
        from_where(given, None)
    for node in (*whole.graph.find_nodes(op="get_attr"), *nodes):
        copy(node)
    if results:
        graph.output(tuple(copies[node.name] for node in results))
    return made_of(whole, graph)
