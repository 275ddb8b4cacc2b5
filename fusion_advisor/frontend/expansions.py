"""Records of what one FX node launches on CUDA: values, slots, and the layouts of tensors."""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.ir.graph import Ref, Tensor

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TracedValue:
    """A tensor in the graph: its layout and the output that holds it."""

    tensor: Tensor
    ref: Ref


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor operand inside an expansion: an operand of the FX node or an earlier output."""

    op: int
    output: int


@dataclass(frozen=True, slots=True)
class ExpandedOutput:
    """One tensor output inside an expansion: its layout and the slot whose storage it shares."""

    tensor: Tensor
    alias: Slot | None


@dataclass(frozen=True, slots=True)
class ExpandedLaunch:
    """One operator inside an expansion. `written` are the operands that it writes in place."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[ExpandedOutput | None, ...]
    written: tuple[Slot, ...]

    @property
    def kernel(self) -> bool:
        """Whether the GPU runs anything: neither a view nor an allocation."""
        if self.written:
            return True
        if self.op.split("::")[-1].split(".")[1] in _ALLOCATORS:
            return False
        return not all(output is not None and output.alias for output in self.outputs)


_ALLOCATORS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")


@dataclass(frozen=True, slots=True)
class Expansion:
    """The launches of one FX node, and its result: a tree of slots and plain values."""

    launches: tuple[ExpandedLaunch, ...]
    result: Any


OPERAND = -1
"""`Slot.op` of an operand of the FX node itself; `output` is then its position."""


class UnknownSize(ValueError):
    """Raised for a size that depends on the values of a tensor, as after `nonzero`; or for a
    `number`, as after `item`."""

    def __init__(self, message: str, *, number: bool = False) -> None:
        super().__init__(message)
        self.number = number


def describe(tensor: torch.Tensor) -> Tensor:
    """The layout of a tensor, symbolic sizes as their hints; storage not yet known."""
    shape = tuple(hint(size) for size in tensor.shape)
    strided = tensor.layout == torch.strided
    return Tensor(
        shape,
        tuple(hint(step) for step in tensor.stride()) if strided else dense(shape, "bool").stride,
        str(tensor.dtype).removeprefix("torch."),
        offset=hint(tensor.storage_offset()) if strided else 0,
        dims=tuple(str(size) for size in tensor.shape) if symbolic(tensor.shape) else (),
    )


def hint(size: Any) -> Any:
    """The concrete value of a possibly symbolic number. Raises UnknownSize where it has none."""
    if isinstance(size, (int, float)):
        return size
    node = size.node
    value = node.hint if node.has_hint() else None
    if value is None:
        number = isinstance(size, torch.SymFloat)
        what = "number" if number else "size"
        raise UnknownSize(f"{what} {node.expr} depends on data", number=number)
    return value


def symbolic(shape: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in shape)


def identifier(name: str) -> str:
    """`name` as a valid Python identifier."""
    name = re.sub(r"\W", "_", name)
    return name if name[:1].isidentifier() else f"_{name}"


def dense(shape: tuple[int, ...], dtype: str) -> Tensor:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return Tensor(shape, tuple(reversed(stride)), dtype)


def permuted(shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> Tensor:
    """A dense tensor whose dimensions lie in memory in `order`, outermost first."""
    stride = [0] * len(shape)
    for dim, step in zip(order, dense(tuple(shape[d] for d in order), dtype).stride, strict=True):
        stride[dim] = step
    return Tensor(shape, tuple(stride), dtype)


def layout_of(value: Any) -> Tensor:
    return value.tensor if isinstance(value, TracedValue) else describe(value)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def values_in(value: Any) -> list[TracedValue]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, TracedValue)]


def freeze(value: Any, slots: dict[Ref, Slot]) -> Any:
    if isinstance(value, TracedValue):
        return slots[value.ref]
    if isinstance(value, (tuple, list)):
        return tuple(freeze(item, slots) for item in value)
    if isinstance(value, dict):
        return {key: freeze(item, slots) for key, item in value.items()}
    return value


def returned(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(leaves(result))


def schema_values(target: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each schema argument of an operator with the value given for it."""
    if not isinstance(target, torch._ops.OpOverload):
        return
    positional = [argument for argument in target._schema.arguments if not argument.kwarg_only]
    yield from zip(positional, args, strict=False)
    by_name = {argument.name: argument for argument in target._schema.arguments}
    for name, value in kwargs.items():
        if name in by_name:
            yield by_name[name], value
