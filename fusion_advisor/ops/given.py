"""Numbers that ops hand on as they are: what a kernel may be given in place of a constant.

The meaning of each op adds such a number to a value, multiplies with it or its reciprocal, compares
with it to choose the larger, or puts it in an element's place. It takes no other way for a special
number, and makes no other number of it.
"""

from __future__ import annotations

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
