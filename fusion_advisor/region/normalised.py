"""Sums of normalised terms: the divisor of each may divide the sum, so that the sum does not wait
for the reduction that gives it, and a row is walked once.

Only where no term then leaves the range of its dtype earlier than the source's: shares of
exponentials that are 1 at the most (a weighted sum under a softmax), and products of two operands
that each are divided by their own 2-norm (a cosine similarity), whose squares the norms sum anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fusion_advisor.region.axes import AxisList
from fusion_advisor.region.exprs import Expr, needed

_MOST = 4
"""Factors of a term, at the most."""

Depends = Callable[[Sequence[int]], Mapping[int, frozenset[int]]]
"""Function that gives the axes which each of some values varies along; operands come first."""


@dataclass(frozen=True)
class Sum:
    """A sum over the axes `along`, by the expressions of its region."""

    exprs: Sequence[Expr]
    along: frozenset[int]
    resolve: Callable[[AxisList], AxisList]
    depends: Depends

    def divided(self, number: int) -> tuple[list[int], list[int]]:
        """Factors of the terms `number`, and what the sum of their product is divided by; no
        divisors where the terms stay as they are."""
        factors = self._factors(number)
        shares = [self._share(factor) for factor in factors]
        kinds = {share[0] for share in shares if share is not None}
        if kinds == {"norm"} and None not in shares and len(factors) <= 2:
            taken = "norm"
        elif "exp" in kinds:
            taken = "exp"
        else:
            return [number], []
        left, divisors = list[int](), list[int]()
        for factor, share in zip(factors, shares, strict=True):
            if share is not None and share[0] == taken:
                left.append(share[1])
                divisors.append(share[2])
            else:
                left.append(factor)
        return left, divisors

    def _factors(self, number: int) -> list[int]:
        """Factors of a product; the product itself where they are many."""
        found, todo = list[int](), [number]
        while todo:
            expr = self.exprs[at := todo.pop()]
            if expr.op == "mul" and not expr.exact:
                todo += reversed(expr.args)
            else:
                found.append(at)
            if len(found) + len(todo) > _MOST:
                return [number]
        return found

    def _share(self, number: int) -> tuple[Literal["exp", "norm"], int, int] | None:
        """Dividend and divisor of a share of exponentials, or of what is divided by its norm."""
        expr = self.exprs[number]
        if expr.op != "div" or expr.exact:
            return None
        dividend, divisor = expr.args
        if self._varies(divisor):
            return None
        if self._sums(divisor, dividend) and self._is_at_most_one(dividend):
            return "exp", dividend, divisor
        root = self.exprs[self._above_a_limit(divisor)]
        if root.op == "sqrt" and self._sums_squares(root.args[0], dividend):
            return "norm", dividend, divisor
        return None

    def _above_a_limit(self, number: int) -> int:
        """The value that a maximum of it and a constant is taken of; any other value itself."""
        expr = self.exprs[number]
        if expr.op == "maximum":
            for value, limit in (expr.args, expr.args[::-1]):
                if self.exprs[limit].op == "const":
                    return value
        return number

    def _is_at_most_one(self, number: int) -> bool:
        """Whether a value is exp(x − m), where m is a maximum along the axes."""
        power = self.exprs[number]
        if power.op != "exp" or self.exprs[power.args[0]].op != "sub":
            return False
        value, shift = self.exprs[power.args[0]].args
        peak = self.exprs[shift]
        return peak.monoid == "max" and self._is_along(peak) and peak.args[0] == value

    def _sums(self, number: int, terms: int) -> bool:
        expr = self.exprs[number]
        return expr.monoid == "sum" and self._is_along(expr) and expr.args[0] == terms

    def _sums_squares(self, number: int, value: int) -> bool:
        expr = self.exprs[number]
        if expr.monoid != "sum" or not self._is_along(expr):
            return False
        square = self.exprs[expr.args[0]]
        return square.op == "mul" and square.args == (value, value)

    def _is_along(self, expr: Expr) -> bool:
        return expr.op == "reduce" and frozenset(self.resolve(expr.axes)) == self.along

    def _varies(self, number: int) -> bool:
        """Whether a value varies along the axes."""
        return bool(self.depends(list(needed(self.exprs, [number])))[number] & self.along)
