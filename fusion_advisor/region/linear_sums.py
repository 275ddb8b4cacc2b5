"""Sums whose terms are known along the whole row: what needs no walk, or not one more.

Terms that are alike but at one place, as the gradient of a loss by labels, are counted. A logarithm
of another sum along the same axes is taken out of the terms and subtracted as often as there are
terms, so that neither sum waits for the other, and a row is walked once. Nothing else is taken out:
a logarithm is 104 at the most in float32, where a maximum, say, may be so large that its difference
from the sum of the other terms has no digits left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fusion_advisor.region.axes import AxisList
from fusion_advisor.region.exprs import INDEX, Expr, Pool
from fusion_advisor.region.primitives import PRIMITIVES


class Spike(NamedTuple):
    """Values along a row: `there` at the position `at`, `elsewhere` at all others. Where `at`
    is None they are all alike."""

    there: int
    elsewhere: int
    at: int | None


class Apart(NamedTuple):
    """Terms without the logarithms that are added to each of them, and those, each with its
    sign."""

    terms: int
    logarithms: tuple[tuple[int, str], ...]


@dataclass
class LinearSum:
    """A sum along some axes, of values of a pool. `depends` has the axes along which each value
    varies that the terms are made from."""

    pool: Pool
    axes: AxisList
    depends: Mapping[int, frozenset[int]]
    _spikes: dict[int, Spike | None] = field(default_factory=dict[int, Spike | None])

    def counted(self, terms: int) -> int | None:
        """The sum of terms that are alike but at one place; None of any others."""
        spike = self._spike(terms)
        if spike is None or spike.at is None:
            return None
        dtype, kind = self._dtype(terms), self._dtype(spike.at)
        length = self.pool.add(Expr("extent", (), INDEX, axes=self.axes))
        inside = self._made(
            "and",
            self._made("ge", spike.at, self._const("0", kind)),
            self._made("lt", spike.at, self._cast(length, kind)),
        )
        zero = self._const("0.0", dtype)
        chosen = self._made("where", inside, spike.there, zero)
        if spike.elsewhere == zero:
            return chosen
        others = self._made("sub", self.length(dtype), self._cast(inside, dtype))
        many = self._made("mul", others, spike.elsewhere)
        rest = self._made("where", self._made("eq", others, zero), zero, many)
        return self._made("add", rest, chosen)

    def apart(self, terms: int) -> Apart | None:
        """Terms and the logarithms of sums along the row that are added to each of them; None where
        there are none."""
        expr, found = self.pool.exprs[terms], list[tuple[int, str]]()
        if expr.op not in ("add", "sub") or expr.exact:
            return None
        left = self._without(terms, "add", found)
        if left is None or not found:
            return None
        return Apart(left, tuple(found))

    def length(self, dtype: str) -> int:
        """The number of terms, as a float."""
        return self._cast(self.pool.add(Expr("size", (), "float32", axes=self.axes)), dtype)

    def _without(self, number: int, sign: str, found: list[tuple[int, str]]) -> int | None:
        """A value without the logarithms that it adds, which join `found`; None where nothing else
        is left of it."""
        expr = self.pool.exprs[number]
        if self._is_logarithm(number):
            found.append((number, sign))
            return None
        if expr.op not in ("add", "sub") or expr.exact:
            return number
        one, other = expr.args
        turned = sign if expr.op == "add" else {"add": "sub", "sub": "add"}[sign]
        left, right = self._without(one, sign, found), self._without(other, turned, found)
        if left is None or right is None:
            alone = left if right is None else right
            negative = right is not None and expr.op == "sub"
            return self._made("neg", alone) if negative and alone is not None else alone
        return number if (left, right) == expr.args else self._made(expr.op, left, right)

    def _is_logarithm(self, number: int) -> bool:
        """Whether a value is the logarithm of a sum along these very axes."""
        expr = self.pool.exprs[number]
        if expr.op != "log" or expr.exact:
            return False
        summed = self.pool.exprs[expr.args[0]]
        along = self.pool.resolved(summed.axes) == self.pool.resolved(self.axes)
        return summed.op == "reduce" and summed.monoid == "sum" and along

    def _spike(self, number: int) -> Spike | None:
        if number not in self._spikes:
            self._spikes[number] = self._spike_of(number, self.pool.exprs[number])
        return self._spikes[number]

    def _spike_of(self, number: int, expr: Expr) -> Spike | None:
        if not self.depends[number] & frozenset(self.pool.resolved(self.axes)):
            return Spike(number, number, None)
        if expr.op not in PRIMITIVES and expr.op not in ("cast", "round"):
            return None
        if expr.op == "eq" and (index := self._index(*expr.args)) is not None:
            return Spike(self.pool.truth(True), self.pool.truth(False), index)
        parts = [self._spike(arg) for arg in expr.args]
        known = [part for part in parts if part is not None]
        places = {part.at for part in known} - {None}
        if len(known) < len(parts) or len(places) > 1:
            return None
        there, elsewhere = (
            self._of(expr, args) for args in zip(*(part[:2] for part in known), strict=True)
        )
        return Spike(there, elsewhere, places.pop() if places else None)

    def _of(self, expr: Expr, args: Sequence[int]) -> int:
        """An expression of other arguments, of which some may be known truths."""
        found = self.pool.simplified(expr, args)
        return self.pool.add(replace(expr, args=tuple(args))) if found is None else found

    def _index(self, one: int, other: int) -> int | None:
        """The index that the positions along the axes are compared with; None in any other
        comparison."""
        axes = self.pool.resolved(self.axes)
        for place, index in ((one, other), (other, one)):
            counted = self.pool.exprs[place]
            if counted.op == "cast" and not self.depends[index] & frozenset(axes):
                position = self.pool.exprs[counted.args[0]]
                if position.op == "place" and self.pool.resolved(position.axes) == axes:
                    return index
        return None

    def _dtype(self, number: int) -> str:
        return self.pool.exprs[number].dtype

    def _const(self, literal: str, dtype: str) -> int:
        return self.pool.add(Expr("const", (), dtype, literal=literal))

    def _cast(self, number: int, dtype: str) -> int:
        if self._dtype(number) == dtype:
            return number
        return self.pool.add(Expr("cast", (number,), dtype, to=dtype))

    def _made(self, op: str, *args: int) -> int:
        truth = PRIMITIVES[op].result == "bool"
        return self.pool.add(Expr(op, args, "bool" if truth else self._dtype(args[-1])))
