"""Calls of one token that `generate()` of transformers compiles by itself, with kernels in them."""
# A model and its cache are whatever the user has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

GENERATES_BY = "get_compiled_call"
"""Name of the method by which `generate()` of transformers compiles the call of one token."""
_A_CACHE = "is_compileable"
"""Name of an attribute that caches of transformers have."""


@dataclass
class GenerateCall:
    """Method of one model by which `generate()` compiles, with calls that run kernels. A copy of
    the model has the method of its class again."""

    model: Any
    backend: partial[Callable[..., Any]]
    known: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    seen: set[int] = field(default_factory=set[int])

    def __call__(self, config: Any) -> Callable[..., Any]:
        """Call for a configuration of transformers; None is the model's default. One that names
        another compiler than Inductor has it."""
        config = config or self.model._default_compile_config()
        if config.backend != "inductor":
            return getattr(type(self.model), GENERATES_BY)(self.model, config)
        if str(config) not in self.known:
            options = {**self.backend.keywords["options"], **(config.options or {})}
            compiled = torch.compile(
                self.model._call_impl, fullgraph=config.fullgraph, dynamic=config.dynamic,
                backend=partial(self.backend, mode=config.mode, options=options),
            )  # fmt: skip
            self.known[str(config)] = partial(self._call, compiled)
        return self.known[str(config)]

    def _call(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call that finds the cache where it lies. A cache that the compiled call of the prompt has
        made does not say so by itself, and CUDA graphs then take no graph that writes into it."""
        for cache in (each for each in kwargs.values() if hasattr(each, _A_CACHE)):
            if id(cache) not in self.seen:
                self.seen.add(id(cache))
                weakref.finalize(cache, self.seen.discard, id(cache))
                for tensor in _kept_in(cache):
                    torch._dynamo.mark_static_address(tensor)
        return compiled(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.model, GENERATES_BY)


def _kept_in(cache: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache of transformers, and of the caches in it."""
    for layer in getattr(cache, "layers", ()):
        leaves = pytree.tree_leaves(vars(layer))
        yield from (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
    for part in vars(cache).values():
        if hasattr(part, _A_CACHE):
            yield from _kept_in(part)
