"""Choice between two graphs that mean the same where some inputs have ones alone, as a padding mask
without padding has.

The inputs are read once a call, before either graph: the host waits for the GPU then. Under the
capture of a CUDA graph nothing can be read, and the graph that serves all inputs runs.
"""
# torch.compile is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from fusion_advisor.dynamo.rewrites import Rewritten

Run = Callable[..., Any]


def choosing(
    short: Rewritten,
    whole: Rewritten,
    inputs: Sequence[Any],
    compiled: Callable[[Rewritten], Run],
    compiled_later: Callable[[Rewritten], Run],
) -> Run:
    """Callable that runs `short` where the inputs that it names have ones alone, and `whole`
    elsewhere. What these inputs ask for is `compiled` at once; the other graph by `compiled_later`,
    as its first call comes."""
    ones = short.ones
    first = _have_ones(inputs, ones)
    runs: dict[bool, Run] = {first: compiled(short if first else whole)}

    def run(*given: Any) -> Any:
        use_short = _have_ones(given, ones)
        if use_short not in runs:
            runs[use_short] = compiled_later(short if use_short else whole)
        return runs[use_short](*given)

    return run


def _have_ones(inputs: Sequence[Any], ones: Sequence[int]) -> bool:
    """Whether these inputs have ones alone. Of fake tensors it is assumed, and never under the
    capture of a CUDA graph."""
    read = [inputs[number] for number in ones]
    if any(isinstance(each, FakeTensor) for each in read):
        return True
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return all(bool((each if each.dtype is torch.bool else each == 1).all()) for each in read)
