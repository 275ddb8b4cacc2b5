"""A model at other sizes: which of its numbers follow from sizes, and groups at a larger batch.

A kernel holds the numbers of the graph, and serves other sizes; a number that Python made of a
size is right for that size alone. A dimension of one element is no axis of a kernel: what is
written at a batch of one serves that alone, what is written at a batch of two serves any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fusion_advisor.dataflow import Dataflow
from fusion_advisor.decide import Decision, deciding
from fusion_advisor.kernel_file import fixed_axes, origins
from fusion_advisor.ops import REGISTRY
from fusion_advisor.records import Node, Ref
from fusion_advisor.rulebook import Rulebook

SIZED = ("aten.view.default", "aten._unsafe_view.default", "aten.expand.default")
"""Ops that are told the sizes of their result, which follow from those of the inputs."""
_FILLED = ("aten.full.default", "aten.full_like.default", "aten.scalar_tensor.default")
"""Ops that are told sizes, and a number beside."""


def other_sizes(batch: int | None, length: int | None) -> Iterator[tuple[int, int | None]]:
    """At which other first and second dimensions of its inputs to see a model: the batch alone is
    another in the first. A length may be limited, and have to be even."""
    if batch:
        yield _other(batch), length
        if length and length > 1:
            yield _other(batch), _other(length)


def _other(size: int) -> int:
    if size <= 2:
        return 2 * size
    return size // 2 if size % 2 == 0 else size - 1


def size_numbers(flow: Dataflow, resized: Sequence[Dataflow]) -> frozenset[str]:
    """The nodes, by name, that compute with numbers which follow from sizes: they have others in
    the same graph at other sizes."""
    return frozenset(
        one.name
        for each in resized
        if _alike(flow, each)
        for one, two in zip(flow.nodes, each.nodes, strict=True)
        if one.kind == "call" and _numbers(one) != _numbers(two)
    )


def _numbers(node: Node) -> object:
    """What a launch computes with beside tensors and sizes."""
    op = REGISTRY.get(node.op)
    if node.op in _FILLED:
        return node.args[-1]
    if op is None or op.pattern in ("view", "creation", "allocation"):
        return None
    given = (*node.args, *(value for _, value in node.kwargs))
    return [value for value in given if isinstance(value, int | float)]


def told_sizes(flow: Dataflow, resized: Sequence[Dataflow]) -> dict[Ref, frozenset[int]]:
    """The results of views and the like that are told sizes which are others in the same graph at
    other sizes, and in which dimensions. A batch of one is left out: see `widened`."""
    found: dict[Ref, frozenset[int]] = {}
    for each in (each for each in resized if _alike(flow, each)):
        for one, two in zip(flow.nodes, each.nodes, strict=True):
            if one.op in SIZED:
                sizes = zip(one.out.shape, two.out.shape, strict=True)
                differ = frozenset(d for d, (a, b) in enumerate(sizes) if a != b and a > 1)
                ref = Ref(one.name)
                found[ref] = found.get(ref, frozenset()) | differ
    return found


def widened(
    flow: Dataflow, wider: Dataflow | None, rulebook: Rulebook
) -> Callable[[Decision], Decision]:
    """Of an accepted set of `flow`, what its kernel is written from: the same set in the graph of a
    larger batch, if it computes the same from the same tensors there and takes each size in which
    the graphs differ from its inputs; else itself."""
    if wider is None or not _alike(flow, wider):
        return lambda decision: decision
    decided = deciding(wider, rulebook)

    def chosen(decision: Decision) -> Decision:
        there = decided(decision.subject.launches)
        return there if there.accepted and _serves(decision, there) else decision

    return chosen


def _alike(one: Dataflow, two: Dataflow) -> bool:
    """Whether two graphs launch the same, sizes and numbers aside."""
    return [(n.name, n.op) for n in one.nodes] == [(n.name, n.op) for n in two.nodes]


def _serves(decision: Decision, there: Decision) -> bool:
    flow, wider, plan = decision.subject.flow, there.subject.flow, there.subject.plan
    one, two = decision.subject.expressed, there.subject.expressed
    if one is None or two is None or plan is None or one.draws:
        return False
    if (one.inputs, one.outputs, one.dims.keys()) != (two.inputs, two.outputs, two.dims.keys()):
        return False
    read = origins(plan.region, fixed_axes(plan))
    for ref, dims in two.dims.items():
        at = flow.position[ref.node]
        if ref not in one.inputs and not _same(flow.nodes[at], wider.nodes[at]):
            return False
        sizes = (each.annotated.tensors[ref].shape for each in (flow, wider))
        for dim, here, larger in zip(dims, *sizes, strict=True):
            if here != larger and not (dim and all(axis in read for axis in dim)):
                return False
    return True


def _same(one: Node, two: Node) -> bool:
    """Whether two nodes are one call, but for the sizes of a view."""
    if one.op in SIZED:
        return one.args[0] == two.args[0]
    return (one.args, one.kwargs) == (two.args, two.kwargs)
