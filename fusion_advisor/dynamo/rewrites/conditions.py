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

    def answer(self, inputs: Sequence[Any]) -> bool | torch.Tensor:
        """Whether it is met; what is read as a tensor of one element."""
        ...


def hold(conditions: Sequence[Requirement], inputs: Sequence[Any]) -> bool:
    """Whether a graph under some conditions means the same for these inputs."""
    return all(bool(each.answer(inputs)) for each in conditions)


@dataclass(frozen=True)
class Answer:
    """Answer of some conditions: `met` by what is known at once, and by elements on the GPU, of
    which `read` has copies on the host with the events behind them."""

    met: bool
    read: tuple[tuple[torch.Tensor, torch.cuda.Event], ...] = ()

    @property
    def waits(self) -> bool:
        """Whether the host waits for the GPU to know it."""
        return self.met and bool(self.read)

    def holds(self) -> bool:
        """Whether the conditions hold, after what the GPU had to do until they were asked."""
        if not self.met:
            return False
        for _, copied in self.read:
            copied.synchronize()
        return all(bool(host) for host, _ in self.read)


def asked(conditions: Sequence[Requirement], inputs: Sequence[Any]) -> Answer:
    """Ask whether conditions hold, without a wait for the GPU."""
    read: list[tuple[torch.Tensor, torch.cuda.Event]] = []
    for each in conditions:
        found = each.answer(inputs)
        if isinstance(found, torch.Tensor) and found.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(found, non_blocking=True)
            copied = torch.cuda.Event()  # on the input's GPU, which need not be the current one
            copied.record(torch.cuda.current_stream(found.device))
            read.append((host, copied))
        elif not found:
            return Answer(met=False)
    return Answer(met=True, read=tuple(read))


@dataclass(frozen=True)
class Ones:
    """An input has ones alone, as a padding mask without padding, and shares no memory with the
    inputs that the graph writes into. Assumed of fake tensors; never true under the capture of a
    CUDA graph, where nothing can be read."""

    number: int
    written: tuple[int, ...] = ()
    reads = True

    def answer(self, inputs: Sequence[Any]) -> bool | torch.Tensor:
        given = inputs[self.number]
        if isinstance(given, FakeTensor):
            return True
        memory = given.untyped_storage()._cdata
        if any(inputs[each].untyped_storage()._cdata == memory for each in self.written):
            return False
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False
        return (given if given.dtype is torch.bool else given == 1).all()


@dataclass(frozen=True)
class Unchanged:
    """An input is the tensor that was read as the graph was rewritten, and nothing was written into
    it since, by the count that autograd keeps."""

    number: int
    tensor: weakref.ref[torch.Tensor]
    version: int
    reads = False

    def answer(self, inputs: Sequence[Any]) -> bool:
        given = inputs[self.number]
        return given is self.tensor() and given._version == self.version
