"""From FX graphs to records at the level eager launches kernels on CUDA.

Each FX node is run again on fake CUDA tensors under a dispatch mode, and every operator that
arrives there becomes one record: `linear` becomes `view, t, addmm, view`, `cross_entropy` two
kernels. No GPU is needed. What a CPU build cannot expand (a cuDNN GRU) stays one whole node.

Values travel as `TracedValue`s (layout, storage, maker), never as the CPU tensors that tracing saw,
so that strides are CUDA's. Equal nodes on equal layouts are expanded once.
"""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import logging
import operator
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily
from torch.utils._pytree import tree_map

from fusion_advisor.frontend.checkpoints import number_of
from fusion_advisor.frontend.decompositions import COMPOSITES, PRIMITIVES
from fusion_advisor.frontend.expansions import (
    OPERAND,
    ExpandedLaunch,
    ExpandedOutput,
    Expansion,
    Slot,
    TracedValue,
    UnknownSize,
    describe,
    hint,
    identifier,
    leaves,
    returned,
    schema_values,
    symbolic,
    values_in,
)
from fusion_advisor.frontend.kept_whole import Method, kept_whole, op_name, whole_operator
from fusion_advisor.frontend.source_tracer import marked
from fusion_advisor.ir.frames import source_of
from fusion_advisor.ir.graph import Node, NodeKind, Phase, Ref, Source, Symbol, Tensor
from fusion_advisor.ops import REGISTRY
from fusion_advisor.support.errors import CaptureError

_log = logging.getLogger(__name__)

aten = torch.ops.aten
_DEVICE = torch.device("cuda", 0)
_COMPOSITE = (
    torch._C.DispatchKey.CompositeImplicitAutograd,
    torch._C.DispatchKey.CompositeExplicitAutograd,
)
_KERNEL_AND_PARTS = (
    torch._C.DispatchKey.CPU,
    torch._C.DispatchKey.CompositeImplicitAutograd,
)
_IGNORED = {
    "prim::device",
    "aten::_assert_tensor_metadata",
    "aten::_assert_async",
    "aten::_assert_scalar",
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
}
_LIFTS = {"aten::lift_fresh_copy", "aten::lift_fresh", "aten::lift"}
_AUTOCAST = torch.ops.higher_order.wrap_with_autocast
_SET_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled


class EagerTrace:
    """Collects the records of one model; feed it placeholders, then graphs, in eager's order."""

    def __init__(self, autocast: torch.dtype | None = None) -> None:
        self.nodes: list[Node] = []
        self.values: dict[str, tuple[str, int]] = {}
        """Node and output that each word of the trail stands for."""
        self.origins: dict[Ref, torch.fx.Node] = {}
        """The FX node that first returned each tensor; none for a constant of the graph, and for
        what lies inside an expansion."""
        self._autocast = autocast
        self._names: dict[str, int] = {}
        self._storages = 0
        self._known: dict[Any, Expansion] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def tensor(
        self,
        name: str,
        kind: NodeKind,
        example: torch.Tensor,
        storage: int = -1,
        phase: Phase = "forward",
    ) -> TracedValue:
        """Adds a tensor that is there before the graph runs; `storage` when it shares memory."""
        name = self._unique(name)
        layout = replace(describe(example), storage=self._storage() if storage < 0 else storage)
        self.nodes.append(Node(name, kind, kind, outputs=(layout,), phase=phase))
        return TracedValue(layout, Ref(name))

    def values_of(self, refs: Iterable[Ref]) -> dict[Ref, TracedValue]:
        """Tensors of the records so far, by their references."""
        nodes = {node.name: node for node in self.nodes}
        found = {ref: nodes[ref.node].outputs[ref.output] for ref in refs}
        return {ref: TracedValue(t, ref) for ref, t in found.items() if t is not None}

    @contextmanager
    def faking(self) -> Generator[Callable[[TracedValue], torch.Tensor]]:
        """Fake CUDA tensors, and the function that makes one for a tensor of the records."""
        with self._fake:
            yield _fake_tensor

    def follow(
        self, run: Callable[[], Any], operands: Sequence[tuple[TracedValue, torch.Tensor]],
        name: str, phase: Phase,
    ) -> None:  # fmt: skip
        """Adds every launch of Python code that works on fake CUDA tensors, `operands` in the
        records; what it computes on the host is no launch."""
        recorder = _DeviceRecorder([tensor for _, tensor in operands])
        with self._fake, torch.no_grad(), recorder:
            run()
        node = torch.fx.Graph().create_node("call_function", run, name=name)
        node.meta["phase"] = phase
        self._replay(recorder.expansion(None), [value for value, _ in operands], node, None, None)

    def graph(self, module: torch.fx.GraphModule, operands: Sequence[Any]) -> Any:
        """Adds every launch of `module` called with `operands` (Values, numbers); its outputs.
        Gradients are on or off afterwards as before: a graph may hold the switches of the model's
        own `torch.no_grad()`, the last of which restores the mode that the trace ran in."""
        with torch.set_grad_enabled(torch.is_grad_enabled()):
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
                step = marked(node.meta.get("stack_trace"))
                if step is not None and isinstance(values[node], TracedValue):
                    self.values[f"#{step}"] = values[node].ref.node, values[node].ref.output
            if node.op != "get_attr" and isinstance(values.get(node), TracedValue):
                self.origins.setdefault(values[node].ref, node)
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
            target = Method(str(node.target))
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
        if not values_in((args, kwargs)) and _plain(example):
            return example if example is not None else target(*args, **kwargs)
        return self._launch(node, target, args, kwargs, autocast, outer, example)

    def _host_read(
        self, node: torch.fx.Node, target: Any, args: Any, outer: torch.fx.Node | None
    ) -> None:
        """Record `.item()`, for which the host waits for the device. Sizes and arithmetic on sizes
        cost nothing."""
        if _qualified(target) == "aten::_local_scalar_dense" or "item" in str(target):
            self.nodes.append(
                Node(
                    self._unique(node.name),
                    "aten._local_scalar_dense.default",
                    args=_arg(args, {}),
                    source=_source(node, outer),
                    module=_module(node, outer),
                    fx=(outer or node).name,
                    phase=node.meta.get("phase", "forward"),
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
        for leaf in leaves((args, kwargs)):
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
        operands: dict[Ref, TracedValue],
        autocast: torch.dtype | None,
        example: Any,
    ) -> Expansion:
        slots = {ref: Slot(OPERAND, index) for index, ref in enumerate(operands)}
        whole = whole_operator(target, args, kwargs, slots)
        if whole is not None:
            return whole
        with ExitStack() as stack:
            stack.enter_context(self._fake)
            stack.enter_context(torch.no_grad())
            fakes = {ref: _fake_tensor(value) for ref, value in operands.items()}
            stack.enter_context(autocast_of("cuda", autocast))
            recorder = _Recorder(list(fakes.values()))
            try:
                with recorder:
                    result = _as_cuda_runs(target, recorder)(
                        *_cuda_args(args, fakes), **dict(_cuda_args(kwargs, fakes))
                    )
            except Exception as error:  # noqa: BLE001 a CPU build's lack is not the model's fault
                _log.debug("%s kept whole: %s", target, error)
                return kept_whole(target, args, kwargs, slots, example)
        return recorder.expansion(result)

    def _replay(
        self,
        expansion: Expansion,
        operands: list[TracedValue],
        node: torch.fx.Node,
        outer: torch.fx.Node | None,
        example: Any,
    ) -> Any:
        names = self._launch_names(expansion, node.name)
        source, module = _source(node, outer), _module(node, outer)
        made: dict[Slot, TracedValue] = {
            Slot(OPERAND, index): value for index, value in enumerate(operands)
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
                made[Slot(index, position)] = TracedValue(tensor, Ref(name, position))
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
                    step=marked(node.meta.get("stack_trace")),
                    fx=(outer or node).name,
                    phase=node.meta.get("phase", "forward"),
                    backward_of=node.meta.get("backward_of", ""),
                    checkpoint=number_of(node),
                )
            )
        result = _fill(expansion.result, made)
        self._state_dims(result, example)
        return result

    def _state_dims(self, result: Any, example: Any) -> None:
        """Replace the sizes of the last launch's outputs by the symbolic sizes that tracing saw."""
        if not isinstance(result, TracedValue) or not isinstance(example, torch.Tensor):
            return
        if not symbolic(example.shape) or not self.nodes:
            return
        last = self.nodes[-1]
        if last.name == result.ref.node and len(example.shape) == len(result.tensor.shape):
            dims = tuple(str(size) for size in example.shape)
            outputs = list(last.outputs)
            outputs[result.ref.output] = replace(result.tensor, dims=dims)
            self.nodes[-1] = replace(last, outputs=tuple(outputs))

    def _launch_names(self, expansion: Expansion, name: str) -> list[str]:
        """Names of an expansion's launches: the FX name for the only kernel (or the last view),
        suffixed names for the others."""
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


def _as_cuda_runs(target: Any, recorder: _Recorder) -> Any:
    """Function to call for an operator. One that has a kernel beside a definition by others is
    launched whole: a build for CPUs has CUDA's kernel of it no more, and calls the others."""
    if not isinstance(target, torch._ops.OpOverload):
        return target
    if all(target.has_kernel_for_dispatch_key(key) for key in _KERNEL_AND_PARTS):
        return partial(recorder.whole, target)
    return COMPOSITES.get(target) or PRIMITIVES.get(str(target), target)


class _Recorder(TorchDispatchMode):
    """Writes down each operator that reaches dispatch, operands as slots."""

    def __init__(self, operands: list[torch.Tensor]) -> None:
        super().__init__()
        self.launches: list[ExpandedLaunch] = []
        self._alive: list[Any] = [*operands]
        self._slots: dict[int, Slot] = {}
        self._homes: dict[int, Slot] = {}
        self._layouts: dict[Slot, Tensor] = {}
        for index, operand in enumerate(operands):
            slot = Slot(OPERAND, index)
            self._slots[id(operand)] = slot
            self._homes.setdefault(_storage_key(operand), slot)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        key = composite_key(func)
        if key is not None and (parts := self._in_parts(func, key, args, kwargs)):
            return parts[0]
        result = on_cuda(func, args, kwargs)
        if func is aten.convolution.default:
            result = _as_cudnn_lays_out(result, args[0], args[1])
        if _qualified(func) in _IGNORED or (
            func is aten.fill_.Scalar and self._made_full(args[0], args[1])
        ):
            return result
        self._record(func, args, kwargs, result)
        return result

    def whole(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Result of an operator that is written down as one launch."""
        with _pop_mode_temporarily():  # what follows is no launch
            result = _as_on_cpu(func, args, kwargs)
        self._record(func, args, kwargs, result)
        return result

    def _in_parts(
        self, func: Any, key: torch._C.DispatchKey, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """Result of an operator, written down as what it calls; None, with nothing written down,
        where some of that has no meaning, or cannot be called here."""
        before = [*self.launches], {**self._slots}, {**self._homes}
        try:
            with self:
                found = func._op_dk(key, *args, **kwargs)
            if all(each.op in REGISTRY for each in self.launches[len(before[0]) :] if each.kernel):
                return (found,)
        except (RuntimeError, TypeError) as error:
            _log.debug("%s kept whole: %s", func, error)
        self.launches, self._slots, self._homes = before
        return None

    def _made_full(self, tensor: torch.Tensor, value: float) -> bool:
        """Whether what was just allocated is filled, by an operator that calls both: one launch, as
        when it is called by its own name."""
        place = Slot(len(self.launches) - 1, 0)
        if self._slots.get(id(tensor)) != place or not self.launches:
            return False
        last = self.launches[-1]
        if last.op != "aten.empty_like.default":
            return False
        self.launches[-1] = replace(last, op="aten.full_like.default", args=(*last.args, value))
        return True

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        written = tuple(
            self._slot(tensor)
            for argument, value in schema_values(func, args, kwargs)
            if argument.alias_info is not None and argument.alias_info.is_write
            for tensor in leaves(value)
            if isinstance(tensor, torch.Tensor)
        )
        frozen_args = self._freeze(args)
        frozen_kwargs = tuple((name, self._freeze(value)) for name, value in kwargs.items())
        index = len(self.launches)
        outputs: list[ExpandedOutput | None] = []
        for position, tensor in enumerate(returned(result)):
            if not isinstance(tensor, torch.Tensor):
                outputs.append(None)
                continue
            slot = Slot(index, position)
            home = self._homes.setdefault(_storage_key(tensor), slot)
            outputs.append(ExpandedOutput(describe(tensor), None if home == slot else home))
            self._slots[id(tensor)] = slot
            self._alive.append(tensor)
        if outputs or written:
            self.launches.append(
                ExpandedLaunch(str(func), frozen_args, frozen_kwargs, tuple(outputs), written)
            )

    def expansion(self, result: Any) -> Expansion:
        """The launches recorded, with what the FX node itself returned."""
        return Expansion(tuple(self.launches), self._freeze(result))

    def _slot(self, tensor: torch.Tensor) -> Slot:
        slot = self._slots.get(id(tensor))
        if slot is None:
            slot = self._homes.get(_storage_key(tensor))
        if slot is None:
            slot = self._constant(tensor)
        return slot

    def _constant(self, tensor: torch.Tensor) -> Slot:
        """The slot of a tensor that is no operand: it was made below dispatch, and is recorded as
        an allocation."""
        slot = Slot(len(self.launches), 0)
        self.launches.append(
            ExpandedLaunch(
                "aten.empty.memory_format", (tuple(tensor.shape),), (),
                (ExpandedOutput(describe(tensor), None),), (),
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


class _DeviceRecorder(_Recorder):
    """Writes down the operators of CUDA tensors alone: those of the host launch nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        tensors = [x for x in leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        if tensors and not any(tensor.is_cuda for tensor in tensors):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def on_cuda(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operator for fake CUDA tensors; where a build for CPUs cannot say it, as its
    kernel for CPUs says it."""
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        if "not linked with support for cuda" not in str(error) or _shares(func):
            raise
    return _as_on_cpu(func, args, kwargs)


def _as_on_cpu(func: Any, args: Any, kwargs: Any) -> Any:
    """Result of an operator for fake CPU tensors laid out as fake CUDA tensors are, on CUDA."""

    def moved(device: torch.device) -> Any:
        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return device if isinstance(value, torch.device) else value
            return torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )

        return move

    cpu = tree_map(moved(torch.device("cpu")), (args, kwargs))
    return tree_map(moved(_DEVICE), func(*cpu[0], **cpu[1]))


def _shares(func: Any) -> bool:
    """Whether an operator writes an operand or returns a view of one."""
    return any(argument.alias_info is not None for argument in func._schema.arguments)


def composite_key(func: Any) -> torch._C.DispatchKey | None:
    """Key of the kernel by which an operator without a meaning of its own calls others, on every
    device; None for another operator. Those over many tensors have a kernel of their own on CUDA,
    which a build for CPUs does not know."""
    name = _qualified(func)
    if str(func) in REGISTRY or not name.startswith("aten::"):
        return None
    if name.startswith(("aten::_foreach", "aten::_fused")):
        return None
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return next((key for key in _COMPOSITE if has(func.name(), key.name)), None)


def _as_cudnn_lays_out(result: Any, x: torch.Tensor, weight: torch.Tensor) -> Any:
    """cuDNN answers channels-last when input or weight is; the CPU build's fakes do not."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(result.dim())
    if wanted is None or x.dtype == torch.float64:
        return result
    if wanted not in (suggest_memory_format(x), suggest_memory_format(weight)):
        return result
    return torch.empty_like(result, memory_format=wanted)


def _fake_tensor(value: TracedValue) -> torch.Tensor:
    tensor = value.tensor
    dtype = getattr(torch, tensor.dtype)
    if tensor.offset:
        base = torch.empty(tensor.offset + tensor.extent, dtype=dtype, device=_DEVICE)
        fake = base.as_strided(tensor.shape, tensor.stride, tensor.offset)
    else:
        fake = torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device=_DEVICE)
    return fake


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


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


def _distinct(value: Any) -> dict[Ref, TracedValue]:
    return {operand.ref: operand for operand in values_in(value)}


def _plain(example: Any) -> bool:
    """Whether a value holds no tensor (a number, a module, None)."""
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves(example))


def _key(
    target: Any,
    args: Any,
    kwargs: Any,
    operands: dict[Ref, TracedValue],
    autocast: torch.dtype | None,
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
    if isinstance(value, TracedValue):
        return ("value", positions[value.ref])
    if isinstance(value, (tuple, list)):
        return tuple(_frozen_key(item, positions) for item in value)
    if isinstance(value, dict):
        return tuple((key, _frozen_key(item, positions)) for key, item in value.items())
    if isinstance(value, (int, float, bool, str)):
        return (type(value), repr(value))
    return repr(value) if isinstance(value, slice) else value


def _cuda_args(value: Any, fakes: dict[Ref, torch.Tensor]) -> Any:
    """Operands as fake CUDA tensors, devices as CUDA, lists as lists again."""
    if isinstance(value, TracedValue):
        return fakes[value.ref]
    if isinstance(value, (tuple, list)):
        return [_cuda_args(item, fakes) for item in value]
    if isinstance(value, dict):
        return {key: _cuda_args(item, fakes) for key, item in value.items()}
    if isinstance(value, torch.device):
        return _DEVICE
    return value


def _fill(value: Any, made: Mapping[Slot, TracedValue]) -> Any:
    if isinstance(value, Slot):
        return made[value]
    if isinstance(value, tuple):
        return tuple(_fill(item, made) for item in value)
    return value


def _arg(value: Any, made: Mapping[Slot, TracedValue]) -> Any:
    """One argument in the form that a record holds."""
    if isinstance(value, Slot):
        return made[value].ref
    if isinstance(value, TracedValue):
        return value.ref
    if isinstance(value, (tuple, list)):
        return tuple(_arg(item, made) for item in cast("Sequence[Any]", value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return hint(value)
    if isinstance(value, complex):
        return Symbol(repr(value))
    if isinstance(value, torch.nn.Module):  # the body of a higher-order operator
        return Symbol(type(value).__name__)
    return Symbol(str(value))


def _qualified(target: Any) -> str:
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


def _short(op: str) -> str:
    """`aten._unsafe_view.default` as `unsafe_view`."""
    return op.split(".")[1].strip("_") if "." in op else op


@contextmanager
def autocast_of(device: str, dtype: torch.dtype | None) -> Generator[None, None, None]:
    """Autocast of a type of device, of CUDA without a GPU, too: `torch.autocast` switches itself
    off where there is none. None: it is off."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_enabled(device, dtype is not None)
    torch.set_autocast_dtype(device, dtype or before[1])
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def _data_dependent(
    node: torch.fx.Node, outer: torch.fx.Node | None, error: UnknownSize
) -> CaptureError:
    source = _source(node, outer)
    where = f"{source.file}:{source.line}: " if source else ""
    name = op_name(node.target)
    if error.number:
        return CaptureError(
            f"{where}{name} takes a number that is read from a tensor ({error}), for which the host"
            " waits for the GPU; keep it a tensor instead of item()"
        )
    return CaptureError(
        f"{where}the size of what {name} returns depends on the values of a tensor ({error}), for"
        " which the host waits for the GPU; write it with a fixed size, for example with a mask or"
        " torch.where"
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
