"""What a region means, without any kernel: its values in torch, on the grid of their axes.

A value is a tensor with one dimension for each axis of the region, of size 1 where it does not
change. Loads are checked: none may lie outside its tensor but where its guard is false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_advisor.codegen.eager_reference import reference_lines
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.lower import Expressed, boundary, lower_region
from fusion_advisor.ir.graph import Ref
from fusion_advisor.region.exprs import INDEX, Expr
from fusion_advisor.region.random import SHARES, STATE
from fusion_advisor.region.region import Output, Region
from fusion_advisor.shipped import fused_runtime

from .regions import Tape, launches

Tensor = torch.Tensor
RANDOM_STATE = (-(2**62) + 12345, 2**40 + 7)
"""Seed and offset of whatever is random."""


def _dtype(name: str) -> torch.dtype:
    return torch.int64 if name == INDEX else getattr(torch, name)


@dataclass(eq=False)
class _Grid:
    """The values of one region for some inputs."""

    region: Region
    inputs: Sequence[Tensor]
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def __post_init__(self) -> None:
        self.axes = tuple(self.region.sizes)
        for number in self.region.live:
            self.values[number] = self._made(self.region.exprs[number])

    def shape(self, axes: Sequence[int]) -> list[int]:
        return [self.region.sizes[axis] if axis in axes else 1 for axis in self.axes]

    def _made(self, expr: Expr) -> Tensor:
        args = [self.values[arg] for arg in expr.args]
        dtype = _dtype(expr.dtype)
        if expr.op == "const":
            literal = {"True": 1, "False": 0}.get(expr.literal, expr.literal)
            number = float(literal) if dtype.is_floating_point else int(literal)
            return torch.tensor(number, dtype=dtype).reshape([1] * len(self.axes))
        if expr.op == "place":
            return self._place(expr.axes)
        if expr.op in ("size", "extent"):
            count = math.prod(self.region.sizes[axis] for axis in expr.axes)
            return torch.tensor(count, dtype=dtype).reshape([1] * len(self.axes))
        if expr.op == "load":
            return self._load(expr)
        if expr.op == "cast":
            return args[0].to(dtype)
        if expr.op == "round":
            return args[0].to(getattr(torch, expr.to)).to(dtype)
        if expr.op in ("reduce", "scan"):
            return self._combined(expr, args[0])
        if expr.op in SHARES:
            return self._random(expr, *args)
        return PRIMITIVES[expr.op](*args).to(dtype)

    def _place(self, axes: Sequence[int]) -> Tensor:
        """Row-major, whatever the order of the grid."""
        total = torch.zeros([1] * len(self.axes), dtype=torch.int64)
        for axis in axes:
            size = self.region.sizes[axis]
            total = total * size + torch.arange(size).reshape(self.shape([axis]))
        return total

    def _random(self, expr: Expr, seed: Tensor, offset: Tensor, place: Tensor) -> Tensor:
        """Each element's own bits; one that a guard leaves out may have any."""
        shape = (max(int(place.max()), 0) + 1,)
        bits = reference_functions()["random_bits"]
        drawn = bits(shape, SHARES[expr.op], int(seed), int(offset), int(expr.literal), "cpu")
        return drawn[place.clamp_min(0)].to(torch.int32)

    def _load(self, expr: Expr) -> Tensor:
        source = self.inputs[expr.input]
        guard = torch.tensor(True) if expr.guard is None else self.values[expr.guard]
        indices: list[Tensor] = []
        assert len(expr.indices) == source.dim()
        for index, size in zip(expr.indices, source.shape, strict=True):
            place = self.values[index].to(torch.int64)
            outside = ((place < 0) | (place >= size)) & guard
            assert not outside.any(), f"a load of in{expr.input} outside its {size} elements"
            indices.append(place.clamp(0, size - 1))
        found = source[tuple(torch.broadcast_tensors(*indices))] if indices else source
        found = found.reshape([1] * len(self.axes)) if not indices else found
        nothing = torch.zeros((), dtype=found.dtype)
        return torch.where(guard, found, nothing).to(_dtype(expr.dtype))

    def _combined(self, expr: Expr, value: Tensor) -> Tensor:
        """The axes of a reduction or a scan flattened, in their own order."""
        full = [max(m, n) for m, n in zip(value.shape, self.shape(expr.axes), strict=True)]
        where = [self.axes.index(axis) for axis in expr.axes]
        last = list(range(-len(where), 0))
        moved = value.expand(full).movedim(where, last)
        flat = moved.flatten(-len(where))
        if expr.op == "scan":
            flat = flat.flip(-1) if expr.reverse else flat
            flat = SCANS[expr.monoid](flat).to(_dtype(expr.dtype))
            flat = flat.flip(-1) if expr.reverse else flat
            return flat.reshape(moved.shape).movedim(last, where)
        found = MONOIDS[expr.monoid](flat).to(_dtype(expr.dtype))
        return found.reshape(
            [1 if a in expr.axes else n for a, n in zip(self.axes, full, strict=True)]
        )

    def output(self, output: Output) -> Tensor:
        order = [axis for dim in output.dims for axis in dim]
        value = self.values[output.value]
        assert not self.region.depends[output.value] - set(order), "a result that changes off it"
        value = value.expand(self.shape(order)) if order else value
        value = value.permute(
            [self.axes.index(a) for a in order]
            + [i for i, a in enumerate(self.axes) if a not in order]
        )
        return value.reshape(output.tensor.shape).to(_dtype(output.tensor.dtype))


def evaluate(region: Region, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results of a region for some inputs."""
    grid = _Grid(region, inputs)
    return [grid.output(output) for output in region.outputs]


def _truncated(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


_SAME_NAME = """
add sub mul neg exp exp2 log log2 sqrt rsqrt sin cos sigmoid floor ceil trunc maximum minimum
eq ne lt le gt ge where erf erfc erfinv expm1 log1p log10 tan tanh asin acos atan sinh cosh asinh
acosh atanh lgamma pow atan2 fmod hypot copysign
"""
PRIMITIVES: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _SAME_NAME.split()},
    "abs": lambda x: x if x.dtype == torch.bool else x.abs(),
    "div": torch.true_divide,
    "floordiv": _truncated,
    "mod": torch.fmod,
    "rint": torch.round,
    "and": torch.bitwise_and,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
}
"""Integer divisions truncate, as they do in a kernel."""

MONOIDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(-1),
    "max": lambda x: x.amax(-1),
    "min": lambda x: x.amin(-1),
    "prod": lambda x: x.prod(-1),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: x.argmin(-1),
}
SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.cumsum(-1),
    "prod": lambda x: x.cumprod(-1),
    "logsum": lambda x: x.logcumsumexp(-1),
}


def reference_functions() -> dict[str, Any]:
    """What an emitted file's reference draws with."""
    return {**vars(fused_runtime)}


def drawn_reference(flow: Dataflow, found: Expressed, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the emitted reference gives for a region that draws random numbers."""
    names = {ref: f"given[{n}]" for n, ref in enumerate(found.inputs)}
    lines = reference_lines(flow, found, names, {}, {n.name: n.name for n in flow.nodes}, {})
    functions = reference_functions() | {"given": _given(flow, found, inputs)}
    functions |= dict(zip(STATE, RANDOM_STATE, strict=True))
    body = "\n".join(f"    {line}" for line in lines)
    exec(f"def reference():\n{body}", functions)
    result = functions["reference"]()
    return list(result) if isinstance(result, tuple) else [result]


class _Recorder(TorchDispatchMode):
    """Runs a function, and writes its launches and views onto a tape as if it ran on CUDA."""

    def __init__(self, tape: Tape, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.tape = tape
        self.fakes = {id(tensor): tape.input(tensor) for tensor in inputs}
        self.alive = list(inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        result = func(*args, **given)
        if func.namespace == "prim":
            return result
        if any(argument.name == "device" for argument in func._schema.arguments):
            given["device"] = torch.device("cuda")
        fakes = self.tape.call(func, *self._fake(args), **self._fake(given))
        for tensor, fake in zip(_flat(result), _flat(fakes), strict=True):
            self.fakes[id(tensor)] = fake
            self.alive.append(tensor)
        return result

    def _fake(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.fakes[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self._fake(item) for item in value)
        if isinstance(value, dict):
            return {key: self._fake(item) for key, item in value.items()}
        return value


def _flat(result: Any) -> list[Tensor]:
    """The tensors that a function returns."""
    found = result if isinstance(result, (tuple, list)) else (result,)
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def expressed_whole(flow: Dataflow) -> Expressed:
    """All launches of a graph as one region; NotExpressible where there is none."""
    return lower_region(flow, boundary(flow, launches(flow)))


def meaning(flow: Dataflow, found: Expressed, inputs: Sequence[Tensor]) -> dict[Ref, Tensor]:
    """What a region gives, by the results that it stores."""
    given = _given(flow, found, inputs)
    if found.draws:
        given += [torch.tensor(state) for state in RANDOM_STATE]
    return dict(zip(found.outputs, evaluate(found.region, given), strict=True))


def _given(flow: Dataflow, found: Expressed, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The tensors behind a region's inputs.

    `inputs` are those of the graph, in order; what the region reads of them through a view is
    taken from where the view looks.
    """
    bases = [node.out.storage for node in flow.nodes if node.kind == "input"]
    base_of = dict(zip(bases, inputs, strict=True))
    given: list[Tensor] = []
    for ref in found.inputs:
        seen = flow.annotated.tensors[ref]
        given.append(torch.as_strided(base_of[seen.storage], seen.shape, seen.stride, seen.offset))
    return given


def held_to_eager(function: Callable[..., Any], *inputs: Tensor, **close: Any) -> Expressed:
    """One region of all that a function launches gives what eager gives; returns that region."""
    tape = Tape()
    recorder = _Recorder(tape, inputs)
    with torch.no_grad(), recorder:
        wanted = _flat(function(*inputs))
    flow = tape.flow(*(recorder.fakes[id(tensor)] for tensor in wanted))
    found = expressed_whole(flow)
    made = {tape.ref(recorder.fakes[id(tensor)]): tensor for tensor in recorder.alive}
    for ref, result in meaning(flow, found, inputs).items():
        torch.testing.assert_close(result, made[ref], equal_nan=True, **close)
    return found
