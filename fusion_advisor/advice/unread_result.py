"""Results that nothing reads."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model, counted, mark

CODE = "unread-result"


def find(model: Model) -> Iterator[Advice]:
    """One for all launches of pointwise work, copies and reductions whose results nothing reads."""
    numbers = [*model.flow.needless]
    if not numbers:
        return
    nodes = model.flow.nodes
    first, last = nodes[numbers[0]], nodes[numbers[-1]]
    yield Advice(
        CODE,
        f"nothing reads what {counted(numbers, 'operator')}"
        f" {'makes' if len(numbers) == 1 else 'make'} ({model.bytes(numbers) / 1e6:.1f} MB):"
        " eager runs them, torch.compile does not; take the lines out",
        model.time_us(numbers),
        model.sources(numbers),
        (f"{first.name} is never read" if first is last else f"{first.name} to {last.name}",),
        mark(CODE, first.op),
    )
