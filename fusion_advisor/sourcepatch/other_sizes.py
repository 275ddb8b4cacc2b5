"""A model at other sizes: which of its numbers follow from sizes, and groups at a larger batch.

A kernel holds the numbers of the graph, and serves other sizes; a number that Python or torch made
of a size is right for that size alone. Every dimension of every input is varied, and every whole
number that a factory is given: all at once where the model takes that, else those that are equal,
else each by itself. A dimension of one element is no axis of a kernel: what is written at a batch
of one serves that alone, what is written at a batch of two serves any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from fusion_advisor.codegen.eager_reference import RESHAPES, Numbers, numbers_of
from fusion_advisor.codegen.interface import Interface, interface
from fusion_advisor.codegen.kernel_file import fixed_axes, origins
from fusion_advisor.cost.dataflow import Dataflow, Variation, dataflow
from fusion_advisor.fusion.decide import Decision, deciding
from fusion_advisor.ir.graph import Graph, Node, Ref
from fusion_advisor.ir.scenario import Sizes
from fusion_advisor.ops import REGISTRY
from fusion_advisor.rulebook.schema import Rulebook

SIZED = ("aten.view.default", "aten._unsafe_view.default", "aten.expand.default")
"""Ops that are given the sizes of their result, which follow from those of the inputs."""

_KINDS = (0, 1, 2)
"""Order in which the other values of a size are tried."""
_Place = tuple[int, int]
"""A tensor of the inputs, by its number, and a dimension of it."""
Captures = Callable[[Sequence[Sizes]], Sequence[Graph | None]]
"""Captures the model at other sizes; None where the model does not take them."""


@dataclass(frozen=True)
class ResizedModel:
    """The model as it ran at other sizes."""

    sizes: Sizes
    flow: Dataflow

    @property
    def said(self) -> str:
        """The sizes in words."""
        given = [node for node in self.flow.nodes if node.kind == "input" and node.outputs]
        shapes = dict.fromkeys(" x ".join(map(str, node.out.shape)) for node in given)
        built = [f"{other} for {one} in get_init_inputs()" for one, other in self.sizes.built]
        return f"at {' and '.join([*shapes, *built])}"

    @property
    def has_one(self) -> bool:
        """Whether a dimension has one element that had more."""
        return any(size == 1 for _, _, size in self.sizes.inputs)

    @property
    def beyond_rows(self) -> bool:
        """Whether more than the number of rows differs."""
        return bool(self.sizes.built) or any(dim for _, dim, _ in self.sizes.inputs)


def capture_resized(
    flow: Dataflow, captures: Captures
) -> tuple[list[ResizedModel], ResizedModel | None]:
    """A model at three other sizes of each dimension of its inputs, and at two of each number that
    it is built with, as far as it takes them; and which of them is that of a larger batch, where it
    was given a batch of one."""
    places = {
        (number, dim): size
        for number, node in enumerate(n for n in flow.nodes if n.kind == "input" and n.outputs)
        for dim, size in enumerate(node.out.shape)
        if size
    }
    known: dict[Sizes, Dataflow | None] = {}
    empty = flow.annotated.graph.empty

    def capture(wanted: Iterable[Sizes]) -> None:
        new = [each for each in dict.fromkeys(wanted) if each not in known and each != Sizes()]
        for sizes, graph in zip(new, captures(new), strict=True):
            known[sizes] = None
            if graph is not None and (empty or not graph.empty):
                known[sizes] = dataflow(graph, flow.annotated.device)

    def taken(sizes: Sizes) -> bool:
        """Whether the model launches the same there, so that the two can be compared."""
        there = known.get(sizes)
        return there is not None and alike(flow, there)

    def equal(dim: int, size: int) -> list[_Place]:
        return [place for place, other in places.items() if (place[1], other) == (dim, size)]

    batch = next((size for (_, dim), size in places.items() if dim == 0), 0)
    first = _varied(places, equal(0, batch), 0)
    whole = [_varied(places, places, kind) for kind in _KINDS]
    built = [
        _varied(places, [p for p, size in places.items() if size == one], kind, one)
        for one in flow.annotated.graph.built
        for kind in (0, 1)
    ]
    capture([first, *whole, *built])
    for kind in _KINDS:
        if taken(whole[kind]):
            continue
        together = {p: _varied(places, equal(p[1], size), kind) for p, size in places.items()}
        capture(together.values())
        left = [place for place in places if not taken(together[place])]
        capture(_varied(places, [place], kind) for place in left)
        groups = [[p for p, size in places.items() if size == places[place]] for place in left]
        capture(_varied(places, group, kind) for group in groups)
    numbers = [_varied({}, (), kind, one) for one in flow.annotated.graph.built for kind in (0, 1)]
    capture(n for n, both in zip(numbers, built, strict=True) if not taken(both))
    found = {s: ResizedModel(s, there) for s, there in known.items() if there is not None}
    return list(found.values()), found.get(first) if batch == 1 else None


def _varied(
    places: Mapping[_Place, int], which: Iterable[_Place], kind: int, built: int = 0
) -> Sizes:
    """Some dimensions, and a number that a factory is given, at one of their other values."""
    inputs = tuple((*place, _others(places[place])[kind]) for place in which)
    return Sizes(inputs, ((built, _others(built)[kind]),) if built > 0 else ())


def _others(size: int) -> tuple[int, int, int]:
    """Other values of a size: a smaller one, 1, and a larger one, where alone a number shows that
    cuts off what lies beyond it. A length may be limited, and have to be even."""
    if size <= 2:
        return (2, 3, 4) if size == 1 else (4, 1, 4)
    return (size // 2 if size % 2 == 0 else size - 1), 1, 2 * size


def size_numbers(
    flow: Dataflow, resized: Sequence[ResizedModel], described: Callable[[str], str] = str
) -> list[dict[str, str]]:
    """For each of other sizes the nodes, by name, that compute with numbers which follow from
    sizes, and what tells, with nodes as they are `described`: they have others there, in the same
    graph."""
    return [
        {
            one.name: _told(flow, each, one, (numbers_of(one), numbers_of(two)), described)
            for one, two in _pairs(flow, each.flow)
            if one.kind == "call" and numbers_of(one) != numbers_of(two)
        }
        for each in resized
    ]


def _told(
    flow: Dataflow,
    other: ResizedModel,
    node: Node,
    numbers: tuple[Numbers, Numbers],
    described: Callable[[str], str],
) -> str:
    """Describe in one line where a node has other numbers."""
    operand = next((ref for ref in node.refs() if ref in flow.annotated.tensors), None)
    tensors = [each.annotated.tensors for each in (flow, other.flow)]
    shapes = [" x ".join(map(str, each[operand].shape)) for each in tensors] if operand else []
    pairs = zip_longest(*numbers, fillvalue="none")
    here, there = next((a, b) for a, b in pairs if a != b)
    if operand is None or shapes[0] == shapes[1]:
        return f"it has {here}, and {there} {other.said}"
    return (
        f"it has {here} for {described(operand.node)} of {shapes[0]}, and {there} for {shapes[1]}"
    )


def spelled_sizes(
    flow: Dataflow, resized: Sequence[ResizedModel]
) -> list[dict[Ref, frozenset[int]]]:
    """For each of other sizes the results whose ops are given sizes that are others there, in the
    same graph, and in which dimensions."""
    found: list[dict[Ref, frozenset[int]]] = []
    for each in resized:
        differing = {
            Ref(one.name): frozenset(
                d for d, n in enumerate(one.out.shape) if n != two.out.shape[d]
            )
            for one, two in _pairs(flow, each.flow)
            if _is_told(one)
        }
        found.append({ref: dims for ref, dims in differing.items() if dims})
    return found


def _is_told(node: Node) -> bool:
    """Whether the reference of a node spells the sizes of its result."""
    op = REGISTRY.get(node.op)
    return node.op in RESHAPES or any(
        "{shape}" in text or "{size}" in text for text in (op.sizes.values() if op else ())
    )


def variations(flow: Dataflow, resized: Sequence[ResizedModel]) -> tuple[Variation, ...]:
    """Differences at each of other sizes, in the same graph."""
    rows = zip(resized, size_numbers(flow, resized), spelled_sizes(flow, resized), strict=True)
    return tuple(
        Variation(_differing(flow, each.flow), frozenset(numbers), given)
        for each, numbers, given in rows
    )


def _differing(flow: Dataflow, other: Dataflow) -> dict[Ref, frozenset[int]]:
    """Dimensions of tensors that have another size in the same graph."""
    return {
        Ref(one.name, output): frozenset(d for d, n in enumerate(a.shape) if n != b.shape[d])
        for one, two in _pairs(flow, other)
        for output, (a, b) in enumerate(zip(one.outputs, two.outputs, strict=True))
        if a is not None and b is not None and a.shape != b.shape
    }


def _pairs(one: Dataflow, two: Dataflow) -> Iterator[tuple[Node, Node]]:
    """The nodes of two graphs that launch the same; none where they do not."""
    return zip(one.nodes, two.nodes, strict=True) if alike(one, two) else iter(())


def widened(
    flow: Dataflow, wider: Dataflow | None, rulebook: Rulebook
) -> Callable[[Decision], Decision]:
    """Function from an accepted set of `flow` to the set that its kernel is written from: the same
    set in the graph of a larger batch, if it computes the same from the same tensors there and
    takes each size in which the graphs differ from its inputs; else the set itself."""
    if wider is None or not alike(flow, wider):
        return lambda decision: decision
    wider = replace(
        wider,
        varied=flow.varied, standing=flow.standing, asked=flow.asked, returned=flow.returned,
        called_together=flow.called_together,
    )  # fmt: skip
    decided = deciding(wider, rulebook)

    def chosen(decision: Decision) -> Decision:
        there = decided(decision.subject.launches)
        return there if there.accepted and _serves(decision, there) else decision

    return chosen


@dataclass(frozen=True)
class Serving:
    """Comparison of sets of launches by what their kernels serve; kernels are written from what
    `at` gives."""

    at: Callable[[Decision], Decision]
    rulebook: Rulebook
    _known: dict[tuple[int, ...], Interface] = field(
        default_factory=dict[tuple[int, ...], Interface]
    )

    def same(self, one: Decision, other: Decision) -> bool:
        """Whether the kernels of two sets compute the same, copies aside."""
        if one.subject.plan is None or other.subject.plan is None or _ops(one) != _ops(other):
            return False
        return self._of(one).computes == self._of(other).computes

    def reference(self, decision: Decision) -> str:
        """Text of the reference of a set's kernel."""
        return self._of(decision).reference

    def serves(self, one: Decision, other: Decision) -> bool:
        """Whether the kernel of the first set, which has the reference of the second's, asks the
        same and holds no shorter rows than a kernel of the second's own would."""
        mine, theirs = (self.at(each).subject.plan for each in (one, other))
        if mine is None or theirs is None or mine.schedule != theirs.schedule:
            return False
        held, needed = (
            max((step.block + step.rest for step in plan.steps if step.inner), default=0)
            for plan in (mine, theirs)
        )
        return held >= needed and self._of(one) == self._of(other)

    def _of(self, decision: Decision) -> Interface:
        launches = decision.subject.launches
        if launches not in self._known:
            self._known[launches] = interface(self.at(decision), self.rulebook)
        return self._known[launches]


def _ops(decision: Decision) -> list[str]:
    """The launches of a set that compute something."""
    subject = decision.subject
    ops = [subject.flow.nodes[number].op for number in subject.launches]
    return [op for op in ops if op != "aten.clone.default"]


def alike(one: Dataflow, two: Dataflow) -> bool:
    """Whether two graphs launch the same, sizes and numbers aside."""
    return _launched(one) == _launched(two)


def _launched(flow: Dataflow) -> list[object]:
    ranks = [[each and len(each.shape) for each in node.outputs] for node in flow.nodes]
    return [(node.name, node.op, rank) for node, rank in zip(flow.nodes, ranks, strict=True)]


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
