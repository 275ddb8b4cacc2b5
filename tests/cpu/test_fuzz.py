"""Random regions through the real stages: whatever gets a plan must be right.

Structure is what is drawn here (ranks, strides, broadcasts, views, reductions, results), so the
arithmetic is tame: sums run in float64, in narrow floats or in integers, where an order of
summation is no matter of luck. FUSION_ADVISOR_SLOW_TESTS in the environment draws many more, anew
each time; otherwise the draws are the same in every run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from fusion_advisor.decide import Decision, decide
from fusion_advisor.emit import emit
from fusion_advisor.group import group
from fusion_advisor.verify import Worker, checker, collect_check, submit_check

from .regions import RULES, Tape, decided

aten = torch.ops.aten
SLOW = "FUSION_ADVISOR_SLOW_TESTS" in os.environ
EXAMPLES = 3000 if SLOW else 150
SEEDS = 2
MOST_ELEMENTS = 3000

FLOATS = (torch.float64, torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 2, 3, 4, 5, 8, 12, 17)
UNARY = (aten.neg, aten.abs, aten.relu, aten.sigmoid, aten.tanh, aten.clone, aten.silu)
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum, aten.minimum)
REDUCED = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
INTEGER_BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.maximum, aten.minimum)


@dataclass
class Sketch:
    """A region being drawn: its tape, the tensors made so far, and the calls as text."""

    tape: Tape = field(default_factory=Tape)
    tensors: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    calls: list[str] = field(default_factory=list[str])

    def call(self, target: Any, *args: Any) -> None:
        result = self.tape.call(target, *args)
        shown = ", ".join(
            f"v{self.index(a)}" if isinstance(a, torch.Tensor) else str(a) for a in args
        )
        self.calls.append(f"v{len(self.tensors)} = {target}({shown})")
        self.tensors.append(result)

    def index(self, tensor: torch.Tensor) -> int:
        return next(i for i, known in enumerate(self.tensors) if known is tensor)


def _layout(draw: Callable[..., Any], shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of this shape: dense, permuted, sliced or expanded."""
    kind = draw(st.sampled_from(["dense", "dense", "permuted", "sliced", "stepped", "expanded"]))
    if kind == "permuted":
        order = draw(st.permutations(range(len(shape))))
        dense = torch.empty([shape[d] for d in order], dtype=dtype)
        return dense.permute([order.index(d) for d in range(len(shape))])
    if kind == "sliced" and shape:
        wide = torch.empty([n + 3 for n in shape], dtype=dtype)
        return wide[tuple(slice(1, 1 + n) for n in shape)]
    if kind == "stepped" and shape:
        return torch.empty([*shape[:-1], 2 * shape[-1]], dtype=dtype)[..., ::2]
    if kind == "expanded":
        narrow = [1 if draw(st.booleans()) else n for n in shape]
        return torch.empty(narrow, dtype=dtype).expand(shape)
    return torch.empty(shape, dtype=dtype)


def _input(draw: Callable[..., Any], sketch: Sketch, base: list[int], dtype: torch.dtype) -> None:
    """A tensor that broadcasts with the base shape."""
    shape = [1 if draw(st.integers(0, 3)) == 0 else n for n in base]
    shape = shape[draw(st.sampled_from([0, 0, 0, 1])) :] if len(shape) > 1 else shape
    tensor = sketch.tape.input(_layout(draw, shape, dtype))
    sketch.calls.append(
        f"v{len(sketch.tensors)} = {str(tensor.dtype)[6:]}{list(tensor.shape)}{tensor.stride()}"
    )
    sketch.tensors.append(tensor)


def _unary(draw: Callable[..., Any], sketch: Sketch, x: torch.Tensor) -> None:
    if x.is_floating_point():
        sketch.call(draw(st.sampled_from(UNARY)).default, x)
    elif x.dtype == torch.bool:
        sketch.call(aten.logical_not.default, x)
    else:
        sketch.call(draw(st.sampled_from([aten.neg, aten.abs, aten.relu])).default, x)


def _binary(draw: Callable[..., Any], sketch: Sketch, x: torch.Tensor) -> None:
    if draw(st.integers(0, 4)) == 0 and x.dtype != torch.bool:
        scalar = 0.5 if x.is_floating_point() else 3
        target = draw(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.gt.Scalar]))
        sketch.call(target, x, scalar)
        return
    other = draw(st.sampled_from(sketch.tensors))
    if math.prod(torch.broadcast_shapes(x.shape, other.shape)) > MOST_ELEMENTS:
        return
    if x.dtype == torch.bool or other.dtype == torch.bool:
        both = x.dtype == other.dtype
        sketch.call(aten.logical_and.default if both else aten.mul.Tensor, x, other)
    elif not x.is_floating_point():
        sketch.call(draw(st.sampled_from(INTEGER_BINARY)), x, other)
    else:
        target = draw(st.sampled_from([*BINARY, aten.lt.Tensor]))
        sketch.call(getattr(target, "default", target), x, other)


def _reduced(draw: Callable[..., Any], sketch: Sketch, x: torch.Tensor) -> None:
    if not x.dim():
        return
    count = draw(st.integers(1, x.dim()))
    dims = sorted(draw(st.permutations(range(x.dim())))[:count])
    targets = list(REDUCED)
    if not x.is_floating_point():
        targets = [aten.sum.dim_IntList, aten.amax.default]
    elif x.dtype == torch.float32:
        targets = [aten.amax.default, aten.amin.default]
    elif draw(st.booleans()):
        sketch.call(aten._softmax.default, x, dims[0], False)
        return
    sketch.call(draw(st.sampled_from(targets)), x, dims, draw(st.booleans()))


def _viewed(draw: Callable[..., Any], sketch: Sketch, x: torch.Tensor) -> None:
    kind = draw(st.sampled_from(["transpose", "unsqueeze", "merge", "split", "expand"]))
    shape, rank = list(x.shape), x.dim()
    if kind == "transpose" and rank > 1:
        sketch.call(aten.transpose.int, x, *draw(st.permutations(range(rank)))[:2])
    elif kind == "unsqueeze" and rank < 4:
        sketch.call(aten.unsqueeze.default, x, draw(st.integers(0, rank)))
    elif kind == "merge" and rank > 1 and x.is_contiguous():
        d = draw(st.integers(0, rank - 2))
        sketch.call(aten.view.default, x, [*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]])
    elif kind == "split" and 0 < rank < 4 and x.is_contiguous():
        d = draw(st.integers(0, rank - 1))
        factors = [n for n in range(1, shape[d] + 1) if shape[d] % n == 0]
        outer = draw(st.sampled_from(factors))
        sketch.call(aten.view.default, x, [*shape[:d], outer, shape[d] // outer, *shape[d + 1 :]])
    elif kind == "expand" and rank and x.numel() * 3 <= MOST_ELEMENTS:
        wide = [3 if n == 1 else n for n in shape]
        if math.prod(wide) <= MOST_ELEMENTS:
            sketch.call(aten.expand.default, x, wide)


def _selected(draw: Callable[..., Any], sketch: Sketch, x: torch.Tensor) -> None:
    """Where one tensor is positive, itself, else another of its dtype."""
    others = [t for t in sketch.tensors if t.dtype == x.dtype]
    other = draw(st.sampled_from(others))
    if x.dtype == torch.bool:
        return
    if math.prod(torch.broadcast_shapes(x.shape, other.shape)) <= MOST_ELEMENTS:
        sketch.call(aten.gt.Scalar, x, 0)
        sketch.call(aten.where.self, sketch.tensors[-1], x, other)


STEPS = (_unary, _unary, _binary, _binary, _binary, _reduced, _viewed, _viewed, _selected)


@st.composite
def sketches(draw: Any) -> tuple[Sketch, list[torch.Tensor]]:
    """A region of 2 to 8 steps, and what it returns."""
    sketch = Sketch()
    rank = draw(st.integers(1, 4))
    base = [draw(st.sampled_from(SIZES[:6] if rank > 2 else SIZES)) for _ in range(rank)]
    dtype = draw(st.sampled_from([*FLOATS, torch.float64, torch.int64, torch.int32]))
    for _ in range(draw(st.integers(1, 3))):
        _input(draw, sketch, base, dtype)
    inputs = len(sketch.tensors)
    for _ in range(draw(st.integers(2, 8))):
        recent = sketch.tensors[-3:] if draw(st.booleans()) else sketch.tensors
        x = draw(st.sampled_from(recent))
        try:
            draw(st.sampled_from(STEPS))(draw, sketch, x)
        except RuntimeError:
            continue  # shapes that do not broadcast
    made = sketch.tensors[inputs:]
    results = [made[-1]] if made else []
    if len(made) > 1 and draw(st.booleans()):
        results.append(draw(st.sampled_from(made[:-1])))
    return sketch, results


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with checker("interpreter") as worker:
        yield worker


def _planned(sketch: Sketch, results: list[torch.Tensor]) -> Iterator[Decision]:
    """All launches as one group when that has a plan, else the groups that are accepted."""
    flow = sketch.tape.flow(*results)
    if not any(flow.launches(i) for i in range(len(flow.nodes))):
        return
    whole = decided(flow)
    if whole.subject.plan is not None:
        yield whole
        return
    for found in group(flow, lambda chosen: decide(flow, chosen, RULES), RULES).groups:
        yield found.decision


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=not SLOW,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(sketches())
def test_what_has_a_plan_is_right(worker: Worker, drawn: tuple[Sketch, list[torch.Tensor]]) -> None:
    sketch, results = drawn
    if not results:
        return
    note("\n".join(sketch.calls))
    note(f"return {[sketch.index(result) for result in results]}")
    for decision in _planned(sketch, results):
        kernel = emit(decision.subject.flow, decision, "drawn", RULES)
        check = collect_check(kernel, submit_check(worker, kernel, seeds=SEEDS))
        if not check.passed:
            note(kernel.text.split("fallbacks = 0")[0])
        assert check.failure is None
