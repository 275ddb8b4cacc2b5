"""A captured graph as something that runs: torch.fx over the same ATen calls that eager launches,
with emitted kernels in place of their groups."""

# torch.fx carries Any in every node.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fusion_advisor.ir.graph import Arg, Graph, Node, Ref, Symbol, Tensor, iter_refs
from fusion_advisor.support.kernel_fault import KernelFault


@dataclass(frozen=True)
class ReplayedKernel:
    """A function in place of a group, with its input and result tensors as (node, output). It runs
    behind the first `after` nodes of the graph."""

    call: Callable[..., Any]
    taken: Sequence[tuple[str, int]]
    made: Sequence[tuple[str, int]]
    after: int


def replayed(
    graph: Graph,
    launchers: Sequence[ReplayedKernel],
    device: str,
    inputs: tuple[torch.Tensor, ...] | None = None,
) -> tuple[fx.GraphModule, tuple[torch.Tensor, ...]]:
    """Build the graph as a module of its inputs, parameters and buffers, with random ones where
    none are given. The module runs in the graph's order; nodes that no result needs and that write
    nothing are left out. Raises KernelFault where a node cannot be run from its record."""
    given = [node for node in graph.nodes if node.kind != "call" and node.outputs]
    tensors = inputs or tuple(_filled(graph, node, device) for node in given)
    built = fx.Graph()
    values: dict[Ref, fx.Node] = {}
    for node in given:
        values[Ref(node.name)] = built.placeholder(node.name)
    for step in _needed(_merged(graph, launchers), graph.outputs):
        if isinstance(step, Node):
            _call(built, step, values, device)
        else:
            _launch(built, step, values)
    built.output(tuple(values[ref] for ref in graph.outputs if ref in values))
    return fx.GraphModule(torch.nn.Module(), built), tensors


def opaque(launcher: ReplayedKernel, graph: Graph, device: str) -> ReplayedKernel:
    """The same kernel as an operator that torch.compile does not look into."""
    shapes = {Ref(n.name, i): t for n in graph.nodes for i, t in enumerate(n.outputs) if t}
    specs = [shapes[Ref(*ref)] for ref in launcher.made]

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        found = launcher.call(*inputs)
        return list(found) if isinstance(found, tuple) else [found]

    def fake(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        del inputs
        return [
            torch.empty_strided(s.shape, s.stride, dtype=getattr(torch, s.dtype), device=device)
            for s in specs
        ]

    operator_ = torch.library.custom_op(
        f"fusion_advisor_bench::launch_{next(_NUMBERS)}",
        run,
        mutates_args=(),
        schema="(Tensor[] inputs) -> Tensor[]",
    )
    operator_.register_fake(fake)

    def call(*inputs: torch.Tensor) -> Any:
        found = operator_(list(inputs))
        return tuple(found) if len(specs) > 1 else found[0]

    return replace(launcher, call=call)


_NUMBERS = itertools.count()
"""Numbers for names: an operator is registered for good, so each gets a name of its own."""


def _merged(graph: Graph, launchers: Sequence[ReplayedKernel]) -> Iterator[Node | ReplayedKernel]:
    waiting = sorted(launchers, key=lambda launcher: launcher.after)
    for number, node in enumerate(graph.nodes):
        while waiting and waiting[0].after <= number:
            yield waiting.pop(0)
        if node.kind == "call":
            yield node
    yield from waiting


def _needed(
    steps: Iterable[Node | ReplayedKernel], outputs: Sequence[Ref]
) -> Sequence[Node | ReplayedKernel]:
    """The steps that a result or a write in place depends on, in their order."""
    needed = {ref.node for ref in outputs}
    kept: list[Node | ReplayedKernel] = []
    for step in reversed(list(steps)):
        if isinstance(step, Node):
            if step.mutates or step.name in needed:
                kept.append(step)
                needed |= {ref.node for ref in step.refs()}
        elif needed & {name for name, _ in step.made}:
            kept.append(step)
            needed |= {name for name, _ in step.taken}
    return kept[::-1]


def _launch(built: fx.Graph, step: ReplayedKernel, values: dict[Ref, fx.Node]) -> None:
    result = built.call_function(step.call, tuple(values[Ref(*ref)] for ref in step.taken))
    for n, ref in enumerate(step.made):
        several = len(step.made) > 1
        values[Ref(*ref)] = (
            built.call_function(operator.getitem, (result, n)) if several else result
        )


def operator_of(node: Node) -> Any:
    """Overload that a call ran. Raises KernelFault where torch has none of that name."""
    found: Any = torch.ops
    for part in node.op.split("."):
        if not hasattr(found, part):
            raise KernelFault(f"{node.name}: {node.op} cannot be run from its record")
        found = getattr(found, part)
    return found


def _call(built: fx.Graph, node: Node, values: dict[Ref, fx.Node], device: str) -> None:
    found = operator_of(node)

    def argument(arg: Arg) -> Any:
        if isinstance(arg, Ref):
            return values[arg]
        if isinstance(arg, Symbol):
            return _constant(arg.text)
        if isinstance(arg, tuple):
            return [argument(item) for item in arg]
        return arg

    named = {
        key: torch.device(device) if key == "device" and value is not None else argument(value)
        for key, value in node.kwargs
    }
    if any(ref not in values for ref in iter_refs(node.args)):
        raise KernelFault(f"{node.name}: an operand of {node.op} is not a tensor of the graph")
    given = tuple(map(argument, node.args))
    result = built.create_node("call_function", found, given, named, name=node.name)
    returns = found._schema.returns
    if len(returns) == 1 and str(returns[0].type) == "Tensor":
        values[Ref(node.name)] = result
        return
    for n, tensor in enumerate(node.outputs):
        if tensor is not None:
            values[Ref(node.name, n)] = built.call_function(operator.getitem, (result, n))


def _constant(text: str) -> Any:
    value: Any = torch
    for part in text.removeprefix("torch.").split("."):
        value = getattr(value, part)
    return value


_INDEXED = ("aten.embedding.default", "aten.index_select.default", "aten.gather.default")


def _filled(graph: Graph, node: Node, device: str) -> torch.Tensor:
    """Random data as a model may hold it: small weights, indices of a table that has them."""
    spec = node.out
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.dtype == "bool":
        return _strided(spec, torch.ones(spec.shape, dtype=dtype, device=device))
    if not dtype.is_floating_point:
        most = _most(graph, Ref(node.name))
        return _strided(spec, torch.randint(0, most, spec.shape, device=device).to(dtype))
    values = torch.randn(spec.shape, device=device, dtype=torch.float32).mul_(0.02)
    return _strided(spec, values.to(dtype))


def _strided(spec: Tensor, values: torch.Tensor) -> torch.Tensor:
    if values.stride() == spec.stride or not spec.numel:
        return values
    laid = torch.empty_strided(spec.shape, spec.stride, dtype=values.dtype, device=values.device)
    narrow = tuple(slice(None) if stride else slice(0, 1) for stride in spec.stride)
    laid[narrow].copy_(values[narrow])
    return laid


def _most(graph: Graph, ref: Ref) -> int:
    """Exclusive upper bound of the integers that an input may hold: rows of the tables that it
    indexes, through views; two where it indexes none."""
    seen, found = {ref}, [1 << 30]
    shapes = {Ref(n.name, i): t for n in graph.nodes for i, t in enumerate(n.outputs) if t}
    for node in graph.nodes:
        refs = list(node.refs())
        if not seen & set(refs):
            continue
        if node.op in _INDEXED and refs[0] not in seen:
            dim = node.args[1] if node.op != _INDEXED[0] and isinstance(node.args[1], int) else 0
            found.append(shapes[refs[0]].shape[dim])
        elif node.kind == "call" and len(refs) == 1:
            seen |= {Ref(node.name, i) for i in range(len(node.outputs))}
    return min(found) if min(found) < 1 << 30 else 2
