"""Lifetimes of a graph's tensors in eager's order: memory over the run, and what a training step
saves for backward.

Memory is that of storages, each up to its last element. A tensor that exists before the graph runs
(parameter, buffer, state of an optimizer, input) lives all the time. Another lives from the launch
that makes it to the last that reads it, through whatever view, and what the graph returns to the
end. What autograd hands to one of its functions, saved tensors and gradients, lives until the last
launch of that function; what the function makes for itself, until it has made a tensor that others
read, as the parts of a C++ expression do. Beside tensors there are the workspaces that PyTorch
keeps for cuBLAS from the first step on, one for each thread that launches products (forward's, and
autograd's for backward), and what a launch takes for itself while it runs. The allocator's
rounding, the workspaces of cuDNN and the CUDA context are not counted.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

from fusion_advisor.cost.annotate import Annotated
from fusion_advisor.cost.leaner import AHEAD, LeanerWay, leaner_ways
from fusion_advisor.cost.times import time_model
from fusion_advisor.ir.graph import Graph, Node, Ref, Source, Tensor
from fusion_advisor.rulebook.schema import Workspaces


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Storage from the position of the node that makes it to that of its last use; `bytes` up to
    its last element. `given`: it exists before the graph runs."""

    first: int
    last: int
    bytes: int
    given: bool


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """Storage that a forward pass keeps for backward: the node that makes it with its layout, the
    forward nodes whose backward reads it, and a way to keep less, None where none is known."""

    name: str
    tensor: Tensor
    bytes: int
    source: Source | None
    saved_by: tuple[str, ...]
    alternative: LeanerWay | None = None


@dataclass(frozen=True, slots=True)
class HeldBytes:
    """Bytes alive while a node runs."""

    node: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory over a run, in eager's order, without the allocator's rounding: the node at its peak
    and the bytes there by what they are for, and the bytes alive while each node runs."""

    peak_bytes: int = 0
    at: str = ""
    parts: dict[str, int] = field(default_factory=dict[str, int])
    curve: tuple[HeldBytes, ...] = ()


def lifetimes(graph: Graph) -> dict[int, Lifetime]:
    """Lifetime of each storage, by its number."""
    storage_of: dict[Ref, int] = {}
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, node in enumerate(graph.nodes):
        for ref in node.refs():
            if ref in storage_of:
                last[storage_of[ref]] = step
        for n, tensor in enumerate(node.outputs):
            if tensor is not None:
                storage = storage_of[Ref(node.name, n)] = tensor.storage
                first.setdefault(storage, step)
                last[storage] = step
                sizes[storage] = max(sizes.get(storage, 0), _extent(tensor))
    ends = _function_ends(graph.nodes)
    made: dict[int, list[int]] = {}  # by each function, in order, and read by others
    returned = {storage_of[ref] for ref in graph.outputs if ref in storage_of}
    for storage, step in first.items():
        if storage in returned or last[storage] > ends[step][1]:
            made.setdefault(ends[step][1], []).append(step)
    for storage, step in last.items():
        begin, end = ends[step]
        if first[storage] < begin:
            last[storage] = end
        else:
            last[storage] = next((at for at in made.get(end, ()) if at >= step), step)
    last.update(dict.fromkeys(returned, len(graph.nodes)))
    return {
        storage: Lifetime(0, len(graph.nodes), size, True)
        if graph.nodes[first[storage]].kind != "call"
        else Lifetime(first[storage], last[storage], size, False)
        for storage, size in sizes.items()
    }


def _function_ends(nodes: Sequence[Node]) -> list[tuple[int, int]]:
    """For each node the first and the last of the nodes that autograd runs in one function with it:
    those that follow each other in the backward of one forward node."""
    found: list[tuple[int, int]] = []
    for (phase, of), run in groupby(nodes, key=lambda node: (node.phase, node.backward_of)):
        begin, steps = len(found), range(len(found), len(found) + len(list(run)))
        whole = phase == "backward" and of
        found += [(begin, steps[-1]) if whole else (step, step) for step in steps]
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes of the storage up to the last element of this tensor."""
    reach = sum(map(operator.mul, tensor.shape, tensor.stride)) - sum(tensor.stride)
    return (tensor.offset + reach + 1) * tensor.itemsize if tensor.numel else 0


def _alive(lives: Iterable[Lifetime], length: int) -> list[int]:
    """Bytes alive at each of `length` nodes, and at the end."""
    change = [0] * (length + 2)
    for life in lives:
        change[life.first] += life.bytes
        change[life.last + 1] -= life.bytes
    return list(accumulate(change[:-1]))


def peak_activation_bytes(graph: Graph) -> int:
    """Peak bytes of intermediates and results alive at once; tensors that exist before the graph
    runs are not counted."""
    made = (life for life in lifetimes(graph).values() if not life.given)
    return max(_alive(made, len(graph.nodes)))


def saved_tensors(annotated: Annotated) -> tuple[SavedTensor, ...]:
    """Storages that forward makes and backward reads, each once, in the order of forward. A
    parameter or an input that backward reads is alive anyway, and not among them."""
    graph = annotated.graph
    first: dict[int, tuple[Node, Tensor]] = {}
    storage_of: dict[Ref, int] = {}
    readers: dict[int, dict[str, None]] = {}
    for node in graph.nodes:
        reads = node.phase == "backward" and annotated.costs[node.name].bytes_read
        for ref in node.refs() if reads else ():  # `ones_like` reads nothing
            if ref in storage_of:
                readers.setdefault(storage_of[ref], {})[node.backward_of] = None
        for n, tensor in enumerate(node.outputs):
            if tensor is not None:
                storage_of[Ref(node.name, n)] = tensor.storage
                first.setdefault(tensor.storage, (node, tensor))
    names = {node.fx: node.name for node in graph.nodes if node.fx and node.phase in AHEAD}
    lives = lifetimes(graph)
    kept = {
        storage: lives[storage].bytes
        for storage, (node, _) in first.items()
        if storage in readers and node.kind == "call" and node.phase in AHEAD
    }
    leaner = leaner_ways(annotated, {s: node for s, (node, _) in first.items()}, kept)
    return tuple(
        SavedTensor(
            node.name, tensor, kept[storage], node.source,
            tuple(names[of] for of in readers[storage] if of in names), leaner.get(storage),
        )
        for storage, (node, tensor) in first.items()
        if storage in kept
    )  # fmt: skip


def memory(annotated: Annotated, workspaces: Workspaces) -> Memory:
    """Memory over the run of a graph."""
    graph = annotated.graph
    lives = lifetimes(graph)
    beside = _beside(annotated, workspaces.of(annotated.device))
    alive = [
        held + sum(more.values())
        for held, more in zip(_alive(lives.values(), len(graph.nodes)), beside, strict=False)
    ]
    curve = [(step, node.name) for step, node in enumerate(graph.nodes) if node.kind == "call"]
    if not curve:
        return Memory()
    step, at = max(curve, key=lambda each: alive[each[0]])
    held = tuple(HeldBytes(name, alive[step]) for step, name in curve)
    return Memory(alive[step], at, _parts(annotated, lives, step, beside[step]), held)


def _beside(annotated: Annotated, workspace: int) -> list[dict[str, int]]:
    """Bytes beside the tensors of the graph while each node runs, by what they are for."""
    nodes, costs = annotated.graph.nodes, annotated.costs
    products = (n for n in nodes if costs[n.name].pattern == "matmul" and costs[n.name].launches)
    threads = {node.phase == "backward" for node in products}
    return [
        {
            "unread parameters": annotated.graph.unread,
            "workspaces of cuBLAS": workspace * len(threads),
            "scratch of the launch": time_model().scratch_bytes(costs[node.name].work),
        }
        for node in nodes
    ]


def _parts(
    annotated: Annotated, lives: Mapping[int, Lifetime], step: int, beside: Mapping[str, int]
) -> dict[str, int]:
    """Bytes alive at one node by what they are for, the most first."""
    use: dict[int, str] = {}
    graph = annotated.graph
    saved = {each.tensor.storage for each in saved_tensors(annotated)}
    returned = {*graph.outputs}
    for node in graph.nodes:
        for n, tensor in enumerate(node.outputs):
            if tensor is None:
                continue
            known = use.setdefault(tensor.storage, _use(node, tensor.storage in saved))
            if known == "temporaries" and Ref(node.name, n) in returned:
                use[tensor.storage] = "gradients" if node.phase == "backward" else "results"
    found = {name: count for name, count in beside.items() if count}
    for storage, life in lives.items():
        if life.first <= step <= life.last:
            found[use[storage]] = found.get(use[storage], 0) + life.bytes
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _use(node: Node, saved: bool) -> str:
    if node.kind != "call":
        return "optimizer state" if node.phase == "optimizer" else f"{node.kind}s"
    return "saved for backward" if saved else "temporaries"
