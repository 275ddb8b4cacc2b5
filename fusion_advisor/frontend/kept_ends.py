"""Slices that cut nothing off yet, kept in a trace with their ends.

For `x[:, :512]` of 100 columns torch returns the tensor itself, and no trace has the number, which
cuts a larger size. An end beyond the captured size becomes a slice of its own; an end equal to the
size shows where the model is traced at a larger one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode


class KeptEnds(TorchFunctionMode):
    """Slices a tensor at each end that lies beyond it before the tensor is indexed."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], torch.Tensor):
            value, index = args
            for dim, end in _ends(index, value.dim()):
                if isinstance(value.shape[dim], int) and end > value.shape[dim]:
                    value = torch.ops.aten.slice.Tensor(value, dim, 0, end)
            args = value, index
        return func(*args, **(kwargs or {}))


def _ends(index: Any, rank: int) -> Iterator[tuple[int, int]]:
    """Dimensions that an index cuts from their beginning, with the numbers that it cuts at; none
    for an index with tensors in it, whose dimensions are others."""
    parts: tuple[Any, ...] = (
        cast("tuple[Any, ...]", index) if isinstance(index, tuple) else (index,)
    )
    if not all(part is None or part is ... or type(part) in (int, slice) for part in parts):
        return
    taken = sum(part is not None and part is not ... for part in parts)
    dim = 0
    for part in parts:
        if part is ...:
            dim += rank - taken
        elif part is not None:
            from_the_beginning = type(part) is slice and not part.start and part.step in (None, 1)
            if from_the_beginning and type(part.stop) is int and part.stop < sys.maxsize:
                yield dim, part.stop
            dim += 1
