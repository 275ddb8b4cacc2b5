"""Conditions under which a rewritten graph means the same, asked before each call of it."""
# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor


class Requirement(Protocol):
    """Requirement on the inputs of a graph. `reads`: the host waits for the GPU to know it."""

    reads: bool

    def holds(self, inputs: Sequence[Any]) -> bool: ...


def hold(conditions: Sequence[Requirement], inputs: Sequence[Any]) -> bool:
    """Whether a graph under some conditions means the same for these inputs."""
    return all(each.holds(inputs) for each in conditions)


@dataclass(frozen=True)
class Ones:
    """An input has ones alone, as a padding mask without padding, and shares no memory with the
    inputs that the graph writes into. Assumed of fake tensors; never true under the capture of a
    CUDA graph, where nothing can be read."""

    number: int
    written: tuple[int, ...] = ()
    reads = True

    def holds(self, inputs: Sequence[Any]) -> bool:
        given = inputs[self.number]
        if isinstance(given, FakeTensor):
            return True
        memory = given.untyped_storage()._cdata
        if any(inputs[each].untyped_storage()._cdata == memory for each in self.written):
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        return bool((given if given.dtype is torch.bool else given == 1).all())


@dataclass(frozen=True)
class Unchanged:
    """An input is the tensor that was read as the graph was rewritten, and nothing was written into
    it since, by the count that autograd keeps."""

    number: int
    tensor: weakref.ref[torch.Tensor]
    version: int
    reads = False

    def holds(self, inputs: Sequence[Any]) -> bool:
        given = inputs[self.number]
        return given is self.tensor() and given._version == self.version
