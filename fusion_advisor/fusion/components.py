"""Stage: groups of launches that become one kernel.

Launches are gathered into components that could share kernels at all; each distinct component is
cut once by `partition`, and the cut is carried to all of its occurrences. Every set that the search
judged and rejected is kept as a candidate with its gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import networkx as nx
from networkx.utils import UnionFind

from fusion_advisor.cost.dataflow import Dataflow, bits, widened
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.gates.products import shortest_product
from fusion_advisor.fusion.lower import boundary, fused_traffic
from fusion_advisor.fusion.partition import (
    Component,
    Traffic,
    Verdict,
    compatible,
    connected,
    contracted,
    partition,
)
from fusion_advisor.ir.graph import Ref
from fusion_advisor.rulebook.schema import Rulebook

Decide = Callable[[Iterable[int]], Decision]


@dataclass
class DecidedSet:
    """Decided set with all of its occurrences, each as positions in the graph."""

    decision: Decision
    instances: list[tuple[int, ...]]
    parent: DecidedSet | None = None


_Set = TypeVar("_Set")


@dataclass
class Grouping(Generic[_Set]):
    """Accepted groups and rejected candidates, as the search found them or by name; the gap of the
    partition to the best one, as a share; and an upper limit on the bytes that any partition could
    save."""

    groups: list[_Set]
    candidates: list[_Set]
    gap: float = 0.0
    saveable_bytes: int = 0


def group(
    flow: Dataflow,
    decide: Decide,
    rulebook: Rulebook,
    kind: Callable[[tuple[int, ...]], object] = lambda component: None,
    unit: Callable[[int], object] = lambda launch: None,
    around: Callable[[int], Iterable[object]] = lambda launch: (),
    worth: Callable[[Sequence[int]], bool] = lambda component: True,
) -> Grouping[DecidedSet]:
    """Partition every component of a graph. Components of the same computation are cut alike,
    components of different `kind` separately. Launches behind each other of one `unit`, None
    aside, are not cut apart. Launches that one thing is `around` are offered as a set. A component
    that is not `worth` a search is one kernel or none."""
    result = Grouping[DecidedSet]([], [])
    by_shape: dict[object, list[tuple[int, ...]]] = {}
    for component in components(flow, flow.fusible):
        alike = _shape(flow, component), kind(component)
        by_shape.setdefault(alike, []).append(component)
    worst = 0.0
    # Where a set may be placed hangs on its own lines, too.
    known: dict[object, Verdict] | None = None if flow.standing else {}
    for occurrences in by_shape.values():
        most_sets = rulebook.search.judged_sets.count if worth(occurrences[0]) else 0
        worst = max(
            worst,
            _solve(
                flow, occurrences, decide, rulebook, result, unit, around, known, most_sets
            ),
        )  # fmt: skip
    result.gap = worst
    _break_cycles(flow, result)
    _maximal_regions(flow, decide, result, rulebook)
    return result


def components(flow: Dataflow, wanted: Sequence[bool]) -> list[tuple[int, ...]]:
    """Sets of wanted launches connected by tensors that can stay on chip, each in graph order. Two
    launches are connected when one reads the other's result, through views that can be pulled
    through, or when both read one full-sized tensor, and nothing bars them."""
    chosen = [i for i, is_wanted in enumerate(wanted) if is_wanted]
    graph: nx.Graph[int] = nx.Graph()
    graph.add_nodes_from(chosen)
    graph.add_edges_from((i, near) for i, near in _links(flow, chosen) if not _apart(flow, i, near))
    found = (tuple(sorted(members)) for members in nx.connected_components(graph))
    return sorted(found)


def _apart(flow: Dataflow, one: int, other: int) -> bool:
    return bool(flow.beyond[one] >> other & 1 or flow.beyond[other] >> one & 1)


def _links(flow: Dataflow, chosen: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Pairs of the chosen launches that a tensor connects."""
    wanted = set(chosen)
    siblings: dict[int, int] = {}
    tensors = flow.annotated.tensors
    for i in chosen:
        outputs = [t.numel for t in flow.nodes[i].outputs if t is not None]
        full = max(outputs + [tensors[ref].numel for ref in flow.operands[i]])
        for ref in flow.operands[i]:
            maker = flow.position[flow.base(ref).node]
            if maker in wanted:
                yield i, maker
            if tensors[ref].numel == full:
                key = flow.elements[ref]
                if key in siblings:
                    yield i, siblings[key]
                siblings[key] = i
    for together in flow.called_together:
        if wanted.issuperset(together):
            yield from ((i, together[0]) for i in together[1:])


def _shape(flow: Dataflow, component: tuple[int, ...]) -> object:
    """Key that is equal for components of the same computation with the same surroundings."""
    local = {number: i for i, number in enumerate(component)}
    inside = 0
    for number in component:
        inside |= 1 << number
    outer: dict[int, int] = {}
    rows: list[object] = []

    def seen(ref: Ref) -> object:
        number = flow.position[ref.node]
        if number in local:
            return local[number], ref.output
        if flow.is_view(number):
            base = flow.base(ref)
            if flow.position[base.node] in local:
                return (
                    "view",
                    flow.annotated.classes[ref.node],
                    seen(flow.operands[number][0]),
                )
        return "out", outer.setdefault(flow.elements[ref], len(outer))

    for number in component:
        node = flow.nodes[number]
        needed = tuple(
            any(use not in local for use in flow.uses(Ref(node.name, n)))
            for n in range(len(node.outputs))
        )
        rows.append(
            (
                flow.annotated.classes[node.name],
                tuple(seen(ref) for ref in flow.operands[number]),
                needed,
                tuple(local[i] for i in bits(flow.above[number] & inside)),
                tuple(local[i] for i in bits(flow.beyond[number] & inside)),
            )
        )
    return tuple(rows)


def _surroundings(flow: Dataflow, place: tuple[int, ...]) -> object:
    """Key that is equal for sets of the same computation of which the same is read and is read of:
    `_shape`, the views between what they read, and those that their expressions make of results."""
    border = boundary(flow, place)
    outer = {ref: number for number, ref in enumerate(border.inputs)}
    ways: list[object] = []
    for ref in border.inputs:
        way = list[int]()
        while flow.is_view(number := flow.position[ref.node]):
            way.append(flow.annotated.classes[ref.node])
            ref = flow.operands[number][0]
            if ref in outer:
                break
        ways.append((tuple(way), outer.get(ref)))
    own = set(place)
    views = tuple(
        flow.annotated.classes[flow.nodes[n].name] for n in border.members if n not in own
    )
    ends = tuple(flow.annotated.classes[ref.node] for ref in border.outputs)
    return _shape(flow, place), tuple(ways), views, ends


def _localised(flow: Dataflow, numbers: tuple[int, ...]) -> Component:
    """Translate a component to its own positions."""
    local = {number: i for i, number in enumerate(numbers)}
    annotated = flow.annotated
    times = annotated.device.times
    bandwidth = annotated.device.bandwidth * times.fastest  # for a bound: nothing is faster
    inside = 0
    for number in numbers:
        inside |= 1 << number

    def narrow(mask: int) -> int:
        return sum(1 << local[i] for i in bits(mask & inside))

    tensor_ids: dict[int, int] = {}

    def tensor_id(ref: Ref) -> int:
        return tensor_ids.setdefault(flow.elements[ref], len(tensor_ids))

    near = [0] * len(numbers)
    for i, j in _links(flow, numbers):
        if not _apart(flow, i, j):
            near[local[i]] |= 1 << local[j]
            near[local[j]] |= 1 << local[i]
    apart = [narrow(flow.beyond[n]) for n in numbers]
    for i, mask in enumerate(list(apart)):
        for j in bits(mask):
            apart[j] |= 1 << i
    traffic: list[Traffic] = []
    for number in numbers:
        node = flow.nodes[number]
        reads = {
            tensor_id(base): annotated.tensors[ref].bytes / bandwidth * 1e6
            for ref in flow.operands[number]
            for base in (flow.base(ref) if flow.position[flow.base(ref).node] in local else ref,)
        }
        writes: list[tuple[int, float, int, bool]] = []
        for n, tensor in enumerate(node.outputs):
            if tensor is None:
                continue
            ref = Ref(node.name, n)
            uses = set(flow.uses(ref))
            readers = sum(1 << local[u] for u in uses if u in local)
            outside = any(u not in local for u in uses)
            if readers or outside:
                time = tensor.bytes / bandwidth * 1e6
                writes.append((tensor_id(ref), time, readers, outside))
        traffic.append(Traffic(tuple(reads.items()), tuple(writes)))
    return Component(
        above=[narrow(flow.above[n]) for n in numbers],
        apart=apart,
        near=near,
        alone_us=[annotated.costs[flow.nodes[n].name].time_us for n in numbers],
        traffic=traffic,
        launch_us=times.launch.value,
    )


def _solve(
    flow: Dataflow,
    occurrences: list[tuple[int, ...]],
    decide: Decide,
    rulebook: Rulebook,
    result: Grouping[DecidedSet],
    unit: Callable[[int], object],
    around: Callable[[int], Iterable[object]],
    known: dict[object, Verdict] | None,
    most_sets: int,
) -> float:
    """Cut one component and carry the cut to its other occurrences; returns the gap. `known` are
    the verdicts on sets that were judged, by what they compute between what: layers that follow
    each other in one component have the same. At most `most_sets` are judged in each search."""
    numbers = occurrences[0]
    component = _localised(flow, numbers)
    units = _units(component, numbers, unit)
    decisions: dict[int, Decision] = {}
    verdicts: dict[int, Verdict] = {}

    def members(mask: int) -> list[int]:
        return [i for number in bits(mask) for i in bits(units[number])]

    def place(mask: int) -> tuple[int, ...]:
        return tuple(numbers[i] for i in members(mask))

    def decision(mask: int) -> Decision:
        if mask not in decisions:
            decisions[mask] = decide(place(mask))
        return decisions[mask]

    shared = known is not None
    by_key = known if known is not None else {}

    def alike(mask: int) -> object:
        return _surroundings(flow, place(mask)) if shared else mask

    def judge(mask: int) -> Verdict:
        key = alike(mask)
        if key not in by_key:
            found = decision(mask)
            launches_us = found.fused_us - flow.annotated.device.times.call.value
            by_key[key] = Verdict(found.accepted, found.hopeless, launches_us)
        verdicts[mask] = by_key[key]
        return by_key[key]

    if len(units) < len(numbers):
        alone_us = [sum(component.alone_us[i] for i in bits(each)) for each in units]
        for number, each in enumerate(units):
            if each & (each - 1) and (verdict := judge(1 << number)).accepted:
                alone_us[number] = min(alone_us[number], verdict.time_us)
        component = contracted(component, units, alone_us)
    offered: dict[object, int] = {}
    for number, each in enumerate(units):
        for thing in {thing for i in bits(each) for thing in around(numbers[i])}:
            offered[thing] = offered.get(thing, 0) | 1 << number
    cut = partition(
        component, judge, rulebook.search.exact_nodes.count, most_sets,
        sorted({*offered.values()}),
    )  # fmt: skip
    covered = sum(cut.sets)
    alone = [1 << i for i in range(component.count) if not covered >> i & 1]
    slow = [mask for mask in alone if judge(mask).accepted]
    whole = component.everything
    if shared and not all(decision(mask).accepted for mask in (*cut.sets, *slow)):
        return _solve(flow, occurrences, decide, rulebook, result, unit, around, None, most_sets)
    legal = component.count > 1 and compatible(component, whole)

    def places(mask: int) -> list[tuple[int, ...]]:
        return [tuple(each[i] for i in members(mask)) for each in occurrences]

    def found(mask: int, parent: DecidedSet | None) -> DecidedSet:
        return DecidedSet(decision(mask), places(mask), parent)

    top = found(whole, None) if legal else None
    for mask in (*cut.sets, *slow):
        result.groups.append(top if top and mask == whole else found(mask, top))
    if top and whole not in cut.sets and not top.decision.accepted:
        result.candidates.append(top)
    rejected: dict[object, DecidedSet] = {}
    for mask in _tried(component, verdicts):
        if mask == whole:
            continue
        key = alike(mask)
        if key in rejected:
            rejected[key].instances += places(mask)
        else:
            rejected[key] = found(mask, top)
    result.candidates.extend(each for each in rejected.values() if not each.decision.accepted)
    return cut.gap


def _units(
    component: Component, numbers: Sequence[int], unit: Callable[[int], object]
) -> list[int]:
    """Sets of positions that are cut together, in their order: one position each but for launches
    of one unit that stand behind each other and can share a kernel."""
    units: list[int] = []
    before: object = None
    for i, number in enumerate(numbers):
        this = unit(number)
        joined = units[-1] | 1 << i if units else 0
        if this is not None and this == before and compatible(component, joined):
            units[-1] = joined
        else:
            units.append(1 << i)
        before = this
    return units


def _tried(component: Component, verdicts: dict[int, Verdict]) -> list[int]:
    """Minimal rejected sets: a set that contains another rejected set fails for the same reason and
    is left out."""
    rejected = [
        mask
        for mask, verdict in verdicts.items()
        if not verdict.accepted and mask & (mask - 1) and connected(component, mask)
    ]
    minimal = [mask for mask in rejected if not any(m != mask and m & mask == m for m in rejected)]
    return sorted(minimal)


def _break_cycles(flow: Dataflow, result: Grouping[DecidedSet]) -> None:
    """Leave sets unfused until no cycle is left, the set that saves least first. Components are cut
    separately, so sets of two components may close a cycle together."""
    while True:
        blocks = [(found, place) for found in result.groups for place in found.instances]
        stuck = _in_cycle(flow, [place for _, place in blocks])
        if not stuck:
            return
        found, place = min(
            (blocks[i] for i in stuck),
            key=lambda block: block[0].decision.unfused_us - block[0].decision.fused_us,
        )
        found.instances.remove(place)
        result.gap = max(result.gap, _lost(found, result))
        result.groups = [g for g in result.groups if g.instances]


def _lost(found: DecidedSet, result: Grouping[DecidedSet]) -> float:
    """Share of the groups' fused time that leaving one instance unfused costs."""
    total = sum(g.decision.fused_us * len(g.instances) for g in result.groups)
    loss = found.decision.unfused_us - found.decision.fused_us
    return loss / total if total else 0.0


def _in_cycle(flow: Dataflow, blocks: list[tuple[int, ...]]) -> list[int]:
    """Blocks that wait for each other, so that no order of launches can serve them."""
    vertex = {i: (n, True) for n, block in enumerate(blocks) for i in block}
    quotient: nx.DiGraph[tuple[int, bool]] = nx.DiGraph()
    for i, before in enumerate(flow.before):
        if flow.is_view(i):  # goes with what it looks at
            vertex[i] = vertex[flow.position[flow.operands[i][0].node]]
        here = vertex.setdefault(i, (i, False))
        quotient.add_edges_from((vertex[p], here) for p in before if vertex[p] != here)
    if nx.is_directed_acyclic_graph(quotient):
        return []
    tangled = (part for part in nx.strongly_connected_components(quotient) if len(part) > 1)
    return [n for part in tangled for n, is_block in part if is_block]


def _maximal_regions(
    flow: Dataflow, decide: Decide, result: Grouping[DecidedSet], rulebook: Rulebook
) -> None:
    """Record the bytes that fusing every maximal region of modelled memory-bound launches would
    save, and the candidates that reach further than a component: regions with ops that have no
    meaning, regions with the compute-bound launches that touch them, and regions with one product
    whose contraction is so short that one kernel would pay."""
    costs = [flow.annotated.costs[node.name] for node in flow.nodes]
    memory_bound = [c.modelled and c.launches > 0 and c.memory_bound for c in costs]
    compute_bound = [c.launches > 0 and not c.memory_bound for c in costs]
    wide = widened(flow, memory_bound)
    fused = {place for g in result.groups for place in g.instances}
    known = fused | {place for c in result.candidates for place in c.instances}
    seen: dict[object, DecidedSet] = {}
    regions = tuple(_convex_regions(wide))
    result.saveable_bytes = _saveable_bytes(wide, regions, result.groups)
    for region in regions:
        ends = _ends(flow, region, compute_bound)
        beside = [tuple(sorted((*region, end))) for end in sorted(ends)]
        products = ((place, shortest_product(flow, place, rulebook)) for place in beside)
        short = [place for place, product in products if product is not None and product.pays]
        for place in dict.fromkeys((region, tuple(sorted((*region, *ends))), *short)):
            if len(place) < 2 or place in known:
                continue
            shape = _shape(flow, place)
            if shape in seen:
                seen[shape].instances.append(place)
            else:
                seen[shape] = DecidedSet(decide(place), [place])
    result.candidates.extend(f for f in seen.values() if not f.decision.accepted)


def _saveable_bytes(
    wide: Dataflow, regions: Sequence[tuple[int, ...]], groups: Sequence[DecidedSet]
) -> int:
    """Bytes that one launch for each region would save; regions that a group spans count as one. At
    least the bytes that the groups save, since their plans may move less than the model of launches
    counts."""
    joint: UnionFind[int] = UnionFind()
    for place in (*regions, *(place for found in groups for place in found.instances)):
        joint.union(*place)
    saved: dict[int, int] = {}
    for found in groups:
        for place in found.instances:
            more = found.decision.unfused_bytes - found.decision.fused_bytes
            saved[joint[place[0]]] = saved.get(joint[place[0]], 0) + more
    total = 0
    for together in joint.to_sets():
        if len(together) < 2 and joint[min(together)] not in saved:
            continue
        unfused = sum(wide.annotated.costs[wide.nodes[i].name].bytes for i in together)
        most = unfused - fused_traffic(wide, boundary(wide, together))
        total += max(most, saved.get(joint[next(iter(together))], 0))
    return total


def _convex_regions(wide: Dataflow) -> Iterable[tuple[int, ...]]:
    """Yield components, each cut into sets that no path leaves and enters again; equal components
    are cut once."""
    cuts: dict[object, tuple[tuple[int, ...], ...]] = {}
    for numbers in components(wide, wide.fusible):
        shape = _shape(wide, numbers)
        if shape not in cuts:
            cuts[shape] = _convex_cut(_localised(wide, numbers))
        yield from (tuple(numbers[i] for i in part) for part in cuts[shape])


def _convex_cut(component: Component) -> tuple[tuple[int, ...], ...]:
    def agree(mask: int) -> Verdict:
        return Verdict(True, False, 0.0)

    sets = partition(component, agree, 0, 0).sets
    covered = 0
    for mask in sets:
        covered |= mask
    alone = (1 << i for i in bits(component.everything & ~covered))
    return tuple(tuple(bits(mask)) for mask in (*sets, *alone))


def _ends(flow: Dataflow, region: tuple[int, ...], compute_bound: list[bool]) -> set[int]:
    """Positions of the compute-bound launches that feed a region or read from it."""
    ends: set[int] = set()
    for number in region:
        for ref in flow.operands[number]:
            maker = flow.position[flow.base(ref).node]
            if compute_bound[maker]:
                ends.add(maker)
        for n in range(len(flow.nodes[number].outputs)):
            ends.update(
                use
                for use in flow.uses(Ref(flow.nodes[number].name, n))
                if use >= 0 and compute_bound[use]
            )
    return ends
