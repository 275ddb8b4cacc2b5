"""Attention as a graph has it: one call, which may take a mask."""

from __future__ import annotations

from fusion_advisor.ir.graph import Node, Ref

ATTENTION = "aten.scaled_dot_product_attention.default"
FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"
EFFICIENT_BACKWARD = "aten._scaled_dot_product_efficient_attention_backward.default"
ATTENTION_BACKWARDS = (FLASH_BACKWARD, EFFICIENT_BACKWARD)
_MASK = 3
"""The position of the mask among the arguments, by the op."""


def mask_of(node: Node) -> Ref | None:
    """The mask that an attention takes; None where it takes none, and for any other node."""
    if node.op != ATTENTION:
        return None
    given = node.args[_MASK] if len(node.args) > _MASK else dict(node.kwargs).get("attn_mask")
    return given if isinstance(given, Ref) else None
