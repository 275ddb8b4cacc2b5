"""Triangles that a model keeps, as GPT-2 keeps its causal mask: tensors of a module that are read
once, as the graph is rewritten, and that have one number at and before each place and one behind.
"""
# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fusion_advisor.dynamo.rewrites.base import Asked
from fusion_advisor.dynamo.rewrites.conditions import Unchanged
from fusion_advisor.dynamo.rewrites.elements import Composed, FixedValue, Holds, Index, Term

_MOST_ELEMENTS = 1 << 26
"""Largest table that is read: 8192 places by as many."""


class Tables(Mapping[str, Callable[[Index], Term]]):
    """Elements of the triangles among the inputs of a graph, by the names that a trace gives to the
    inputs. `read` has the condition of each that was used, that it is as it was."""

    def __init__(self, asked: Asked, names: Sequence[str]) -> None:
        self.read: dict[str, Unchanged] = {}
        self._found: dict[str, Callable[[Index], Term]] = {}
        placeholders = (node for node in asked.module.graph.nodes if node.op == "placeholder")
        for number, (name, placeholder, value) in enumerate(
            zip(names, placeholders, asked.inputs, strict=True)
        ):
            if _kept_by_a_module(placeholder) and (numbers := _triangle(value)) is not None:
                same = Unchanged(number, weakref.ref(value), value._version)
                self._found[name] = partial(self._at, name, same, *map(FixedValue, numbers))

    def _at(
        self, name: str, same: Unchanged, seen: FixedValue, later: FixedValue, index: Index
    ) -> Term:
        self.read[name] = same
        before = Holds(sympy.expand(index[-2] - index[-1]))
        return Composed(torch.ops.aten.where.self, (before, seen, later), {})

    def __getitem__(self, name: str) -> Callable[[Index], Term]:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _triangle(value: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The numbers of a triangle, at and before each place and behind; None for any other tensor,
    and for one that cannot be read."""
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, FakeTensor)
        or value.is_inference()
        or value.dim() < len(("query", "key"))
        or not 1 < value.numel() <= _MOST_ELEMENTS
        or any(size != 1 for size in value.shape[:-2])
    ):
        return None
    table = value.detach().reshape(value.shape[-2:]).cpu()
    lower = torch.ones(table.shape, dtype=torch.bool).tril()
    seen, later = table[lower].unique(), table[~lower].unique()
    return (seen[0], later[0]) if seen.numel() == later.numel() == 1 else None


def _kept_by_a_module(placeholder: torch.fx.Node) -> bool:
    """Whether an input is a parameter, a buffer or an attribute of a module."""
    source: Any = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return False
    kind = source.guard_source  # a method in older releases
    asked = cast(Any, kind() if callable(kind) else kind)
    kinds: tuple[Callable[[], bool], ...] = (
        asked.is_unspecialized_nn_module, asked.is_unspecialized_builtin_nn_module,
        asked.is_specialized_nn_module,
    )  # fmt: skip
    return any(each() for each in kinds)
