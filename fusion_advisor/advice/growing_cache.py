"""Caches that are copied whole to append to them."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, by, counted, layout, mark
from fusion_advisor.ir.graph import Ref

_CAT = "aten.cat.default"


def find(model: Model) -> Iterator[Advice]:
    """One for each line that appends."""
    flow = model.flow
    least = model.rulebook.advice_kind("growing-cache").number("kept").value
    kept = {i: share for i in model.left if (share := _kept(model, i)) > least}
    for numbers in by(kept, lambda i: flow.nodes[i].source).values():
        first = numbers[0]
        yield Advice(
            "growing-cache",
            f"{counted(numbers, 'concatenation')} ({flow.nodes[first].name},"
            f" {model.bytes(numbers) / 1e6:.1f} MB in all) of a cache, to append to it: write the"
            " new part in place into one that is allocated once",
            sum(model.cost(i).time_us * kept[i] for i in numbers),
            model.sources(numbers),
            (f"{kept[first]:.1%} of {layout(flow.nodes[first].out)} was an input, and the result is"
             " returned",),
            mark("growing-cache", len(flow.nodes[first].out.shape), flow.nodes[first].out.dtype),
        )  # fmt: skip


def _kept(model: Model, number: int) -> float:
    """Share of a concatenation that was an input of the model, if the input is a cache: the
    appended part is computed from something else, and the whole is both used and returned."""
    flow = model.flow
    node = flow.nodes[number]
    uses = set(flow.uses(Ref(node.name))) if node.op == _CAT else set[int]()
    parts = flow.operands[number]
    given = [ref for ref in parts if model.origin(ref).kind == "input"]
    if -1 not in uses or len(uses) == 1 or len(given) != 1:
        return 0.0
    cache = flow.position[model.origin(given[0]).name]
    made = [flow.position[model.origin(ref).name] for ref in parts if ref not in given]
    if not all(flow.nodes[i].kind == "call" and not flow.above[i] >> cache & 1 for i in made):
        return 0.0
    return flow.annotated.tensors[given[0]].numel / max(node.out.numel, 1)
