"""Rewrites of Dynamo's graph that are worth more than a kernel, before AOTAutograd traces it."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.dynamo.rewrites.attention_by_hand import attention_by_hand
from fusion_advisor.dynamo.rewrites.base import Asked, Reading, Rewrite, Taken
from fusion_advisor.dynamo.rewrites.conditions import Requirement
from fusion_advisor.dynamo.rewrites.grouped_heads import grouped_heads
from fusion_advisor.dynamo.rewrites.linear_cross_entropy import linear_cross_entropy
from fusion_advisor.dynamo.rewrites.needless_masks import needless_masks
from fusion_advisor.dynamo.rewrites.nodes import copied, take_out_dead
from fusion_advisor.rulebook.schema import Rulebook

REWRITES: tuple[Rewrite, ...] = (
    attention_by_hand, needless_masks, grouped_heads, linear_cross_entropy,
)  # fmt: skip
"""Rewrites in their order: each sees what those before have made."""


@dataclass(frozen=True)
class Rewritten:
    """Graph after the rewrites; `module` is the graph that was given where none was made."""

    module: torch.fx.GraphModule
    taken: tuple[Taken, ...] = ()

    @property
    def reads(self) -> bool:
        """Whether the host waits for an input to know whether the graph means the same."""
        return any(each.reads for each in self.conditions)

    @property
    def conditions(self) -> tuple[Requirement, ...]:
        """All that must hold for the graph to mean the same, what is read last."""
        every = dict.fromkeys(each for taken in self.taken for each in taken.conditions)
        return tuple(sorted(every, key=lambda each: each.reads))


def rewrite(
    module: torch.fx.GraphModule,
    inputs: Sequence[Any],
    rulebook: Rulebook,
    *,
    conditions: bool = True,
    read: Reading = "before",
    chunked_loss: bool = False,
) -> Rewritten:
    """Rewrite a graph as Dynamo hands it to a backend; the graph that is given stays. With
    `conditions` also where the meaning is the same for some inputs alone, by `read` also where
    the host waits to know that, with `chunked_loss` also losses in chunks, whose gain is memory in
    a training step."""
    changed = copied(module)
    unread = frozenset(node for node in changed.graph.nodes if not node.users)
    asked = Asked(changed, inputs, rulebook, conditions, read, chunked_loss, unread)
    taken = tuple(each for unit in REWRITES for each in unit(asked))
    if not taken:
        return Rewritten(module)
    take_out_dead(changed.graph, unread)
    changed.recompile()
    return Rewritten(changed, taken)
