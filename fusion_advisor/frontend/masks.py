"""Contents of attention masks that depend on sizes alone: the masks are computed."""

# torch carries Any in its operators.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_advisor.frontend.replay import operator_of, replayed
from fusion_advisor.ir.graph import Graph, Mask, MaskSays, Node, Ref
from fusion_advisor.ops.attention import mask_of
from fusion_advisor.support.kernel_fault import KernelFault

_MOST_NAMED = 3
"""Names of inputs and parameters that a mask depends on, at most; inputs go first."""


def masks(graph: Graph, most: int) -> tuple[Mask, ...]:
    """A mask for each attention that takes one. A mask is unknown where inputs or parameters decide
    it, and where it has more than `most` elements."""
    nodes = {node.name: node for node in graph.nodes}
    makers = _Makers(graph)
    known: dict[object, tuple[MaskSays, str]] = {}

    def said(node: Node, ref: Ref) -> Mask:
        rows, columns = (nodes[r.node].outputs[r.output] for r in list(node.refs())[:2])
        assert rows
        assert columns
        needed = makers.of(ref, node)
        key = ref, needed, rows.shape[-2], columns.shape[-2]
        if key not in known:
            known[key] = _says(graph, nodes, most, *key)
        return Mask(node.name, *known[key])

    return tuple(said(node, ref) for node in graph.nodes if (ref := mask_of(node)))


class _Makers:
    """The nodes that make masks."""

    def __init__(self, graph: Graph) -> None:
        self._nodes = {node.name: node for node in graph.nodes}
        self._place = {name: number for number, name in enumerate(self._nodes)}
        self._writers: dict[int, list[str]] = {}
        for node in graph.nodes:
            for storage in node.mutates:
                self._writers.setdefault(storage, []).append(node.name)

    def of(self, mask: Ref, attention: Node) -> frozenset[str]:
        """The nodes that a mask is computed from, and those that write into them, of the nodes
        before the attention that takes the mask."""
        needed: set[str] = set()
        written: set[int] = set()
        todo = [mask.node]
        while todo:
            name = todo.pop()
            if name in needed or self._place[name] >= self._place[attention.name]:
                continue
            needed.add(name)
            todo += [ref.node for ref in self._nodes[name].refs()]
            storages = {t.storage for t in self._nodes[name].outputs if t} - written
            todo += [each for storage in storages for each in self._writers.get(storage, ())]
            written |= storages
        return frozenset(needed)


def _says(
    graph: Graph,
    nodes: dict[str, Node],
    most: int,
    mask: Ref,
    needed: frozenset[str],
    rows: int,
    columns: int,
) -> tuple[MaskSays, str]:
    """Places that a mask made by the nodes `needed` hides, of so many queries and keys, and how
    that is known."""
    given = [name for name in needed if nodes[name].kind != "call"]
    if given:
        first = sorted(given, key=lambda name: (nodes[name].kind != "input", name))[:_MOST_NAMED]
        others = " and others" if len(given) > len(first) else ""
        return "unknown", f"it depends on {', '.join(first)}{others}"
    if any(_draws(nodes[name]) for name in needed):
        return "unknown", "it is drawn at random"
    largest = max(t.numel for name in needed for t in nodes[name].outputs if t)
    if largest > most:
        return "unknown", f"it is made of {largest} elements, more than are looked at ({most})"
    made = replace(graph, nodes=tuple(n for n in graph.nodes if n.name in needed), outputs=(mask,))
    try:
        module, _ = replayed(made, (), "cpu")
        (value,) = module()
    except (KernelFault, RuntimeError) as error:
        return "unknown", f"it cannot be computed here ({' '.join(str(error).split())[:80]})"
    return _read(value, rows, columns)


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in operator_of(node).tags


def _read(value: torch.Tensor, rows: int, columns: int) -> tuple[MaskSays, str]:
    """Places that a computed mask hides: False in a bool mask, large negative numbers in an
    additive one."""
    seen = value if value.dtype == torch.bool else value == 0
    hidden = ~seen if value.dtype == torch.bool else value <= torch.finfo(value.dtype).min
    made = "made from sizes alone, and computed:"
    if bool(seen.all()):
        return "nothing", f"{made} it lets every place be seen"
    causal = torch.ones(rows, columns, dtype=torch.bool).tril()
    if bool((seen == causal).all()) and bool((hidden == ~causal).all()):
        return "causal", f"{made} it hides what comes after each place, and nothing else"
    share = float(hidden.float().mean())
    if not share:
        return "other", f"{made} it adds other numbers than zero and the least, and hides no place"
    return "other", f"{made} it hides {share:.1%} of the places, not as is_causal does"
