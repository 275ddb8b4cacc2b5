"""Recurrent layers as one launch: cuDNN runs them whole, a CPU build unrolls them over time."""
# torch carries Any in its operator tables.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

aten = torch.ops.aten

RECURRENT: tuple[Any, ...] = (
    aten.lstm.input,
    aten.gru.input,
    aten.rnn_tanh.input,
    aten.rnn_relu.input,
)


def output_shape(
    inputs: tuple[int, ...], state: tuple[int, ...], bidirectional: bool
) -> tuple[int, ...]:
    """The shape of every step's hidden state, [T, B, D·H] or [B, T, D·H] as the input is."""
    return (*inputs[:-1], state[-1] * (2 if bidirectional else 1))


@contextmanager
def whole_recurrent_layers() -> Generator[None, None, None]:
    """While active, recurrent layers compute shapes alone instead of unrolling over time."""
    with ExitStack() as stack:
        for operator in RECURRENT:
            key = torch._C.DispatchKey.CompositeImplicitAutograd
            stack.enter_context(mock.patch.dict(operator.py_kernels, {key: _shapes}))
            operator._dispatch_cache.clear()
            stack.callback(operator._dispatch_cache.clear)
        stack.enter_context(torch._C._EnablePythonDispatcher())
        yield


def _shapes(
    x: Any, state: Any, params: Any, has_biases: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool,
) -> Any:  # fmt: skip
    states = state if isinstance(state, (list, tuple)) else (state,)
    shape = output_shape(tuple(x.shape), tuple(states[0].shape), bidirectional)
    if batch_first:
        out = x.new_empty((shape[1], shape[0], shape[2])).transpose(0, 1)
    else:
        out = x.new_empty(shape)
    return (out, *(torch.empty_like(each) for each in states))
