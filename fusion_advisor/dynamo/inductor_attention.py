"""Attention that is written out, as Inductor sees it: does it have one operator for that?

Inductor looks for two batched products joined by a softmax in the forms of its own list (PyTorch,
_inductor/fx_passes/fuse_attention.py), before it divides a graph. What it does not find there is a
softmax between two products, which a kernel of ours may be faster at. The list changes with
PyTorch, so that Inductor itself is asked, about the attention alone.
"""
# torch.fx and Inductor's internals are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_advisor.frontend.aot import fake_mode
from fusion_advisor.ops import REGISTRY

_BATCHED = ("aten.bmm.default", "aten.baddbmm.default")
_PRODUCTS = (*_BATCHED, "aten.mm.default", "aten.addmm.default", "aten.convolution.default")
Onward = Callable[[torch.fx.Node], Iterable[torch.fx.Node]]
"""Nodes that come next, before a node or behind it."""
_FUSED = "scaled_dot_product"
"""Part of the names of the operators that Inductor puts in place of attention."""


def inductor_fuses(softmax: torch.fx.Node) -> bool:
    """Whether Inductor has one operator for the attention around a softmax of a graph of ATen
    operators; False where the softmax stands between no two batched products."""
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes, lazy_init

    found = _attention(softmax)
    if found is None:
        return False
    module, inputs = found
    with fake_mode(inputs):
        made = make_fx(module, decomposition_table=select_decomp_table())(*inputs)
    made.graph.eliminate_dead_code()
    # Inductor makes its list once for each device that it is named, and adds it to what is there.
    named = (softmax.meta["val"].device,) * (len(signature(joint_graph_passes).parameters) - 1)
    lazy_init(*named)
    with config.patch(shape_padding=False):  # which is timed
        joint_graph_passes(made, *named)
    return any(_FUSED in str(node.target) for node in made.graph.nodes)


def _attention(softmax: torch.fx.Node) -> tuple[torch.fx.GraphModule, list[Any]] | None:
    """The nodes from the operands of the first product to the result of the second as a graph, and
    its inputs; None where there are no two such products."""
    scores = _way(softmax, lambda node: node.all_input_nodes)
    weights = _way(softmax, lambda node: [*node.users])
    if not (scores and weights):
        return None
    inside = scores | weights
    for node in scores | weights:
        if _named(node) in _BATCHED:
            inside |= _views(node, lambda node: node.all_input_nodes)
    for node in weights:
        if _named(node) in _BATCHED:
            inside |= _views(node, lambda node: [*node.users])
    order = [node for node in softmax.graph.nodes if node in inside]
    given = dict.fromkeys(of for node in order for of in node.all_input_nodes if of not in inside)
    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(f"given_{n}") for n, node in enumerate(given)}
    for node in order:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    ends = [node for node in order if not inside.issuperset(node.users) or not node.users]
    graph.output(tuple(copies[node] for node in ends))
    module = torch.fx.GraphModule(softmax.graph.owning_module or torch.nn.Module(), graph)
    return module, [node.meta["val"] for node in given]


def _way(start: torch.fx.Node, onward: Onward) -> set[torch.fx.Node]:
    """The nodes from one to the next batched products, which are included; no way leads through
    another product."""
    known = dict[torch.fx.Node, bool]()

    def leads(node: torch.fx.Node) -> bool:
        if node not in known:
            if _named(node) in _PRODUCTS:
                known[node] = _named(node) in _BATCHED
            else:
                known[node] = sum(map(leads, onward(node))) > 0  # each is asked
        return known[node]

    leads(start)
    return {node for node, led in known.items() if led}


def _views(start: torch.fx.Node, onward: Onward) -> set[torch.fx.Node]:
    """The views and copies that lead to a node, or that are made of it."""
    found, todo = set[torch.fx.Node](), [*onward(start)]
    while todo:
        node = todo.pop()
        op = REGISTRY.get(_named(node))
        moves = _named(node) == "aten.clone.default" or (op is not None and op.pattern == "view")
        if node not in found and moves:
            found.add(node)
            todo += onward(node)
    return found


def _named(node: torch.fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""
