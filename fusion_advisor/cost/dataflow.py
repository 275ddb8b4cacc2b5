"""Data flow of a graph: dependencies with views seen through and in-place writes resolved.

A node is known here by its position in the graph. Sets of positions are Python integers used as bit
sets, so that reachability over thousands of nodes costs milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fusion_advisor.cost.annotate import Annotated, annotate, element_set
from fusion_advisor.ir.graph import Graph, Node, Ref
from fusion_advisor.ir.source_names import source_names
from fusion_advisor.rulebook.devices import Device


def bits(mask: int) -> Iterator[int]:
    """Yield the positions in a bit set, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True)
class Variation:
    """Difference of a run of the same launches at other sizes: dimensions of tensors; nodes, by
    name, that computed with other numbers; and dimensions of results that their ops were given."""

    dims: Mapping[Ref, frozenset[int]]
    numbers: frozenset[str] = frozenset()
    given: Mapping[Ref, frozenset[int]] = field(default_factory=dict[Ref, frozenset[int]])


@dataclass
class Dataflow:
    """Dependencies of an annotated graph.

    `operands[i]` are the tensors that node i reads, after in-place writes; `readers[ref]` the nodes
    that read a tensor directly (views among them). `before[i]` are the nodes that i waits for
    directly, `above[i]` all positions that must run before i, and `beyond[i]` those of `above[i]`
    that can never share a kernel with i: a node that nothing fuses with lies between.
    """

    annotated: Annotated
    position: dict[str, int] = field(default_factory=dict[str, int])
    operands: list[tuple[Ref, ...]] = field(default_factory=list[tuple[Ref, ...]])
    readers: dict[Ref, list[int]] = field(default_factory=dict[Ref, list[int]])
    before: list[set[int]] = field(default_factory=list[set[int]])
    above: list[int] = field(default_factory=list[int])
    beyond: list[int] = field(default_factory=list[int])
    fusible: list[bool] = field(default_factory=list[bool])
    results: tuple[Ref, ...] = ()
    """Tensors that the caller gets, in order, after in-place writes."""
    returned: set[Ref] = field(default_factory=set[Ref])
    elements: dict[Ref, int] = field(default_factory=dict[Ref, int])
    """Keys that are equal for tensors that address the same elements of one storage."""
    varied: Sequence[Variation] = ()
    """Differences of the model as it ran at other sizes."""
    asked: frozenset[tuple[str, float]] = frozenset()
    """Numbers of nodes, by name, that follow from no size: what calls a kernel asks for them."""
    standing: Sequence[Mapping[object, object]] = ()
    """Expressions of the source that each node is made in, by the blocks that these stand in, the
    outermost first; () where no source is read."""

    called_together: Mapping[tuple[int, ...], Sequence[tuple[int, ...]]] = field(
        default_factory=dict[tuple[int, ...], Sequence[tuple[int, ...]]]
    )
    """Sets of launches that one launcher may have although no tensor is between them, for one call
    of the source gives the results of all; each with the sets that are connected."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.annotated.graph.nodes

    @cached_property
    def source_names(self) -> Mapping[Ref, str]:
        """Name in the user's source of each tensor that has one."""
        return source_names(self.nodes, self.readers, self.returned)

    @cached_property
    def launches_of(self) -> Counter[str]:
        """Number of launches of each call of the exported program."""
        return Counter(node.fx for i, node in enumerate(self.nodes) if node.fx and self.launches(i))

    def is_view(self, number: int) -> bool:
        return self.annotated.costs[self.nodes[number].name].pattern == "view"

    def launches(self, number: int) -> bool:
        return self.annotated.costs[self.nodes[number].name].launches > 0

    @cached_property
    def ends(self) -> list[tuple[int, int]]:
        """Nodes that no other reads, each with the one that made what it is a view of."""
        read = set[int]().union(*self.before)
        names = ((i, node.name) for i, node in enumerate(self.nodes) if i not in read)
        return [(i, self.position[self.base(Ref(name)).node]) for i, name in names]

    def unread(self) -> set[Ref]:
        """Tensors that nothing reads, of launches that write into nothing: source that runs is not
        rid of them, so that they are results of what a patch puts in its place."""
        found = set[Ref]()
        for made in {made for _, made in self.ends if self.launches(made)}:
            node = self.nodes[made]
            given = [Ref(node.name, n) for n in range(len(node.outputs))]
            if not node.mutates and not any(True for ref in given for _ in self.uses(ref)):
                found.update(given)
        return found

    @cached_property
    def needless(self) -> tuple[int, ...]:
        """Positions of launches of memory-bound work that make what nothing reads, and of those
        that make something for these alone."""
        found = {self.position[ref.node] for ref in self.unread()}
        found = {i for i in found if self.annotated.costs[self.nodes[i].name].fusible}
        read = [ref for i in found for ref in self.operands[i]]
        return tuple(sorted({*found, *self.only_for(found, read)}))

    def only_for(self, numbers: Iterable[int], refs: Iterable[Ref]) -> list[int]:
        """Positions of the launches that make some tensors for these launches alone, back to matrix
        products; none that writes into a tensor, or makes another that is read elsewhere."""
        gone, todo, made = set(numbers), list(refs), list[int]()
        while todo:
            number = self.position[self.base(todo.pop()).node]
            node = self.nodes[number]
            if number in gone or node.mutates or not self.launches(number):
                continue
            given = (Ref(node.name, n) for n in range(len(node.outputs)))
            if all(i in gone for ref in given for i in self.uses(ref)):
                gone.add(number)
                made.append(number)
                multiplies = self.annotated.costs[node.name].pattern == "matmul"
                todo += () if multiplies else self.operands[number]
        return made

    def base(self, ref: Ref) -> Ref:
        """Tensor at the start of a chain of views."""
        while self.is_view(self.position[ref.node]):
            ref = self.operands[self.position[ref.node]][0]
        return ref

    def uses(self, ref: Ref) -> Iterator[int]:
        """Yield the positions of the launches that read a tensor, views seen through; -1
        for the caller."""
        if ref in self.returned:
            yield -1
        for reader in self.readers.get(ref, ()):
            if self.is_view(reader):
                for output in range(len(self.nodes[reader].outputs)):
                    yield from self.uses(Ref(self.nodes[reader].name, output))
            else:
                yield reader


def dataflow(graph: Graph, device: Device) -> Dataflow:
    """Build the dependencies of a graph, with the cost of each launch on a device."""
    annotated = annotate(graph, device)
    flow = Dataflow(annotated)
    nodes = annotated.graph.nodes
    flow.position = {node.name: i for i, node in enumerate(nodes)}
    known: dict[object, int] = {}
    for ref, tensor in annotated.tensors.items():
        flow.elements[ref] = known.setdefault(element_set(tensor), len(known))
    after, barred = _resolve_writes(flow)
    for i, node in enumerate(nodes):
        cost = annotated.costs[node.name]
        flow.fusible.append(
            cost.fusible and cost.launches > 0 and cost.memory_bound and i not in barred
        )
        before = {flow.position[ref.node] for ref in flow.operands[i]} | after.get(i, set())
        flow.before.append(before)
        flow.above.append(0)
        for p in before:
            flow.above[i] |= flow.above[p] | (1 << p)
    for i in flow.needless:  # a kernel that leaves it out saves what its source could
        flow.fusible[i] = False
    flow.beyond = _beyond(flow, flow.fusible, _views_that_pass(flow))
    return flow


def widened(flow: Dataflow, passing: Sequence[bool]) -> Dataflow:
    """Copy of a dataflow in which only the launches that are not `passing` bar fusion."""
    return replace(
        flow, fusible=list(passing), beyond=_beyond(flow, passing, [True] * len(passing))
    )


def timed(flow: Dataflow, times: Mapping[str, float]) -> Dataflow:
    """Copy of a dataflow whose launches take the given microseconds, by name; the others as
    predicted."""
    costs = flow.annotated.costs
    measured = {name: replace(costs[name], time_us=us) for name, us in times.items()}
    return replace(flow, annotated=replace(flow.annotated, costs={**costs, **measured}))


def _views_that_pass(flow: Dataflow) -> list[bool]:
    """Views whose consumers can pull elements through them."""
    return [flow.annotated.costs[node.name].fusible for node in flow.nodes]


def _beyond(flow: Dataflow, launches: Sequence[bool], views: Sequence[bool]) -> list[int]:
    """For each node, the nodes that feed it through a launch or a view that bars fusion."""
    beyond: list[int] = []
    for before in flow.before:
        out = 0
        for p in before:
            out |= beyond[p]
            passes = views[p] if flow.is_view(p) else launches[p] or not flow.launches(p)
            if not passes:
                out |= flow.above[p] | (1 << p)
        beyond.append(out)
    others = _other_passes(flow)
    return [mask | others[pass_of(node)] for mask, node in zip(beyond, flow.nodes, strict=True)]


def pass_of(node: Node) -> str:
    """Pass of a step that a node runs in: the loss runs with forward."""
    return "forward" if node.phase == "loss" else node.phase


def _other_passes(flow: Dataflow) -> dict[str, int]:
    """For each pass, the nodes of the others: autograd runs one after the other, and calls no
    kernel that is of two."""
    masks: dict[str, int] = {}
    for i, node in enumerate(flow.nodes):
        masks[pass_of(node)] = masks.get(pass_of(node), 0) | (1 << i)
    every = sum(masks.values())
    return {name: every ^ mask for name, mask in masks.items()}


def _resolve_writes(flow: Dataflow) -> tuple[dict[int, set[int]], set[int]]:
    """Point every reader at the tensor that it really reads. Returns the extra order between nodes
    (no read moves across a write that aliases it) and the in-place nodes that must stay as they
    are: those that write a tensor of the caller, or a tensor that is later read through an older
    view."""
    annotated, nodes = flow.annotated, flow.nodes
    touches: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        seen = {t.storage for t in node.outputs if t is not None}
        seen |= {annotated.tensors[r].storage for r in node.refs() if r in annotated.tensors}
        for storage in seen:
            touches.setdefault(storage, []).append(i)

    after: dict[int, set[int]] = {}
    barred: set[int] = set()
    current: dict[Ref, Ref] = {}
    for i, node in enumerate(nodes):
        refs = tuple(current.get(r, r) for r in node.refs() if r in annotated.tensors)
        flow.operands.append(refs)
        for ref in refs:
            readers = flow.readers.setdefault(ref, [])
            if not readers or readers[-1] != i:
                readers.append(i)
        for storage in () if flow.is_view(i) else node.mutates:
            after.setdefault(i, set()).update(other for other in touches[storage] if other < i)
            if _keeps_in_place(flow, i, storage, touches[storage]):
                barred.add(i)
                for other in touches[storage]:
                    if other > i:
                        after.setdefault(other, set()).add(i)
            else:
                written = Ref(node.name)
                for other in touches[storage]:
                    if other < i:
                        for n, tensor in enumerate(nodes[other].outputs):
                            if tensor is not None and tensor.storage == storage:
                                current[Ref(nodes[other].name, n)] = written
    flow.results = tuple(
        current.get(ref, ref) for ref in annotated.graph.outputs if ref in annotated.tensors
    )
    flow.returned = set(flow.results)
    return after, barred


def _keeps_in_place(flow: Dataflow, number: int, storage: int, touching: list[int]) -> bool:
    """Whether the write is visible beyond the value that the node returns."""
    nodes, tensors = flow.nodes, flow.annotated.tensors
    written = nodes[number].outputs[0] if nodes[number].outputs else None
    if written is None or written.storage != storage or len(nodes[number].mutates) > 1:
        return True
    older = {
        Ref(nodes[i].name, n)
        for i in touching
        if i < number
        for n, tensor in enumerate(nodes[i].outputs)
        if tensor is not None and tensor.storage == storage
    }
    if any(nodes[flow.position[ref.node]].kind != "call" for ref in older):
        return True
    different = {
        ref
        for ref in older
        if (tensors[ref].shape, tensors[ref].stride, tensors[ref].offset)
        != (written.shape, written.stride, written.offset)
    }
    later = {ref for i in touching if i > number for ref in nodes[i].refs()}
    return bool(different & (later | set(flow.annotated.graph.outputs)))
