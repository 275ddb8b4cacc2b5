"""Copies in a wider float that forward keeps for backward."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import MOST_TOLD, Advice, Model, by, counted, mark


def find(model: Model) -> Iterator[Advice]:
    """One for all copies of one dtype that could be made again in backward."""
    nodes = model.flow.nodes
    found = {
        number: each.alternative
        for number, each in model.saved
        if each.alternative and model.widens(number)
    }
    for dtype, numbers in by(found, lambda i: nodes[i].out.dtype).items():
        ways = [found[i] for i in numbers]
        freed = sum(way.saved_bytes for way in ways)
        longer = sum(way.extra_us for way in ways)
        largest = sorted(numbers, key=lambda i: -found[i].saved_bytes)
        yield Advice(
            "float-copies",
            f"{counted(numbers, f'{dtype} copy')} of narrower tensors kept for backward"
            f" ({freed / 1e9:.3g} GB of memory): cast again there, in an autograd.Function or under"
            f" torch.utils.checkpoint ({longer:.0f} us a step at most)",
            None,
            model.sources(largest),
            tuple(
                f"{nodes[i].name}: {found[i].saved_bytes / 1e6:.1f} MB" for i in largest[:MOST_TOLD]
            ),
            mark("float-copies", dtype),
        )
