"""The records that flow between the stages: plain, frozen, free of torch.

A `Graph` is the model as eager mode launches it on CUDA: one `Node` for each kernel and for each
view. FX ends in `capture`; every later stage reads these records alone, so that it can be tested
without torch and reloaded from a report.

Units: sizes, strides and offsets are elements; `bytes` are HBM bytes; times are microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
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
"""Prefixes of operator names that are kernels of this tool."""

FLOATS = ("float32", "float64")
"""Float dtypes that values have on chip; narrower floats are widened to one of them."""


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
    """Expression of each dimension (`4`, `s0`); empty when all dimensions are static."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def extent(self) -> int:
        """Elements from the first addressed element to the last; 0 when the tensor is empty."""
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
        """HBM bytes that a kernel moves when it touches the whole tensor once."""
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
    """Reference to the `output`-th output of a node."""

    node: str
    output: int = 0


@dataclass(frozen=True, slots=True)
class Symbol:
    """Torch constant by its Python spelling: `torch.bfloat16`, `torch.channels_last`."""

    text: str


class GivenNumber(float):
    """Number that the source of a model holds where a kernel is called: an argument of the kernel,
    in place of a constant. Numbers of one `key` are one argument; `name` is the source's word for
    it. With `inverse` it is the reciprocal of the number `given`, which the source holds."""

    key: Hashable
    name: str
    given: float
    inverse: bool

    def __new__(
        cls, value: float, key: Hashable, name: str, *, inverse: bool = False
    ) -> GivenNumber:
        """Number, or the reciprocal of a number: an infinity for zero, as in eager's divisions."""
        inverted = 1.0 / value if value else math.copysign(math.inf, value)
        made = super().__new__(cls, inverted if inverse else value)
        made.key, made.name, made.given, made.inverse = key, name, float(value), inverse
        return made

    @property
    def reciprocal(self) -> GivenNumber:
        """The number that is multiplied with in place of a division."""
        return GivenNumber(self.given, self.key, self.name, inverse=True)


Arg = Ref | Symbol | None | bool | int | float | str | tuple["Arg", ...]


@row
@dataclass(frozen=True, slots=True)
class Source:
    """Line of the model's own source."""

    file: str
    line: int


Phase = Literal["forward", "loss", "backward", "optimizer"]
"""Part of a training step."""

NodeKind = Literal["input", "parameter", "buffer", "constant", "call"]


@dataclass(frozen=True, slots=True)
class Node:
    """One eager launch, one view, or one tensor that exists before the graph runs.

    `op` is the overload as torch prints it (`aten.add.Tensor`); for a tensor that exists before,
    its kind. `outputs` holds one entry for each returned tensor: None for an output that is no
    tensor or that the launch does not fill. `mutates` lists the storages written in place.
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
    """Step of the graph's `trail` that made the node."""
    fx: str = ""
    """Node of the exported program that the launch belongs to."""
    phase: Phase = "forward"
    backward_of: str = ""
    """`fx` of the forward node that a launch of backward belongs to."""
    checkpoint: int | None = None
    """Number of the model's checkpoint that the node lies in; of backward: that it computes
    again for."""

    @property
    def out(self) -> Tensor:
        """First tensor that the node returns. Raises ValueError when there is none."""
        for tensor in self.outputs:
            if tensor is not None:
                return tensor
        raise ValueError(f"node {self.name} ({self.op}) returns no tensor")

    def refs(self) -> Iterator[Ref]:
        """Yield every tensor operand in order, repeats included."""
        yield from iter_refs(self.args)
        for _, value in self.kwargs:
            yield from iter_refs(value)


def iter_refs(arg: Arg) -> Iterator[Ref]:
    """Yield the references inside one argument, in order."""
    if isinstance(arg, Ref):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from iter_refs(item)


MaskSays = Literal["nothing", "causal", "other", "unknown"]


@row
@dataclass(frozen=True, slots=True)
class Mask:
    """Places that the mask of the attention `node` hides: none, those of `is_causal`, others, or
    unknown; and the evidence for that, or why there is none."""

    node: str
    says: MaskSays
    why: str


@row
@dataclass(frozen=True, slots=True)
class Rewrite:
    """Place of the model that means the same when it is written otherwise, as the backend of
    torch.compile rewrites it: by the name of the rewrite, the line and the path of the module (from
    a module that has it). `why` is the evidence; `line` the Python to write there, "" where there
    is none; `causal` says that is_causal is part of it."""

    name: str
    source: Source | None
    module: str
    why: str
    line: str
    causal: bool


@dataclass(frozen=True, slots=True)
class Graph:
    """Captured model: nodes in eager's order, and the tensors that it returns."""

    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...] = field(metadata=ROWS)
    captured_by: str = "export"
    graph_breaks: tuple[str, ...] = ()
    differs_from_eager: tuple[str, ...] = ()
    source: str = ""
    assumed: tuple[str, ...] = field(default_factory=tuple)
    """Settings that the scenario left open and capture chose."""
    trail: Trail | None = None
    """Source expression of each node, where the capture was asked for the trace."""
    files: tuple[str, ...] = ()
    """Files of the user's own modules that were loaded with the model."""
    masks: tuple[Mask, ...] = ()
    """Masks of the attention nodes that take one."""
    rewrites: tuple[Rewrite, ...] = ()
    """Places that a rewrite of Dynamo's graph takes."""
    not_rewritten: str = ""
    """Reason why no rewrite was looked for, or none in some part; "" where all was seen."""
    built: tuple[int, ...] = ()
    """Distinct whole numbers that the model's factory was given."""
    not_run: tuple[str, ...] = ()
    """Topmost modules of the model whose parameters no launch reads: `model.vision_tower`."""
    unread: int = 0
    """Bytes of the model's parameters and buffers that no launch reads."""
    trained: tuple[str, ...] = ()
    """Inputs and parameters that require a gradient, where gradients are on."""

    def naming(self, named: Callable[[str], str]) -> Graph:
        """Copy of the graph whose source lines have their files renamed by `named`, and whose
        `files` are empty."""

        def elsewhere(source: Source | None) -> Source | None:
            return source and Source(named(source.file), source.line)

        nodes = tuple(replace(node, source=elsewhere(node.source)) for node in self.nodes)
        rewrites = tuple(replace(each, source=elsewhere(each.source)) for each in self.rewrites)
        return replace(self, nodes=nodes, rewrites=rewrites, files=())

    @property
    def empty(self) -> bool:
        """Whether some node has results and none of its results has elements: a model is not run
        for a node that costs nothing. One empty result beside others is how an op leaves out a
        result that its device lacks."""
        made = ([t.numel for t in node.outputs if t is not None] for node in self.nodes)
        return any(counts and not any(counts) for counts in made)
