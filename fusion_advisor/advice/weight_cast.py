"""Parameters that are converted at every call."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, mark
from fusion_advisor.advice.copies import copies


def find(model: Model) -> Iterator[Advice]:
    """One for each pair of dtypes."""
    flow = model.flow
    casts = {
        number: flow.annotated.tensors[ref].dtype
        for number, ref in copies(model)
        if model.origin(ref).kind == "parameter"
        and flow.annotated.tensors[ref].itemsize > flow.nodes[number].out.itemsize
    }
    pairs = by(casts, lambda i: (casts[i], flow.nodes[i].out.dtype))
    for (before, after), numbers in pairs.items():
        yield Advice(
            "weight-cast",
            f"{counted(numbers, 'conversion')} of parameters from {before} to {after} at every call"
            f" ({model.bytes(numbers) / 1e6:.1f} MB): hold them in {after}",
            model.time_us(numbers),
            model.sources(numbers),
            (f"the first is {flow.nodes[numbers[0]].name}, of"
             f" {model.origin(flow.operands[numbers[0]][-1]).name}",),
            mark("weight-cast", before, after),
        )  # fmt: skip
