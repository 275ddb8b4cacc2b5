"""Stage: findings that are not a fusion."""

from __future__ import annotations

from collections.abc import Iterable

from fusion_advisor.advice import KINDS, Advice, Model
from fusion_advisor.dataflow import Dataflow
from fusion_advisor.rulebook import Rulebook


def advise(
    flow: Dataflow, grouped: Iterable[int], training: bool, rulebook: Rulebook
) -> tuple[Advice, ...]:
    """All findings, the most time first. `grouped` are the launches that a kernel takes over."""
    model = Model(flow, frozenset(grouped), training, rulebook)
    found = [advice for find in KINDS.values() for advice in find(model)]
    return tuple(sorted(found, key=lambda advice: -(advice.saved_us or 0.0)))
