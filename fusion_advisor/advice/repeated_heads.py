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
        more = _read_more(model, numbers, times)
        computes = _computes(model, numbers)
        yield Advice(
            "repeated-heads",
            f"{counted(numbers, 'copy')} ({flow.nodes[first].name},"
            f" {model.bytes(numbers) / 1e6:.1f} MB in all) of keys or values for {times} heads"
            " each: pass the shared ones to scaled_dot_product_attention with enable_gqa=True",
            saved(model, numbers, times),
            model.sources(numbers),
            (
                f"{flow.nodes[first].op} of {layout(before)}, each element {times} times",
                f"attention alone reads it; it reads {more / 1e6:.1f} MB more"
                + (", and is compute-bound" if computes else ""),
            ),
            mark("repeated-heads", layout(before)),
        )


def saved(model: Model, numbers: list[int], times: int) -> float:
    """Time of some copies, each of so many heads, and of reading them, us."""
    read_us = _read_more(model, numbers, times) / model.flow.annotated.device.bandwidth * 1e6
    return model.time_us(numbers) + (0.0 if _computes(model, numbers) else read_us)


def _read_more(model: Model, numbers: list[int], times: int) -> int:
    """Bytes that attention reads of copies beyond what is copied."""
    return sum(model.flow.nodes[i].out.bytes for i in numbers) * (times - 1) // times


def _computes(model: Model, numbers: list[int]) -> bool:
    """Whether a reader of some copies is compute-bound."""
    flow = model.flow
    readers = {j for i in numbers for j in flow.uses(Ref(flow.nodes[i].name))}
    return any(not model.cost(j).memory_bound for j in readers)
