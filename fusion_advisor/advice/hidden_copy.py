"""Launches that move a tensor to another layout and compute nothing."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, layout, mark
from fusion_advisor.advice.copies import copies, needed, repeats, same_dtype, sharing_heads
from fusion_advisor.ir.graph import Ref


def find(model: Model) -> Iterator[Advice]:
    """One for each line that copies."""
    flow = model.flow
    copied = {
        number: ref
        for number, ref in copies(model)
        if same_dtype(model, number, ref)
        and not needed(model, number, ref)
        and sharing_heads(model, number, ref) == 1
    }
    for numbers in by(copied, lambda i: flow.nodes[i].source).values():
        first = numbers[0]
        before, after = flow.annotated.tensors[copied[first]], flow.nodes[first].out
        times = repeats(before)
        same = layout(before) == layout(after)
        what = (
            "of the same layout: use what it copies"
            if same
            else f"of what was expanded, each element {times} times: let the next op broadcast"
            if times > 1
            else "for another layout alone: keep the layout that the next op takes,"
            " or let it read through the view"
        )
        yield Advice(
            "hidden-copy",
            f"{counted(numbers, 'copy')} ({flow.nodes[first].name},"
            f" {model.bytes(numbers) / 1e6:.1f} MB in all) {what}",
            model.time_us(numbers),
            model.sources(numbers),
            (*_evidence(model, first, copied[first]),),
            mark("hidden-copy", flow.nodes[first].op, layout(before), layout(after)),
        )


def _evidence(model: Model, number: int, ref: Ref) -> Iterator[str]:
    flow = model.flow
    before, after = flow.annotated.tensors[ref], flow.nodes[number].out
    yield f"{flow.nodes[number].op} of {layout(before)} makes {layout(after)}"
    origin = model.origin(ref)
    kept = origin.kind in ("parameter", "buffer")
    yield f"copies what {origin.name} {'holds' if origin.kind != 'call' else 'made'}" + (
        f", a {origin.kind}: it can be stored so once" if kept else f" ({origin.op})"
    )
    readers = dict.fromkeys(flow.uses(Ref(flow.nodes[number].name)))
    names = [flow.nodes[i].op if i >= 0 else "the caller" for i in readers]
    yield f"read by {', '.join(dict.fromkeys(names)) or 'nobody'}"
