"""Stage: lower a set of graph nodes to one region, with its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.decisive import decisive_nodes, roughened
from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ir.graph import GivenNumber, Ref, Tensor
from fusion_advisor.ops import REGISTRY, state
from fusion_advisor.region.axes import Dims, NotExpressible
from fusion_advisor.region.builder import NARROW_FLOATS, Builder, Value
from fusion_advisor.region.region import Region, finish


@dataclass(frozen=True)
class Boundary:
    """Tensors that a set of nodes reads from memory and leaves in memory. `members` are the
    launches and the views between them, in the graph's order."""

    members: tuple[int, ...]
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


@dataclass(frozen=True)
class Expressed:
    """Region with the tensors that it stands for.

    `inputs[i]` is the tensor behind the region's input i (none is behind seed and offset, which
    come last), `outputs` are the stored tensors; `dims` gives every tensor inside the region its
    resolved axes, and `draws` gives every random node the number of its first draw and the tensor
    that eager would fill. `flips` names the values that decide a place, a truth or a draw and
    that the region rounds otherwise than eager; with `decides` something of that kind decides, a
    step included.
    """

    region: Region
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    members: tuple[int, ...]
    dims: dict[Ref, Dims]
    draws: dict[str, tuple[int, Tensor]]
    flips: tuple[str, ...] = ()
    decides: bool = False
    numbers: tuple[GivenNumber, ...] = ()
    """Numbers that the kernel is given beside its tensors."""

    @property
    def form(self) -> object:
        """Key that is equal where the same kernel serves, with its arguments in the same order."""
        region = self.region
        inputs = tuple((tensor.shape, tensor.stride, tensor.dtype) for tensor in region.inputs)
        return region.exprs, inputs, tuple(output.value for output in region.outputs)


def boundary(flow: Dataflow, launches: Iterable[int]) -> Boundary:
    """Find the views inside a set of launches, and the tensors that cross the set's border."""
    inside = set(launches)
    views: set[int] = set()
    inputs: dict[Ref, None] = {}

    def internal(ref: Ref) -> bool:
        number = flow.position[ref.node]
        if number in inside:
            return True
        if not flow.is_view(number) or not internal(flow.operands[number][0]):
            return False
        views.add(number)
        return True

    for number in sorted(inside):
        for ref in flow.operands[number]:
            if not internal(ref):
                inputs[ref] = None
    made = (
        Ref(flow.nodes[number].name, i)
        for number in sorted(inside)
        for i, tensor in enumerate(flow.nodes[number].outputs)
        if tensor is not None
    )
    outputs = list[Ref]()
    for ref in made:
        if any(use not in inside for use in flow.uses(ref)):
            chain = _views_of_its_expression(flow, ref)
            views.update(chain)
            outputs.append(Ref(flow.nodes[chain[-1]].name) if chain else ref)
    return Boundary(tuple(sorted(inside | views)), tuple(inputs), tuple(outputs))


def _views_of_its_expression(flow: Dataflow, ref: Ref) -> list[int]:
    """The views through which one expression of the source gives a tensor that it makes, where they
    are all that reads it: behind the copy of a `reshape`."""
    step, chain = flow.nodes[flow.position[ref.node]].step, list[int]()
    while step is not None:
        inner = [n for n in flow.readers.get(ref, ()) if flow.nodes[n].step == step]
        if not inner:
            return chain
        if ref in flow.returned or len(flow.readers[ref]) > 1 or not flow.is_view(inner[0]):
            return []
        chain += inner
        ref = Ref(flow.nodes[inner[0]].name)
    return chain


def fused_traffic(flow: Dataflow, border: Boundary) -> int:
    """Bytes that one kernel for the set would move: the launches' bytes, less those written and
    read only inside the set, less those that several launches read. Where a launch wrote a part of
    a tensor (a cache), the rest of the tensor is still read."""
    annotated = flow.annotated
    tensors = annotated.tensors
    made = {flow.nodes[i].name for i in border.members if flow.launches(i)}
    kept = {flow.base(ref) for ref in border.outputs}
    shared: dict[int, int] = {}
    read_of: dict[Ref, int] = {}
    seen_of: dict[Ref, list[Tensor]] = {}
    total = 0
    for number in border.members:
        node, cost = flow.nodes[number], annotated.costs[flow.nodes[number].name]
        if not cost.launches:
            continue
        total += cost.bytes
        for i, tensor in enumerate(node.outputs):
            if tensor is not None and Ref(node.name, i) not in kept:
                total -= min(tensor.bytes, cost.bytes_written)
        for base, refs in _by_base(flow, number).items():
            read = min(addressed_bytes(tensors[ref] for ref in refs), cost.bytes_read)
            if base.node in made:
                total -= min(read, annotated.costs[base.node].bytes_written)
                continue
            first = 0
            for element, ref in {flow.elements[ref]: ref for ref in refs}.items():
                own, before = min(tensors[ref].bytes, cost.bytes_read), shared.get(element, 0)
                first += max(own - before, 0)
                shared[element] = max(own, before)
            first = min(first, read)
            total -= read - first
            read_of[base] = read_of.get(base, 0) + first
            seen_of.setdefault(base, []).extend(tensors[ref] for ref in refs)
    # Views that overlap, a tensor and its halves say, are read once, whichever launches read them.
    return total - sum(
        max(read - addressed_bytes(seen_of[base]), 0) for base, read in read_of.items()
    )


def _by_base(flow: Dataflow, number: int) -> dict[Ref, list[Ref]]:
    """Operands of a launch, grouped by the tensor that they are views of."""
    found: dict[Ref, list[Ref]] = {}
    for ref in flow.operands[number]:
        found.setdefault(flow.base(ref), []).append(ref)
    return found


def lower_region(flow: Dataflow, border: Boundary) -> Expressed:
    """Lower the nodes one after the other into one builder. What feeds a discontinuous op is
    rounded where eager stores it, and is exact up to there. Raises NotExpressible where the region
    form cannot express a node or a view."""
    builder, decisive = Builder(), decisive_nodes(flow, border.members)
    tensors = flow.annotated.tensors
    values: dict[Ref, Value] = {}
    order: list[Ref] = []
    draws: dict[str, tuple[int, Tensor]] = {}
    shared = _seen_in_several_ways(flow, border) | {*_made_beside(flow, border)}

    def load(ref: Ref) -> Value:
        order.append(ref)
        return builder.input(tensors[ref])

    def value_of(ref: Ref) -> Value:
        if ref not in values:
            number = flow.position[ref.node]
            if ref in shared and flow.is_view(number):
                _state(number)
            else:
                values[ref] = load(ref)
        return values[ref]

    def _state(number: int) -> None:
        node = flow.nodes[number]
        op = REGISTRY.get(node.op)
        if op is None:
            raise NotExpressible(f"{node.op} is not in the registry")
        resolved = iter(flow.operands[number])
        first_draw = builder.streams
        narrow = all(made.dtype in NARROW_FLOATS for made in node.outputs if made)
        with builder.made(exactly=number in decisive.nodes, roughly=narrow):
            found = state(op, builder, node, lambda _: value_of(next(resolved)))
        if number in decisive.nodes:
            found = [value and builder.stored(value, value.logical) for value in found]
        if builder.streams > first_draw:
            draws[node.name] = first_draw, node.out
        for i, value in enumerate(found):
            if value is not None:
                values[Ref(node.name, i)] = value
        first = values.get(Ref(node.name))
        if first is not None and op.pattern != "view":
            builder.labels.setdefault(first.id, node.name)
            builder.results.setdefault(first.id, node.name)

    for number in border.members:
        _state(number)
    if draws and builder.given:
        raise NotExpressible("random numbers beside a number of the call")
    missing = [ref for ref in border.outputs if ref not in values]
    if missing:
        lost = f"output {missing[0].output} of {missing[0].node} has no meaning"
        raise NotExpressible(lost, final=False)
    numbers = {ref: value.id for ref, value in values.items()}
    builder.exprs[:] = decisive.loosened(builder.exprs, numbers)
    if wide := [numbers[ref] for ref in border.outputs if tensors[ref].dtype == "float32"]:
        builder.exprs[:] = roughened(builder.exprs, wide)
    region = finish(builder, [(values[ref], tensors[ref]) for ref in border.outputs])
    resolve = builder.axes.resolve
    dims = {ref: tuple(resolve(d) for d in value.dims) for ref, value in values.items()}
    flips = tuple(decisive.flips(flow, builder.exprs, numbers))
    return Expressed(
        region, tuple(order), border.outputs, border.members, dims, draws, flips,
        decisive.may_differ(builder.exprs, numbers), tuple(builder.given),
    )  # fmt: skip


def _seen_in_several_ways(flow: Dataflow, border: Boundary) -> set[Ref]:
    """Inputs that are views of one tensor with the same elements, or of another input: loaded once,
    as the nearest tensor that they are all views of. Only where every view on the way can be pulled
    through."""
    ways: dict[int, list[Ref]] = {}
    for ref in border.inputs:
        ways.setdefault(flow.elements[ref], []).append(ref)
    shared: set[Ref] = set()
    for refs in ways.values():
        if len({_layout(flow.annotated.tensors[ref]) for ref in refs}) > 1:
            chains = [_views_to(flow, ref, frozenset()) for ref in refs]
            nearest = next((r for r in chains[0] if all(r in chain for chain in chains)), None)
            for chain in chains:
                shared.update(chain if nearest is None else chain[: chain.index(nearest)])
    inputs = frozenset(border.inputs)
    for ref in border.inputs:
        way = _views_to(flow, ref, inputs - {ref})
        if way and flow.operands[flow.position[way[-1].node]][0] in inputs:
            shared.update(way)
    return shared


def _made_beside(flow: Dataflow, border: Boundary) -> Iterator[Ref]:
    """Yield the views of whole tensors that an expression of the source makes of what it is given,
    in a block in which it makes one of the launches: nothing beside it holds them."""
    if not flow.standing:
        return
    tensors = flow.annotated.tensors
    made = [flow.standing[number] for number in border.members if flow.launches(number)]
    place = [place for place in made[0] if all(place in each for each in made)][-1:]
    spans = {each[at] for each in made for at in place}
    blocks = {at for each in made for at in [*each][-1:]}
    for ref in border.inputs:
        for view in _views_to(flow, ref, frozenset()):
            number = flow.position[view.node]
            standing = flow.standing[number]
            whole = tensors[view].numel == tensors[flow.operands[number][0]].numel
            beside = any(standing.get(at) in spans for at in place)
            base = flow.nodes[flow.position[flow.base(view).node]]
            apart = base.step != flow.nodes[number].step  # not a product's own view of what it made
            if not (whole and apart and beside and blocks.issuperset([*standing][-1:])):
                break
            yield view


def _views_to(flow: Dataflow, ref: Ref, ends: frozenset[Ref]) -> list[Ref]:
    """Views from one tensor back to the first of `ends`, or to the base tensor."""
    way: list[Ref] = []
    while flow.is_view(number := flow.position[ref.node]):
        if not flow.annotated.costs[ref.node].fusible:
            break
        way.append(ref)
        ref = flow.operands[number][0]
        if ref in ends:
            break
    return way


def _layout(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride
