"""Contract of the rewrites of Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class Taken:
    """A rewrite that was made at a node: its name, and why it holds. The graph means the same as
    before where each input whose number is in `ones` has ones alone."""

    name: str
    node: torch.fx.Node
    why: str
    ones: tuple[int, ...] = ()


@dataclass(frozen=True)
class Asked:
    """Graph to rewrite, with its inputs as Dynamo gives them. `read`: a rewrite may ask what an
    input has."""

    module: torch.fx.GraphModule
    inputs: Sequence[Any]
    rulebook: Rulebook
    read: bool = True


Rewrite = Callable[[Asked], Iterator[Taken]]
