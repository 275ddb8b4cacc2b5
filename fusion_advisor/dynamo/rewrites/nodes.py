"""Queries of nodes in Dynamo's graph, whichever way a call is spelled."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true


def called(node: Any, *names: str) -> bool:
    """Whether a node calls a function or method of one of these names."""
    if not isinstance(node, torch.fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    named = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return named in names


def value_of(node: Any) -> torch.Tensor | None:
    """Fake tensor of a node; None for what is no tensor."""
    value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def argument(node: torch.fx.Node, place: int, name: str) -> Any:
    """Argument of a call by its place or name; None where it is not given."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def number_of(node: torch.fx.Node) -> Any:
    """The number that a call of two operands has beside its tensor, or the node of one that is
    known at run time alone; None where both are tensors."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for place, each in enumerate(node.args):
        if value_of(each) is None:
            divided_by = place == 1 or called(node, "mul", "imul", "multiply")
            return each if divided_by else None
    return None


_WRITING = ("setitem", "iadd", "isub", "imul", "itruediv", "iand", "ior", "ixor", "ipow")
"""Functions of `operator` that write into their operand."""


def writes(node: torch.fx.Node) -> bool:
    """Whether a node may write into a tensor that it is given, by its name."""
    if node.op not in ("call_function", "call_method"):
        return False
    named = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = named.endswith("_") and not named.endswith("__")
    return in_place or "out" in node.kwargs or named in _WRITING


def storage(node: Any) -> int | None:
    """The memory of a node's tensor, the same for its views; None for what is no tensor."""
    value = value_of(node)
    return None if value is None else value.untyped_storage()._cdata


def take_out_dead(graph: torch.fx.Graph) -> None:
    """Take out the nodes that nothing needs. What writes in place is needed where its memory is
    read later, or is an input's; to torch.fx an unused call of `masked_fill_` is dead."""
    needed: set[torch.fx.Node] = set()
    read = {storage(node) for node in graph.nodes if node.op in ("placeholder", "get_attr")}
    read.add(None)  # what is not known to be a tensor may be any
    for node in reversed(list(graph.nodes)):
        writing = writes(node)
        written = writing and storage(node.kwargs.get("out", argument(node, 0, "input"))) in read
        if node in needed or written or (node.is_impure() and not writing):
            needed.update(node.all_input_nodes)
            read.update(map(storage, node.all_input_nodes))
        else:
            graph.erase_node(node)


def alike(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether sizes are the same, whatever the symbols among them stand for."""
    return len(these) == len(those) and all(
        statically_known_true(a == b) for a, b in zip(these, those, strict=True)
    )
