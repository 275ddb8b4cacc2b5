"""From a module and its inputs to FX graphs of ATen operators, with the fall-backs.

`torch.export` (non-strict) comes first; where it refuses, `make_fx` follows the same eager run
without export's contracts on inputs, outputs and state, and Dynamo is asked where it breaks the
graph: those places stay one graph here and are several under `torch.compile`. Dynamo's own pieces
are not used: between two of them it runs the model on the same fake tensors as `make_fx` does, so
it gets no further. Nothing here needs weights or a GPU: parameters and inputs are fake tensors.
"""
# torch carries Any in most of what is used here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import inspect
import logging
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export.graph_signature import InputKind
from torch.fx import traceback as fx_traceback
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree

from fusion_advisor.frontend.autocast import Casts, blocks_on_cpu
from fusion_advisor.frontend.checkpoints import Checkpoint, noted
from fusion_advisor.frontend.eager_trace import EagerTrace, autocast_of
from fusion_advisor.frontend.emitted_calls import own_kernels
from fusion_advisor.frontend.expansions import describe, identifier
from fusion_advisor.frontend.kept_ends import KeptEnds
from fusion_advisor.frontend.recurrent import whole_recurrent_layers
from fusion_advisor.frontend.source_tracer import Recorder, mark
from fusion_advisor.frontend.triton_calls import opaque_triton
from fusion_advisor.frontend.user_model import swappable
from fusion_advisor.ir.frames import choose, source_of_frame, source_of_traceback
from fusion_advisor.ir.graph import NodeKind, Ref, Source
from fusion_advisor.ir.source_trace import Trail
from fusion_advisor.support.errors import CaptureError

_KINDS: dict[InputKind, NodeKind] = {
    InputKind.USER_INPUT: "input",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


@dataclass(frozen=True, slots=True)
class Placeholder:
    """An argument of a graph: a tensor, a number or None, and its role in the model."""

    name: str
    kind: NodeKind
    value: Any
    path: str = ""
    """Path of a parameter, buffer or constant in the model, `layers.0.weight`."""


@dataclass(slots=True)
class Traced:
    """FX graphs in eager's order, with notes on how they were traced."""

    module: torch.fx.GraphModule
    placeholders: list[Placeholder]
    captured_by: str
    graph_breaks: list[str] = field(default_factory=list[str])
    differs: list[str] = field(default_factory=list[str])
    results: int | None = None
    """Number of leading outputs of the graph that are mutated state and no results."""
    trail: Trail | None = None
    checkpoints: Sequence[Checkpoint] = ()
    """Calls of `torch.utils.checkpoint`, by the numbers that the nodes have."""

    @property
    def traced_with(self) -> list[Placeholder]:
        """The placeholders that the words of the trail count: export lifts constants after the
        trace, and puts them before the inputs."""
        return [each for each in self.placeholders if each.kind != "constant"]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """One way to trace; `note` is what its use says about the graph."""

    name: str
    run: Callable[[], Traced]
    note: str = ""
    masks: bool = True


def trace(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake: FakeTensorMode,
    *,
    grad: bool = False,
    dynamic: bool = False,
    autocast: torch.dtype | None = None,
    trail: bool = False,
    references: str | None = None,
    breaks: bool = True,
    hint: str = "",
) -> Traced:
    """The graph of one forward pass, with the trail of its nodes on request; kernels of the package
    `references` are traced by their references. Without `breaks` Dynamo is not asked for graph
    breaks, which makes it forget what the process has compiled. CaptureError names the user's line
    when no graph can be had, with a hint at what else to give."""
    module, differs = _unwrap(module)
    if not grad:
        differs += _fast_paths(module)
    attempts: list[_Attempt] = [
        _Attempt("export", lambda: _export(module, args, kwargs, fake, dynamic)),
        _Attempt("make_fx", lambda: _make_fx(module, args, kwargs, fake)),
    ]
    if dynamic:
        static = "sizes are static: export with dynamic sizes refused"
        attempts.insert(
            1, _Attempt("export", lambda: _export(module, args, kwargs, fake, False), note=static)
        )
    if "transformers.masking_utils" in sys.modules:
        traced = "attention masks are materialised, as transformers does while it is traced"
        attempts += [replace(attempt, masks=False, note=traced) for attempt in attempts]
    failures: list[tuple[str, Exception]] = []
    for attempt in attempts:
        recorder = Recorder(module) if trail else None
        checkpoints: list[Checkpoint] = []
        try:
            with (
                own_kernels(module, references),
                _tracing(grad, attempt.masks, autocast, recorder, checkpoints) as seen,
            ):
                result = _without_levels(attempt.run(), fake)
                result.checkpoints = checkpoints
        except Exception as error:  # noqa: BLE001 whatever a tracer or a model raises
            failures.append((attempt.name, error))
            continue
        if recorder is not None:
            result.trail = recorder.trail(tuple(p.path or p.name for p in result.traced_with))
        if failures:
            result.differs.append(f"{failures[0][0]} refused: {_first_line(failures[0][1])}")
        if result.captured_by == "make_fx" and breaks:
            with _quiet(grad):
                _state_breaks(result, module, args, kwargs, fake)
        elif result.captured_by == "make_fx":
            result.differs.append("graph breaks are not known: Dynamo was not asked")
        if attempt.note:
            result.differs.append(attempt.note)
        result.differs += [*differs, *dict.fromkeys(seen)]
        return result
    raise _refusal(failures, module, hint)


def _refusal(
    failures: list[tuple[str, Exception]], module: torch.nn.Module, hint: str
) -> CaptureError:
    """The error of the plain run itself, in one line: the last attempt runs the model as
    eager does."""
    error = failures[-1][1]
    source = source_of_traceback(error) or source_of_traceback(failures[0][1])
    source = source or _forward_source(module)
    where = f"{source.file}:{source.line}: " if source else ""
    advice = hint or "correct the model or its inputs"
    if _depends_on_data(error):
        advice = "a size or a branch depends on the values of a tensor: make it a Python number"
    refusal = CaptureError(
        f"{where}forward raised {type(error).__name__}: {_first_line(error)}; {advice}"
    )
    refusal.__cause__ = error
    return refusal


def _forward_source(module: torch.nn.Module) -> Source | None:
    """The first line of the model's forward, for a call that failed before it."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return choose([(code.co_filename, code.co_firstlineno)]) if code else None


def _depends_on_data(error: Exception) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(
        names
        & {
            "DataDependentOutputException",
            "DynamicOutputShapeException",
            "GuardOnDataDependentSymNode",
            "UserErrorType",
        }
    ) or "depends on data" in str(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return _without_addresses(lines[0])[:300] if lines else "no message"


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# Ways to trace.


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake: FakeTensorMode,
    dynamic: bool,
) -> Traced:
    """Export's graph. Raises UnknownSize when a size in it has no number; a plain run may
    give one."""
    shapes = None
    if dynamic:
        auto = torch.export.Dim.AUTO
        bound = inspect.signature(module.forward).bind(*args, **kwargs)

        def sizes(leaf: Any) -> dict[int, Any] | None:
            return dict.fromkeys(range(leaf.dim()), auto) if torch.is_tensor(leaf) else None

        shapes = pytree.tree_map(sizes, dict(bound.arguments))
    with fake, KeptEnds():
        program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            describe(value)
    return from_program(program)


def _without_levels(traced: Traced, fake: FakeTensorMode) -> Traced:
    """The graph with the operators that `torch.vmap` makes of a function's, where torch's tracer
    has kept the function's own between calls that open and close a level."""
    from torch.fx.experimental.proxy_tensor import make_fx

    nodes = traced.module.graph.nodes
    if not any("functorch" in getattr(node.target, "__module__", "") for node in nodes):
        return traced

    def run(*given: Any) -> Any:
        with fx_traceback.preserve_node_meta():
            return torch.fx.Interpreter(traced.module).run(*given)

    with fake:
        traced.module = make_fx(run)(*(each.value for each in traced.placeholders))
    return traced


def from_program(program: torch.export.ExportedProgram) -> Traced:
    """The graph of an exported program, `.pt2` files included."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    placeholders: list[Placeholder] = []
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        value = node.meta.get("val")
        if value is None:
            value = getattr(spec.arg, "value", None)
        kind = _KINDS.get(spec.kind, "constant")
        name = spec.target if spec.target and kind != "input" else node.name
        path = spec.target or "" if kind != "input" else ""
        placeholders.append(Placeholder(identifier(name), kind, value, path))
    return Traced(program.graph_module, placeholders, "export")


def _make_fx(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake: FakeTensorMode,
) -> Traced:
    """The operators of one plain run, without export's checks on inputs, outputs and state."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with fake, KeptEnds():
        state = dict(module.named_parameters()) | dict(module.named_buffers())
        state = {name: _as_fake(fake, tensor) for name, tensor in state.items()}
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [_as_fake(fake, leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def run(state: dict[str, torch.Tensor], tensors: list[torch.Tensor]) -> Any:
            given = iter(tensors)
            filled = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
            inner_args, inner_kwargs = pytree.tree_unflatten(filled, spec)
            result = torch.func.functional_call(module, state, inner_args, inner_kwargs)
            return list(_tensors_in(result))

        vars(run)["_orig_mod"] = module  # whose modules torch notes in the nodes
        traced = make_fx(
            run,
            pre_dispatch=True,
            record_module_stack=True,
            record_stack_traces=True,
            _allow_non_fake_inputs=True,
        )(state, tensors)
    kinds = {name: "parameter" for name, _ in module.named_parameters()}
    placeholders = [
        Placeholder(identifier(name), "parameter" if name in kinds else "buffer", tensor, name)
        for name, tensor in state.items()
    ]
    names = _leaf_names(args, kwargs)
    for name, leaf in zip(names, leaves, strict=True):
        if isinstance(leaf, torch.Tensor):
            placeholders.append(Placeholder(identifier(name), "input", leaf))
    return Traced(traced, placeholders, "make_fx")


def _state_breaks(
    traced: Traced,
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake: FakeTensorMode,
) -> None:
    """Record where Dynamo breaks the graph, as `file:line: reason`."""
    args, kwargs = pytree.tree_map(partial(_as_fake, fake), (args, kwargs))
    try:
        with fake:
            explained = torch._dynamo.explain(module)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 the graph is there; only what is said of it suffers
        traced.differs.append(f"graph breaks are not known: Dynamo raised {_first_line(error)}")
        return
    for reason in explained.break_reasons:
        source = choose([(frame.filename, frame.lineno or 0) for frame in reason.user_stack])
        where = f"{source.file}:{source.line}: " if source else ""
        what, *more = (line.strip() for line in reason.reason.splitlines() if line.strip())
        why = next((line for line in more if line.startswith("Explanation: ")), "")
        text = _without_addresses(f"{what}. {why.removeprefix('Explanation: ')}".strip(". "))
        traced.graph_breaks.append(f"{where}{text}")


def _leaf_names(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    paths = pytree.tree_flatten_with_path((args, kwargs))[0]
    return ["input_" + "_".join(_key_text(key) for key in path[1:]) for path, _ in paths]


def _key_text(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", key)))


def _as_fake(fake: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, torch._subclasses.FakeTensor):
        return fake.from_tensor(value)
    return value


def _tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Every tensor a model returned, inside whatever object it returned."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            yield from _tensors_in(item, seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, seen)
    elif hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
        for item in vars(value).values():
            yield from _tensors_in(item, seen)


# What surrounds a trace.


@contextmanager
def _quiet(grad: bool) -> Generator[None, None, None]:
    """Silence torch's warnings and logs; gradients are as the scenario has them."""
    logger = logging.getLogger("torch")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextmanager
def _tracing(
    grad: bool,
    masks: bool,
    autocast: torch.dtype | None,
    recorder: Recorder | None,
    checkpoints: list[Checkpoint],
) -> Generator[list[str], None, None]:
    """Quiet torch, opaque Triton launches, CUDA's autocast; yields a list that collects what
    differs from eager. Each call of a checkpoint is added to `checkpoints`."""
    seen: list[str] = []
    with ExitStack() as stack:
        stack.enter_context(_quiet(grad))
        stack.enter_context(opaque_triton())
        stack.enter_context(whole_recurrent_layers())
        stack.enter_context(noted(checkpoints))
        stack.enter_context(swappable())
        common = "torch.cuda.amp.common.amp_definitely_not_available"
        stack.enter_context(mock.patch(common, return_value=False))
        stack.enter_context(mock.patch("torch.cuda.is_bf16_supported", return_value=True))
        stack.enter_context(mock.patch("torch.fx.proxy.CapturedTraceback", _user_frame(recorder)))
        stack.enter_context(mock.patch.object(torch.fx.GraphModule, "recompile", _recompile_later))
        proxies = "torch.fx.experimental.proxy_tensor._extract_tensor_metadata"
        stack.enter_context(mock.patch(proxies, _nothing))  # `val` has it all
        sizes = "torch.fx.experimental.symbolic_shapes._free_unbacked_symbols_with_path"
        stack.enter_context(mock.patch(sizes, _unbacked_symbols))
        if masks:
            stack.enter_context(_eager_masks(seen))
        # The launcher casts: here the model sees the dtypes, and may ask whether autocast is on.
        stack.enter_context(Casts().on_cpu())
        if autocast:
            stack.enter_context(autocast_of("cuda", autocast))
            stack.enter_context(autocast_of("cpu", autocast))
        stack.enter_context(blocks_on_cpu())
        if recorder is not None:
            stack.enter_context(recorder.following())
        yield seen


def _user_frame(recorder: Recorder | None) -> type[_UserFrame]:
    """The stand-in for a traceback, which asks the recorder for the number of each node."""
    return type("_RecordedFrame", (_UserFrame,), {"recorder": recorder}) if recorder else _UserFrame


class _UserFrame:
    """Stands in for torch's recorded traceback: the user's frame alone, ten times as fast."""

    recorder: Recorder | None = None

    def __init__(self, source: Source | None, step: int | None) -> None:
        self._source = source
        self._step = step

    @classmethod
    def extract(cls, **_: Any) -> _UserFrame:
        frame = sys._getframe(1)
        step = cls.recorder.evaluated(frame) if cls.recorder else None
        return cls(source_of_frame(frame), step)

    def summary(self) -> traceback.StackSummary:
        """One frame, called `forward` because torch drops what comes before such a frame, and the
        number of the step in the trail."""
        places: list[tuple[str, int]] = []
        if self._source is not None:
            places.append((self._source.file, self._source.line))
        if self._step is not None:
            places.append((mark(self._step), 1))
        frames = [
            traceback.FrameSummary(file, line, "forward", lookup_line=False, line="")
            for file, line in places
        ]
        return traceback.StackSummary.from_list(frames)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _unbacked_symbols(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """The result of torch's own search: {} where no such symbol is pending, without a walk."""
    pending = kwargs.get("pending")
    return {} if pending is not None and not pending else _search(*args, **kwargs)


_search = symbolic_shapes._free_unbacked_symbols_with_path

_recompile = torch.fx.GraphModule.recompile


def _recompile_later(module: torch.fx.GraphModule) -> None:
    """Make a graph write its Python code when it is first called, which most graphs never are."""

    def forward(self: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _recompile(self)
        return type(self).forward(self, *args, **kwargs)

    type(module).forward = forward


@contextmanager
def _eager_masks(seen: list[str]) -> Generator[None, None, None]:
    """Lets transformers skip attention masks as it does in eager.

    While it sees a trace it materialises them, and attention leaves the flash kernel.
    """
    masking = sys.modules.get("transformers.masking_utils")
    wanted = ("is_torchdynamo_exporting", "is_tracing", "find_packed_sequence_indices")
    if masking is None or not all(hasattr(masking, name) for name in wanted):
        yield
        return

    def unpacked(*_: Any, **__: Any) -> None:
        seen.append(
            "transformers' search for packed sequences (a few small kernels and a host sync) "
            "is left out"
        )

    with (
        mock.patch.object(masking, "is_torchdynamo_exporting", return_value=False),
        mock.patch.object(masking, "is_tracing", return_value=False),
        mock.patch.object(masking, "find_packed_sequence_indices", unpacked),
    ):
        yield


def unwrapped(module: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
    """The module inside the wrappers around a model, and a note on each wrapper. Raises
    CaptureError for FSDP and tensor parallelism, whose parameters are shards, and for a
    ScriptModule; no module is changed."""
    notes: list[str] = []
    _refuse_shards(module)
    while (held := _held(module)) is not None:
        module, what = held
        notes.append(f"the model is {what}")
    if isinstance(module, torch.jit.ScriptModule):
        raise CaptureError(
            "the model is a script, whose forward cannot be traced: give the module as it is "
            "before torch.jit.script or torch.jit.trace"
        )
    if getattr(module, "_compiled_call_impl", None) is not None:
        notes.append(f"the model is {_COMPILED}")
    return module, notes


def _unwrap(module: torch.nn.Module) -> tuple[torch.nn.Module, list[str]]:
    """Take wrappers off, also those inside the model, with a note on each."""
    module, notes = unwrapped(module)
    for name, child in [*module.named_modules(remove_duplicate=False)]:
        place = f"submodule {name}"
        held = _held(child)
        if held is not None:
            inner, what = held
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, inner)
            return module, [*notes, f"{place} is {what}", *_unwrap(module)[1]]
        if getattr(child, "_compiled_call_impl", None) is not None:
            child._compiled_call_impl = None
            if name:  # the model's own is noted
                notes.append(f"{place} is {_COMPILED}")
    return module, notes


_COMPILED = "compiled by torch.compile: captured as eager runs it"


def _held(module: torch.nn.Module) -> tuple[torch.nn.Module, str] | None:
    """The module in a wrapper with a note; None for a module that is no wrapper."""
    kind = type(module).__name__
    inner: Any = module
    if kind in ("DistributedDataParallel", "DataParallel"):
        return inner.module, f"wrapped in {kind}: captured as one replica, unwrapped"
    if kind == "OptimizedModule":
        return inner._orig_mod, _COMPILED
    return None


def _refuse_shards(module: torch.nn.Module) -> None:
    # Whoever uses it has imported it; nobody else should pay for that.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule) if fsdp else ()
    for name, child in module.named_modules():
        if isinstance(child, sharded):
            place = f"submodule {name}" if name else "the model"
            raise CaptureError(
                f"{place} is wrapped in {type(child).__name__}, whose parameters are shards: "
                "give the module before it is wrapped"
            )
    tensor = sys.modules.get("torch.distributed.tensor")
    part = tensor.DTensor if tensor else ()
    for name, held in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(held, part):
            raise CaptureError(
                f"{name} is a DTensor, of which each device has a part: "
                "give the module before it is parallelized, in the sizes of one device"
            )


def _fast_paths(module: torch.nn.Module) -> list[str]:
    """Fused paths that eager inference may take and tracing never does."""
    fused = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)
    kinds = {type(child).__name__ for child in module.modules() if isinstance(child, fused)}
    return [
        f"nn.{kind}: eager inference under no_grad may take its fused fast path, tracing does not"
        for kind in sorted(kinds)
    ]


def launch(traced: Traced, launcher: EagerTrace) -> tuple[Ref, ...]:
    """Feeds the traced graph to `launcher`; the references to what the model returns."""
    used = {n.name for n in traced.module.graph.nodes if n.op == "placeholder" and n.users}
    names = [n.name for n in traced.module.graph.nodes if n.op == "placeholder"]
    operands: list[Any] = []
    storages: dict[int, int] = {}
    words = {id(each): f"@{number}" for number, each in enumerate(traced.traced_with)}
    for placeholder, name in zip(traced.placeholders, names, strict=True):
        value = placeholder.value
        if isinstance(value, torch.Tensor) and (placeholder.kind == "input" or name in used):
            key = value.untyped_storage()._cdata
            made = launcher.tensor(placeholder.name, placeholder.kind, value, storages.get(key, -1))
            storages[key] = made.tensor.storage
            if id(placeholder) in words:
                launcher.values[words[id(placeholder)]] = made.ref.node, made.ref.output
            operands.append(made)
        else:
            operands.append(value)
    results = launcher.graph(traced.module, operands)
    return tuple(value.ref for value in _values_in(results))


def _values_in(results: Any) -> Iterator[Any]:
    if isinstance(results, (tuple, list)):
        for item in results:
            yield from _values_in(item)
    elif isinstance(results, dict):
        for item in results.values():
            yield from _values_in(item)
    elif hasattr(results, "ref"):
        yield results
