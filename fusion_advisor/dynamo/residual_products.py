"""Rewrite of a product that is added to a residual: the product adds into the residual's memory,
which nothing else reads any more.

The product's epilogue reads the residual while it has the results at hand, so that what comes next,
a norm mostly, moves two tensors less. `torch.addmm` of a whole residual copies that first, which
costs what it saves; the operator here writes into it. In a functional graph the sum stands as an
`addmm`, as analysis knows it. Inductor is given the operator that writes: AOTAutograd makes it
functional again, and Inductor puts it in place.

In inference alone, since a training step keeps residuals for its backward pass, and not where
Inductor measures its own products, which may take what follows into them.
"""
# torch.fx and torch.library carry Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.dynamo.rewrites.base import Taken
from fusion_advisor.dynamo.rewrites.nodes import alike
from fusion_advisor.frontend.expansions import hint

_ATEN = torch.ops.aten
_ADD, _MUL, _MM, _ADDMM = _ATEN.add.Tensor, _ATEN.mul.Tensor, _ATEN.mm.default, _ATEN.addmm.default
_VIEW = _ATEN.view.default
_VIEWS = _VIEW, _ATEN._unsafe_view.default, _ATEN.reshape.default
NAME = "residual-product"

_SIGNATURE = "(Tensor(a!) total, Tensor a, Tensor b, float scale) -> ()"
torch.library.define("fusion_advisor::add_product_", _SIGNATURE)


@torch.library.impl("fusion_advisor::add_product_", "default")
def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Add a product [M, K] x [K, N], times a number, to a tensor [M, N] in its memory."""
    total.addmm_(a, b, alpha=scale)


@torch.library.register_fake("fusion_advisor::add_product_")
def _fake(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Give nothing, as the operator does."""


OPERATOR = torch.ops.fusion_advisor.add_product_.default


@dataclass(frozen=True)
class _Product:
    """A product of two matrices, times a number, as a view that a sum alone reads."""

    made: torch.fx.Node
    scale: float
    view: list[torch.fx.Node]
    """Views between the product and the sum, the last one first."""


def residual_products(module: torch.fx.GraphModule, least: float) -> list[Taken]:
    """Make each product of at least so many FLOPs that is added to a residual one `addmm`, in the
    graph itself, which is functional and of ATen calls; returns those, each at its `addmm`. Only
    where the product may add into the residual's memory."""
    found: list[Taken] = []
    for node in module.graph.find_nodes(op="call_function", target=_ADD):
        for residual, given in (node.args, node.args[::-1]):
            product = None if node.kwargs else _product(given, node)
            if product and _may_add(node, residual, product.made, least):
                total = _one_call(node, residual, product)
                found.append(Taken(NAME, total, "nothing reads the residual after the sum"))
                break
    if found:
        module.graph.eliminate_dead_code()
        module.recompile()
    return found


def write_in_place(module: torch.fx.GraphModule, taken: Sequence[Taken]) -> None:
    """Let each of these sums be written into its residual, in the graph itself. A residual that is
    read later, since kernels were put into the graph, has a sum beside it again."""
    graph = module.graph
    for total in (each.node for each in taken):
        flat, a, b = total.args
        scale: Any = total.kwargs["alpha"]
        with graph.inserting_before(total):
            if _is_last(total, flat):
                graph.call_function(OPERATOR, (flat, a, b, scale))
                new: Any = flat
            else:
                product = graph.call_function(_MM, (a, b))
                new = graph.call_function(_ADD, (flat, product), {"alpha": scale})
        total.replace_all_uses_with(new)
        graph.erase_node(total)
    module.recompile()


def _product(node: Any, reader: torch.fx.Node) -> _Product | None:
    """Product that an operand [..., N] of a sum is; None where it is something else, or is read by
    others, too."""
    scale, views = 1.0, list[torch.fx.Node]()
    while isinstance(node, torch.fx.Node) and list(node.users) == [reader]:
        if node.target is _MM:
            return _Product(node, scale, views)
        if node.target in _VIEWS:
            views.append(node)
        elif node.target is _MUL and scale == 1 and isinstance(node.args[1], int | float):
            scale = float(node.args[1])
        else:
            return None
        node, reader = node.args[0], node
    return None


def _may_add(node: torch.fx.Node, residual: Any, product: torch.fx.Node, least: float) -> bool:
    """Whether a product may add into the memory of the residual, and is worth it."""
    values = [_value(each) for each in (node, residual, product, *product.args)]
    total, into, made, a, b = values
    return (
        (
            all(each.dtype is made.dtype and each.device == made.device for each in values)
            and made.dtype.is_floating_point
            and isinstance(made.shape[1], int)
            and alike(total.shape, into.shape)
            and alike(total.shape[-1:], made.shape[1:])
            and into.is_contiguous()
            and 2 * hint(a.numel()) * hint(b.shape[1]) >= least
            and _is_last(node, residual)
        )
        if all(isinstance(each, torch.Tensor) for each in values)
        else False
    )


def _one_call(node: torch.fx.Node, residual: torch.fx.Node, product: _Product) -> torch.fx.Node:
    """Put one `addmm` in place of a sum; returns it."""
    graph, made, value = node.graph, product.made, _value(residual)
    with graph.inserting_before(node):
        flat = residual
        if value.dim() != len(made.meta["val"].shape):
            width = made.meta["val"].shape[1]
            flat = graph.call_function(_VIEW, (residual, [-1, width]))
            flat.meta = {**residual.meta, "val": value.view(-1, width)}
        total = graph.call_function(_ADDMM, (flat, *made.args), {"alpha": product.scale})
        total.meta = {**node.meta, "val": made.meta["val"]}
        seen = total
        for view in reversed(product.view):
            shape = _value(view).shape
            below = seen
            # What an `_unsafe_view` gives must not be written, as a residual is later.
            seen = graph.call_function(_VIEW, (below, view.args[1]))
            seen.meta = {**node.meta, "val": _value(below).view(shape)}
    node.replace_all_uses_with(seen)
    graph.erase_node(node)
    return total


def _is_last(node: torch.fx.Node, residual: Any) -> bool:
    """Whether a node is the last to read the memory of a residual, which the graph itself makes."""
    memory, behind = _memory(residual), node.next
    while behind.op != "root":
        if memory in map(_memory, behind.all_input_nodes):
            return False
        behind = behind.next
    given = (each for each in node.graph.nodes if each.op in ("placeholder", "get_attr"))
    return memory not in map(_memory, given)


def _memory(node: torch.fx.Node) -> int | None:
    """The memory of a node's tensor, the same for its views; None for what is no tensor."""
    value = _value(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _value(node: Any) -> Any:
    """Fake tensor of a node; None for what is no node."""
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else None
