"""Attentions that a mask keeps from the flash kernel."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, layout, mark
from fusion_advisor.ir.graph import Mask
from fusion_advisor.ops.attention import mask_of

_FLASH = ("float16", "bfloat16")
_SAID = {
    "nothing": "a mask that hides nothing: leave it out",
    "causal": "a mask that is causal: pass is_causal=True instead",
    "other": "a mask that hides what is_causal does not: FlexAttention compiles such masks",
    "unknown": "a mask that is not known: leave it out where it hides nothing, pass"
    " is_causal=True where it is causal",
}


def find(model: Model) -> Iterator[Advice]:
    """One for each line and for what its masks say, where the flash kernel would serve."""
    flow = model.flow
    masks = {mask.node: mask for mask in flow.annotated.graph.masks}
    masked = {
        i: masks.get(
            flow.nodes[i].name, Mask(flow.nodes[i].name, "unknown", "it was not looked at")
        )
        for i in model.launches
        if keeps_off(model, i)
    }
    groups = by(masked, lambda i: (flow.nodes[i].source, masked[i].says, masked[i].why))
    for (_, says, why), numbers in groups.items():
        first = model.call(numbers[0])
        mask = mask_of(first.node)
        assert mask is not None
        yield Advice(
            "masked-attention",
            f"{counted(numbers, 'attention')} ({first.node.name}) with {_SAID[says]};"
            " attn_mask keeps them off the flash kernel",
            saved(model, numbers, says),
            model.sources(numbers),
            (f"the mask is {layout(first.tensors[mask])}: {why}",),
            mark("masked-attention", says, layout(first.operand(0))),
        )


def keeps_off(model: Model, number: int) -> bool:
    """Whether a launch is an attention that the flash kernel would serve without its mask."""
    call = model.call(number)
    if mask_of(call.node) is None:
        return False
    query, value = call.operand(0), call.operand(2)
    widest = model.rulebook.advice_kind("masked-attention").number("width").value
    return (
        query.dtype in _FLASH
        and len(query.shape) == len(("batch", "heads", "length", "width"))
        and query.shape[-2] > 1
        and query.shape[-1] == value.shape[-1] <= widest
    )


def saved(model: Model, numbers: list[int], says: str) -> float | None:
    """Part of the attention's predicted time that the flash kernel saves, as measured; None where
    it is unknown."""
    if says not in ("nothing", "causal"):
        return None
    kind = model.rulebook.advice_kind("masked-attention")
    faster = kind.number("causal" if says == "causal" else "unmasked").value
    return model.time_us(numbers) * (1 - 1 / faster) + model.time_us(making(model, numbers))


def making(model: Model, numbers: list[int]) -> list[int]:
    """The launches that only make the masks of these attentions."""
    masks = [ref for i in numbers if (ref := mask_of(model.flow.nodes[i]))]
    return model.flow.only_for(numbers, masks)
