"""Equivalence of two captured graphs: the same computation from the same inputs and parameters, in
all or except for what was replaced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from hashlib import sha256

from fusion_advisor.cost.dataflow import Dataflow, bits
from fusion_advisor.ir.graph import Arg, Node, Ref, Tensor


def difference(one: Dataflow, other: Dataflow) -> str:
    """Describe a difference between two graphs; empty where they are equal: the same results, made
    by the same operators with the same arguments, and the same writes to tensors of the caller. The
    order of launches, nodes that no result needs, and copies of the same values do not count."""
    said = _difference(_Meaning(one), _Meaning(other))
    if said and not _difference(_Meaning(one, layouts=False), _Meaning(other, layouts=False)):
        return ""  # one of them copies what the other reads where it lies
    return said


def _difference(first: _Meaning, second: _Meaning) -> str:
    mine, theirs = first.results(), second.results()
    if len(mine) != len(theirs):
        return f"{len(theirs)} results instead of {len(mine)}"
    for number, (left, right) in enumerate(zip(mine, theirs, strict=True)):
        if left != right:
            ours, yours = first.unlike(second, number), second.unlike(first, number)
            return f"result {number}: {yours or 'something else'} instead of {ours or 'the same'}"
    if sorted(first.writes()) != sorted(second.writes()):
        return "writes in place differ"
    return ""


def missing_launch(one: Dataflow, other: Dataflow, gone: Collection[str]) -> str:
    """Describe a launch of the first graph that the second lacks: one that is not `gone`, with
    tensors of the same layouts, or the layout of a result; "" where nothing is missing."""
    tensors, others = one.annotated.tensors, other.annotated.tensors
    results = [_layout(tensors[ref]) for ref in one.annotated.graph.outputs]
    if results != [_layout(others[ref]) for ref in other.annotated.graph.outputs]:
        return "a result has another shape, dtype or strides"
    left = Counter(_launch(other, number) for number in range(len(other.nodes)))
    for number, node in enumerate(one.nodes):
        if node.name in gone or node.kind != "call" or one.is_view(number):
            continue
        launch = _launch(one, number)
        if not left[launch]:
            return f"{_named(node)} is not launched as it was"
        left[launch] -= 1
    return ""


def _launch(flow: Dataflow, number: int) -> object:
    """An operator with its arguments, of tensors their layouts."""
    node, tensors = flow.nodes[number], flow.annotated.tensors

    def shown(arg: Arg) -> object:
        if isinstance(arg, Ref):
            return _layout(tensors[arg]) if arg in tensors else None
        return tuple(map(shown, arg)) if isinstance(arg, tuple) else repr(arg)

    kwargs = tuple((name, shown(arg)) for name, arg in node.kwargs if name not in _PLACE)
    return out_of_place(node.op), tuple(map(shown, node.args)), kwargs


def _named(node: Node) -> str:
    """An operator and where it stands in the source."""
    return f"{node.op} ({node.source.file}:{node.source.line})" if node.source else node.op


def _layout(tensor: Tensor) -> object:
    return tensor.shape, tensor.stride, tensor.dtype


@dataclass(frozen=True)
class _Moved:
    """Elements of a tensor, by its hash, with its dimensions, `rank` of them, elsewhere: `dims` are
    their numbers, -1 for one of one element that was added."""

    of: str
    rank: int
    dims: tuple[int, ...]


class _Meaning:
    """Computation of a graph. Without `layouts` only results lie somewhere: a copy is what it
    copies, and a view is told by its operator and its sizes."""

    def __init__(self, flow: Dataflow, *, layouts: bool = True) -> None:
        self._flow = flow
        self._layouts = layouts
        self._hashes: list[str] = []
        self._moves = dict[int, _Moved]()
        for number, node in enumerate(flow.nodes):
            operands = iter(flow.operands[number])
            args = tuple(self._shown(arg, operands) for arg in node.args)
            named = ((name, self._shown(value, operands)) for name, value in node.kwargs)
            said = self._said(node)
            kwargs = tuple(pair for pair in named if pair[0] not in said)
            if "_like." in node.op:  # what it is like counts by its layout alone
                args = args[1:]
            given = node.name if node.kind != "call" else ""
            row: object = (given, out_of_place(node.op), args, kwargs)
            if layouts and flow.is_view(number):  # what it looks at; `_of` tells the layout
                row = "view", self._of(flow.base(flow.operands[number][0]))
            elif not layouts and node.op in _RESHAPES:
                row = "reshape", args[:1]
            elif not layouts and "as_strided" in node.op:
                tensors = flow.annotated.tensors
                row = row, [(tensors[r].stride, tensors[r].offset) for r in flow.operands[number]]
            same = ""
            if not layouts and (moved := self._moved(number)):
                self._moves[number] = moved
                plain = [*moved.dims] == [*range(moved.rank)]
                row, same = (moved.of, moved.dims), moved.of if plain else ""
            same = same or (not layouts and self._unchanged(number))
            self._hashes.append(same or sha256(repr(row).encode()).hexdigest())

    def _moved(self, number: int) -> _Moved | None:
        """Tensor that a view, or the copy of one, has the elements of, and where its dimensions lie
        in that; None where it does more than to move, add and leave out some."""
        flow, node = self._flow, self._flow.nodes[number]
        if node.kind != "call" or not flow.operands[number] or node.op not in (*_MOVING, _COPY):
            return None
        of = flow.operands[number][0]
        at, rank = flow.position[of.node], len(flow.annotated.tensors[of].shape)
        whole = None if of.output else _Moved(self._hashes[at], rank, (*range(rank),))
        if (made := self._moves.get(at, whole)) is None or len(made.dims) != rank:
            return None
        dims, args = [*made.dims], node.args[1:]
        match node.op.split(".")[1], args:
            case "clone", _:
                pass
            case "permute", (tuple(order),):
                dims = [dims[each] for each in order if isinstance(each, int)]
            case "transpose", (int(one), int(other)):
                dims[one], dims[other] = dims[other], dims[one]
            case "unsqueeze", (int(place),):
                dims.insert(place % (rank + 1), -1)
            case "squeeze", (int(place),) if flow.annotated.tensors[of].shape[place] == 1:
                del dims[place]
            case _:
                return None
        return _Moved(made.of, made.rank, tuple(dims))

    def _unchanged(self, number: int) -> str:
        """Hash of what a copy or a view has the elements and sizes of; empty where there is
        none."""
        flow, tensors = self._flow, self._flow.annotated.tensors
        node = flow.nodes[number]
        if node.op not in (*_RESHAPES, _COPY, "aten.expand.default"):
            return ""
        of = flow.operands[number][0]
        made, given = node.outputs[0], tensors[of]
        like = made is not None and (made.shape, made.dtype) == (given.shape, given.dtype)
        return self._hashes[flow.position[of.node]] if like and not of.output else ""

    def _said(self, node: Node) -> tuple[str, ...]:
        """Keywords that change nothing: where the tensor lives, and the dtype of a result that has
        that of its first operand, which autocast gives to some operators."""
        tensors = self._flow.annotated.tensors
        dtypes = {tensors[ref].dtype for ref in [*node.refs()][:1] if ref in tensors}
        dtypes |= {made.dtype for made in node.outputs if made}
        unchanged = len(dtypes) == 1 and dtypes < _FLOATS
        return (*_PLACE, "dtype") if unchanged else _PLACE

    def _shown(self, arg: Arg, operands: Iterator[Ref]) -> object:
        tensors = self._flow.annotated.tensors
        if isinstance(arg, Ref):
            if arg not in tensors:
                return None
            return self._of(next(operands))
        if isinstance(arg, tuple):
            return tuple(self._shown(item, operands) for item in arg)
        return repr(arg)

    def _of(self, ref: Ref) -> str:
        made = self._flow.annotated.tensors[ref]
        number = self._flow.position[ref.node]
        layout = (made.stride, made.offset) if self._layouts else ()
        return repr((self._hashes[number], ref.output, (made.shape, made.dtype, *layout)))

    def results(self) -> list[str]:
        flow = self._flow
        tensors = flow.annotated.tensors
        return [
            repr((self._of(ref), _layout(tensors[ref]), tensors[ref].offset))
            for ref in flow.annotated.graph.outputs
        ]

    def writes(self) -> list[str]:
        """Hashes of the launches that write tensors that exist before the graph runs."""
        flow = self._flow
        given = {t.storage for node in flow.nodes if node.kind != "call" for t in node.outputs if t}
        return [
            self._hashes[number]
            for number, node in enumerate(flow.nodes)
            if node.kind == "call" and given & set(node.mutates)
        ]

    def unlike(self, other: _Meaning, number: int) -> str:
        """The first launch behind a result that the other graph does not have."""
        flow, known = self._flow, set(other._hashes)
        ref = flow.annotated.graph.outputs[number]
        last = flow.position[ref.node]
        for position in (*bits(flow.above[last]), last):
            node = flow.nodes[position]
            if self._hashes[position] not in known:
                return _named(node)
        return ""


_RESHAPES = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
"""Views that change no element's place in its order."""

_COPY = "aten.clone.default"

_MOVING = (
    "aten.permute.default", "aten.transpose.int", "aten.unsqueeze.default", "aten.squeeze.dim"
)  # fmt: skip
"""Views that move dimensions, and add or leave out some of one element."""

_PLACE = ("pin_memory", "device", "layout")
"""Keywords for where a tensor lives, which is the same for all of a model."""

_FLOATS = frozenset(("float16", "bfloat16", "float32", "float64"))
"""Dtypes of which a reduction's result has its operand's; integers are widened."""


def out_of_place(op: str) -> str:
    """`aten.add_.Tensor` as `aten.add.Tensor`: the dataflow tells which reader sees the write."""
    parts = op.split(".")
    if len(parts) > 1 and parts[1].endswith("_") and not parts[1].endswith("__"):
        parts[1] = parts[1].removesuffix("_")
    return ".".join(parts)
