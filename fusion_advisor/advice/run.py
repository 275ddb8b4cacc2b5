"""Stage: findings that are not a fusion."""

from __future__ import annotations

from collections.abc import Iterable

from fusion_advisor.advice import KINDS, Advice, Model
from fusion_advisor.advice.base import QueueStep
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.faults import Faults
from fusion_advisor.rulebook.schema import Rulebook


def advise(
    flow: Dataflow,
    grouped: Iterable[int],
    training: bool,
    rulebook: Rulebook,
    faults: Faults | None = None,
    queue: QueueStep | None = None,
) -> tuple[Advice, ...]:
    """All findings, the most time first. `grouped` are the launches that a kernel replaces. Given
    `faults`, a kind of advice that fails is left out and noted there; `queue` is a step as it was
    measured."""
    model = Model(flow, frozenset(grouped), training, rulebook, queue)
    found: list[Advice] = []
    for find in KINDS.values():
        try:
            found += find(model)
        except Exception as error:
            if faults is None:
                raise
            faults.note(error)
    return tuple(sorted(found, key=lambda advice: -(advice.saved_us or 0.0)))
