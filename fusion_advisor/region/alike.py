"""Parts of a concatenation that compute alike, as one value of the position.

`cat(x[1] * c - x[0] * s, x[0] * c + x[1] * s)` is one product of x, and one of x with its parts
exchanged, added with a sign: each element is loaded and multiplied once, not once in every part and
then chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from fusion_advisor.ir.graph import FLOATS
from fusion_advisor.region.axes import AxisList
from fusion_advisor.region.exprs import INDEX, Expr, Pool
from fusion_advisor.region.primitives import PRIMITIVES

Key = tuple[object, ...]


@dataclass(eq=False)
class Alike:
    """Values of a new axis with one position for each part; `chosen` makes one of parts that have
    nothing in common."""

    pool: Pool
    which: int
    resolve: Callable[[AxisList], AxisList]
    chosen: Callable[[Sequence[int]], int]
    _known: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])
    _keys: dict[int, int] = field(default_factory=dict[int, int])
    _numbers: dict[Key, int] = field(default_factory=dict[Key, int])

    def value(self, parts: tuple[int, ...]) -> int:
        """The value that is each part at its position."""
        if parts not in self._known:
            self._known[parts] = self._made(parts)
        return self._known[parts]

    def _made(self, parts: tuple[int, ...]) -> int:
        if self._same(parts):
            return parts[0]
        exprs = [self.pool.exprs[part] for part in parts]
        first = exprs[0]
        if first.dtype == INDEX:
            found = self._index(parts)
            return self.chosen(parts) if found is None else found
        if first.dtype in FLOATS and any(each.op == "neg" for each in exprs):
            bare = tuple(
                e.args[0] if e.op == "neg" else p for e, p in zip(exprs, parts, strict=True)
            )
            return self._signed(self.value(bare), [e.op == "neg" for e in exprs], first)
        if first.dtype in FLOATS and {each.op for each in exprs} == {"add", "sub"}:
            like = [replace(each, op="add", args=()) for each in exprs]
            if any(each != like[0] for each in like):
                return self.chosen(parts)
            left, right = (self.value(tuple(e.args[n] for e in exprs)) for n in (0, 1))
            right = self._signed(right, [each.op == "sub" for each in exprs], first)
            return self._added(replace(like[0], args=(left, right)), parts[0])
        if any(replace(each, args=()) != replace(first, args=()) for each in exprs):
            return self.chosen(parts)
        if first.op == "load" and not first.guarded:
            indices = [self._index(tuple(e.args[n] for e in exprs)) for n in range(len(first.args))]
            if any(index is None for index in indices):
                return self.chosen(parts)
            args = tuple(index for index in indices if index is not None)
            return self._added(replace(first, args=args), parts[0])
        if first.op in PRIMITIVES or first.op in ("cast", "round"):
            args = tuple(
                self.value(tuple(e.args[n] for e in exprs)) for n in range(len(first.args))
            )
            return self._added(replace(first, args=args), parts[0])
        return self.chosen(parts)

    def _added(self, expr: Expr, part: int) -> int:
        return self.pool.add(expr, self.pool.labels.get(part, ""))

    def _signed(self, value: int, turned: Sequence[bool], like: Expr) -> int:
        """A value with its sign turned in some parts."""
        pool = self.pool
        negative = pool.add(replace(like, op="neg", args=(value,)))
        found = negative if turned[-1] else value
        for number in range(len(turned) - 2, -1, -1):
            here = pool.reckon("eq", pool.place((self.which,)), pool.whole(number))
            found = pool.choose(here, negative if turned[number] else value, found)
        return found

    # -- indices ---------------------------------------------------------------------------------

    def _index(self, parts: tuple[int, ...]) -> int | None:
        """The index that is each part's at its position; None where the parts are not one index
        and numbers as far apart."""
        if self._same(parts):
            return parts[0]
        pool, split = self.pool, [self._split(part) for part in parts]
        bases, numbers = [base for base, _ in split], [number for _, number in split]
        apart = numbers[1] - numbers[0]
        steps = {b - a for a, b in pairwise(numbers)}
        if len({base is None for base in bases}) > 1 or steps != {apart}:
            return None
        known = tuple(base for base in bases if base is not None)
        if known and not self._same(known):
            return None
        whole = self._joined(known[0], apart, len(parts)) if known and not numbers[0] else None
        if whole is not None:
            return whole
        moved = pool.reckon("mul", pool.place((self.which,)), pool.whole(abs(apart)))
        first = pool.whole(numbers[0])
        at = pool.reckon("add" if apart > 0 else "sub", first, moved)
        return pool.reckon("add", at, known[0]) if known else at

    def _joined(self, base: int, apart: int, count: int) -> int | None:
        """The position along the parts and what lies within them, or the other way round."""
        expr = self.pool.exprs[base]
        if expr.op == "mul" and apart == 1 and self.pool.known(expr.args[1]) == count:
            outer = self.pool.exprs[expr.args[0]]
            if outer.op == "place":
                return self.pool.place((*self.resolve(outer.axes), self.which))
        if expr.op == "place":
            axes, size = self.resolve(expr.axes), 1
            for axis in axes:
                size *= self.pool.extent_of(axis)
            if size == apart:
                return self.pool.place((self.which, *axes))
        return None

    def _split(self, number: int) -> tuple[int | None, int]:
        """An index as another one and a number."""
        pool, expr = self.pool, self.pool.exprs[number]
        known = pool.known(number)
        if known is not None:
            return None, known
        if expr.op == "add":
            for one, other in (expr.args, expr.args[::-1]):
                known = pool.known(other)
                if known is not None:
                    return one, known
        return number, 0

    # -- equality --------------------------------------------------------------------------------

    def _same(self, parts: tuple[int, ...]) -> bool:
        """Whether parts are one value, whatever axes their positions were counted along before
        these became one."""
        return len({self._key(part) for part in parts}) == 1

    def _key(self, number: int) -> int:
        """Number of a value that all have that are the same; a nested key would be hashed anew, to
        its leaves, wherever it is asked for."""
        if number not in self._keys:
            expr = self.pool.exprs[number]
            plain = replace(expr, args=(), axes=self.resolve(expr.axes))
            key = (plain, *map(self._key, expr.args))
            self._keys[number] = self._numbers.setdefault(key, len(self._numbers))
        return self._keys[number]
