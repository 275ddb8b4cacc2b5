"""Dependent reductions that one pass over a row can make: which they are, seen in their algebra.

Three forms can be carried from one part of a row to the next. A sum of terms that exp(−shift)
scales, where the shift follows a maximum of the same row (softmax, logsumexp): when the maximum
grows, what was summed is scaled again. A sum of terms less such a shift (of log-probabilities):
what was summed is lowered by the growth of the maximum, once for each term. And a sum of squared
deviations from the mean of the same row (variance): partial sums are moved to the common mean.
Every other reduction that needs another one takes a pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fusion_advisor.ir.graph import FLOATS
from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.layout import reach


@dataclass(frozen=True)
class Rescaled:
    """`total` sums terms in exp(… − `shift`), and `shift` is made from the maximum `peak` alone."""

    total: int
    peak: int
    shift: int


@dataclass(frozen=True)
class Shifted:
    """`total` sums terms less `shift`, and `shift` is made from the maximum `peak` alone."""

    total: int
    peak: int
    shift: int


@dataclass(frozen=True)
class Moments:
    """`squares` sums (`value` − `mean`)², where the mean comes from the sum `total`. Where the
    source takes back what rounding left over in the deviations, `rest` is the sum of that and
    `lost` its mean."""

    value: int
    total: int
    mean: int
    rest: int | None
    lost: int | None
    squares: int


@dataclass(frozen=True)
class Pass:
    """What one walk over a row finds: reductions that stand alone, and the dependent ones."""

    plain: tuple[int, ...]
    rescaled: tuple[Rescaled, ...]
    shifted: tuple[Shifted, ...]
    moments: tuple[Moments, ...]

    @property
    def followers(self) -> tuple[Rescaled | Shifted, ...]:
        """The sums that follow a maximum."""
        return (*self.rescaled, *self.shifted)

    @property
    def found(self) -> frozenset[int]:
        """Every reduction that is known after the pass."""
        moments = {n for m in self.moments for n in (m.total, m.rest, m.squares) if n is not None}
        return frozenset(self.plain) | moments | {each.total for each in self.followers}


def passes(region: Region, inner: frozenset[int]) -> tuple[Pass, ...]:
    """The reductions along a row, in as few walks over it as their algebra allows."""
    rows = [n for n in sorted(region.all("reduce")) if inner == frozenset(region.exprs[n].axes)]
    moments = {m.squares: m for n in rows if (m := _moments(region, n))}
    parts = {n: m for m in moments.values() for n in (m.total, m.rest) if n is not None}
    following: dict[int, Rescaled | Shifted] = {}
    for number in rows:
        found = _rescaled(region, number, rows) or _shifted(region, number, rows)
        if found is not None:
            following[number] = found
    level: dict[int, int] = {}
    for number in rows:
        needs = _needs(region, number, rows)
        if number in following:
            others = [level[n] + 1 for n in needs - {following[number].peak}]
            level[number] = max([level[following[number].peak], *others])
        elif number in moments or number in parts:
            level[number] = _level_of_value(region, (moments | parts)[number], rows, level)
        else:
            level[number] = max((level[n] + 1 for n in needs), default=0)
    return tuple(_pass(at, level, following, moments, parts) for at in sorted(set(level.values())))


def at_least_one(region: Region, inner: frozenset[int]) -> dict[int, int]:
    """Sums along a row of exp(x − maximum of x), each with its terms: one term is 1, so that no sum
    is less."""
    rows = [n for n in sorted(region.all("reduce")) if inner == frozenset(region.exprs[n].axes)]
    found: dict[int, int] = {}
    for rescaled in (r for n in rows if (r := _rescaled(region, n, rows))):
        term = _bare(region, region.exprs[rescaled.total].args[0])
        power = region.exprs[term]
        if power.op == "exp" and _finite(region, rescaled.shift) == rescaled.peak:
            value = region.exprs[_bare(region, power.args[0])].args[0]
            if _bare(region, value) == _bare(region, region.exprs[rescaled.peak].args[0]):
                found[rescaled.total] = term
    return found


def _finite(region: Region, number: int) -> int:
    """The value that stands for itself where it is finite, and for 0 where it is not, as the
    maximum in `logsumexp`; any other value itself."""
    exprs = region.exprs
    if exprs[number].op != "where":
        return number
    infinite, zero, value = exprs[number].args
    if exprs[infinite].op != "eq" or exprs[zero].literal != "0.0":
        return number
    size, limit = exprs[infinite].args
    same = exprs[size].op == "abs" and exprs[size].args == (value,)
    return value if same and exprs[limit].literal == "inf" else number


def only_summed(region: Region, sums: Mapping[int, int]) -> frozenset[int]:
    """Terms that nothing but their sum is made from."""
    results = {output.value for output in region.outputs}
    elsewhere = {arg for n in region.live if n not in sums for arg in region.exprs[n].args}
    return frozenset(sums.values()) - elsewhere - results


def _pass(
    at: int,
    level: dict[int, int],
    following: dict[int, Rescaled | Shifted],
    moments: dict[int, Moments],
    parts: dict[int, Moments],
) -> Pass:
    here = [n for n, depth in level.items() if depth == at]
    carried = [following[n] for n in here if n in following and level[following[n].peak] == at]
    totals = {each.total for each in carried}
    plain = [n for n in here if n not in totals and n not in moments and n not in parts]
    return Pass(
        tuple(plain),
        tuple(each for each in carried if isinstance(each, Rescaled)),
        tuple(each for each in carried if isinstance(each, Shifted)),
        tuple(moments[n] for n in here if n in moments),
    )


def _level_of_value(
    region: Region, moments: Moments, rows: list[int], level: dict[int, int]
) -> int:
    inside = _needs_of(region, moments.value, rows)
    return max((level[n] + 1 for n in inside), default=0)


def _needs(region: Region, number: int, rows: list[int]) -> set[int]:
    """The reductions along the row that a reduction's operand is made from."""
    return _needs_of(region, region.exprs[number].args[0], rows)


def _needs_of(region: Region, number: int, rows: list[int]) -> set[int]:
    return reach(region, number) & set(rows)


def _bare(region: Region, number: int) -> int:
    """The value behind casts that change nothing here."""
    while region.exprs[number].op == "cast" and region.exprs[number].dtype in (
        "float32",
        "float64",
    ):
        number = region.exprs[number].args[0]
    return number


def _rescaled(region: Region, number: int, rows: list[int]) -> Rescaled | None:
    expr = region.exprs[number]
    if expr.monoid != "sum":
        return None
    for factor in _factors(region, expr.args[0]):
        power = region.exprs[factor]
        if power.op != "exp":
            continue
        apart = region.exprs[_bare(region, power.args[0])]
        if apart.op != "sub":
            continue
        others = [apart.args[0], *(f for f in _factors(region, expr.args[0]) if f != factor)]
        peak = _peak(region, expr, apart.args[1], others, rows)
        if peak is not None:
            return Rescaled(number, peak, apart.args[1])
    return None


def _shifted(region: Region, number: int, rows: list[int]) -> Shifted | None:
    expr = region.exprs[number]
    apart = region.exprs[_bare(region, expr.args[0])]
    if expr.monoid != "sum" or apart.op != "sub" or expr.dtype not in FLOATS:
        return None
    value, shift = apart.args
    peak = _peak(region, expr, shift, [value], rows)
    return None if peak is None else Shifted(number, peak, shift)


def _peak(
    region: Region, total: Expr, shift: int, others: Iterable[int], rows: list[int]
) -> int | None:
    """The maximum along a sum's row from which alone a shift of its terms is made, and nothing
    else of them; None where there is none."""
    peaks = _needs_of(region, shift, rows)
    if len(peaks) != 1 or region.depends[shift] & set(total.axes):
        return None
    (peak,) = peaks
    found = region.exprs[peak]
    alone = not any(peak in _needs_of(region, other, rows) for other in others)
    return peak if found.monoid == "max" and found.axes == total.axes and alone else None


def _factors(region: Region, number: int) -> Iterator[int]:
    number = _bare(region, number)
    if region.exprs[number].op == "mul":
        for arg in region.exprs[number].args:
            yield from _factors(region, arg)
    else:
        yield number


def _moments(region: Region, number: int) -> Moments | None:
    expr = region.exprs[number]
    square = region.exprs[_bare(region, expr.args[0])]
    if expr.monoid != "sum" or square.op != "mul" or square.args[0] != square.args[1]:
        return None
    outer = _centred(region, square.args[0], expr.axes)
    if outer is None:
        return None
    inner = _centred(region, outer[0], expr.axes, about=True)
    if inner is None:
        return Moments(*outer, None, None, number)
    return Moments(*inner, *outer[1:], number)


def _centred(
    region: Region, number: int, axes: tuple[int, ...], *, about: bool = False
) -> tuple[int, int, int] | None:
    """The value, the sum that makes its mean, and the mean, where a value is what it differs from
    its mean; `about`: or from its mean to fewer digits."""
    apart = region.exprs[_bare(region, number)]
    if apart.op != "sub":
        return None
    value, mean = (_bare(region, arg) for arg in apart.args)
    made = region.exprs[mean]
    if about and made.op == "round":
        made = region.exprs[_bare(region, made.args[0])]
    if made.op != "div":
        return None
    total, divisor = (_bare(region, arg) for arg in made.args)
    count = region.exprs[divisor]
    reduced = region.exprs[total]
    whole = count.op in ("size", "taken") and set(count.axes) == set(axes)
    summed = reduced.op == "reduce" and reduced.monoid == "sum" and reduced.axes == axes
    if whole and summed and _bare(region, reduced.args[0]) == value:
        return value, total, mean
    return None
