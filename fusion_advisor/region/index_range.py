"""Interval arithmetic over indices: which integers in memory keep an index in range.

Eager asserts that indices are in range; the data of a check has to be in range, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from fusion_advisor.ir.graph import FLOATS
from fusion_advisor.region.exprs import Expr

Interval = tuple[int, int]
"""The smallest and the largest value."""
_Operation = Callable[[Interval, Interval], Interval | None]
"""Computes the interval of a result; a unary operation gets its operand twice."""


def data_below(
    exprs: Sequence[Expr], index: int, size: int, sizes: Mapping[int, int], most: int = 0
) -> int | None:
    """The largest n = most, most / 2, most / 4, … such that integers from 0 to n - 1 in memory keep
    an index from 0 to size - 1; None where no n does. `sizes` has the extent of each axis; `most`
    is `size` where it is not given.
    """
    n = most or size
    while n:
        found = _Bounds(exprs, (0, n - 1), sizes).of(index)
        if found is not None and found[0] >= 0 and found[1] < size:
            return n
        n //= 2
    return None


def never(exprs: Sequence[Expr], condition: int, stored: int, sizes: Mapping[int, int]) -> bool:
    """Whether a condition is false wherever the integers in memory are a number."""
    return _Bounds(exprs, (stored, stored), sizes).of(condition) == (0, 0)


class _Bounds:
    """Interval arithmetic over index expressions; None is unknown."""

    def __init__(self, exprs: Sequence[Expr], stored: Interval, sizes: Mapping[int, int]) -> None:
        self._exprs = exprs
        self._stored = stored
        self._sizes = sizes
        self._known: dict[int, Interval | None] = {}

    def of(self, number: int) -> Interval | None:
        if number not in self._known:
            self._known[number] = self._found(self._exprs[number])
        return self._known[number]

    def _found(self, expr: Expr) -> Interval | None:
        if expr.dtype in FLOATS:
            return None
        if expr.number is not None:
            return expr.number, expr.number
        if expr.op == "load":
            return (0, 1) if expr.dtype == "bool" else self._stored
        if expr.op == "place" or expr.monoid in ("argmax", "argmin"):
            return 0, max(self._extent(expr) - 1, 0)
        if expr.op == "extent":
            return self._extent(expr), self._extent(expr)
        operands = [self.of(arg) for arg in expr.args]
        if expr.op == "where":
            return _chosen(*operands)
        known = [operand for operand in operands if operand is not None]
        if len(known) < len(operands) or expr.op not in _OPS:
            return None
        return _OPS[expr.op](known[0], known[-1])

    def _extent(self, expr: Expr) -> int:
        """The number of places along an expression's axes."""
        return prod(self._sizes[axis] for axis in expr.axes)


def _chosen(
    condition: Interval | None, yes: Interval | None, no: Interval | None
) -> Interval | None:
    if condition == (1, 1):
        return yes
    if condition == (0, 0):
        return no
    return None if yes is None or no is None else (min(yes[0], no[0]), max(yes[1], no[1]))


def _corners(op: Callable[[int, int], int]) -> _Operation:
    """An operation that is monotonic in each operand."""

    def bounds(a: Interval, b: Interval) -> Interval:
        values = [op(x, y) for x in a for y in b]
        return min(values), max(values)

    return bounds


def _same(a: Interval, _: Interval) -> Interval:
    return a


def _negated(a: Interval, _: Interval) -> Interval:
    return -a[1], -a[0]


def _magnitude(a: Interval, _: Interval) -> Interval:
    return max(a[0], -a[1], 0), max(abs(a[0]), abs(a[1]))


def _sum(a: Interval, b: Interval) -> Interval:
    return a[0] + b[0], a[1] + b[1]


def _difference(a: Interval, b: Interval) -> Interval:
    return a[0] - b[1], a[1] - b[0]


def _quotient(a: Interval, b: Interval) -> Interval | None:
    return _corners(lambda x, y: x // y)(a, b) if b[0] > 0 else None


def _remainder(a: Interval, b: Interval) -> Interval | None:
    if b[0] <= 0:
        return None
    return a if a[0] >= 0 and a[1] < b[0] else (0, b[1] - 1)


def _below(a: Interval, b: Interval) -> Interval:
    return int(a[1] < b[0]), int(a[0] < b[1])


def _above(a: Interval, b: Interval) -> Interval:
    return _below(b, a)


def _equal(a: Interval, b: Interval) -> Interval:
    return int(a == b and a[0] == a[1]), int(a[0] <= b[1] and b[0] <= a[1])


def _turned(a: Interval, _: Interval) -> Interval:
    return 1 - a[1], 1 - a[0]


_OPS: dict[str, _Operation] = {
    "cast": _same,
    "neg": _negated,
    "abs": _magnitude,
    "add": _sum,
    "sub": _difference,
    "mul": _corners(lambda x, y: x * y),
    "minimum": _corners(min),
    "maximum": _corners(max),
    "floordiv": _quotient,
    "mod": _remainder,
    "lt": _below,
    "gt": _above,
    "le": lambda a, b: _turned(_above(a, b), a),
    "ge": lambda a, b: _turned(_below(a, b), a),
    "eq": _equal,
    "ne": lambda a, b: _turned(_equal(a, b), a),
    "and": lambda a, b: (a[0] & b[0], a[1] & b[1]),
    "or": lambda a, b: (a[0] | b[0], a[1] | b[1]),
}
