"""Signature of a call: how its arguments nest, and the layout of each tensor, never its data.

Numbers, strings and names are kept as they are, for they steer what runs. Containers that torch
knows (tuples, dicts, `ModelOutput`, whatever is registered with its pytree) and plain objects
(dataclasses, transformers' caches) are walked; anything else is named and not described.
"""
# Arguments are whatever the user's program passes.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import Enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from fusion_advisor.ir.graph import Tensor

_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
_NAMED = (type, FunctionType, BuiltinFunctionType)
_PLAIN = (
    *(type(None), bool, int, float, complex, str, range, Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *_NAMED,
)
_WITH_CONTENT = (dict, list, tuple, set, frozenset, bytes, ModuleType, torch.nn.Module)
"""Types whose objects have content beside their attributes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A tensor; the same tensor has the same number wherever it is passed."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    """For a leaf. A computed tensor may be written in place, a leaf with gradients may not."""


@dataclass(frozen=True, slots=True)
class Plain:
    """A value without tensors; `text` tells it from others."""

    text: str
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Nested:
    """A container that torch's pytree knows; `spec` is this level alone."""

    spec: pytree.TreeSpec
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class HeldObject:
    """An object by its attributes."""

    kind: type
    names: tuple[str, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Unknown:
    """Argument that cannot be described; `what` names it in words."""

    what: str


Part = Layout | Plain | Nested | HeldObject | Unknown


def signature(value: Any) -> Part:
    """Arguments without their data; equal for calls that are made alike. Raises nothing."""
    try:
        return _Walk().part(value)
    except Exception as error:  # noqa: BLE001 an object may do anything where it is looked at
        return Unknown(f"one that raises {type(error).__name__} where it is looked into")


def unknown_in(part: Part) -> Iterator[str]:
    """The parts of a signature that cannot be described, in words."""
    if isinstance(part, Unknown):
        yield part.what
    elif isinstance(part, Nested | HeldObject):
        for inner in part.parts:
            yield from unknown_in(inner)


def undescribed(part: Part, refusal: str = "cannot be described") -> str:
    """Sentence that says of the first argument without a description what it is, who refuses it,
    and what to pass instead; "" where all are described."""
    what = next(unknown_in(part), "")
    return what and (
        f"an argument is {what}, which {refusal}; pass tensors, numbers, strings, and containers "
        "or plain objects of these"
    )


def fakes(part: Part, fake: FakeTensorMode) -> Any:
    """Arguments of such a signature, with tensors of that mode. TypeError for what is unknown."""
    made: dict[int, torch.Tensor] = {}

    def of(part: Part) -> Any:
        if isinstance(part, Layout):
            if part.number not in made:
                made[part.number] = _empty(part, fake)
            return made[part.number]
        if isinstance(part, Plain):
            return part.value
        if isinstance(part, Nested):
            return pytree.tree_unflatten(map(of, part.parts), part.spec)
        if isinstance(part, HeldObject):
            return _holding(part.kind, part.names, list(map(of, part.parts)))
        raise TypeError(part.what)

    return of(part)


def without_sizes(part: Part, numbers: tuple[type, ...] = (int, float)) -> Part:
    """The rest of a signature without sizes and numbers of these types: equal for calls that differ
    in these alone."""
    if isinstance(part, Layout):
        return replace(part, shape=(len(part.shape),), stride=())
    if isinstance(part, Plain):
        return Plain("number", None) if type(part.value) in numbers else part
    if isinstance(part, Nested | HeldObject):
        return replace(part, parts=tuple(without_sizes(each, numbers) for each in part.parts))
    return part


def sizes(part: Part) -> tuple[int, ...]:
    """The numbers that `without_sizes(part, (int,))` leaves out: sizes, strides and whole
    numbers."""
    if isinstance(part, Layout):
        return (*part.shape, *part.stride)
    if isinstance(part, Nested | HeldObject):
        return tuple(size for each in part.parts for size in sizes(each))
    return (part.value,) if isinstance(part, Plain) and type(part.value) is int else ()


def elements(part: Part) -> int:
    """Elements of all tensors together."""
    if isinstance(part, Nested | HeldObject):
        return sum(map(elements, part.parts))
    return math.prod(part.shape) if isinstance(part, Layout) else 0


@contextmanager
def objects_known(part: Part) -> Generator[None]:
    """Let torch's pytree walk the objects of a signature, so that their tensors become inputs of a
    graph."""
    kinds = {inner.kind for inner in _held(part)} - pytree.SUPPORTED_NODES.keys()
    for kind in kinds:
        _register(kind)
    try:
        yield
    finally:
        for kind in kinds:
            pytree._deregister_pytree_node(kind)


def as_data(part: Part) -> Any:
    """A signature for a file: `float32[4, 8]` for a tensor, with its strides where they are not
    those of a contiguous one."""
    if isinstance(part, Layout):
        return _layout_text(part)
    if isinstance(part, Plain):
        kept = part.value is None or type(part.value) in (bool, int, str)
        return part.value if kept else part.text
    if isinstance(part, HeldObject):
        inner = dict(zip(part.names, map(as_data, part.parts), strict=True))
        return {_name(part.kind): inner}
    if isinstance(part, Nested):
        kind, inner = part.spec.type, list(map(as_data, part.parts))
        if (
            isinstance(kind, type)
            and issubclass(kind, dict)
            and len(part.spec.context) == len(inner)
        ):
            return dict(zip(map(str, part.spec.context), inner, strict=True))
        return inner if kind in (list, tuple) else {_name(kind): inner}
    return {"unknown": part.what}


class _Walk:
    """Numbers the tensors of one call as they come."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()

    def part(self, value: Any) -> Part:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _PLAIN):
            return Plain(_name(value) if isinstance(value, _NAMED) else repr(value), value)
        if id(value) in self._open:
            return Unknown(f"a {_name(type(value))} that holds itself")
        self._open.add(id(value))
        try:
            return self._inside(value)
        finally:
            self._open.discard(id(value))

    def _inside(self, value: Any) -> Part:
        leaves, spec = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
        if not spec.is_leaf():
            return Nested(spec, tuple(map(self.part, leaves)))
        state = _state(value)
        if state is None:
            return Unknown(f"a {_name(type(value))}")
        return HeldObject(type(value), tuple(state), tuple(map(self.part, state.values())))

    def _tensor(self, value: torch.Tensor) -> Part:
        if type(value) not in _TENSORS:
            return Unknown(f"a tensor of class {_name(type(value))}")
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            return Unknown("a tensor that is sparse, nested or quantized")
        number = self._numbers.setdefault(id(value), len(self._numbers))
        return Layout(
            number, tuple(value.shape), value.stride(), value.dtype, value.device,
            value.requires_grad and value.is_leaf,
        )  # fmt: skip


def _empty(layout: Layout, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        return torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=layout.device,
            requires_grad=layout.requires_grad,
        )  # fmt: skip


def _state(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None where it may have other content."""
    kind: Any = type(value)
    if isinstance(value, _WITH_CONTENT) or kind.__reduce_ex__ is not object.__reduce_ex__:
        return None
    if is_dataclass(value) and not hasattr(value, "__dict__"):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if kind.__reduce__ is not object.__reduce__ or kind.__getstate__ is not object.__getstate__:
        return None
    state: Any = kind.__getstate__(value)
    if isinstance(state, tuple):
        own, slots = state
        return {**(own or {}), **slots}
    return dict(state) if isinstance(state, dict) else None


def _holding(kind: type, names: Sequence[str], values: Sequence[Any]) -> Any:
    """An object of that class with those attributes; its constructor is not called."""
    made: Any = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def _held(part: Part) -> Iterator[HeldObject]:
    if isinstance(part, Nested | HeldObject):
        if isinstance(part, HeldObject):
            yield part
        for inner in part.parts:
            yield from _held(inner)


def _register(kind: type) -> None:
    """Register a class with pytree: plain attributes are its context, the others its children."""

    def keyed(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        state = _state(value) or {}
        inner = {name: each for name, each in state.items() if not isinstance(each, _PLAIN)}
        plain = tuple((name, each) for name, each in state.items() if name not in inner)
        children = [(pytree.GetAttrKey(name), each) for name, each in inner.items()]
        return children, (tuple(inner), plain)

    def flat(value: Any) -> tuple[list[Any], Any]:
        children, context = keyed(value)
        return [child for _, child in children], context

    def whole(values: Any, context: Any) -> Any:
        names, plain = context
        return _holding(kind, [*names, *dict(plain)], [*values, *dict(plain).values()])

    pytree._private_register_pytree_node(
        kind, flat, whole,
        serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
        flatten_with_keys_fn=keyed,
    )  # fmt: skip


def _layout_text(layout: Layout) -> str:
    dtype = str(layout.dtype).removeprefix("torch.")
    text = f"{dtype}{list(layout.shape)} on {layout.device}"
    if not Tensor(layout.shape, layout.stride, dtype).contiguous:
        text += f", strides {list(layout.stride)}"
    return text + (", requires gradient" if layout.requires_grad else "")


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
