"""Checkpoints that make backward compute more again than their memory is worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusion_advisor.advice.base import Advice, Model, counted, mark
from fusion_advisor.cost.recomputed import Checkpointed, checkpoints

CODE = "checkpoint"


def find(model: Model) -> Iterator[Advice]:
    """One for checkpoints that free no memory, and one for the others, where matrix products and
    attention that backward computes again take more than the stated share of the step."""
    found = checkpoints(model.flow.annotated)
    idle = [each for each in found if each.freed_bytes <= each.kept_bytes]
    if idle:
        yield _frees_nothing(model, idle)
    coarse = [each for each in found if each.freed_bytes > each.kept_bytes]
    again = [model.flow.position[node.name] for each in coarse for node in each.again]
    products = [i for i in again if model.multiplies(i)]
    least = model.rulebook.advice_kind(CODE).number("share").value
    if model.time_us(products) > least * model.time_us(model.launches):
        yield _too_coarse(model, coarse, products)


def _frees_nothing(model: Model, found: Sequence[Checkpointed]) -> Advice:
    freed, kept = sum(each.freed_bytes for each in found), sum(each.kept_bytes for each in found)
    launches, us = _again(found)
    first = [model.flow.position[each.first.name] for each in found]
    return Advice(
        CODE,
        f"{counted(first, 'checkpoint')} {_do(first, 'free')} no memory: {kept / 1e6:.1f} MB are"
        f" kept for what backward computes again, {freed / 1e6:.1f} MB would be kept without: call"
        " the part without a checkpoint, or make it larger",
        us,
        model.sources(first),
        (f"{launches} launches of backward again: {us:.0f} us",),
        mark(CODE, "frees nothing"),
    )


def _too_coarse(model: Model, found: Sequence[Checkpointed], products: Sequence[int]) -> Advice:
    flow = model.flow
    first = [flow.position[each.first.name] for each in found]
    launches, again_us = _again(found)
    spared = sum(each.freed_bytes - each.kept_bytes for each in found)
    more = sum(flow.nodes[i].out.bytes for i in products)
    us = model.time_us(products)
    return Advice(
        CODE,
        f"{counted(first, 'checkpoint')} {_do(first, 'spare')} {spared / 1e9:.3g} GB for"
        f" {again_us / 1e3:.3g} ms a step, of which {us / 1e3:.3g} ms are matrix"
        f" products and attention: keep their results ({more / 1e9:.3g} GB), make again the rest"
        " (context_fn=functools.partial(create_selective_checkpoint_contexts, [operators]))",
        us,
        model.sources(first),
        (
            f"{launches} launches of backward again, {len(products)} of them matrix products or"
            " attention",
        ),
        mark(CODE, "too coarse"),
    )


def _again(found: Sequence[Checkpointed]) -> tuple[int, float]:
    """Launches of backward that compute again, and their time in microseconds."""
    return sum(len(each.again) for each in found), sum(each.again_us for each in found)


def _do(subjects: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(subjects) == 1 else verb
