"""Idiom of a region, recognised in its structure and never in the model's names.

The idioms are those of `rules/patterns`; their `order` decides between several that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusion_advisor.fusion.gates import Subject
from fusion_advisor.fusion.library_match import gelu_tanh_argument
from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.normal_form import Forms, equal, symbol
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Rulebook

_TRANSPARENT = ("cast", "round")


@dataclass(frozen=True)
class Form:
    """Region with the queries that the recognisers make."""

    region: Region

    def bare(self, number: int) -> int:
        """Value behind conversions."""
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
        return (i for i in self.all("reduce") if self.region.exprs[i].monoid == monoid)

    def users(self, number: int) -> Sequence[int]:
        """Values computed from a value, looking through conversions."""
        return self._users.get(number, ())

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for i in self.region.live:
            for arg in {*self.args(i)} if self.bare(i) == i else ():
                found.setdefault(arg, []).append(i)
        return found

    def behind(self, number: int, ops: Sequence[str]) -> set[int]:
        """Values that a value is computed from, looking through `ops` alone."""
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
        return self.expr(number).op in ("const", "given", "size")


def name_of(subject: Subject, rulebook: Rulebook) -> str:
    """Name of the first idiom, in the rulebook's order, that the region fits."""
    form = Form(subject.expressed.region) if subject.expressed else None
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


def softmaxes(form: Form) -> Iterator[tuple[int, int]]:
    """Match exp(x - max x) over the sum of those exponentials; yields x and the quotient."""
    shifted = {
        i: form.args(arg)[0]
        for i in form.all("exp")
        for arg in form.args(i)
        if form.expr(arg).op == "sub" and form.expr(form.args(arg)[1]).op == "reduce"
    }
    sums = {i for i in form.reductions("sum") if form.args(i)[0] in shifted}
    for i in form.all("div"):
        over, under = form.args(i)
        if over in shifted and under in sums:
            yield shifted[over], i


def _is_softmax(form: Form) -> bool:
    return any(softmaxes(form))


def _mean_squares(form: Form) -> Iterator[int]:
    """Match values that are squared, summed along a row, and end under a root."""
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


def _mean_of(form: Form, number: int) -> int | None:
    """Value x where `number` is the mean of x along a row; else None."""
    if form.expr(number).op in ("div", "mul"):
        number, count = form.args(number)
        if form.constant(count) and form.expr(number).op == "reduce":
            return form.args(number)[0]
    return None


def normalised(form: Form) -> Iterator[tuple[int, int, bool]]:
    """Match the rows of norms; yields the row, the value that is squared, and whether the row is
    centred first."""
    for squared in _mean_squares(form):
        if form.expr(squared).op == "sub":
            row, centre = form.args(squared)
            if _mean_of(form, centre) == row:
                yield row, squared, True
                continue
        sums = (form.args(i)[0] for i in form.reductions("sum"))
        yield squared, squared, squared in sums


def _is_layer_norm(form: Form) -> bool:
    return any(centred for _, _, centred in normalised(form))


def _is_rms_norm(form: Form) -> bool:
    return any(not centred for _, _, centred in normalised(form))


def _is_residual_norm(form: Form) -> bool:
    """Whether the row is a sum of two tensors of the row's own size."""
    depends = form.region.depends
    return any(
        form.expr(row).op == "add"
        and all(form.expr(a).op == "load" and depends[a] == depends[row] for a in form.args(row))
        for row, _, _ in normalised(form)
    )


def tanh_gelus(form: Form) -> Iterator[tuple[int, int]]:
    """Match tanh(sqrt(2/pi) (u + 0.044715 u^3)) of a value u; yields the tanh and u."""
    wanted = gelu_tanh_argument(symbol("u"))
    for tanh in form.all("tanh"):
        for arg in form.args(tanh):
            for u in form.behind(arg, ("add", "mul", "pow")):
                if equal(Forms(form.region, {u: symbol("u")}).of(arg), wanted):
                    yield tanh, u


def _is_gelu_tanh(form: Form) -> bool:
    return any(tanh_gelus(form))


def _factors(form: Form, number: int) -> Iterator[int]:
    """Yield the factors of a value, and every product on the way to them."""
    number = form.bare(number)
    yield number
    if form.expr(number).op == "mul":
        for arg in form.args(number):
            yield from _factors(form, arg)


def gated(form: Form) -> Iterator[tuple[int, int, bool]]:
    """Match a product of a and sigmoid(a); yields the product, a, and whether there is
    another factor."""
    for product in form.all("mul"):
        factors = set(_factors(form, product))
        for gate in {form.args(i)[0] for i in factors if form.expr(i).op == "sigmoid"}:
            if gate not in factors - {product}:
                continue
            own = {*_factors(form, gate)}
            others = (i for i in factors - own if form.expr(i).op not in ("mul", "sigmoid"))
            yield product, gate, any(not form.constant(i) for i in others)


def _is_swiglu(form: Form) -> bool:
    return any(more for _, _, more in gated(form))


_BY_FORM: dict[str, Callable[[Form], bool]] = {
    "softmax": _is_softmax,
    "residual-norm": _is_residual_norm,
    "rms-norm": _is_rms_norm,
    "layer-norm": _is_layer_norm,
    "gelu-tanh": _is_gelu_tanh,
    "swiglu": _is_swiglu,
}
