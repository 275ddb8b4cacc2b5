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
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor

from fusion_advisor.dynamo.rewrites.base import Asked
from fusion_advisor.dynamo.rewrites.conditions import Unchanged
from fusion_advisor.dynamo.rewrites.elements import Composed, FixedValue, Holds, Index, Term
from fusion_advisor.dynamo.rewrites.nodes import kept_by_a_module


class Tables(Mapping[str, Callable[[Index], Term]]):
    """Elements of the triangles among the inputs of a graph, by the names that a trace gives to the
    inputs. A tensor is read as it is asked for: most of what a module keeps are weights, which no
    mask reads. `read` has the condition of each that was used, that it is as it was."""

    def __init__(self, asked: Asked, names: Sequence[str]) -> None:
        self.read: dict[str, Unchanged] = {}
        self._found: dict[str, Callable[[Index], Term] | None] = {}
        self._most = asked.rulebook.capture.mask_elements.count
        placeholders = (node for node in asked.module.graph.nodes if node.op == "placeholder")
        self._kept = {
            name: (number, value)
            for number, (name, placeholder, value) in enumerate(
                zip(names, placeholders, asked.inputs, strict=True)
            )
            if kept_by_a_module(placeholder)
        }

    def _at(
        self, name: str, same: Unchanged, seen: FixedValue, later: FixedValue, index: Index
    ) -> Term:
        self.read[name] = same
        before = Holds(sympy.expand(index[-2] - index[-1]))
        return Composed(torch.ops.aten.where.self, (before, seen, later), {})

    def __getitem__(self, name: str) -> Callable[[Index], Term]:
        if name not in self._found:
            self._found[name] = self._element(*self._kept[name], name)
        if (found := self._found[name]) is None:
            raise KeyError(name)
        return found

    def _element(self, number: int, value: Any, name: str) -> Callable[[Index], Term] | None:
        """Element of a tensor as a function of its index; None where it is no triangle."""
        numbers = _triangle(value, self._most)
        if numbers is None:
            return None
        same = Unchanged(number, weakref.ref(value), value._version)
        return partial(self._at, name, same, *map(FixedValue, numbers))

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._kept if name in self)

    def __len__(self) -> int:
        return len(list(iter(self)))


def _triangle(value: Any, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Numbers of a triangle, at and before each place and behind; None for any other tensor, for
    one of more than `most` elements and for one that cannot be read."""
    if (
        not isinstance(value, torch.Tensor)
        or isinstance(value, FakeTensor)
        or value.is_inference()
        or value.dim() < len(("query", "key"))
        or not 1 < value.numel() <= most
        or any(size != 1 for size in value.shape[:-2])
    ):
        return None
    table = value.detach().reshape(value.shape[-2:])
    seen, later = table[0, 0], table[0, -1]
    lower = torch.ones(table.shape, dtype=torch.bool, device=table.device).tril()
    if table.shape[-1] == 1 or not torch.equal(table, torch.where(lower, seen, later)):
        return None
    return seen.cpu(), later.cpu()
