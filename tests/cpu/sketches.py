"""Random regions out of the registry, node by node: what the fuzzers draw, here and on a GPU.

Drawn are structures: ranks, strides, dtypes, broadcasts, views, moved elements, gathers, windows,
scans, reductions along rows and columns, random numbers, in-place writes, several results. The
arithmetic is tame: sums run in float64, in narrow floats or in integers, where an order of
summation is no matter of luck, and what jumps (comparisons, arg-reductions) is left to the gate
that judges it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import fuse

from .regions import APART, PACKED, Tape, decided

aten = torch.ops.aten
Tensor = torch.Tensor
Item = TypeVar("Item")

MOST_ELEMENTS = 3000
"""Of a tensor in a region of short rows."""
FLOATS = (torch.float64, torch.bfloat16, torch.float16, torch.float32)
NARROW = (torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)
SIZES = (1, 2, 3, 4, 5, 8, 12, 17)
ROWS = (1, 2, 5, 40, 700, 3000)
COLUMNS = (64, 100, 777, 1024, 5000, 40_000, 131_072)
UNARY = (aten.neg, aten.abs, aten.relu, aten.sigmoid, aten.tanh, aten.clone, aten.silu)
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum, aten.minimum)


class Choices(Protocol):
    """Where a sketch takes its decisions from."""

    def pick(self, among: Sequence[Item]) -> Item: ...

    def number(self, low: int, high: int) -> int: ...

    def shuffled(self, items: Sequence[Item]) -> list[Item]: ...


class Seeded:
    """Decisions of a pseudo-random generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def pick(self, among: Sequence[Item]) -> Item:
        return self._random.choice(among)

    def number(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        return self._random.sample(items, len(items))


@dataclass
class Sketch:
    """A region being drawn: its tape, the tensors made so far, and the calls as text."""

    choices: Choices
    most_elements: int = MOST_ELEMENTS
    tape: Tape = field(default_factory=Tape)
    tensors: list[Tensor] = field(default_factory=list[Tensor])
    calls: list[str] = field(default_factory=list[str])
    results: list[Tensor] = field(default_factory=list[Tensor])
    indices: list[int] = field(default_factory=list[int])

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Tensor:
        """One node; of several results the first is used further."""
        result = self.tape.call(target, *args, **kwargs)
        shown = [self._shown(arg) for arg in args]
        shown += [f"{name}={self._shown(value)}" for name, value in kwargs.items()]
        self.calls.append(f"v{len(self.tensors)} = {target}({', '.join(shown)})")
        first = result[0] if isinstance(result, (tuple, list)) else result
        self.tensors.append(first)
        return first

    def input(self, tensor: Tensor) -> Tensor:
        fake = self.tape.input(tensor)
        dtype = str(fake.dtype).removeprefix("torch.")
        self.calls.append(f"v{len(self.tensors)} = {dtype}{list(fake.shape)}{fake.stride()}")
        self.tensors.append(fake)
        return fake

    def index_input(self, shape: list[int]) -> Tensor:
        """An input that is read as an index alone: no later step may compute with it."""
        self.indices.append(len(self.tensors))
        return self.input(torch.empty(shape, dtype=torch.int64, device="meta"))

    @property
    def operands(self) -> list[Tensor]:
        return [t for n, t in enumerate(self.tensors) if n not in self.indices]

    def _shown(self, arg: Any) -> str:
        if isinstance(arg, Tensor):
            return f"v{self.index(arg)}"
        if isinstance(arg, list):
            return f"[{', '.join(map(self._shown, arg))}]"
        return str(arg)

    def index(self, tensor: Tensor) -> int:
        return next(i for i, known in enumerate(self.tensors) if known is tensor)

    @property
    def text(self) -> str:
        returned = ", ".join(f"v{self.index(result)}" for result in self.results)
        return "\n".join([*self.calls, f"return {returned}"])

    def fits(self, *shapes: Sequence[int]) -> bool:
        """Do shapes broadcast to one that is not too large?"""
        return math.prod(torch.broadcast_shapes(*shapes)) <= self.most_elements


# -- inputs ----------------------------------------------------------------------------------------


def _laid_out(c: Choices, shape: list[int], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape: dense, permuted, sliced, stepped, expanded, or at an odd offset."""
    kind = c.pick(["dense", "dense", "permuted", "sliced", "stepped", "expanded"])
    if kind == "permuted":
        order = c.shuffled(range(len(shape)))
        dense = torch.empty([shape[d] for d in order], dtype=dtype, device="meta")
        return dense.permute([order.index(d) for d in range(len(shape))])
    if kind == "sliced" and shape:
        wide = torch.empty([n + 3 for n in shape], dtype=dtype, device="meta")
        return wide[tuple(slice(1, 1 + n) for n in shape)]
    if kind == "stepped" and shape:
        return torch.empty([*shape[:-1], 2 * shape[-1]], dtype=dtype, device="meta")[..., ::2]
    if kind == "expanded":
        narrow = [1 if c.number(0, 1) else n for n in shape]
        return torch.empty(narrow, dtype=dtype, device="meta").expand(shape)
    return torch.empty(shape, dtype=dtype, device="meta")


def _input(sketch: Sketch, base: list[int], dtype: torch.dtype) -> None:
    """A tensor that broadcasts with the base shape."""
    c = sketch.choices
    shape = [1 if c.number(0, 3) == 0 else n for n in base]
    shape = shape[c.pick([0, 0, 0, 1]) :] if len(shape) > 1 else shape
    if c.number(0, 11) == 0:
        dtype = c.pick([*FLOATS, *FLOAT8, *INTEGERS, torch.bool])
    sketch.input(_laid_out(c, shape, dtype))


# -- steps -----------------------------------------------------------------------------------------


def _computes(x: Tensor) -> bool:
    """Does eager compute in this dtype?"""
    return x.dtype not in FLOAT8


def _unary(sketch: Sketch, x: Tensor) -> None:
    c = sketch.choices
    if not _computes(x):
        sketch.call(aten._to_copy.default, x, dtype=c.pick(FLOATS))
    elif x.is_floating_point():
        sketch.call(c.pick(UNARY).default, x)
    elif x.dtype == torch.bool:
        sketch.call(aten.logical_not.default, x)
    else:
        sketch.call(c.pick([aten.neg, aten.abs, aten.relu]).default, x)


def _converted(sketch: Sketch, x: Tensor) -> None:
    """A cast of the source; none from floats to integers, of which NaN has no value there, nor to
    float8_e4m3fn, whose overflow differs between versions of torch."""
    c = sketch.choices
    if x.is_floating_point():
        sketch.call(aten._to_copy.default, x, dtype=c.pick([*FLOATS, torch.float8_e5m2]))
    else:
        sketch.call(aten._to_copy.default, x, dtype=c.pick([*FLOATS, torch.int64, torch.int32]))


def _binary(sketch: Sketch, x: Tensor) -> None:
    c = sketch.choices
    if not _computes(x):
        return
    if c.number(0, 4) == 0 and x.dtype != torch.bool:
        scalar = 0.5 if x.is_floating_point() else 3
        sketch.call(c.pick([aten.add.Tensor, aten.mul.Tensor, aten.gt.Scalar]), x, scalar)
        return
    other = c.pick(sketch.operands)
    if not _computes(other) or not sketch.fits(x.shape, other.shape):
        return
    if x.dtype == torch.bool or other.dtype == torch.bool:
        both = x.dtype == other.dtype
        sketch.call(aten.logical_and.default if both else aten.mul.Tensor, x, other)
    elif x.is_floating_point() or other.is_floating_point():
        target = c.pick([*BINARY, aten.lt.Tensor])
        sketch.call(getattr(target, "default", target), x, other)
    else:
        target = c.pick(BINARY)
        sketch.call(getattr(target, "default", target), x, other)


def _in_place(sketch: Sketch, x: Tensor) -> None:
    """A write into what a node made: a view of it may be read later."""
    c = sketch.choices
    made = [t for t in sketch.tensors if sketch.tape.made(t) and t.is_floating_point()]
    made = [t for t in made if _computes(t) and not _overlaps(t)]
    if not made:
        return
    target = c.pick(made)
    if c.number(0, 1):
        sketch.call(c.pick([aten.relu_.default, aten.neg_.default, aten.sigmoid_.default]), target)
    elif x.dtype == target.dtype and torch.broadcast_shapes(x.shape, target.shape) == target.shape:
        sketch.call(c.pick([aten.add_.Tensor, aten.mul_.Tensor]), target, x)


def _overlaps(x: Tensor) -> bool:
    return any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))


def _reduced(sketch: Sketch, x: Tensor) -> None:
    c = sketch.choices
    if not x.dim() or not _computes(x):
        return
    dims = sorted(c.shuffled(range(x.dim()))[: c.number(1, x.dim())])
    keep = bool(c.number(0, 1))
    if x.dtype == torch.bool:
        sketch.call(aten.any.dims, x, dims, keep)
    elif not x.is_floating_point():
        sketch.call(c.pick([aten.sum.dim_IntList, aten.amax.default]), x, dims, keep)
    elif x.dtype == torch.float32:
        sketch.call(c.pick([aten.amax.default, aten.amin.default]), x, dims, keep)
    else:
        targets = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default]
        sketch.call(c.pick(targets), x, dims, keep)


def _normalised(sketch: Sketch, x: Tensor) -> None:
    """Rows reduced and used again."""
    c = sketch.choices
    if not x.dim() or not x.is_floating_point() or not _computes(x) or x.dtype == torch.float32:
        return
    dim = c.number(0, x.dim() - 1)
    kind = c.number(0, 3)
    if kind == 0:
        sketch.call(aten._softmax.default, x, dim, False)
    elif kind == 1:
        sketch.call(aten._log_softmax.default, x, dim, False)
    elif kind == 2:
        sketch.call(aten.sub.Tensor, x, sketch.call(aten.amax.default, x, [dim], True))
    else:
        sketch.call(aten.mul.Tensor, x, sketch.call(aten.mean.dim, x, [dim], True))


def _chosen_place(sketch: Sketch, x: Tensor) -> None:
    """An arg-reduction, or a maximum with its place."""
    c = sketch.choices
    if not x.dim() or not _computes(x) or x.dtype in (torch.bool, torch.uint8):
        return
    dim = c.number(0, x.dim() - 1)
    if c.number(0, 1):
        sketch.call(aten.argmax.default, x, dim, bool(c.number(0, 1)))
    else:
        sketch.call(aten.max.dim, x, dim, bool(c.number(0, 1)))


def _scanned(sketch: Sketch, x: Tensor) -> None:
    if not x.dim() or not _computes(x) or x.dtype in (torch.float32, torch.bool):
        return
    dim = sketch.choices.number(0, x.dim() - 1)
    if x.dtype != torch.float64 or x.shape[dim] <= 1024:  # its reference is no wider than it is
        sketch.call(aten.cumsum.default, x, dim)


def _viewed(sketch: Sketch, x: Tensor) -> None:
    c = sketch.choices
    kind = c.pick(["transpose", "unsqueeze", "merge", "split", "expand"])
    shape, rank = list(x.shape), x.dim()
    if kind == "transpose" and rank > 1:
        sketch.call(aten.transpose.int, x, *c.shuffled(range(rank))[:2])
    elif kind == "unsqueeze" and rank < 4:
        sketch.call(aten.unsqueeze.default, x, c.number(0, rank))
    elif kind == "merge" and rank > 1 and x.is_contiguous():
        d = c.number(0, rank - 2)
        sketch.call(aten.view.default, x, [*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]])
    elif kind == "split" and 0 < rank < 4 and x.is_contiguous():
        d = c.number(0, rank - 1)
        outer = c.pick([n for n in range(1, min(shape[d], 64) + 1) if shape[d] % n == 0])
        sketch.call(aten.view.default, x, [*shape[:d], outer, shape[d] // outer, *shape[d + 1 :]])
    elif kind == "expand" and rank:
        wide = [3 if n == 1 else n for n in shape]
        if sketch.fits(wide):
            sketch.call(aten.expand.default, x, wide)


def _moved(sketch: Sketch, x: Tensor) -> None:
    """Elements elsewhere: a part of them, turned round, one behind the other, padded, repeated."""
    c = sketch.choices
    if not x.dim():
        return
    dim = c.number(0, x.dim() - 1)
    size, copied = x.shape[dim], _computes(x)
    kind = c.pick(["slice", "select", "flip", "roll", "cat", "stack", "pad", "repeat"])
    if kind == "slice":
        sketch.call(aten.slice.Tensor, x, dim, c.number(0, size - 1), 2**63 - 1, c.pick([1, 1, 2]))
    elif kind == "select" and x.dim() > 1:
        sketch.call(aten.select.int, x, dim, c.number(0, size - 1))
    elif kind == "flip" and copied:
        sketch.call(aten.flip.default, x, [dim])
    elif kind == "roll" and copied:
        sketch.call(aten.roll.default, x, [c.number(-2, 5)], [dim])
    elif kind in ("cat", "stack") and copied:
        others = [t for t in sketch.operands if t.shape == x.shape and t.dtype == x.dtype]
        if 2 * x.numel() <= sketch.most_elements:
            target = aten.cat.default if kind == "cat" else aten.stack.default
            if x.dim() < 4 or kind == "cat":
                sketch.call(target, [x, c.pick(others)], dim)
    elif kind == "pad" and copied and x.numel() + 4 * x.numel() // x.shape[-1] < MOST_ELEMENTS:
        sketch.call(aten.constant_pad_nd.default, x, [c.number(0, 2), c.number(0, 2)], 1)
    elif kind == "repeat" and copied and 2 * x.numel() <= sketch.most_elements:
        sketch.call(aten.repeat.default, x, [1 + (d == dim) for d in range(x.dim())])


def _gathered(sketch: Sketch, x: Tensor) -> None:
    """Rows, columns or elements by indices from memory."""
    c = sketch.choices
    if not x.dim() or not _computes(x):
        return
    dim = c.number(0, x.dim() - 1)
    if c.number(0, 1):
        index = sketch.index_input([c.number(1, 7)])
        if sketch.fits([7 if d == dim else n for d, n in enumerate(x.shape)]):
            sketch.call(aten.index_select.default, x, dim, index)
    else:
        shape = [c.number(1, 4) if d == dim else n for d, n in enumerate(x.shape)]
        if sketch.fits(shape):
            index = sketch.index_input(shape)
            sketch.call(aten.gather.default, x, dim, index)


def _windowed(sketch: Sketch, x: Tensor) -> None:
    c = sketch.choices
    if x.dim() < 3 or not x.is_floating_point() or not _computes(x) or min(x.shape[-2:]) < 2:
        return
    if x.dtype != torch.float32 and c.number(0, 1):
        sketch.call(aten.avg_pool2d.default, x, [2, 2], [c.pick([1, 2])] * 2)
    else:
        padding = [c.number(0, 1)] * 2
        sketch.call(aten.max_pool2d_with_indices.default, x, [2, 2], [1, 2], padding)


def _drawn(sketch: Sketch, x: Tensor) -> None:
    """Random numbers."""
    c = sketch.choices
    if not x.is_floating_point() or not _computes(x) or not x.dim():
        return
    kind = c.number(0, 3)
    if kind <= 1:
        sketch.call(aten.native_dropout.default, x, c.pick([0.1, 0.5]), True)
    elif kind == 2:
        sketch.call(aten.mul.Tensor, x, sketch.call(aten.rand_like.default, x))
    else:
        sketch.call(aten.mul.Tensor, x, sketch.call(aten.bernoulli.p, x, 0.3))


def _selected(sketch: Sketch, x: Tensor) -> None:
    """Where one tensor is positive, itself, else another of its dtype."""
    other = sketch.choices.pick([t for t in sketch.operands if t.dtype == x.dtype])
    if x.dtype != torch.bool and _computes(x) and sketch.fits(x.shape, other.shape):
        sketch.call(aten.where.self, sketch.call(aten.gt.Scalar, x, 0), x, other)


STEPS: tuple[Callable[[Sketch, Tensor], None], ...] = (
    *(_unary, _unary, _binary, _binary, _binary, _converted, _in_place, _selected),
    *(_reduced, _reduced, _normalised, _chosen_place, _scanned),
    *(_viewed, _viewed, _moved, _moved, _gathered, _windowed, _drawn),
)


def _step(sketch: Sketch, step: Callable[[Sketch, Tensor], None], x: Tensor) -> None:
    try:
        step(sketch, x)
    except (RuntimeError, IndexError, NotImplementedError):
        return  # shapes that do not broadcast, a dtype that eager does not take


def _beside(sketch: Sketch, shared: Tensor) -> Tensor:
    """One of several results over spaces of their own, each made from an input of its own and one
    that all of them read."""
    c = sketch.choices
    own = sketch.input(_laid_out(c, [c.pick(SIZES[:5]), *shared.shape], shared.dtype))
    made = [sketch.call(c.pick([aten.add.Tensor, aten.mul.Tensor]), own, shared)]
    for _ in range(c.number(0, 2)):
        before = len(sketch.tensors)
        _step(sketch, c.pick([_unary, _converted, _viewed, _moved]), sketch.tensors[-1])
        made += [t for t in sketch.tensors[before:] if sketch.tape.made(t)]
    return made[-1]


def sketched(choices: Choices) -> Sketch:
    """A region of 2 to 8 steps: mostly of a few thousand elements and up to four dimensions, now
    and then of long or many rows, which other schedules serve."""
    if choices.number(0, 3):
        sketch = Sketch(choices)
        rank = choices.number(1, 4)
        base = [choices.pick(SIZES[:6] if rank > 2 else SIZES) for _ in range(rank)]
    else:
        sketch = Sketch(choices, most_elements=1 << 40)
        base = [choices.pick(ROWS), choices.pick(COLUMNS)]
    dtype = choices.pick([*FLOATS, torch.float64, *NARROW, torch.int64, torch.int32])
    for _ in range(choices.number(1, 3)):
        _input(sketch, base, dtype)
    if math.prod(base) <= MOST_ELEMENTS and choices.number(0, 6) == 6:
        shared = sketch.input(_laid_out(choices, base, dtype))
        sketch.results = [_beside(sketch, shared) for _ in range(choices.number(2, 3))]
        return sketch
    inputs = len(sketch.tensors)
    for _ in range(choices.number(2, 8)):
        recent = sketch.operands[-3:] if choices.number(0, 1) else sketch.operands
        _step(sketch, choices.pick(STEPS), choices.pick(recent))
    made = [t for t in sketch.tensors[inputs:] if sketch.tape.made(t)]
    wanted = min(len(made), choices.pick([1, 1, 2, 3]))
    sketch.results = list(dict.fromkeys([*made[-1:], *choices.shuffled(made)[:wanted]]))[:wanted]
    return sketch


def planned(sketch: Sketch) -> Iterator[Decision]:
    """All launches as one group when that has a plan and nothing jumps on what is computed inside;
    else the groups that are accepted. Rows of every other sketch are packed, or apart in pieces."""
    rules = (PACKED, APART)[len(sketch.text) % 2]
    if not sketch.results:
        return
    flow = sketch.tape.flow(*sketch.results)
    if not any(flow.launches(i) for i in range(len(flow.nodes))):
        return
    whole = decided(flow, rules)
    jumps = any(g.name == "discontinuous" and g.outcome == "fails" for g in whole.gates)
    if whole.subject.plan is not None and not jumps:
        yield whole
        return
    for found in fuse(flow, rules).grouping.groups:
        yield found.decision
