"""Operands that a called function makes, in names that are bound where it is called.

A method that computes a product and a part of a group, `s = self.scores(q, k)` before a softmax, is
opened: a kernel stands for its part, and the product, `q @ k.transpose(-2, -1)`, is written where
the method is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import dropwhile

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ops import REGISTRY
from fusion_advisor.sourcepatch.editing.sources import (
    OpenedExpression,
    SourcePlace,
    Sources,
    names_in,
    span_of,
)
from fusion_advisor.sourcepatch.editing.spelling import Names, SpellingAtPlace


@dataclass(frozen=True)
class OpenedOperand:
    """An operand, and the evaluations that make it."""

    at: OpenedExpression
    steps: frozenset[int]


def opened_operand(
    sources: Sources,
    flow: Dataflow,
    place: SourcePlace,
    line: int,
    names: Names,
    ref: Ref,
    gone: Set[int],
) -> OpenedOperand | None:
    """The outermost expression of a function, called from a place, that gives a tensor and none of
    the evaluations that are `gone`, as a line of the place spells it, where `names` are bound. None
    where there is none, or what it reads is computed in the function, too."""
    step = flow.nodes[flow.position[ref.node]].step
    positions = sources.standing[step] if step is not None else {}
    for at, standing in dropwhile(lambda each: each[0] != place, positions.items()):
        call = sources.trail.activations[at.activation]
        steps = sources.evaluated(at, standing.span, within=True)
        outside = at.activation == place.activation or at.turns or steps & gone
        if outside or sources.value_at(at, standing.span) != ref:
            continue
        node = sources.file(at.block.file).expressions.get(standing.span)
        spelling = _OperandSpelling(sources, flow, place, line, names)
        made = spelling.of(node, at.activation) if node is not None else None
        if made is None or not names_in(made):
            return None
        text = ast.unparse(made)
        return OpenedOperand(OpenedExpression(text, call.file, standing.span), steps)
    return None


def launches_nothing(sources: Sources, flow: Dataflow, steps: Iterable[int]) -> bool:
    """Whether some evaluations make views alone, or nothing."""
    made = (node for step in steps for node in sources.made.get(step, ()))
    return all(flow.is_view(flow.position[node.name]) for node in made)


def alters(sources: Sources, steps: frozenset[int]) -> bool:
    """Whether some evaluations draw random numbers or write in place: they may not be made twice,
    nor in another order."""
    made = (node for step in steps for node in sources.made.get(step, ()))
    return any(
        node.mutates or (op := REGISTRY.get(node.op)) is None or op.pattern == "random"
        for node in made
        if node.kind == "call"
    )


class _OperandSpelling(SpellingAtPlace):
    """Expressions with the calls that they make, which are made once. A name that a function binds
    is followed as far as nothing is launched for it."""

    def __init__(
        self, sources: Sources, flow: Dataflow, place: SourcePlace, line: int, names: Names
    ) -> None:
        super().__init__(sources, place, line, names)
        self._flow = flow

    def of(self, node: ast.expr, activation: int) -> ast.expr | None:
        """An expression of a call's function as the place spells it; None where it cannot."""
        if isinstance(node, ast.Call):
            return self._filled(node, activation)
        return super().of(node, activation)

    def _name(self, node: ast.Name, activation: int) -> ast.expr | None:
        word = self._word(node, activation) or ""
        if activation != self.place.activation and word[:1] == "#" and self._held(word) is None:
            return self._view(word, activation)
        return super()._name(node, activation)

    def _view(self, word: str, activation: int) -> ast.expr | None:
        """An expression of the same call that launches nothing, by the word of its value."""
        found = self.sources.made_by(word, activation)
        if found is None:
            return None
        place, node = found
        steps = self.sources.evaluated(place, span_of(node), within=True)
        plain = launches_nothing(self.sources, self._flow, steps)
        return self.of(node, activation) if plain else None
