"""Checkpoints of a model (`torch.utils.checkpoint`): the part of the graph that each one holds.

A trace goes through a checkpoint as through any call, and leaves its number in the nodes of the
part. When the graph is run again under autograd, the part runs within a checkpoint of torch's own:
what it keeps, and what backward computes again, is then what eager keeps and computes again.
"""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportPrivateUsage=false, reportMissingTypeStubs=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch.fx import traceback as fx_traceback

from fusion_advisor.frontend.trained import launched_as

_NUMBER = "fusion_advisor_checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """One call of a checkpoint: whether backward stops computing again as soon as it has all that
    it reads, and the maker of the two contexts that say what is kept all the same."""

    stops_early: bool
    contexts: Callable[[], Any] | None = None

    def run(self, part: Callable[..., Any], operands: Sequence[Any]) -> Any:
        """Results of a part of a graph that keeps its operands for backward, and what the contexts
        say. torch takes a run that is traced for a compiler's, which keeps all."""
        module: Any = torch.utils.checkpoint
        more = {"context_fn": self._contexts} if self.contexts else {}
        with (
            module.set_checkpoint_early_stop(self.stops_early),
            mock.patch.object(module, "_is_compiling", return_value=False),
        ):
            return module.checkpoint(
                part, *operands, use_reentrant=False, preserve_rng_state=False, **more
            )

    def _contexts(self) -> Any:
        """The two contexts. A policy is asked for what CUDA launches."""
        assert self.contexts is not None
        kept, made_again = self.contexts()
        policy = getattr(kept, "policy_fn", None)
        if policy is not None:

            def as_launched(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
                return policy(context, launched_as(op, *args), *args, **kwargs)

            kept.policy_fn = as_launched
        return kept, made_again


@contextmanager
def noted(found: list[Checkpoint]) -> Generator[None, None, None]:
    """While active, each call of a checkpoint is added to `found`, and the nodes that are traced in
    it have its position there. A checkpoint within another belongs to the outer one: that one keeps
    no tensor of the inner one."""
    module = torch.utils.checkpoint
    plain = module._checkpoint_without_reentrant_generator
    signature = inspect.signature(plain)
    inside: list[Checkpoint] = []

    @contextmanager
    def number(checkpoint: Checkpoint) -> Generator[None, None, None]:
        if inside:
            yield
            return
        inside.append(checkpoint)
        found.append(checkpoint)
        with ExitStack() as stack:
            stack.callback(inside.pop)
            stack.enter_context(fx_traceback.preserve_node_meta())
            stack.enter_context(fx_traceback.annotate({_NUMBER: len(found) - 1}))
            yield

    def without_reentrant(*args: Any, **kwargs: Any) -> Generator[None, None, None]:
        given = signature.bind(*args, **kwargs).arguments
        contexts = given.get("context_fn")
        contexts = None if contexts is module.noop_context_fn else contexts
        with number(Checkpoint(given.get("early_stop", True), contexts)):
            yield

    def apply(function: Any, _: Any, *args: Any) -> Any:
        with number(Checkpoint(stops_early=False)):
            return function(*args)

    with (
        mock.patch.object(module, "_checkpoint_without_reentrant_generator", without_reentrant),
        mock.patch.object(module.CheckpointFunction, "apply", apply),
    ):
        yield


def parts(graph: torch.fx.Graph) -> list[tuple[int | None, list[torch.fx.Node]]]:
    """Nodes in order, those from the first to the last of one checkpoint together with its number,
    every other one alone with None."""
    nodes = list(graph.nodes)
    last = {n: at for at, node in enumerate(nodes) if (n := number_of(node)) is not None}
    found: list[tuple[int | None, list[torch.fx.Node]]] = []
    at = 0
    while at < len(nodes):
        number = number_of(nodes[at])
        end = at if number is None else last[number]
        found.append((number, nodes[at : end + 1]))
        at = end + 1
    return found


def number_of(node: torch.fx.Node) -> int | None:
    """Number of the checkpoint that a node was traced in; None outside of all."""
    return node.meta.get("custom", {}).get(_NUMBER)
