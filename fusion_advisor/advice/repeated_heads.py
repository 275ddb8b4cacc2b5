"""Keys and values that are copied for the heads that share them."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, layout, mark
from fusion_advisor.advice.copies import copies, sharing_heads
from fusion_advisor.ir.graph import Ref


def find(model: Model) -> Iterator[Advice]:
    """One for each line that copies them."""
    flow = model.flow
    copied = {n: ref for n, ref in copies(model) if sharing_heads(model, n, ref) > 1}
    for numbers in by(copied, lambda i: flow.nodes[i].source).values():
        first = numbers[0]
        before = flow.annotated.tensors[copied[first]]
        times = before.shape[2]
        more = sum(flow.nodes[i].out.bytes for i in numbers) * (times - 1) // times
        read_us = more / flow.annotated.device.bandwidth * 1e6
        readers = {j for i in numbers for j in flow.uses(Ref(flow.nodes[i].name))}
        computes = any(not model.cost(j).memory_bound for j in readers)
        saved = model.time_us(numbers) + (0.0 if computes else read_us)
        yield Advice(
            "repeated-heads",
            f"{counted(numbers, 'copy')} ({flow.nodes[first].name},"
            f" {model.bytes(numbers) / 1e6:.1f} MB in all) of keys or values for {times} heads"
            " each: pass the shared ones to scaled_dot_product_attention with enable_gqa=True",
            saved,
            model.sources(numbers),
            (
                f"{flow.nodes[first].op} of {layout(before)}, each element {times} times",
                f"attention alone reads it; it reads {more / 1e6:.1f} MB more"
                + (", and is compute-bound" if computes else ""),
            ),
            mark("repeated-heads", layout(before)),
        )
