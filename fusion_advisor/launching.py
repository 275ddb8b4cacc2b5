"""From FX graphs to records at the level eager launches kernels on CUDA.

Each FX node is run again on fake CUDA tensors under a dispatch mode, and every operator that
arrives there becomes one record: `linear` becomes `view, t, addmm, view`, `cross_entropy` two
kernels. No GPU is needed. What a CPU build cannot expand (a cuDNN GRU) stays one whole node.

Values travel as `Value`s (layout, storage, who made it), never as the CPU tensors that tracing
saw, so that strides are CUDA's. Equal nodes on equal layouts are expanded once.
"""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.errors import CaptureError
from fusion_advisor.frames import source_of
from fusion_advisor.records import Node, NodeKind, Ref, Source, Symbol, Tensor
from fusion_advisor.recurrent import RECURRENT, output_shape

_log = logging.getLogger(__name__)

aten = torch.ops.aten

_DEVICE = torch.device("cuda", 0)

_IGNORED = {
    "prim::device",
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
}
_LIFTS = {"aten::lift_fresh_copy", "aten::lift_fresh", "aten::lift"}
_ALLOCATORS = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor on its way through the graph: its layout and the output that holds it."""

    tensor: Tensor
    ref: Ref


@dataclass(frozen=True, slots=True)
class _Slot:
    """A tensor operand inside an expansion: an operand of the FX node or an earlier output."""

    op: int
    output: int


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor output inside an expansion: its layout and the slot whose storage it shares."""

    tensor: Tensor
    alias: _Slot | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """One operator inside an expansion. `written` are the operands it writes in place."""

    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[_Output | None, ...]
    written: tuple[_Slot, ...]

    @property
    def kernel(self) -> bool:
        """Whether the GPU runs anything: neither a view nor an allocation."""
        if self.written:
            return True
        if self.op.split("::")[-1].split(".")[1] in _ALLOCATORS:
            return False
        return not all(output is not None and output.alias for output in self.outputs)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """What one FX node launches, and what it returns: a tree of slots and plain values."""

    launches: tuple[_Launch, ...]
    result: Any


_OPERAND = -1
"""`_Slot.op` of an operand of the FX node itself; `output` is then its position."""


class UnknownSize(ValueError):
    """A size that only the values of a tensor decide, as after `nonzero`."""


class Launcher:
    """Collects the records of one model; feed it placeholders, then graphs, in eager's order."""

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        self.nodes: list[Node] = []
        self._autocast = autocast
        self._names: dict[str, int] = {}
        self._storages = 0
        self._known: dict[Any, _Expansion] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(self, name: str, kind: NodeKind, example: torch.Tensor, storage: int = -1) -> Value:
        """Adds a tensor that is there before the graph runs; `storage` when it shares memory."""
        name = self._unique(name)
        layout = replace(describe(example), storage=self._storage() if storage < 0 else storage)
        self.nodes.append(Node(name, kind, kind, outputs=(layout,)))
        return Value(layout, Ref(name))

    def graph(self, module: torch.fx.GraphModule, operands: Sequence[Any]) -> Any:
        """Adds every launch of `module` called with `operands` (Values, numbers); its outputs."""
        return self._walk(module, operands, self._autocast, None)

    def _walk(
        self,
        module: torch.fx.GraphModule,
        operands: Sequence[Any],
        autocast: torch.dtype | None,
        outer: torch.fx.Node | None,
    ) -> Any:
        values: dict[torch.fx.Node, Any] = {}
        given = iter(operands)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                values[node] = self._attribute(module, node)
            elif node.op == "output":
                return _substitute(node.args[0], values)
            else:
                try:
                    values[node] = self._call(module, node, values, autocast, outer)
                except UnknownSize as error:
                    raise _data_dependent(node, outer, error) from error
        return None

    def _attribute(self, module: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
        value: Any = module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        name = identifier(str(node.target))
        kind: NodeKind = "parameter" if isinstance(value, torch.nn.Parameter) else "constant"
        return self.tensor(name, kind, value)

    def _call(
        self,
        module: torch.fx.GraphModule,
        node: torch.fx.Node,
        values: Mapping[torch.fx.Node, Any],
        autocast: torch.dtype | None,
        outer: torch.fx.Node | None,
    ) -> Any:
        args = _substitute(node.args, values)
        kwargs = _substitute(node.kwargs, values)
        if node.op == "call_module":
            raise TypeError(f"{node.name}: call_module is traced before it is launched")
        target: Any = node.target
        if node.op == "call_method":
            target = _Method(str(node.target))
        if target is operator.getitem and isinstance(args[0], (tuple, list)):
            return args[0][args[1]]
        if target is _AUTOCAST:
            dtype = args[1] or torch.get_autocast_dtype("cuda")
            return self._walk(args[4], args[5:], dtype if args[2] else None, node)
        if target is _SET_GRAD:
            return self._walk(args[1], args[2:], autocast, node)
        if _qualified(target) in _IGNORED:
            return None
        if _qualified(target) in _LIFTS:
            return args[0]
        example = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            self._host_read(node, target, args, outer)
            return hint(example) if example.node.has_hint() else example
        if not _tensors((args, kwargs)) and _plain(example):
            return example if example is not None else target(*args, **kwargs)
        return self._launch(node, target, args, kwargs, autocast, outer, example)

    def _host_read(
        self, node: torch.fx.Node, target: Any, args: Any, outer: torch.fx.Node | None
    ) -> None:
        """`.item()`: the host waits for the device. Sizes and arithmetic on them cost nothing."""
        if _qualified(target) == "aten::_local_scalar_dense" or "item" in str(target):
            self.nodes.append(
                Node(
                    self._unique(node.name),
                    "aten._local_scalar_dense.default",
                    args=_arg(args, {}),
                    source=_source(node, outer),
                    module=_module(node, outer),
                )
            )

    def _launch(
        self,
        node: torch.fx.Node,
        target: Any,
        args: Any,
        kwargs: Any,
        autocast: torch.dtype | None,
        outer: torch.fx.Node | None,
        example: Any,
    ) -> Any:
        for leaf in _leaves((args, kwargs)):
            if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                hint(leaf)
        operands = _distinct((args, kwargs))
        key = _key(target, args, kwargs, operands, autocast)
        expansion = self._known.get(key)
        if expansion is None:
            expansion = self._expand(target, args, kwargs, operands, autocast, example)
            self._known[key] = expansion
        return self._replay(expansion, list(operands.values()), node, outer, example)

    def _expand(
        self,
        target: Any,
        args: Any,
        kwargs: Any,
        operands: dict[Ref, Value],
        autocast: torch.dtype | None,
        example: Any,
    ) -> _Expansion:
        slots = {ref: _Slot(_OPERAND, index) for index, ref in enumerate(operands)}
        whole = _whole(target, args, kwargs, slots)
        if whole is not None:
            return whole
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            stack.enter_context(torch.no_grad())
            fakes = {ref: _fake_tensor(value) for ref, value in operands.items()}
            stack.enter_context(_autocast(autocast))
            recorder = _Recorder(list(fakes.values()))
            try:
                with recorder:
                    result = target(*_cuda_args(args, fakes), **dict(_cuda_args(kwargs, fakes)))
            except Exception as error:  # noqa: BLE001 a CPU build's lack is not the model's fault
                _log.debug("%s kept whole: %s", target, error)
                return _kept_whole(target, args, kwargs, slots, example)
        return recorder.expansion(result)

    def _replay(
        self,
        expansion: _Expansion,
        operands: list[Value],
        node: torch.fx.Node,
        outer: torch.fx.Node | None,
        example: Any,
    ) -> Any:
        names = self._launch_names(expansion, node.name)
        source, module = _source(node, outer), _module(node, outer)
        made: dict[_Slot, Value] = {
            _Slot(_OPERAND, index): value for index, value in enumerate(operands)
        }
        for index, (launch, name) in enumerate(zip(expansion.launches, names, strict=True)):
            outputs: list[Tensor | None] = []
            for position, output in enumerate(launch.outputs):
                if output is None:
                    outputs.append(None)
                    continue
                shared = output.alias and made[output.alias].tensor.storage
                storage = self._storage() if shared is None else shared
                tensor = replace(output.tensor, storage=storage)
                outputs.append(tensor)
                made[_Slot(index, position)] = Value(tensor, Ref(name, position))
            self.nodes.append(
                Node(
                    name,
                    launch.op,
                    args=_arg(launch.args, made),
                    kwargs=tuple((key, _arg(value, made)) for key, value in launch.kwargs),
                    outputs=tuple(outputs),
                    mutates=tuple(
                        dict.fromkeys(made[slot].tensor.storage for slot in launch.written)
                    ),
                    source=source,
                    module=module,
                )
            )
        result = _fill(expansion.result, made)
        self._state_dims(result, example)
        return result

    def _state_dims(self, result: Any, example: Any) -> None:
        """Writes the symbolic sizes that tracing saw over the outputs of the last launch."""
        if not isinstance(result, Value) or not isinstance(example, torch.Tensor):
            return
        if not _symbolic(example.shape) or not self.nodes:
            return
        last = self.nodes[-1]
        if last.name == result.ref.node and len(example.shape) == len(result.tensor.shape):
            dims = tuple(str(size) for size in example.shape)
            outputs = list(last.outputs)
            outputs[result.ref.output] = replace(result.tensor, dims=dims)
            self.nodes[-1] = replace(last, outputs=tuple(outputs))

    def _launch_names(self, expansion: _Expansion, name: str) -> list[str]:
        """The FX name for the only kernel (or the last view); suffixed names for the others."""
        launches = expansion.launches
        kernels = [index for index, launch in enumerate(launches) if launch.kernel]
        views_only = len(launches) - 1 if not kernels else -1
        main = kernels[0] if len(kernels) == 1 else views_only
        return [
            self._unique(name if index == main else f"{name}_{_short(launch.op)}")
            for index, launch in enumerate(launches)
        ]

    def _unique(self, name: str) -> str:
        name = identifier(name)
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        if not count:
            return name
        while f"{name}_{count}" in self._names:
            count += 1
        self._names[name] = count + 1
        self._names[f"{name}_{count}"] = 1
        return f"{name}_{count}"

    def _storage(self) -> int:
        self._storages += 1
        return self._storages - 1


class _Method:
    """A tensor method as a callable target, equal by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(tensor, self.name)(*args, **kwargs)

    def __str__(self) -> str:
        return f"method.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Method) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class _Recorder(TorchDispatchMode):
    """Writes down each operator that reaches dispatch, operands as slots."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        super().__init__()
        self.launches: list[_Launch] = []
        self._alive: list[Any] = [*operands]
        self._slots: dict[int, _Slot] = {}
        self._homes: dict[int, _Slot] = {}
        self._layouts: dict[_Slot, Tensor] = {}
        for index, operand in enumerate(operands):
            slot = _Slot(_OPERAND, index)
            self._slots[id(operand)] = slot
            self._homes.setdefault(_storage_key(operand), slot)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is aten.convolution.default:
            result = _as_cudnn_lays_out(result, args[0], args[1])
        if _qualified(func) in _IGNORED:
            return result
        self._record(func, args, kwargs, result)
        return result

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        written = tuple(
            self._slot(tensor)
            for argument, value in _schema_values(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _leaves(value)
            if isinstance(tensor, torch.Tensor)
        )
        frozen_args = self._freeze(args)
        frozen_kwargs = tuple((name, self._freeze(value)) for name, value in kwargs.items())
        index = len(self.launches)
        outputs: list[_Output | None] = []
        for position, tensor in enumerate(_returned(result)):
            if not isinstance(tensor, torch.Tensor):
                outputs.append(None)
                continue
            slot = _Slot(index, position)
            home = self._homes.setdefault(_storage_key(tensor), slot)
            outputs.append(_Output(describe(tensor), None if home == slot else home))
            self._slots[id(tensor)] = slot
            self._alive.append(tensor)
        if outputs or written:
            self.launches.append(
                _Launch(str(func), frozen_args, frozen_kwargs, tuple(outputs), written)
            )

    def expansion(self, result: Any) -> _Expansion:
        """The launches recorded, with what the FX node itself returned."""
        return _Expansion(tuple(self.launches), self._freeze(result))

    def _slot(self, tensor: torch.Tensor) -> _Slot:
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._homes.get(_storage_key(tensor))
        if slot is None:
            slot = self._constant(tensor)
        return slot

    def _constant(self, tensor: torch.Tensor) -> _Slot:
        """A tensor that nobody handed in: made below dispatch, so recorded as an allocation."""
        slot = _Slot(len(self.launches), 0)
        self.launches.append(
            _Launch(
                "aten.empty.memory_format", (tuple(tensor.shape),), (),
                (_Output(describe(tensor), None),), (),
            )
        )  # fmt: skip
        self._slots[id(tensor)] = slot
        self._homes[_storage_key(tensor)] = slot
        self._alive.append(tensor)
        return slot

    def _freeze(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._slot(value)
        if isinstance(value, (tuple, list)):
            return tuple(self._freeze(item) for item in value)
        if isinstance(value, dict):
            return {key: self._freeze(item) for key, item in value.items()}
        return value


# Operators kept whole: the CPU build would expand what a CUDA build runs as one kernel.


def _rms_norm(args: Any, kwargs: Any, slots: dict[Ref, _Slot]) -> _Expansion | None:
    """`rms_norm` is one fused kernel on CUDA where input and weight agree in dtype."""
    names = ("input", "normalized_shape", "weight", "eps")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    x = _layout(given["input"])
    weight = given.get("weight")
    if weight is not None and _layout(weight).dtype != x.dtype:
        return None
    normalized = len(given["normalized_shape"])
    rows = x.shape[: len(x.shape) - normalized] + (1,) * normalized
    statistics = "float32" if x.dtype in ("float16", "bfloat16") else x.dtype
    out = _dense(x.shape, x.dtype)
    call = tuple(_freeze(given.get(name), slots) for name in names)
    return _single("aten._fused_rms_norm.default", call, (), (out, _dense(rows, statistics)), 0)


def _attention(args: Any, kwargs: Any, slots: dict[Ref, _Slot]) -> _Expansion | None:
    """Flash or memory-efficient attention: one kernel for [B, H, S, D] operands.

    Flash lays its output out as the query is, memory-efficient attention as [B, S, H, D]. The
    logsumexp that the kernel also writes is not modelled. Operands of other ranks than 4 take the
    unfused path on CUDA too.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    query, value = _layout(given["query"]), _layout(given["value"])
    if len(query.shape) != 4 or len(value.shape) != 4 or query.dtype == "float64":
        return None
    batch, heads, length, _ = query.shape
    width = value.shape[-1]
    flash = query.dtype in ("float16", "bfloat16") and given.get("attn_mask") is None
    order = (0, 2, 1, 3)
    if flash and query.stride[1] > query.stride[2]:
        order = (0, 1, 2, 3)
    out = _permuted((batch, heads, length, width), order, query.dtype)
    frozen = tuple(_freeze(arg, slots) for arg in args)
    options = tuple((name, _freeze(arg, slots)) for name, arg in kwargs.items())
    return _single("aten.scaled_dot_product_attention.default", frozen, options, (out,), 0)


def _batch_norm(args: Any, kwargs: Any, slots: dict[Ref, _Slot]) -> _Expansion | None:
    """One kernel for both modes; in training it writes the running statistics in place."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum")
    given = dict(zip((*names, "eps"), args, strict=False)) | dict(kwargs)
    x = _layout(given["input"])
    training = bool(given["training"])
    channels = (x.shape[1] if training else 0,)
    statistics = _dense(channels, "float32" if x.dtype in ("float16", "bfloat16") else x.dtype)
    out = replace(x, storage=-1, offset=0)
    if 0 in x.stride or x.numel != _extent(x):
        out = _dense(x.shape, x.dtype)
    call = tuple(_freeze(given.get(name), slots) for name in (*names, "eps"))
    running = (given.get("running_mean"), given.get("running_var"))
    written = tuple(slots[value.ref] for value in running if isinstance(value, Value))
    expansion = _single(
        "aten.native_batch_norm.default", call, (), (out, statistics, statistics), 0
    )
    launch = replace(expansion.launches[0], written=written if training else ())
    return replace(expansion, launches=(launch,))


def _recurrent(operator: Any) -> Callable[[Any, Any, dict[Ref, _Slot]], _Expansion]:
    """One node for a recurrent layer: every step's state, then the last states."""

    def whole(args: Any, kwargs: Any, slots: dict[Ref, _Slot]) -> _Expansion:
        x = _layout(args[0])
        states = args[1] if isinstance(args[1], (tuple, list)) else (args[1],)
        last = [_dense(_layout(state).shape, x.dtype) for state in states]
        shape = output_shape(x.shape, last[0].shape, bool(args[7]))
        out = _permuted(shape, (1, 0, 2), x.dtype) if args[8] else _dense(shape, x.dtype)
        call = tuple(_freeze(arg, slots) for arg in args)
        return _single(str(operator), call, (), (out, *last), None)

    return whole


_WHOLE: dict[Any, Callable[[Any, Any, dict[Ref, _Slot]], _Expansion | None]] = {
    aten.batch_norm.default: _batch_norm,
    aten.rms_norm.default: _rms_norm,
    **{operator: _recurrent(operator) for operator in RECURRENT},
    aten.scaled_dot_product_attention.default: _attention,
}


def _whole(target: Any, args: Any, kwargs: Any, slots: dict[Ref, _Slot]) -> _Expansion | None:
    try:
        rule = _WHOLE.get(target)
    except TypeError:
        return None
    return rule(args, kwargs, slots) if rule else None


def _single(
    op: str, args: Any, kwargs: Any, outputs: tuple[Tensor, ...], result: int | None
) -> _Expansion:
    launch = _Launch(op, args, kwargs, tuple(_Output(tensor, None) for tensor in outputs), ())
    slots = tuple(_Slot(0, index) for index in range(len(outputs)))
    return _Expansion((launch,), slots if result is None else slots[result])


def _kept_whole(
    target: Any, args: Any, kwargs: Any, slots: dict[Ref, _Slot], example: Any
) -> _Expansion:
    """One node with the outputs that tracing saw, for what cannot be expanded here."""
    written: list[_Slot] = []
    for argument, value in _schema_values(target, args, kwargs):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [slots[operand.ref] for operand in _tensors(value)]
    outputs = tuple(
        _Output(describe(leaf), None) if isinstance(leaf, torch.Tensor) else None
        for leaf in _returned(example)
    )
    launch = _Launch(
        _op_name(target),
        _freeze(args, slots),
        tuple((name, _freeze(value, slots)) for name, value in kwargs.items()),
        outputs,
        tuple(written),
    )
    results = tuple(_Slot(0, index) if output else None for index, output in enumerate(outputs))
    single = not isinstance(example, (tuple, list))
    return _Expansion((launch,), results[0] if single and results else results)


def _as_cudnn_lays_out(result: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """cuDNN answers channels-last when input or weight is; the CPU build's fakes do not."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(result.dim())
    if wanted is None or x.dtype == torch.float64:
        return result
    if wanted not in (suggest_memory_format(x), suggest_memory_format(weight)):
        return result
    return torch.empty_like(result, memory_format=wanted)


# Layouts.


def describe(tensor: torch.Tensor) -> Tensor:
    """The layout of a tensor, symbolic sizes as their hints; storage not yet known."""
    shape = tuple(hint(size) for size in tensor.shape)
    strided = tensor.layout == torch.strided
    return Tensor(
        shape,
        tuple(hint(step) for step in tensor.stride()) if strided else _dense(shape, "bool").stride,
        str(tensor.dtype).removeprefix("torch."),
        offset=hint(tensor.storage_offset()) if strided else 0,
        dims=tuple(str(size) for size in tensor.shape) if _symbolic(tensor.shape) else (),
    )


def hint(size: Any) -> Any:
    """The concrete value of a possibly symbolic number; UnknownSize when it has none."""
    if isinstance(size, (int, float)):
        return size
    node = size.node
    value = node.hint if node.has_hint() else None
    if value is None:
        raise UnknownSize(f"size {node.expr} depends on data")
    return value


def _symbolic(shape: Any) -> bool:
    return any(isinstance(size, torch.SymInt) for size in shape)


def identifier(name: str) -> str:
    """`name` as a valid Python identifier."""
    name = re.sub(r"\W", "_", name)
    return name if name[:1].isidentifier() else f"_{name}"


def _dense(shape: tuple[int, ...], dtype: str) -> Tensor:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return Tensor(shape, tuple(reversed(stride)), dtype)


def _extent(tensor: Tensor) -> int:
    """Elements from the first addressed to the last."""
    if tensor.numel == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride, strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)


def _permuted(shape: tuple[int, ...], order: tuple[int, ...], dtype: str) -> Tensor:
    """A dense tensor whose dimensions lie in memory in `order`, outermost first."""
    stride = [0] * len(shape)
    for dim, step in zip(order, _dense(tuple(shape[d] for d in order), dtype).stride, strict=True):
        stride[dim] = step
    return Tensor(shape, tuple(stride), dtype)


def _layout(value: Any) -> Tensor:
    return value.tensor if isinstance(value, Value) else describe(value)


def _fake_tensor(value: Value) -> torch.Tensor:
    tensor = value.tensor
    dtype = getattr(torch, tensor.dtype)
    if tensor.offset:
        base = torch.empty(tensor.offset + _extent(tensor), dtype=dtype, device=_DEVICE)
        fake = base.as_strided(tensor.shape, tensor.stride, tensor.offset)
    else:
        fake = torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=_DEVICE)
    return fake


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


# Trees of arguments.


def _substitute(value: Any, values: Mapping[torch.fx.Node, Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return values[value]
    if isinstance(value, (tuple, list)):
        return tuple(_substitute(item, values) for item in value)
    if isinstance(value, dict):
        return {key: _substitute(item, values) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_substitute(x, values) for x in (value.start, value.stop, value.step)))
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _tensors(value: Any) -> list[Value]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Value)]


def _distinct(value: Any) -> dict[Ref, Value]:
    return {operand.ref: operand for operand in _tensors(value)}


def _plain(example: Any) -> bool:
    """Whether nothing in it is a tensor (a number, a module, None)."""
    return not any(isinstance(leaf, torch.Tensor) for leaf in _leaves(example))


def _key(
    target: Any, args: Any, kwargs: Any, operands: dict[Ref, Value], autocast: torch.dtype | None
) -> Any:
    positions = {ref: index for index, ref in enumerate(operands)}
    layouts = tuple(
        (v.tensor.shape, v.tensor.stride, v.tensor.dtype, v.tensor.offset)
        for v in operands.values()
    )
    shared: dict[int, int] = {}
    aliases = tuple(shared.setdefault(v.tensor.storage, i) for i, v in enumerate(operands.values()))
    return (target, layouts, aliases, autocast, _frozen_key((args, kwargs), positions))


def _frozen_key(value: Any, positions: dict[Ref, int]) -> Any:
    if isinstance(value, Value):
        return ("value", positions[value.ref])
    if isinstance(value, (tuple, list)):
        return tuple(_frozen_key(item, positions) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen_key(item, positions)) for key, item in value.items())
    if isinstance(value, (int, float, bool, str)):
        return (type(value), repr(value))
    return repr(value) if isinstance(value, slice) else value


def _freeze(value: Any, slots: dict[Ref, _Slot]) -> Any:
    if isinstance(value, Value):
        return slots[value.ref]
    if isinstance(value, (tuple, list)):
        return tuple(_freeze(item, slots) for item in value)
    if isinstance(value, dict):
        return {key: _freeze(item, slots) for key, item in value.items()}
    return value


def _cuda_args(value: Any, fakes: dict[Ref, torch.Tensor]) -> Any:
    """Operands as fake CUDA tensors, devices as CUDA, lists as lists again."""
    if isinstance(value, Value):
        return fakes[value.ref]
    if isinstance(value, (tuple, list)):
        return [_cuda_args(item, fakes) for item in value]
    if isinstance(value, dict):
        return {key: _cuda_args(item, fakes) for key, item in value.items()}
    if isinstance(value, torch.device):
        return _DEVICE
    return value


def _fill(value: Any, made: Mapping[_Slot, Value]) -> Any:
    if isinstance(value, _Slot):
        return made[value]
    if isinstance(value, tuple):
        return tuple(_fill(item, made) for item in value)
    return value


def _arg(value: Any, made: Mapping[_Slot, Value]) -> Any:
    """One argument as a record holds it."""
    if isinstance(value, _Slot):
        return made[value].ref
    if isinstance(value, Value):
        return value.ref
    if isinstance(value, (tuple, list)):
        return tuple(_arg(item, made) for item in cast("Sequence[Any]", value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return hint(value)
    if isinstance(value, complex):
        return Symbol(repr(value))
    return Symbol(str(value))


def _returned(result: Any) -> list[Any]:
    if result is None:
        return []
    return list(_leaves(result))


# Operators.


def _schema_values(target: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Each schema argument of an operator with the value given for it."""
    if not isinstance(target, torch._ops.OpOverload):
        return
    positional = [argument for argument in target._schema.arguments if not argument.kwarg_only]
    yield from zip(positional, args, strict=False)
    by_name = {argument.name: argument for argument in target._schema.arguments}
    for name, value in kwargs.items():
        if name in by_name:
            yield by_name[name], value


def _qualified(target: Any) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _op_name(target: Any) -> str:
    if isinstance(target, (torch._ops.OpOverload, _Method)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module = getattr(target, "__module__", "") or ""
    return f"{module}.{getattr(target, '__name__', type(target).__name__)}".lstrip(".")


def _short(op: str) -> str:
    """`aten._unsafe_view.default` as `unsafe_view`."""
    return op.split(".")[1].strip("_") if "." in op else op


@contextmanager
def _autocast(dtype: torch.dtype | None) -> Generator[None, None, None]:
    """CUDA autocast without a GPU: `torch.autocast` switches itself off where there is none."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before[1])
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])


# Where a node comes from.


def _data_dependent(
    node: torch.fx.Node, outer: torch.fx.Node | None, error: UnknownSize
) -> CaptureError:
    source = _source(node, outer)
    where = f"{source.file}:{source.line}: " if source else ""
    return CaptureError(
        f"{where}the size of what {_op_name(node.target)} returns depends on the values of a "
        f"tensor ({error}); write it with a fixed size, for example with a mask or torch.where"
    )


def _source(node: torch.fx.Node, outer: torch.fx.Node | None) -> Source | None:
    trace = node.meta.get("stack_trace") or (outer.meta.get("stack_trace") if outer else None)
    return source_of(trace) if trace else None


def _module(node: torch.fx.Node, outer: torch.fx.Node | None) -> str:
    """The path of the innermost module, `layers.0.mlp`; empty for the model itself."""
    stack = node.meta.get("nn_module_stack") or (outer.meta.get("nn_module_stack") if outer else {})
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return re.sub(r"^L\['self'\]\.?", "", path)


__all__ = ["Launcher", "Value", "describe", "hint", "identifier"]
