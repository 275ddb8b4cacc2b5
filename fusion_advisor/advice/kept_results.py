"""Results that forward keeps for backward, which can make them again from what is kept anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fusion_advisor.advice.base import MOST_TOLD, Advice, Model, counted, mark

CODE = "kept-results"


def find(model: Model) -> Iterator[Advice]:
    """One for all results of pointwise work, and all masks that were drawn."""
    found = [
        (number, each.alternative)
        for number, each in model.saved
        if each.alternative and not model.widens(number)
    ]
    freed = sum(way.saved_bytes for _, way in found)
    least = model.rulebook.advice_kind(CODE).number("share").value
    if not found or freed < least * sum(each.bytes for _, each in model.saved):
        return
    longer = sum(way.extra_us for _, way in found)
    made: Counter[str] = Counter()
    for number, way in found:
        made[_named(model.flow.nodes[number].op)] += way.saved_bytes
    largest = sorted(found, key=lambda each: -each[1].saved_bytes)
    results = counted([number for number, _ in found], "result")
    most = made.most_common(MOST_TOLD)
    yield Advice(
        CODE,
        f"{freed / 1e9:.3g} GB of {results} kept for backward ({', '.join(op for op, _ in most)})"
        f" can be made again from what is kept anyway ({longer:.0f} us a step at most): by"
        " torch.compile, in an autograd.Function or under torch.utils.checkpoint",
        None,
        model.sources(number for number, _ in largest),
        tuple(f"{op}: {size / 1e6:.1f} MB" for op, size in most),
        mark(CODE, *sorted(made)),
    )


def _named(op: str) -> str:
    """Name of an operator without its namespace and overload."""
    return op.split(".")[1]
