"""The records that flow between the stages: plain, frozen, free of torch.

A `Graph` is the model as eager mode launches it on CUDA: one `Node` for each kernel and for each
view. FX ends in `capture`; every later stage reads these records alone, so that it can be tested
without torch and reloaded from a report.

Units: sizes, strides and offsets are elements; `bytes` are HBM bytes; times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from fusion_advisor.ir.source_trace import Trail
from fusion_advisor.support.codec import ROWS, row

DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "complex64": 8,
    "complex128": 16,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
}

OWN_OPS = "fusion_advisor."
"""How the names of operators begin that are kernels of this tool."""

FLOATS = ("float32", "float64")
"""The floats that values are held in on chip; narrower ones are widened."""


@row
@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor as eager lays it out. `storage` is equal for tensors that share memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int = -1
    offset: int = 0
    dims: tuple[str, ...] = ()
    """The expression of each dimension (`4`, `s0`); empty when all are static."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first addressed to the last; 0 when it is empty."""
        steps = zip(self.shape, self.stride, strict=True)
        return 1 + sum((size - 1) * step for size, step in steps) if self.numel else 0

    @property
    def addressed(self) -> int:
        """Distinct elements: a broadcast dimension (stride 0) counts once, and so does an element
        that lies in several windows."""
        runs: dict[int, int] = {}
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if not size:
                return 0
            if not stride or size == 1:
                continue
            run = next((s for s, n in runs.items() if not stride % s and stride < n * s), None)
            if run is None:
                runs[stride] = size
            else:
                runs[run] += (size - 1) * (stride // run)
        return math.prod(runs.values())

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """HBM bytes that a kernel addresses when it touches the whole tensor once."""
        return self.addressed * self.itemsize

    @property
    def contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size == 0:
                return True
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Ref:
    """The `output`-th output of a node."""

    node: str
    output: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """A torch constant by its Python spelling: `torch.bfloat16`, `torch.channels_last`."""

    text: str


Arg = Ref | Symbol | None | bool | int | float | str | tuple["Arg", ...]


@row
@dataclass(frozen=True, slots=True)
class Source:
    """A line of the model's own source."""

    file: str
    line: int


NodeKind = Literal["input", "parameter", "buffer", "constant", "call"]


@dataclass(frozen=True, slots=True)
class Node:
    """One eager launch, one view, or one tensor that is there before the graph runs.

    `op` is the overload as torch prints it (`aten.add.Tensor`); for tensors that are there before,
    it is the kind. `outputs` holds one entry for each returned tensor; None for an output that
    is not a tensor or that the launch does not fill. `mutates` lists the storages written in place.
    """

    name: str
    op: str
    kind: NodeKind = "call"
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[Tensor | None, ...] = ()
    mutates: tuple[int, ...] = ()
    source: Source | None = None
    module: str = ""
    step: int | None = None
    """The step of the graph's trail that made it."""
    fx: str = ""
    """The node of the exported program that it was launched for."""

    @property
    def out(self) -> Tensor:
        """The first tensor that the node returns; ValueError when there is none."""
        for tensor in self.outputs:
            if tensor is not None:
                return tensor
        raise ValueError(f"node {self.name} ({self.op}) returns no tensor")

    def refs(self) -> Iterator[Ref]:
        """Every tensor operand in order, repeats included."""
        yield from iter_refs(self.args)
        for _, value in self.kwargs:
            yield from iter_refs(value)


def iter_refs(arg: Arg) -> Iterator[Ref]:
    """The references inside one argument, in order."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from iter_refs(item)


MaskSays = Literal["nothing", "causal", "other", "unknown"]


@row
@dataclass(frozen=True, slots=True)
class Mask:
    """What the mask of the attention `node` hides: nothing, what is_causal hides, other places, or
    it is unknown; and how that is known, or why it is not."""

    node: str
    says: MaskSays
    why: str


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured model: nodes in eager's order, and what it returns."""

    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...] = field(metadata=ROWS)
    captured_by: str = "export"
    graph_breaks: tuple[str, ...] = ()
    differs_from_eager: tuple[str, ...] = ()
    source: str = ""
    assumed: tuple[str, ...] = field(default_factory=tuple)
    """What the scenario did not say and capture chose."""
    trail: Trail | None = None
    """Which expression made each node, where the capture was asked for it."""
    files: tuple[str, ...] = ()
    """The user's own modules that were loaded with the model."""
    masks: tuple[Mask, ...] = ()
    """Of the attentions that take one."""
    built: tuple[int, ...] = ()
    """The whole numbers that the model's factory was given, each once."""
    not_run: tuple[str, ...] = ()
    """The model's topmost modules of which no launch reads a parameter: `model.vision_tower`."""

    def naming(self, named: Callable[[str], str]) -> Graph:
        """The same with its lines' files named so, and none of the files that were loaded."""
        nodes = tuple(
            replace(node, source=Source(named(node.source.file), node.source.line))
            if node.source
            else node
            for node in self.nodes
        )
        return replace(self, nodes=nodes, files=())

    @property
    def empty(self) -> bool:
        """Whether a node has results, and none of them has elements: no model is run for what costs
        nothing. One empty result beside others is how an op leaves out what its device lacks."""
        made = ([t.numel for t in node.outputs if t is not None] for node in self.nodes)
        return any(counts and not any(counts) for counts in made)
