"""Stage: findings that are not a fusion."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion_advisor.advice import KINDS, Advice, Model
from fusion_advisor.advice.base import QueueStep
from fusion_advisor.advice.rewritten import RewriteFinding, rewritten
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


def rewritings(
    flow: Dataflow, advice: Sequence[Advice], training: bool, rulebook: Rulebook, faults: Faults
) -> tuple[RewriteFinding, ...]:
    """Rewrites of a graph as findings, the most time first, each with the advice that says the
    same. None where looking at one fails, which is noted in `faults`."""
    model = Model(flow, frozenset(), training, rulebook)
    try:
        found = [*rewritten(model, advice)]
    except Exception as error:  # noqa: BLE001 a fault of ours, which a strict run raises
        faults.note(error)
        return ()
    return tuple(sorted(found, key=lambda each: -(each.saved_us or 0.0)))
