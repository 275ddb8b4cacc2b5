"""Contract of the rewrites of Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fusion_advisor.dynamo.rewrites.conditions import Requirement
from fusion_advisor.ir.frames import source_of
from fusion_advisor.ir.graph import Source
from fusion_advisor.rulebook.schema import Rulebook

Reading = Literal["never", "before", "within"]
"""When an input is read to choose between two graphs: before either, or while the GPU has the part
to do that both begin with."""


@dataclass(frozen=True)
class Taken:
    """A rewrite that was made at a node: its name, and why it holds. The graph means the same as
    before where all conditions hold."""

    name: str
    node: torch.fx.Node
    why: str
    conditions: tuple[Requirement, ...] = ()

    @property
    def source(self) -> Source | None:
        """Line of the user that the node is from; None where it is not known."""
        return source_of(self.node.stack_trace) if self.node.stack_trace else None


@dataclass(frozen=True)
class Asked:
    """Graph to rewrite, with its inputs as Dynamo gives them. `conditions`: a rewrite may have
    some; `read`: when those are asked that the host waits for. `chunked_loss`: the last product and
    the loss of a training step may go in chunks of rows."""

    module: torch.fx.GraphModule
    inputs: Sequence[Any]
    rulebook: Rulebook
    conditions: bool
    read: Reading
    chunked_loss: bool
    unread: frozenset[torch.fx.Node]
    """Nodes that nothing reads in the graph as it was given: they do something, or are dead."""


Rewrite = Callable[[Asked], Iterator[Taken]]
