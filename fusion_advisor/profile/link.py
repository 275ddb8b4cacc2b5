"""Linking of a step's kernels to the launches of the graph, each kernel to one launch at most.

A kernel is launched under an op, which correlation ids name: the ops of the step are aligned with
the graph's launches by name and sizes, in order. Kernels without such an op (in a CUDA graph, of
Inductor) are aligned between those: matrix products, attention and convolutions by their class,
Inductor's kernels by the ops in their names, others by the words in theirs, then by class.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Literal

from fusion_advisor.cost.dataflow import Dataflow, pass_of
from fusion_advisor.ir.graph import Ref
from fusion_advisor.profile.steps import PHASES, TracedKernel
from fusion_advisor.profile.trace import HostOp, Sizes

By = Literal["id", "alignment"]

ANCHORS = ("matmul", "attention", "convolution", "recurrent")
"""Classes that compilers leave as they are, or replace by a kernel of the same class."""

_GENERATED = re.compile(r"triton_[a-z]+_fused_(.+?)_\d+(?:_|$)")
_HELPER = re.compile(r"splitkreduce|split_k_reduce|fmha_reduce|flash_fwd_splitkv_combine", re.I)
"""Kernels that end what the kernel before began."""
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_SILENT = frozenset({"native", "to", "tensor", "unsafe", "default", "out"})
"""Words of an op's name that no kernel has in its own."""


@dataclass(frozen=True)
class Link:
    """Kernels, by position in the step, of the launch `node`, by position in the graph. `also` are
    launches that the same kernels compute; `op` is the op that launched them, where it is known."""

    node: int
    kernels: tuple[int, ...]
    by: By
    also: tuple[int, ...] = ()
    op: HostOp | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        return (*self.also, self.node)


@dataclass
class _Item:
    """Kernels that one op launched, or one kernel alone. `op` is the op that the graph has, None
    where there is none; `under` the name of any op that launched them; `fused` are the ops in the
    name of a kernel of Inductor."""

    kernels: list[int]
    op: HostOp | None
    under: str
    fused: frozenset[str]
    words: frozenset[str]
    sort: str

    @property
    def look(self) -> object:
        """Key that is equal for items that fit the same launches."""
        op = self.op and (self.op.name, self.op.sizes)
        return op, self.under, self.fused, self.words, self.sort

    @property
    def alone(self) -> bool:
        """Whether no operator of torch is known to have launched the kernels."""
        return not self.under.startswith("aten::")


class _Launches:
    """The launches of one pass of the graph, as the trace's ops are called."""

    def __init__(self, flow: Dataflow, phase: str) -> None:
        self.flow, self.phase = flow, phase
        launches = (i for i in range(len(flow.nodes)) if flow.launches(i))
        self.places = [i for i in launches if pass_of(flow.nodes[i]) == phase]
        nodes = [flow.nodes[i] for i in self.places]
        self.ops = [op_name(node.op) for node in nodes]
        self.bases = [name.rpartition("::")[2] for name in self.ops]
        self.sizes = [sizes_of(flow, i) for i in self.places]
        self.sorts = [flow.annotated.costs[node.name].pattern for node in nodes]
        self.words = [words(base) for base in self.bases]


def op_name(op: str) -> str:
    """Name of an overload as a profiler has it: `aten::add` for `aten.add.Tensor`."""
    parts = op.split(".")
    return f"{parts[0]}::{parts[1]}" if len(parts) > 1 else op


def sizes_of(flow: Dataflow, number: int) -> Sizes:
    """Sizes of a node's tensor operands, scalars left out, as `record_shapes` gives them."""
    tensors = flow.annotated.tensors
    given = (tensors[ref].shape for ref in flow.nodes[number].refs() if ref in tensors)
    return tuple(shape for shape in given if shape)


def link(flow: Dataflow, kernels: Sequence[TracedKernel]) -> list[Link]:
    """Links of a step's kernels, in the graph's order, pass by pass of those that it has."""
    passes = [_Launches(flow, phase) for phase in PHASES]
    found = [one for launches in passes for one in _linked(launches, kernels)]
    return sorted(found, key=lambda one: one.node)


def _linked(launches: _Launches, kernels: Sequence[TracedKernel]) -> list[Link]:
    """Links of one pass."""
    items = [*_items(launches, kernels)]
    pairs: list[tuple[int, int]] = []

    def add(fits: Callable[[int, _Item], bool]) -> None:
        for nodes, found in _between(pairs, len(launches.places), len(items)):
            known: dict[object, int] = {}  # of items that look alike
            masks: list[int] = []
            for item in found:
                mask = known.get(items[item].look)
                if mask is None:
                    mask = sum(1 << n for n, node in enumerate(nodes) if fits(node, items[item]))
                masks.append(known.setdefault(items[item].look, mask))
            pairs.extend((nodes[n], found[i]) for n, i in longest_pairing(masks, len(nodes)))
        pairs.sort()

    def named(node: int, item: _Item) -> bool:
        return item.op is not None and item.op.name == launches.ops[node]

    add(lambda node, item: named(node, item) and _alike(item.op, launches.sizes[node]))
    others = not pairs  # a trace of other sizes, which is refused by what is linked
    add(lambda node, item: named(node, item) and (others or _sizeless(item.op)))
    add(lambda node, item: item.sort in ANCHORS and item.sort == launches.sorts[node])
    loose = [*_out_of_order(launches, items, pairs)]
    shared = _Fused(launches, items, [*pairs, *loose]).spread(pairs)
    taken = {node for nodes in shared.values() for node in nodes}

    def free(node: int, item: _Item) -> bool:
        return item.op is None and not item.fused and node not in taken

    def variant(node: int, item: _Item) -> bool:
        """Whether the operator is the launch's, written in place or not."""
        return item.under.rstrip("_") == launches.ops[node].rstrip("_")

    def told(node: int, item: _Item) -> bool:
        return worded(launches.words[node], item.words) if item.alone else variant(node, item)

    add(lambda node, item: free(node, item) and told(node, item))
    add(lambda n, item: free(n, item) and item.alone and item.sort == launches.sorts[n])
    places = launches.places
    single = [
        Link(
            places[node], tuple(items[item].kernels),
            "id" if named(node, items[item]) else "alignment", op=items[item].op,
        )
        for node, item in (*pairs, *loose)
        if item not in shared
    ]  # fmt: skip
    several = [
        Link(
            places[max(nodes)], tuple(items[item].kernels), "alignment",
            tuple(places[node] for node in sorted(nodes)[:-1]),
        )
        for item, nodes in shared.items()
    ]  # fmt: skip
    return [*single, *several]


def _alike(op: HostOp | None, sizes: Sizes) -> bool:
    """Whether an op's recorded sizes are those of a launch; `out` arguments may stand behind."""
    return op is not None and op.sizes is not None and op.sizes[: len(sizes)] == sizes


def _is_operator(op: HostOp) -> bool:
    """Whether an op is an operator, of torch or not: an annotation is none, nor is what autograd
    says of the function that it runs."""
    return "::" in op.name and not op.name.startswith("autograd::")


def _sizeless(op: HostOp | None) -> bool:
    """Whether the sizes of an op were not recorded."""
    return op is not None and op.sizes is None


def words(name: str) -> frozenset[str]:
    """Words of a name in whatever spelling: `rsqrt`, `kernel`, `cuda` for `rsqrt_kernel_cuda`."""
    return frozenset(word.lower() for word in _WORD.findall(name))


def worded(op: frozenset[str], other: frozenset[str]) -> bool:
    """Whether the words of an op's name are in another name: `add` is in `CUDAFunctor_add`."""
    told = op - _SILENT
    return bool(told) and told <= other


def _items(launches: _Launches, kernels: Sequence[TracedKernel]) -> Iterator[_Item]:
    """Yield the kernels of a pass by the ops that launched them."""
    known = {*launches.ops}
    bases = {op_name(node.op).rpartition("::")[2].rstrip("_") for node in launches.flow.nodes}
    vocabulary = sorted(bases, key=len, reverse=True)
    last: _Item | None = None
    owner: HostOp | None = None
    before: list[int] = []  # fills, which the next kernel needs
    for number, kernel in enumerate(kernels):
        if kernel.phase != launches.phase:
            continue
        op = next((op for op in kernel.chain if op.name in known), None)
        inner = op or next((op for op in reversed(kernel.chain) if _is_operator(op)), None)
        if inner is None and kernel.kind == "set":
            before.append(number)
            continue
        helps = inner is None and _HELPER.search(kernel.name)
        if last is not None and ((inner is not None and inner is owner) or helps):
            last.kernels.append(number)
            if last.sort not in ANCHORS and kernel.sort in ANCHORS:
                last.sort = kernel.sort
            continue
        if last is not None:
            yield last
        generated = _GENERATED.search(kernel.name)
        fused = frozenset(_spelled(generated[1], vocabulary) if generated else ())
        under = inner.name if inner else ""
        last = _Item([*before, number], op, under, fused, words(kernel.name), kernel.sort)
        owner, before = inner, []
    if last is not None:
        yield last


def _spelled(text: str, vocabulary: Sequence[str]) -> Iterator[str]:
    """Yield the ops in the name of a kernel of Inductor, which joins them by `_`; the longest of
    the vocabulary comes first."""
    while text:
        word = next((w for w in vocabulary if text == w or text.startswith(f"{w}_")), "")
        if word:
            yield word
        text = text[len(word) + 1 :] if word else text.partition("_")[2]


def _between(
    pairs: Sequence[tuple[int, int]], nodes: int, items: int
) -> Iterator[tuple[range, range]]:
    """Nodes and items between pairs that follow each other."""
    ends = [(-1, -1), *pairs, (nodes, items)]
    for (node, item), (next_node, next_item) in pairwise(ends):
        if node + 1 < next_node and item + 1 < next_item:
            yield range(node + 1, next_node), range(item + 1, next_item)


def longest_pairing(masks: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """Yield the longest pairing in order of items with `count` nodes; a mask has a bit for each
    node that its item fits. A row of the table of lengths is one integer: a bit is clear where the
    length grows (Hyyrö, 2004)."""
    full = (1 << count) - 1
    rows = [full]
    for mask in masks:
        fits = rows[-1] & mask
        rows.append(((rows[-1] + fits) | (rows[-1] - fits)) & full)

    def length(row: int, width: int) -> int:
        return width - (rows[row] & ((1 << width) - 1)).bit_count()

    row, width = len(masks), count
    while row and width:
        if length(row - 1, width) == length(row, width):
            row -= 1
        elif length(row, width - 1) == length(row, width):
            width -= 1
        else:
            row, width = row - 1, width - 1
            yield width, row


# -- order -----------------------------------------------------------------------------------------


class _Order:
    """Order of a launch: after the kernels of what it reads, before those of what reads it,
    through whatever is between; by the launches that are linked."""

    def __init__(self, launches: _Launches, pairs: Sequence[tuple[int, int]]) -> None:
        self._above = launches.flow.above
        self._places = launches.places
        self._known = sorted((item, launches.places[node]) for node, item in pairs)
        self._limits: dict[int, tuple[float, float]] = {}

    def allows(self, node: int, item: int) -> bool:
        if node not in self._limits:
            self._limits[node] = self._between(self._places[node])
        first, last = self._limits[node]
        return first <= item <= last

    def _between(self, place: int) -> tuple[float, float]:
        """The last kernel of what a launch reads, and the first of what reads it."""
        above, bit, known = self._above[place], 1 << place, self._known
        first = next((item for item, other in reversed(known) if above >> other & 1), -inf)
        return first, next((item for item, other in known if self._above[other] & bit), inf)


def _out_of_order(
    launches: _Launches, items: Sequence[_Item], pairs: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Yield launches with ops of the same name and sizes that a compiler has moved past others."""
    nodes, taken = {node for node, _ in pairs}, {item for _, item in pairs}
    order = _Order(launches, pairs)
    left: dict[str, list[int]] = {}
    for node in range(len(launches.places)):
        if node not in nodes:
            left.setdefault(launches.ops[node], []).append(node)
    for number, item in enumerate(items):
        if number in taken or item.op is None:
            continue
        for node in left.get(item.op.name, ()):
            if _alike(item.op, launches.sizes[node]) and order.allows(node, number):
                left[item.op.name].remove(node)
                yield node, number
                break


# -- kernels that compute several launches ---------------------------------------------------------

_OPENED, _NEXT_TO = 0.6, 0.5
"""Worth of a kernel that computes something at all, and of a launch that is computed together with
one that it is connected to, where a launch whose op the kernel names is worth 1."""


class _Fused:
    """Spreads launches over generated kernels, by the ops in the kernels' names."""

    def __init__(
        self, launches: _Launches, items: Sequence[_Item], known: Sequence[tuple[int, int]]
    ) -> None:
        self._launches, self._items = launches, items
        self._known = known
        self._order = _Order(launches, [each for each in known if not items[each[1]].fused])
        self._owner: dict[int, int] = {}

    def spread(self, pairs: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
        """Launches of each generated kernel. Between two pairs each kernel takes a run of launches
        that it names; then what only its launches read, and what it names beside them."""
        self._owner = {node: item for node, item in pairs if self._items[item].fused}
        for nodes, items in _between(pairs, len(self._launches.places), len(self._items)):
            fused = [item for item in items if self._items[item].fused]
            if fused:
                self._owner |= self._runs(nodes, fused)
        linked = {node for node, _ in self._known}
        everything = range(len(self._launches.places))
        self._absorb([n for n in everything if n not in linked and not self._apart(n)])
        found: dict[int, list[int]] = {}
        for node, item in self._owner.items():
            found.setdefault(item, []).append(node)
        return found

    def _named(self, node: int, item: int) -> bool:
        named = self._launches.bases[node].rstrip("_") in self._items[item].fused
        return named and self._order.allows(node, item)

    def _apart(self, node: int) -> bool:
        """Whether a launch is never a part of a generated kernel that does not name it."""
        return self._launches.sorts[node] in ANCHORS

    def _runs(self, nodes: range, items: Sequence[int]) -> Mapping[int, int]:
        """Runs of launches, in order, of most worth: a table over launches and kernels. A run may
        have launches within that its kernel does not name, but no product."""
        worst = float("-inf")
        best = [[0.0] * (len(items) + 1) for _ in range(len(nodes) + 1)]
        inside = [[worst] * (len(items) + 1) for _ in range(len(nodes) + 1)]
        for n, node in enumerate(nodes, 1):
            near = n > 1 and self._connected(nodes[n - 2], node)
            for i, item in enumerate(items, 1):
                inside[n][i] = worst if self._apart(node) else inside[n - 1][i]
                if self._named(node, item):
                    opened = best[n - 1][i - 1] + 1 + _OPENED
                    inside[n][i] = max(opened, inside[n - 1][i] + 1 + near * _NEXT_TO)
                best[n][i] = max(best[n - 1][i], best[n][i - 1], inside[n][i])
        found: dict[int, int] = {}
        n, i = len(nodes), len(items)
        within = False
        while n and i:
            if not within and best[n][i] == best[n - 1][i]:
                n -= 1
            elif not within and best[n][i] == best[n][i - 1]:
                i -= 1
            elif not self._named(nodes[n - 1], items[i - 1]):
                n -= 1
            else:
                found[nodes[n - 1]] = items[i - 1]
                within = inside[n][i] != best[n - 1][i - 1] + 1 + _OPENED
                n, i = n - 1, i if within else i - 1
        return found

    def _connected(self, one: int, other: int) -> bool:
        """Whether a launch reads the result of another, or both read one tensor."""
        flow, places = self._launches.flow, self._launches.places
        bases = {flow.base(ref) for ref in flow.operands[places[other]]}
        read = {flow.base(ref) for ref in flow.operands[places[one]]}
        return bool(bases & read) or flow.nodes[places[one]].name in {ref.node for ref in bases}

    def _absorb(self, left: list[int]) -> None:
        """Give launches that no kernel has to a kernel that names them and has one of their readers
        or operands, else to the kernel of all their readers."""
        flow, places = self._launches.flow, self._launches.places
        number = {place: node for node, place in enumerate(places)}
        todo = [node for node in reversed(left) if node not in self._owner]
        while True:
            taken: list[int] = []
            for node in todo:
                outputs = range(len(flow.nodes[places[node]].outputs))
                name = flow.nodes[places[node]].name
                uses = {use for n in outputs for use in flow.uses(Ref(name, n))}
                readers = {self._owner.get(number.get(use, -1)) for use in uses}
                makers = {
                    self._owner.get(number.get(flow.position[flow.base(ref).node], -1))
                    for ref in flow.operands[places[node]]
                }
                near = [item for item in (*readers, *makers) if item is not None]
                owner = next((item for item in sorted(near) if self._named(node, item)), None)
                alone = next(iter(readers)) if len(readers) == 1 else None
                if owner is None and alone is not None and self._order.allows(node, alone):
                    owner = alone
                if owner is not None:
                    self._owner[node] = owner
                    taken.append(node)
            if not taken:
                return
            todo = [node for node in todo if node not in self._owner]
