"""Which idiom a region is: seen in its structure for the name, and proven on numbers for the
question whether one PyTorch op computes exactly the same.

The names are those of `rules/patterns`; their `order` decides between several that fit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from fusion_advisor.gates import Subject
from fusion_advisor.region import Expr, Region
from fusion_advisor.rulebook import Rulebook

_TRANSPARENT = ("cast", "round")


@dataclass(frozen=True)
class _Form:
    """A region with what the recognisers ask of it."""

    region: Region

    def bare(self, number: int) -> int:
        """The value behind conversions."""
        while self.region.exprs[number].op in _TRANSPARENT:
            number = self.region.exprs[number].args[0]
        return number

    def expr(self, number: int) -> Expr:
        return self.region.exprs[self.bare(number)]

    def args(self, number: int) -> tuple[int, ...]:
        return tuple(self.bare(arg) for arg in self.expr(number).args)

    def all(self, op: str) -> Iterator[int]:
        return (i for i in self.region.live if self.region.exprs[i].op == op)

    def reductions(self, monoid: str) -> Iterator[int]:
        return (i for i in self.all("reduce") if self.region.exprs[i].attr[0] == monoid)

    def behind(self, number: int, ops: Sequence[str]) -> set[int]:
        """Everything that a value is made from, looked through `ops` alone."""
        found: set[int] = set()
        todo = [self.bare(number)]
        while todo:
            one = todo.pop()
            if one not in found:
                found.add(one)
                if self.region.exprs[one].op in ops:
                    todo.extend(self.args(one))
        return found

    def constant(self, number: int) -> bool:
        return self.expr(number).op in ("const", "size")


def name_of(subject: Subject, rulebook: Rulebook) -> str:
    """The first idiom, in the rulebook's order, that the region fits."""
    form = _Form(subject.expressed.region) if subject.expressed else None
    for name in rulebook.patterns:
        by_launches = _BY_LAUNCHES.get(name)
        by_form = _BY_FORM.get(name)
        if by_launches and by_launches(subject):
            return name
        if by_form and form and by_form(form):
            return name
    return "other"


# -- by the launches -------------------------------------------------------------------------------


def _patterns(subject: Subject) -> set[str]:
    return {subject.cost(i).pattern for i in subject.launches}


def _is_attention(subject: Subject) -> bool:
    return "attention" in _patterns(subject)


def _has_product(subject: Subject) -> bool:
    return bool(_patterns(subject) & {"matmul", "convolution"})


def _is_gemm_norm(subject: Subject) -> bool:
    return _has_product(subject) and "reduction" in _patterns(subject)


def _is_gemm_activation(subject: Subject) -> bool:
    return _has_product(subject) and "reduction" not in _patterns(subject)


def _is_backward(subject: Subject) -> bool:
    return any("_backward" in subject.flow.nodes[i].op for i in subject.launches)


def _is_reduction(subject: Subject) -> bool:
    return "reduction" in _patterns(subject)


def _is_pointwise(subject: Subject) -> bool:
    return not _is_reduction(subject)


_BY_LAUNCHES: dict[str, Callable[[Subject], bool]] = {
    "attention": _is_attention,
    "gemm-norm": _is_gemm_norm,
    "gemm-activation": _is_gemm_activation,
    "backward": _is_backward,
    "reduction-pointwise": _is_reduction,
    "pointwise-chain": _is_pointwise,
}


# -- by the form -----------------------------------------------------------------------------------


def _is_softmax(form: _Form) -> bool:
    """exp(x - max x) over the sum of those."""
    shifted = {
        i
        for i in form.all("exp")
        for arg in form.args(i)
        if form.expr(arg).op == "sub" and form.expr(form.args(arg)[1]).op == "reduce"
    }
    sums = {i for i in form.reductions("sum") if form.args(i)[0] in shifted}
    return any(
        form.args(i)[0] in shifted and form.args(i)[1] in sums for i in form.all("div")
    )


def _mean_squares(form: _Form) -> Iterator[int]:
    """What is squared, summed along a row, and ends under a root."""
    roots = [i for op in ("sqrt", "rsqrt") for i in form.all(op)]
    under = set[int]().union(
        *(form.behind(form.args(i)[0], ("add", "mul", "div", "maximum")) for i in roots)
    )
    for total in form.reductions("sum"):
        square = form.args(total)[0]
        if total in under and form.expr(square).op == "mul":
            left, right = form.args(square)
            if left == right:
                yield left


def _mean_of(form: _Form, number: int) -> int | None:
    """x, where the value is the mean of x along a row."""
    if form.expr(number).op in ("div", "mul"):
        number, count = form.args(number)
        if form.constant(count) and form.expr(number).op == "reduce":
            return form.args(number)[0]
    return None


def _normalised(form: _Form) -> Iterator[tuple[int, bool]]:
    """The rows that norms work on, and whether they are centred first."""
    for squared in _mean_squares(form):
        if form.expr(squared).op == "sub":
            row, centre = form.args(squared)
            if _mean_of(form, centre) == row:
                yield row, True
                continue
        sums = (form.args(i)[0] for i in form.reductions("sum"))
        yield squared, squared in sums


def _is_layer_norm(form: _Form) -> bool:
    return any(centred for _, centred in _normalised(form))


def _is_rms_norm(form: _Form) -> bool:
    return any(not centred for _, centred in _normalised(form))


def _is_residual_norm(form: _Form) -> bool:
    """The row is a sum of two tensors of its own size."""
    depends = form.region.depends
    return any(
        form.expr(row).op == "add"
        and all(form.expr(a).op == "load" and depends[a] == depends[row] for a in form.args(row))
        for row, _ in _normalised(form)
    )


def _is_gelu_tanh(form: _Form) -> bool:
    """A tanh of sqrt(2/pi) (u + 0.044715 u^3) of some value u."""
    for tanh in form.all("tanh"):
        inner = form.args(tanh)[0]
        for u in form.behind(inner, ("add", "mul", "pow")):
            got = [_evaluate(form.region, inner, {u: x}) for x in _SAMPLES]
            wanted = [0.7978845608 * (x + 0.044715 * x**3) for x in _SAMPLES]
            if all(g is not None and _near(g, w) for g, w in zip(got, wanted, strict=True)):
                return True
    return False


def _factors(form: _Form, number: int) -> list[int]:
    number = form.bare(number)
    if form.expr(number).op != "mul":
        return [number]
    return [factor for arg in form.args(number) for factor in _factors(form, arg)]


def _is_swiglu(form: _Form) -> bool:
    """A product of a, sigmoid(a) and something else."""
    for product in form.all("mul"):
        factors = _factors(form, product)
        gates = [form.args(i)[0] for i in factors if form.expr(i).op == "sigmoid"]
        others = [i for i in factors if form.expr(i).op != "sigmoid" and not form.constant(i)]
        if any(gate in others and len(others) > 1 for gate in gates):
            return True
    return False


_BY_FORM: dict[str, Callable[[_Form], bool]] = {
    "softmax": _is_softmax,
    "residual-norm": _is_residual_norm,
    "rms-norm": _is_rms_norm,
    "layer-norm": _is_layer_norm,
    "gelu-tanh": _is_gelu_tanh,
    "swiglu": _is_swiglu,
}


# -- exactly one op --------------------------------------------------------------------------------

Lanes = list[float]
"""One value along a short row; a single lane where it does not change along it."""

_SAMPLES = (-2.3, -0.7, 0.4, 1.9)
_LANES = 5

_SCALAR: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "abs": abs,
    "exp": math.exp,
    "exp2": lambda a: 2.0**a,
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1.0 / math.sqrt(a),
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": lambda a: 1.0 / (1.0 + math.exp(-a)),
    "pow": lambda a, b: a**b,
    "maximum": max,
    "minimum": min,
}

_COMBINE: dict[str, Callable[[Lanes], float]] = {
    "sum": math.fsum, "max": max, "min": min, "prod": math.prod,
}  # fmt: skip


def _near(got: float, wanted: float) -> bool:
    return math.isclose(got, wanted, rel_tol=1e-6, abs_tol=1e-12)


def _number(text: str) -> float:
    """A constant as the region spells it."""
    return float({"True": "1", "False": "0"}.get(text, text))


def _evaluate(region: Region, number: int, given: dict[int, float]) -> float | None:
    """A value without rows from the values given; None where it needs others."""
    row = _rows(region, {i: [x] for i, x in given.items()}, [number])
    return row[number][0] if row and len(row[number]) == 1 else None


def _rows(region: Region, given: dict[int, Lanes], wanted: Sequence[int]) -> dict[int, Lanes] | None:
    """The values wanted, on one short row; None where an op has no scalar form here."""
    values = dict(given)

    def value(number: int) -> Lanes:
        if number in values:
            return values[number]
        expr = region.exprs[number]
        if expr.op == "const":
            found = [_number(expr.attr[0])]
        elif expr.op == "size":
            found = [float(_LANES)]
        elif expr.op in _TRANSPARENT:
            found = value(expr.args[0])
        elif expr.op == "reduce":
            found = [_COMBINE[expr.attr[0]](value(expr.args[0]))]
        else:
            operands = [value(arg) for arg in expr.args]
            width = max(map(len, operands))
            columns = [lanes * width if len(lanes) == 1 else lanes for lanes in operands]
            found = [_SCALAR[expr.op](*one) for one in zip(*columns, strict=True)]
        values[number] = found
        return found

    try:
        for number in wanted:
            value(number)
    except (KeyError, ValueError, ZeroDivisionError, OverflowError, TypeError):
        return None  # not one of the idioms: they are defined on these numbers
    return values


Formula = Callable[..., Lanes]


def _softmax(eps: float, x: Lanes) -> Lanes:
    total = math.fsum(map(math.exp, x))
    return [math.exp(a) / total for a in x]


def _rms_norm(eps: float, x: Lanes, *weight: Lanes) -> Lanes:
    scale = 1.0 / math.sqrt(math.fsum(a * a for a in x) / len(x) + eps)
    return _affine([a * scale for a in x], *weight)


def _layer_norm(eps: float, x: Lanes, *weight: Lanes) -> Lanes:
    mean = math.fsum(x) / len(x)
    return _rms_norm(eps, [a - mean for a in x], *weight)


def _affine(x: Lanes, weight: Lanes | None = None, bias: Lanes | None = None) -> Lanes:
    scaled = [a * w for a, w in zip(x, weight or [1.0] * len(x), strict=True)]
    return [a + b for a, b in zip(scaled, bias or [0.0] * len(x), strict=True)]


def _gelu_tanh(eps: float, x: Lanes) -> Lanes:
    return [
        0.5 * a * (1.0 + math.tanh(0.7978845608 * (a + 0.044715 * a**3))) for a in x
    ]


_EXACT: dict[str, tuple[Formula, int]] = {
    "softmax": (_softmax, 0),
    "rms-norm": (_rms_norm, 1),
    "layer-norm": (_layer_norm, 2),
    "gelu-tanh": (_gelu_tanh, 0),
}
"""What each op computes on one row, and how many vectors it takes beside the row."""


def exact(subject: Subject, name: str) -> str:
    """The PyTorch line that computes exactly this region; empty when there is none.

    One full-size input, the op's vectors, one output of the input's size and dtype, and the same
    numbers on a sample row.
    """
    rule, known = subject.rulebook.patterns.get(name), _EXACT.get(name)
    if subject.expressed is None or rule is None or not rule.framework or known is None:
        return ""
    region, (formula, vectors) = subject.expressed.region, known
    loads = [i for i in region.live if region.exprs[i].op == "load"]
    row = region.reduced
    full = [i for i in loads if region.depends[i] == frozenset(region.sizes)]
    extra = [i for i in loads if i not in full]
    if len(full) != 1 or len(region.outputs) != 1 or len(extra) > vectors:
        return ""
    output, source = region.outputs[0], region.inputs[region.exprs[full[0]].attr]
    same = output.tensor.shape == source.shape and output.tensor.dtype == source.dtype
    if not same or any(region.depends[i] != row for i in extra):
        return ""
    eps = _matching_eps(region, formula, full[0], extra)
    return "" if eps is None else _spelled(rule.framework, region, full[0], eps, len(extra))


def _matching_eps(region: Region, formula: Formula, x: int, extra: Sequence[int]) -> float | None:
    """The constant of the region with which the formula gives the region's numbers."""
    draw = random.Random(0)
    result = region.outputs[0].value
    # On a row of small values an eps shows.
    samples = [
        {i: [scale * draw.uniform(-2.0, 2.0) for _ in range(_LANES)] for i in (x, *extra)}
        for scale in (1.0, 1e-3)
    ]
    got = [_rows(region, dict(sample), [result]) for sample in samples]
    constants = [region.exprs[i] for i in region.live if region.exprs[i].op == "const"]
    choices = {float(c.attr[0]) for c in constants if c.dtype in ("float32", "float64")}
    for order in permutations(extra):
        for eps in sorted(choices | {0.0}):
            wanted = [formula(eps, s[x], *(s[i] for i in order)) for s in samples]
            if all(
                g is not None
                and len(g[result]) == _LANES
                and all(map(_near, g[result], w))
                for g, w in zip(got, wanted, strict=True)
            ):
                return eps
    return None


def _spelled(line: str, region: Region, x: int, eps: float, vectors: int) -> str:
    """The rulebook's line with this region's dimension and constants."""
    dims = region.input_dims[region.exprs[x].attr]
    reduced = [d for d, axes in enumerate(dims) if axes and set(axes) <= region.reduced]
    if reduced and "dim=-1" in line:
        if len(reduced) != 1:
            return ""
        return line if reduced[0] == len(dims) - 1 else line.replace("dim=-1", f"dim={reduced[0]}")
    if reduced and len(dims) - 1 not in reduced:
        return ""
    for name in ("weight", "bias")[vectors:]:
        line = line.replace(f", {name}", f", {name}=None" if name == "weight" else ", None")
    return line.replace("weight=None", "None").replace("eps", repr(eps))
