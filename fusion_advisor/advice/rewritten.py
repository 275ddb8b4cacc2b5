"""Rewrites of a captured model as findings: the launches that each replaces, and what it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fusion_advisor.advice import masked_attention, repeated_heads
from fusion_advisor.advice.base import Advice, Model
from fusion_advisor.advice.copies import repeats
from fusion_advisor.ir.graph import Rewrite, Source
from fusion_advisor.ops.attention import ATTENTION, mask_of


@dataclass(frozen=True)
class RewriteFinding:
    """A line that means the same when it is written otherwise, in all places that it runs: `nodes`
    by position, `saved_us` None where nothing predicts it, `line` the Python to write, "" where
    there is none; `advice` are those that say the same of its lines."""

    code: str
    message: str
    nodes: tuple[int, ...]
    saved_us: float | None
    proof: str
    sources: tuple[Source, ...]
    line: str
    advice: tuple[Advice, ...]


Replaced = tuple[list[int], float | None]
"""Launches that a rewrite replaces, and the time that it saves, us."""


def rewritten(model: Model, advice: Sequence[Advice]) -> Iterator[RewriteFinding]:
    """One for each line that rewrites of the model's graph take."""
    lines: dict[object, list[Rewrite]] = {}
    for each in model.flow.annotated.graph.rewrites:
        lines.setdefault((each.name, each.source, each.why, each.line), []).append(each)
    for first, *others in lines.values():
        find, said_by = _KINDS[first.name]
        nodes, saved_us = find(model, [*_at(model, (first, *others))], first)
        own = (first.source,) if first.source else ()
        sources = tuple(dict.fromkeys((*own, *model.sources(nodes))))
        same = [a for a in advice if a.code == said_by and {*a.sources} & {*sources}]
        if saved_us is None and same:
            saved_us = sum(a.saved_us or 0.0 for a in same)
        kind = model.rulebook.rewrites[first.name]
        proof = f"{first.why}; proven {kind.proof}"
        yield RewriteFinding(
            first.name, kind.fix, tuple(sorted(nodes)), saved_us, proof, sources, first.line,
            tuple(same),
        )  # fmt: skip


def _at(model: Model, places: Iterable[Rewrite]) -> Iterator[int]:
    """Launches of forward at the line and in the modules of rewrites."""
    for number in model.launches:
        node = model.flow.nodes[number]
        if node.phase != "backward" and any(
            node.source == each.source and f".{node.module}".endswith(f".{each.module}".rstrip("."))
            for each in places
        ):
            yield number


def _mask(model: Model, numbers: list[int], rewrite: Rewrite) -> Replaced:
    masked = [i for i in numbers if mask_of(model.flow.nodes[i])]
    making = masked_attention.making(model, masked)
    flash = [i for i in masked if masked_attention.keeps_off(model, i)]
    says = "causal" if rewrite.causal else "nothing"
    saved = masked_attention.saved(model, flash, says) if flash else model.time_us(making)
    return [*masked, *making], saved


def _repetition(model: Model, numbers: list[int], rewrite: Rewrite) -> Replaced:
    del rewrite
    flow = model.flow
    times: dict[int, int] = {}
    for attention in numbers:
        if flow.nodes[attention].op == ATTENTION:
            for ref in flow.operands[attention][1:3]:
                copy = flow.position[flow.base(ref).node]
                if flow.launches(copy) and flow.operands[copy]:
                    times[copy] = repeats(flow.annotated.tensors[flow.operands[copy][-1]])
    copied = [i for i, count in times.items() if count > 1]
    saved = sum(repeated_heads.saved(model, [i], times[i]) for i in copied)
    return copied, saved


def _by_hand(model: Model, numbers: list[int], rewrite: Rewrite) -> Replaced:
    """Find two products and what is between them. Attention is counted by the arithmetic of both,
    at the share of the peak that products reach."""
    del rewrite
    flow, device = model.flow, model.flow.annotated.device
    found: list[int] = []
    for end in filter(model.multiplies, numbers):
        chain = model.flow.only_for([end], flow.operands[end][:1])
        if any("softmax" in flow.nodes[i].op for i in chain):
            found += [end, *chain]
    costs = [model.cost(i) for i in found if model.multiplies(i)]
    seconds = sum(cost.flops / device.peak_flops(cost.unit, cost.dtype) for cost in costs)
    attention_us = 1e6 * seconds / device.achieved.matmul_share.value
    return found, max(model.time_us(found) - attention_us, 0.0)


def _loss(model: Model, numbers: list[int], rewrite: Rewrite) -> Replaced:
    """Find a loss and its product. What a step gains is said by advice on the logits; a forward
    pass alone saves memory."""
    del rewrite
    refs = (ref for i in numbers for ref in model.flow.operands[i][:1])
    return [*numbers, *model.flow.only_for(numbers, refs)], None


_KINDS: dict[str, tuple[Callable[[Model, list[int], Rewrite], Replaced], str]] = {
    "attention-by-hand": (_by_hand, ""),
    "needless-mask": (_mask, "masked-attention"),
    "grouped-heads": (_repetition, "repeated-heads"),
    "linear-cross-entropy": (_loss, "materialised-logits"),
}
"""Rewrites by name: what each replaces, and the kind of advice that says the same."""
