"""Logits that are written to memory for a loss alone."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, layout, mark
from fusion_advisor.ir.graph import Ref

_LOG_SOFTMAX = "aten._log_softmax.default"


def find(model: Model) -> Iterator[Advice]:
    """One for each loss over the result of a product, where the rest of the product's launches
    takes more than the stated share of the step."""
    flow = model.flow
    share = model.rulebook.advice_kind("materialised-logits").number("share").value
    whole_us = model.time_us(model.launches)
    for number in model.launches:
        node = flow.nodes[number]
        if node.op != _LOG_SOFTMAX or node.phase != "loss":
            continue
        product = _product(model, number)
        if product is None:
            continue
        size = flow.nodes[product].out.numel
        others = [i for i in model.launches if i != product and _works_on(model, i, size)]
        us = 1e6 * model.bytes(others) / flow.annotated.device.bandwidth
        if us < share * whole_us:
            continue
        held = sum(
            tensor.bytes
            for i in (product, *others)
            if flow.nodes[i].phase in ("forward", "loss")
            for tensor in flow.nodes[i].outputs
            if tensor is not None and tensor.numel == size
        )
        yield Advice(
            "materialised-logits",
            f"{len(others)} launches on logits of {layout(flow.nodes[product].out)} beside their"
            f" product, {held / 1e9:.3g} GB of memory before backward: compute loss and gradients"
            " in chunks of rows (torch.nn.functional.linear_cross_entropy in torch 2.13, or"
            " Liger's fused linear cross-entropy)",
            us,
            model.sources((product, number)),
            (
                f"{us:.0f} us of {whole_us:.0f} us a step; products in chunks take longer, by as"
                " much as a measurement tells",
            ),
            mark("materialised-logits", node.op),
        )


def _product(model: Model, number: int) -> int | None:
    """Product whose result reaches a launch through launches of one operand; None where another
    launch comes first."""
    flow = model.flow
    while True:
        if not flow.operands[number]:
            return None
        number = flow.position[flow.base(flow.operands[number][0]).node]
        cost = flow.annotated.costs[flow.nodes[number].name]
        if cost.pattern == "matmul":
            return number
        if cost.pattern != "pointwise" or len(flow.operands[number]) != 1:
            return None


def _works_on(model: Model, number: int, size: int) -> bool:
    """Whether a memory-bound launch reads or writes a tensor of so many elements."""
    flow = model.flow
    node, tensors = flow.nodes[number], flow.annotated.tensors
    made = [Ref(node.name, n) for n in range(len(node.outputs))]
    seen = (tensors[ref] for ref in (*node.refs(), *made) if ref in tensors)
    return model.cost(number).memory_bound and any(each.numel == size for each in seen)
