"""Match of a region with one PyTorch op that computes exactly the same: their normal forms are
identical, however the source spells the region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from fusion_advisor.fusion.gates import Subject
from fusion_advisor.ir.graph import FLOATS, Tensor
from fusion_advisor.region.axes import Dims
from fusion_advisor.region.normal_form import (
    Form,
    Forms,
    equal,
    exponential,
    hyperbolic_tangent,
    number,
    plus,
    power,
    size,
    times,
    total,
)
from fusion_advisor.region.region import Region

Row = frozenset[int]
Formula = Callable[..., Form]
"""Function from the axes of a row, a constant, the row and vectors to the op's result."""


def _softmax(row: Row, eps: float, x: Form) -> Form:
    raised = exponential(x)
    return times(raised, power(total(raised, row), -1.0))


def _mean(x: Form, row: Row) -> Form:
    return times(total(x, row), power(size(row), -1.0))


def _rms_norm(row: Row, eps: float, x: Form, *vectors: Form) -> Form:
    scale = power(plus(_mean(times(x, x), row), number(eps)), -0.5)
    scaled = times(x, scale)
    for vector in vectors[:1]:
        scaled = times(scaled, vector)
    return plus(scaled, *vectors[1:])


def _layer_norm(row: Row, eps: float, x: Form, *vectors: Form) -> Form:
    return _rms_norm(row, eps, plus(x, times(_mean(x, row), number(-1.0))), *vectors)


def gelu_tanh_argument(x: Form) -> Form:
    """Argument of the tanh in GELU's tanh form: sqrt(2/pi) (x + 0.044715 x^3)."""
    inner = plus(x, times(power(x, 3.0), number(0.044715)))
    return times(inner, number(0.7978845608))


def _gelu_tanh(row: Row, eps: float, x: Form) -> Form:
    return times(
        times(x, number(0.5)), plus(number(1.0), hyperbolic_tangent(gelu_tanh_argument(x)))
    )


_EXACT: dict[str, tuple[Formula, int]] = {
    "softmax": (_softmax, 0),
    "rms-norm": (_rms_norm, 1),
    "layer-norm": (_layer_norm, 2),
    "gelu-tanh": (_gelu_tanh, 0),
}
"""Formula of each op on one row, and the number of vectors that the op takes beside the row."""


@dataclass(frozen=True)
class Spelling:
    """Region as one call: PyTorch's line and Liger's, empty where there is none; `names` gives the
    region's input for each name in the lines."""

    framework: str
    liger: str
    names: tuple[tuple[str, int], ...]


def exact(subject: Subject, name: str) -> Spelling | None:
    """Find the call that computes exactly this region; None when there is none. Requires one
    full-size input, read as it lies, the op's vectors, one output of the input's dimensions and
    dtype, and the same normal form."""
    rule, known = subject.rulebook.patterns.get(name), _EXACT.get(name)
    if subject.expressed is None or rule is None or not rule.framework or known is None:
        return None
    region, (formula, vectors) = subject.expressed.region, known
    loads = [i for i in region.live if region.exprs[i].op == "load"]
    row = region.reduced
    full = [i for i in loads if region.depends[i] == frozenset(region.sizes)]
    extra = [i for i in loads if i not in full]
    if len(full) != 1 or len(region.outputs) != 1 or len(extra) > vectors:
        return None
    output, (source, dims) = region.outputs[0], _loaded(region, full[0])
    same = (output.tensor.shape, output.tensor.dtype) == (source.shape, source.dtype)
    if not same or output.dims != dims or not all(_as_it_lies(region, i) for i in loads):
        return None
    if any(_loaded(region, i)[1] != (dims[-1],) or region.depends[i] != row for i in extra):
        return None
    matching = _matching(region, formula, full[0], extra)
    if matching is None:
        return None
    eps, order = matching
    line = _spelled(rule.framework, region, full[0], eps, len(extra))
    whole = len(extra) == vectors  # Liger asks for all of them
    liger = _spelled(rule.liger, region, full[0], eps, vectors) if rule.liger and whole else ""
    numbers = (region.exprs[i].input for i in (full[0], *order))
    names = tuple(zip(("x", "weight", "bias"), numbers, strict=False))
    return Spelling(line, liger, names) if line else None


def _as_it_lies(region: Region, load: int) -> bool:
    """Whether a load takes each element from its own place: not shifted, flipped or padded."""
    expr, (_, dims) = region.exprs[load], _loaded(region, load)
    places = (region.exprs[index] for index in expr.indices)
    return not expr.guarded and all(
        place.op == "place" and place.axes == dim
        for place, dim in zip(places, dims, strict=True)
        if dim
    )


def _matching(
    region: Region, formula: Formula, x: int, extra: Sequence[int]
) -> tuple[float, tuple[int, ...]] | None:
    """Constant and order of the vectors with which the formula equals the region's value; None
    where it does not."""
    forms = Forms(region)
    result = forms.of(region.outputs[0].value)
    constants = [region.exprs[i] for i in region.all("const")]
    choices = {float(c.literal) for c in constants if c.dtype in FLOATS}
    choices |= {region.exprs[i].captured for i in region.all("given")}
    for order in permutations(extra):
        for eps in sorted(choices | {0.0}):
            wanted = formula(region.reduced, eps, forms.of(x), *(forms.of(i) for i in order))
            if equal(result, wanted):
                return eps, order
    return None


def _spelled(line: str, region: Region, x: int, eps: float, vectors: int) -> str:
    """Fill the rulebook's line with this region's dimension and constants; empty where the op
    cannot take the row: a part of a dimension, or dimensions that the op does not accept."""
    dims = _loaded(region, x)[1]
    reduced = [d for d, axes in enumerate(dims) if set(axes) & region.reduced]
    if frozenset(axis for d in reduced for axis in dims[d]) != region.reduced:
        return ""
    if reduced and "dim=-1" in line:
        if len(reduced) != 1:
            return ""
        return line if reduced[0] == len(dims) - 1 else line.replace("dim=-1", f"dim={reduced[0]}")
    if reduced and reduced != [len(dims) - 1]:
        return ""
    for name in ("weight", "bias")[vectors:]:
        line = line.replace(f", {name}", f", {name}=None" if name == "weight" else ", None")
    return line.replace("weight=None", "None").replace("eps", repr(eps))


def _loaded(region: Region, load: int) -> tuple[Tensor, Dims]:
    number: int = region.exprs[load].input
    return region.inputs[number], region.input_dims[number]
