"""Cut of a rewritten graph before the first attention whose mask padding decides: what comes before
runs on the GPU while the host waits to know whether there is padding.

The part before may be done in vain: where there is padding the graph for all inputs runs from the
start.
"""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
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
    """Graph in two parts: `before` gives some tensors from the inputs, `behind` the results of the
    graph from the inputs and these tensors."""

    before: torch.fx.GraphModule
    behind: torch.fx.GraphModule


def cut(rewritten: Rewritten) -> TwoParts | None:
    """Cut a graph that was rewritten under a condition that is read. None where the parts might do
    something else than the whole, or the part before leaves something that the whole graph, run
    after it, would meet."""
    nodes = list(rewritten.module.graph.nodes)
    reading = {each.node for each in rewritten.taken if any(c.reads for c in each.conditions)}
    first = next(number for number, node in enumerate(nodes) if node in reading)
    before = [node for node in nodes[:first] if node.op not in _HELD]
    for node in nodes[first:]:  # a cut gives no tuples
        if node.target is operator.getitem and _lists(node.args[0]) and node.args[0] in before:
            before.append(node)
    behind = [node for node in nodes if node.op not in _HELD and node not in before]
    read = {each for node in behind for each in node.all_input_nodes}
    constants = _constants(before, behind)
    anew: list[torch.fx.Node] = []
    for node in reversed(before):  # a size or a constant is worked out in each part
        known = node in constants or isinstance(_value(node), torch.SymInt | torch.Size)
        if node in read and known:
            anew.insert(0, node)
            read.update(node.all_input_nodes)
    across = [node for node in before if node in read and node not in anew]
    if not across or not all(isinstance(_value(node), torch.Tensor) for node in across):
        return None
    if _leaves_something(rewritten.module.graph, before):
        return None
    memory = {storage(node) for node in across}
    if any(writes_into(node, memory) for node in behind):
        return None
    whole = rewritten.module
    return TwoParts(_part(whole, before, (), across), _part(whole, [*anew, *behind], across))


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


def _leaves_something(graph: torch.fx.Graph, before: Sequence[torch.fx.Node]) -> bool:
    """Whether what runs before a cut leaves something that a graph which is run after it meets: it
    writes into an input, with which others may share memory in a later call, or into unknown
    memory, it leaves gradients switched otherwise than they were, or it enters another state."""
    switched = [node.args[0] for node in before if node.target is torch._C._set_grad_enabled]
    if switched and switched[-1] != torch.is_grad_enabled():
        return True
    into = {storage(each) for node in before for each in written(node)}
    given = {storage(node) for node in graph.nodes if node.op in _HELD}
    return None in into or bool(into & given) or any(map(_stands_alone, before))


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
