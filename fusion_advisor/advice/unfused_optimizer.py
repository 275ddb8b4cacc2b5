"""Optimizers that read and write their state several times a step."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, mark
from fusion_advisor.ir.graph import Tensor

_FUSED = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}
"""Optimizers of torch that have `fused=True`."""


def find(model: Model) -> Iterator[Advice]:
    """One for an optimizer that torch has as one kernel, and that runs as several."""
    nodes = model.flow.nodes
    numbers = [i for i in model.launches if nodes[i].phase == "optimizer"]
    name = _FUSED.get(nodes[numbers[0]].fx) if numbers else None
    if name is None or len(numbers) < 2:
        return
    moved = _least_bytes(model, numbers)
    fused_us = 1e6 * moved / model.flow.annotated.device.bandwidth
    now, before = model.time_us(numbers), model.bytes(numbers)
    if now > fused_us:
        yield Advice(
            "unfused-optimizer",
            f"{name} takes {len(numbers)} passes over the parameters"
            f" ({before / 1e9:.3g} GB): torch.optim.{name}(..., fused=True) takes one"
            f" ({moved / 1e9:.3g} GB)",
            now - fused_us,
            (),
            (f"{now:.0f} us as it is, {fused_us:.0f} us for one read and one write of each",),
            mark("unfused-optimizer", name),
        )


def _least_bytes(model: Model, numbers: list[int]) -> int:
    """HBM bytes when each tensor that was there before is read once, and written once where the
    optimizer writes it."""
    tensors = model.flow.annotated.tensors
    inside = {model.flow.nodes[i].name for i in numbers}
    read: dict[int, Tensor] = {}
    written: set[int] = set()
    for i in numbers:
        node = model.flow.nodes[i]
        written.update(node.mutates)
        for ref in node.refs():
            if ref.node not in inside and ref in tensors:
                read.setdefault(tensors[ref].storage, tensors[ref])
    return sum(t.bytes * (2 if storage in written else 1) for storage, t in read.items())
