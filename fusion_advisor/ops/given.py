"""Numbers that ops hand on as they are: what a kernel may be given in place of a constant.

The meaning of each op adds such a number to a value, multiplies with it or its reciprocal, compares
with it to choose the larger, or puts it in an element's place. It takes no other way for a special
number, and makes no other number of it.
"""

from __future__ import annotations

from dataclasses import replace
from inspect import Parameter, signature

from fusion_advisor.ir.graph import Node
from fusion_advisor.ops.registry import REGISTRY, in_place

_POINTWISE = {
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), (1,)),
    **dict.fromkeys(("aten.sub.Tensor", "aten.sub.Scalar"), (1,)),
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), (1,)),
    **dict.fromkeys(("aten.div.Tensor", "aten.div.Scalar"), (1,)),
    "aten.rsub.Scalar": (1,),
    "aten.clamp.default": (1, 2),
    "aten.clamp_min.default": (1,),
    "aten.clamp_max.default": (1,),
    "aten.hardtanh.default": (1, 2),
    "aten.leaky_relu.default": (1,),
    "aten.masked_fill.Scalar": (2,),
}
HANDED_ON: dict[str, tuple[int, ...]] = {
    **_POINTWISE,
    **{in_place(name): places for name, places in _POINTWISE.items() if in_place(name) in REGISTRY},
    "aten.where.ScalarOther": (2,),
    "aten.native_layer_norm.default": (4,),
    "aten._fused_rms_norm.default": (3,),
    "aten.native_group_norm.default": (7,),
    "aten.native_batch_norm.default": (7,),
    "aten.cudnn_batch_norm.default": (7,),
}
"""Positions of such numbers among the arguments of an op, by its name. Arguments behind the last of
them (a factor `alpha`) or by keyword say something else of the number."""


def written_out(node: Node) -> Node:
    """A node with the defaults of the numbers that its op hands on: torch leaves out of a call what
    equals them, so that a number has no place where it happens to be the default."""
    last = max(HANDED_ON.get(node.op, ()), default=-1)
    meaning = REGISTRY[node.op].meaning if len(node.args) <= last else None
    if meaning is None or node.kwargs:
        return node
    operands = [*signature(meaning).parameters.values()][1:]  # behind the builder
    defaults = [each.default for each in operands[len(node.args) : last + 1]]
    if any(each is Parameter.empty or each is None for each in defaults):
        return node
    return replace(node, args=(*node.args, *defaults))
