"""Dynamo's graph as the ATen calls of a plain run, and the records of what they launch.

The graph is run once on fake tensors, in place operators made functional, parameters as inputs.
What it writes into its inputs is copied there at its end. Sizes stay symbolic in the graph and are
their hints in the records: nothing here asks for a size in a way that fixes it.
"""
# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, has_data_mutation, to_fun
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from fusion_advisor.frontend.decompositions import COMPOSITES, eager_dropout
from fusion_advisor.frontend.eager_trace import EagerTrace, composite_key
from fusion_advisor.frontend.expansions import hint, identifier
from fusion_advisor.frontend.export import Placeholder, Traced, launch
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.support.errors import CaptureError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lowered:
    """The ATen graph, with Dynamo's placeholders; its records; and the FX node of each tensor."""

    module: torch.fx.GraphModule
    graph: Graph
    origins: dict[Ref, torch.fx.Node]


def lower(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Lowered:
    """Lower the graph that Dynamo hands to a backend. Raises CaptureError where the graph cannot be
    replaced part by part without a change that the caller sees."""
    fake = fake_mode(inputs)
    values = [as_fake(value, fake) for value in inputs]

    def run(*given: Any) -> Any:
        with fx_traceback.preserve_node_meta():
            return torch.fx.Interpreter(module).run(*given)

    # What CUDA runs as several kernels is taken apart.
    with fake, eager_dropout(), enable_python_dispatcher():
        traced = make_fx(functional(run), decomposition_table=composites())(*values)
    traced.graph.eliminate_dead_code()
    _refuse_early_writes(traced)
    lowered = _recorded(traced, _placeholders(module, values))
    _keep_metadata(module, traced)
    return lowered


def record(module: torch.fx.GraphModule) -> Lowered:
    """Record what a graph that AOTAutograd has made launches, which is one of ATen calls already.
    Raises CaptureError where it cannot be replaced part by part."""
    _refuse_early_writes(module)
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return _recorded(module, _placeholders(module, [node.meta["val"] for node in nodes]))


def _recorded(traced: torch.fx.GraphModule, placeholders: list[Placeholder]) -> Lowered:
    launcher = EagerTrace()
    outputs = launch(Traced(traced, placeholders, "dynamo"), launcher)
    graph = Graph(tuple(launcher.nodes), outputs, captured_by="dynamo", source="torch.compile")
    return Lowered(traced, graph, launcher.origins)


def take_apart(lowered: Lowered, name: str) -> None:
    """Replace one call of the graph by the calls that its operator makes, which the records have
    already, and give those their FX nodes. A call that cannot be traced by itself stays whole."""
    call = next((node for node in lowered.module.graph.nodes if node.name == name), None)
    found = None if call is None else call.meta.get("val")
    if call is None or not isinstance(found, FakeTensor):
        return
    operator: Any = call.target
    key, operands = composite_key(operator), call.all_input_nodes
    if key is None:
        return

    def run(*given: Any) -> Any:
        values = dict(zip(operands, given, strict=True))
        return operator(*map_arg(call.args, values.get), **map_arg(call.kwargs, values.get))

    given = [node.meta["val"] for node in operands]
    parts = {operator: partial(operator._op_dk, key)}
    try:
        with found.fake_mode, enable_python_dispatcher():
            traced = make_fx(run, decomposition_table=parts)(*given)
    except (RuntimeError, TypeError) as error:  # as where it asks for a symbolic size as a number
        _log.debug("%s kept whole: %s", operator, error)
        return
    made = [node for node in traced.graph.nodes if node.op == "call_function"]
    result = traced.graph.output_node().args[0]
    others = len(traced.graph.nodes) - len(made) - len(operands) - 1
    if others or any(map(_writes, made)) or not isinstance(result, torch.fx.Node):
        return
    copies = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
    with lowered.module.graph.inserting_before(call):
        lowered.module.graph.graph_copy(traced.graph, copies)
    whole = copies[result]
    launches = (launched for launched in lowered.graph.nodes if launched.fx == name)
    for node in made:
        copies[node].meta = {**call.meta, **node.meta}
    for launched, node in zip(launches, made, strict=False):
        if launched.op != str(node.target):
            break
        lowered.origins[Ref(launched.name)] = copies[node]
    call.replace_all_uses_with(whole)
    lowered.origins.update({ref: whole for ref, node in lowered.origins.items() if node is call})


def composites() -> dict[Any, Callable[..., Any]]:
    """The decomposition of each composite operator, without writes in place. A decomposition that
    calls its own operator, as a loss calls the loss of the elements, means the launch there."""
    within: set[Any] = set()

    def once(operator: Any, parts: Callable[..., Any]) -> Callable[..., Any]:
        def decomposed(*args: Any, **kwargs: Any) -> Any:
            if operator in within:
                return NotImplemented
            within.add(operator)
            try:
                return functional(partial(parts, **kwargs))(*args)
            finally:
                within.discard(operator)

        return decomposed

    return {operator: once(operator, parts) for operator, parts in COMPOSITES.items()}


def functional(run: Callable[..., Any]) -> Callable[..., Any]:
    """The run without writes in place, except for a copy at the end into each input that was
    written, as AOTAutograd has it. `torch.func.functionalize` would ask for sizes as numbers, which
    fixes them."""

    def functional(*given: Any) -> Any:
        below = torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize)
        with torch._C._ExcludeDispatchKeyGuard(below), FunctionalTensorMode():
            wrapped = pytree.tree_map(to_fun, given)
            found = run(*wrapped)
            written = [
                (old, new)
                for old, new in zip(given, wrapped, strict=True)
                if isinstance(new, FunctionalTensor) and has_data_mutation(new)
            ]

            def value(result: Any) -> Any:
                """Value of a result; of an input that was written and is given back, the input."""
                inside = ((old, new) for old, new in written if _in_one_memory(result, new))
                old, new = next(inside, (None, None))
                if new is None:
                    return from_fun(result)
                if not _is_one_view(result, new):  # where an input lies is nothing to build upon
                    raise CaptureError("it returns a part of an input which it writes")
                return old

            results = pytree.tree_map(value, found)
            copies = [(old, from_fun(new)) for old, new in written]
        for old, new in copies:
            old.copy_(new)
        return results

    return functional


def _in_one_memory(result: Any, written: torch.Tensor) -> bool:
    """Whether a result of a functional run lies in an input that it wrote."""
    if not isinstance(result, FunctionalTensor):
        return False
    return result.untyped_storage()._cdata == written.untyped_storage()._cdata


def _is_one_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors in one memory are the same elements in the same order."""
    if one.dim() != other.dim():
        return False
    mine, its = ((t.storage_offset(), *t.shape, *t.stride()) for t in (one, other))
    return all(statically_known_true(a == b) for a, b in zip(mine, its, strict=True))


def fake_mode(inputs: Sequence[Any]) -> FakeTensorMode:
    """The fake mode that Dynamo gives to backends; its shape environment holds the guards."""
    context = TracingContext.try_get()
    if context is not None and context.fake_mode is not None:
        return context.fake_mode
    found = (value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    return next(found, None) or FakeTensorMode()


def as_fake(value: Any, fake: FakeTensorMode) -> Any:
    """An input as Dynamo describes it: which of its sizes are symbolic, and where it comes from."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, FakeTensor) and value.fake_mode is fake:
        return value
    context = TracingContext.try_get()
    known = context.tensor_to_context.get(value) if context is not None else None
    source = getattr(known, "tensor_source", None)
    return fake.from_tensor(value, symbolic_context=known, source=source)


def _placeholders(module: torch.fx.GraphModule, values: Sequence[Any]) -> list[Placeholder]:
    """The inputs as the records name them; symbolic numbers become their hints."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [
        Placeholder(
            identifier(node.name.removeprefix("l_")),
            "parameter" if isinstance(value, torch.nn.Parameter) else "input",
            hint(value) if isinstance(value, (torch.SymInt, torch.SymFloat)) else value,
        )
        for node, value in zip(nodes, values, strict=True)
    ]


def _refuse_early_writes(traced: torch.fx.GraphModule) -> None:
    """Raise CaptureError where a write in place is not at the end: a functional graph is not the
    same to its caller there."""
    written: list[torch.fx.Node] = []
    for node in traced.graph.nodes:
        if _writes(node):
            written.append(node)
        elif written and node.op != "output":
            raise CaptureError(f"{written[-1].target} writes in place before {node.target}")


def _writes(node: torch.fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and schema is not None and schema.is_mutable


def _keep_metadata(module: torch.fx.GraphModule, traced: torch.fx.GraphModule) -> None:
    """Keep the metadata of Dynamo's graph that AOTAutograd and Inductor read: which inputs stay
    where they are."""
    traced.meta.update(module.meta)
    for name in [
        *traced._buffers
    ]:  # constants (`torch.tensor(2.0)`), which Dynamo knows no source of
        constant = traced._buffers.pop(name)
        setattr(traced, name, constant)
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(module, name):
            setattr(traced, name, getattr(module, name))
    given = (node for node in module.graph.nodes if node.op == "placeholder")
    made = (node for node in traced.graph.nodes if node.op == "placeholder")
    for old, new in zip(given, made, strict=True):
        new.meta = {**old.meta, **new.meta}
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
