"""Differences between the captured graph and what eager runs."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_advisor.advice.base import Advice, Model


def find(model: Model) -> Iterator[Advice]:
    """One for each difference that the capture noticed."""
    for line in model.flow.annotated.graph.differs_from_eager:
        message = f"what was analysed is not all eager runs: {line}"
        yield Advice("differs-from-eager", message, None, ())
