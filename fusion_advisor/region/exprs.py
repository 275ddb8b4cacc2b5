"""Expressions: the typed scalar values of a region, hash-consed, and the substitution of indices.

A value is a function of the positions along its axes. Where a view moves elements (a slice, a flip,
a concatenation, a gather), the consumer's position replaces the axis, down to the loads: nothing is
materialised. Positions and index arithmetic have the dtype `index`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fusion_advisor.ir.graph import FLOATS
from fusion_advisor.region.axes import AxisList, NotExpressible
from fusion_advisor.region.primitives import MONOIDS, PRIMITIVES

INDEX = "index"
HALVES = ("float16", "bfloat16")


def rounded(number: float, dtype: str) -> float:
    """A number rounded to a 16-bit float, by way of float32 as in eager; unchanged for
    other dtypes."""
    if dtype not in HALVES:
        return number
    try:
        single = struct.pack("<f", number)
        if dtype == "float16":
            return struct.unpack("<e", struct.pack("<e", *struct.unpack("<f", single)))[0]
    except OverflowError:
        return math.copysign(math.inf, number)
    bits = int.from_bytes(single, "little")
    bits += 0x7FFF + (bits >> 16 & 1)  # to nearest, ties to even
    return struct.unpack("<f", (bits & 0xFFFF0000).to_bytes(4, "little"))[0]


@dataclass(frozen=True, slots=True)
class Expr:
    """One value. `op`: `load`, `const`, `given`, `place`, `extent`, `size`, `round`, `cast`,
    `reduce`, `scan`, `random16`, `random32`, or a primitive.

    A load has the number of its `input`, and as `args` the index of each dimension, with a guard
    behind them when `guarded`: where the guard is false, nothing is read and the value is zero. A
    constant has its `literal`; a given number has its place among those of the kernel as `literal`,
    and where its reciprocal is wanted `inverse` as `to`; a place, an extent (an integer), a size (a
    float), a reduction and a scan have their `axes`; a reduction and a scan their `monoid`; a scan
    may be in `reverse`; a round and a cast have the dtype they go `to`. Random bits have seed,
    offset and the number of the element as `args`, and which draw of the region they are as
    `literal`.
    """

    op: str
    args: tuple[int, ...]
    dtype: str
    input: int = -1
    literal: str = ""
    axes: AxisList = ()
    monoid: str = ""
    to: str = ""
    guarded: bool = False
    reverse: bool = False
    exact: bool = False
    """Whether it is rounded once, with nothing contracted, as what a discontinuous op is fed has to
    be."""
    captured: float = field(default=0.0, compare=False)
    """Value of a given number in the graph."""
    rough: bool = False
    """Whether eager stores what it is made for in 16 bits: no digit beyond those shows."""

    @property
    def indices(self) -> tuple[int, ...]:
        """A load's index of each dimension."""
        return self.args[:-1] if self.guarded else self.args

    @property
    def guard(self) -> int | None:
        return self.args[-1] if self.guarded else None

    @property
    def number(self) -> int | None:
        """The value of an integer or bool constant; None for everything else."""
        if self.op != "const" or self.dtype in FLOATS:
            return None
        return int(self.literal == "True") if self.dtype == "bool" else int(self.literal)


def number_of(given: Expr) -> str:
    """Name of a given number among the arguments of a region: its own, or that of its
    reciprocal."""
    return f"{given.to or 'number'}{given.literal}"


FOLD: dict[str, Callable[[int, int], int | bool]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "minimum": min,
    "eq": lambda a, b: a == b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}
_COMPARISONS = ("eq", "lt", "le", "gt", "ge")


@dataclass(eq=False)
class Pool:
    """Hash-consed expressions: equal expressions have one number."""

    exprs: list[Expr] = field(default_factory=list[Expr])
    labels: dict[int, str] = field(default_factory=dict[int, str])
    label: str = ""
    sizes: Mapping[int, int] = field(default_factory=dict[int, int])
    """The extent of each unsplit axis that is known."""
    exactly: bool = False
    """Whether arithmetic expressions that are added now are exact."""
    roughly: bool = False
    """Whether functions that are added now have a short form that is good enough."""
    pulled_below: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Reductions and scans with a position that was substituted below them: the position may not
    depend on an axis that they combine."""
    ends: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """Reductions that are the end of a scan of the same values, by number: the scan, and its
    element there. Where the scan is made anyway, its own element is what others of it are compared
    with: a reduction adds up in another order."""
    _ids: dict[Expr, int] = field(default_factory=dict[Expr, int])

    def resolved(self, axes: AxisList) -> AxisList:
        """The unsplit axes that represent some axes."""
        return axes

    def extent_of(self, axis: int) -> int:
        """The size of an unsplit axis."""
        return self.sizes[axis]

    def fix(self, axes: AxisList) -> None:
        """Note that some sizes become literals of an index."""

    @contextmanager
    def made(self, *, exactly: bool, roughly: bool = False) -> Generator[None]:
        """Whether arithmetic that is added within is exact, or may be rough; what is stated
        meanwhile for its operands has its own answer."""
        before = self.exactly, self.roughly
        self.exactly, self.roughly = exactly, roughly
        yield
        self.exactly, self.roughly = before

    def add(self, expr: Expr, label: str = "") -> int:
        """The number of an expression; a new one is added."""
        if self.exactly and expr.dtype in FLOATS and expr.op in PRIMITIVES:
            expr = replace(expr, exact=True)
        if self.roughly and expr.dtype == "float32" and expr.op in PRIMITIVES:
            expr = replace(expr, rough=bool(PRIMITIVES[expr.op].precise))
        found = self._ids.get(expr)
        if found is None:
            found = self._ids[expr] = len(self.exprs)
            self.exprs.append(expr)
            if label or self.label:
                self.labels[found] = label or self.label
        return found

    # -- places ----------------------------------------------------------------------------------

    def whole(self, number: int) -> int:
        """An integer constant of the index arithmetic."""
        return self.add(Expr("const", (), INDEX, literal=str(number)))

    def place(self, axes: AxisList) -> int:
        """The position along some axes, outermost first."""
        return self.add(Expr("place", (), INDEX, axes=axes)) if axes else self.whole(0)

    def reckon(self, op: str, left: int, right: int) -> int:
        """An operation of the index arithmetic, with constants folded. Comparisons give a bool."""
        a, b = self.known(left), self.known(right)
        if a is not None and b is not None:
            value = FOLD[op](a, b)
            if isinstance(value, bool):
                return self.truth(value)
            return self.whole(value)
        if (op == "add" and b == 0) or (op == "sub" and b == 0) or (op == "mul" and b == 1):
            return left
        if (op == "add" and a == 0) or (op == "mul" and a == 1):
            return right
        if op == "mul" and 0 in (a, b):
            return self.whole(0)
        if op == "add" and (whole := self._undivided(left, right)) is not None:
            return whole
        if op == "floordiv" and b == 1:
            return left
        if op == "mod" and b == 1:
            return self.whole(0)
        turned = self.exprs[right]
        if op == "sub" and a is not None and turned.op == "sub":  # a flip of a flip
            first = self.known(turned.args[0])
            if first is not None:
                return self.reckon("add", turned.args[1], self.whole(a - first))
        dtype = "bool" if op in _COMPARISONS else INDEX
        return self.add(Expr(op, (left, right), dtype))

    def _undivided(self, left: int, right: int) -> int | None:
        """The index i, where `left` + `right` is i

        d * d + i % d; else None.
        """
        whole, rest = self.exprs[left], self.exprs[right]
        if whole.op != "mul" or rest.op != "mod" or whole.args[1] != rest.args[1]:
            return None
        quotient = self.exprs[whole.args[0]]
        return rest.args[0] if (quotient.op, quotient.args) == ("floordiv", rest.args) else None

    def truth(self, value: bool) -> int:
        return self.add(Expr("const", (), "bool", literal=repr(value)))

    def both(self, left: int | None, right: int | None) -> int | None:
        """The conjunction of two conditions; None is the condition that always holds."""
        if left is None or self._literal(left) == "True":
            return None if right is not None and self._literal(right) == "True" else right
        if right is None or self._literal(right) == "True" or left == right:
            return left
        if "False" in (self._literal(left), self._literal(right)):
            return self.truth(False)
        return self.add(Expr("and", (left, right), "bool"))

    def choose(self, condition: int | None, yes: int, no: int) -> int:
        """`yes` where the condition holds, `no` elsewhere."""
        literal = "True" if condition is None else self._literal(condition)
        if condition is None or literal == "True" or yes == no:
            return yes
        if literal == "False":
            return no
        return self.add(Expr("where", (condition, yes, no), self.exprs[yes].dtype))

    def coarse(self, number: int) -> int:
        """A number of few digits near a float32 value, to subtract from many: one with more digits
        than they have rounds most of the differences to the same side, which their sum then is off
        by. Another dtype as it is."""
        if self.exprs[number].dtype != "float32":
            return number
        return self.add(Expr("round", (number,), "float32", to="bfloat16"))

    def simplified(self, expr: Expr, args: Sequence[int]) -> int | None:
        """A choice or a conjunction of other arguments, of which some may be known truths, or the
        rounding of what has become a number; None for any other expression."""
        if expr.op == "where":
            return self.choose(*args)
        if expr.op == "round" and expr.to in HALVES and self.exprs[args[0]].op == "const":
            number = self.exprs[args[0]]
            return self.add(replace(number, literal=repr(rounded(float(number.literal), expr.to))))
        if (expr.op, expr.dtype) != ("and", "bool"):
            return None
        both = self.both(*args)
        return self.truth(True) if both is None else both

    def _literal(self, number: int) -> str:
        return self.exprs[number].literal

    def known(self, number: int) -> int | None:
        """The number of an index that is constant; else None."""
        expr = self.exprs[number]
        return expr.number if expr.dtype == INDEX else None

    def pulled(
        self,
        number: int,
        places: Mapping[int, int],
        guard: int | None = None,
        *,
        every: bool = False,
    ) -> int:
        """The value with `places[axis]` substituted for each axis. Loads that this moves are
        guarded (with `every`, all loads). Raises NotExpressible for a scan that would be read out
        of order."""
        return _Pull(self, places, guard, every).visit(number, frozenset(places))


@dataclass(eq=False)
class _Pull:
    """One substitution. `free` are the axes that no reduction around a value binds."""

    pool: Pool
    places: Mapping[int, int]
    guard: int | None
    every: bool
    memo: dict[tuple[int, frozenset[int]], int] = field(
        default_factory=dict[tuple[int, frozenset[int]], int]
    )

    def visit(self, number: int, free: frozenset[int]) -> int:
        key = (number, free)
        if key not in self.memo:
            self.memo[key] = self._made(number, free)
        return self.memo[key]

    def _made(self, number: int, free: frozenset[int]) -> int:
        pool, expr = self.pool, self.pool.exprs[number]
        if expr.op == "place":
            return self._place(expr, free)
        if expr.op in ("reduce", "scan") and self._stays(number, expr, free):
            return number
        if expr.op == "scan":
            return self._scan(number, expr, free)
        if expr.op == "reduce":
            free -= frozenset(pool.resolved(expr.axes))
        args = tuple(self.visit(arg, free) for arg in expr.args)
        if args == expr.args and not (self.every and expr.op == "load"):
            return number
        if expr.op == "load":
            return self._load(number, expr, args)
        if (found := pool.simplified(expr, args)) is not None:
            return found
        if expr.op in FOLD and pool.exprs[args[0]].dtype == INDEX:
            return pool.reckon(expr.op, *args)
        made = pool.add(replace(expr, args=args), pool.labels.get(number, ""))
        if expr.op == "reduce":
            below = [self.places[axis] for axis in free]
            below += [] if self.guard is None else [self.guard]
            pool.pulled_below += [(made, place) for place in below]
        return made

    def _stays(self, number: int, expr: Expr, free: frozenset[int]) -> bool:
        """Whether a reduction or a scan is read where it was. Nothing below it is guarded then: a
        position outside counts for the whole row."""
        if not self.every:
            return False
        if expr.op == "scan" and free & set(self.pool.resolved(expr.axes)):
            return False
        return replace(self, every=False, memo={}).visit(number, free) == number

    def _place(self, expr: Expr, free: frozenset[int]) -> int:
        pool, axes = self.pool, self.pool.resolved(expr.axes)
        if not free & set(axes):
            return pool.place(expr.axes)
        pool.fix(axes[1:])
        total = pool.whole(0)
        for axis in axes:
            part = self.places[axis] if axis in free else pool.place((axis,))
            scaled = pool.reckon("mul", total, pool.whole(pool.extent_of(axis)))
            total = pool.reckon("add", scaled, part)
        return total

    def _load(self, number: int, expr: Expr, args: tuple[int, ...]) -> int:
        pool = self.pool
        own = args[-1] if expr.guarded else None
        guard = pool.both(own, self.guard)
        if guard is not None and pool.exprs[guard].literal == "False":
            zero = {"bool": "False", "float32": "0.0", "float64": "0.0"}.get(expr.dtype, "0")
            return pool.add(Expr("const", (), expr.dtype, literal=zero))
        behind = () if guard is None else (guard,)
        moved = replace(expr, args=(*args[: len(expr.indices)], *behind), guarded=guard is not None)
        return pool.add(moved, pool.labels.get(number, ""))

    def _scan(self, number: int, expr: Expr, free: frozenset[int]) -> int:
        """Substitute in a scan: its whole axis, forwards or backwards; its first positions, with
        neutral elements before them; or its end, where it is a reduction."""
        pool, label = self.pool, self.pool.labels.get(number, "")
        axes = pool.resolved(expr.axes)
        around = free - set(axes)
        if not free & set(axes):
            moved = replace(expr, args=(self.visit(expr.args[0], free),))
        elif len(axes) != 1:
            raise NotExpressible("a scan that is read out of order")
        elif pool.known(self.places[axes[0]]) == (0 if expr.reverse else pool.extent_of(*axes) - 1):
            whole = self.visit(expr.args[0], around)
            moved = replace(expr, op="reduce", args=(whole,), reverse=False)
            if (whole,) == expr.args and expr.dtype in FLOATS:
                element = self._end(number, expr, axes)
                pool.ends[pool.add(moved, label)] = number, element
        else:
            axis, backwards = self._direction(expr, axes[0])
            body = self.visit(expr.args[0], free)
            where = self.places[axes[0]]
            if not backwards and pool.exprs[where].op != "place":
                begun = pool.reckon("ge", where, pool.whole(0))
                body = pool.choose(begun, body, pool.add(_neutral(expr)))
            moved = replace(expr, args=(body,), axes=(axis,), reverse=expr.reverse != backwards)
        made = pool.add(moved, label)
        pool.pulled_below += [(made, self.places[axis]) for axis in around]
        if self.guard is not None and around == free:
            pool.pulled_below.append((made, self.guard))
        return made

    def _end(self, number: int, scan: Expr, axes: AxisList) -> int:
        """The element of a scan at its end, as the sum of what is zero elsewhere."""
        pool = self.pool
        last = pool.whole(0)
        if not scan.reverse:
            extent = pool.add(Expr("extent", (), INDEX, axes=axes))
            last = pool.reckon("sub", extent, pool.whole(1))
        zero = pool.add(Expr("const", (), scan.dtype, literal="0.0"))
        there = pool.choose(pool.reckon("eq", pool.place(axes), last), number, zero)
        return pool.add(Expr("reduce", (there,), scan.dtype, axes=axes, monoid="sum"))

    def _direction(self, scan: Expr, combined: int) -> tuple[int, bool]:
        """The one axis that an index walks, and whether it walks backwards."""
        pool, size = self.pool, self.pool.extent_of(combined)
        expr, backwards, part = pool.exprs[self.places[combined]], False, False
        if expr.op == "sub" and pool.known(expr.args[0]) == size - 1:
            expr, backwards = pool.exprs[expr.args[1]], True
        elif expr.op == "sub" and (pool.known(expr.args[1]) or 0) > 0:
            expr, part = pool.exprs[expr.args[0]], True
        axes = pool.resolved(expr.axes) if expr.op == "place" else ()
        if len(axes) == 1:
            if pool.extent_of(axes[0]) == size and not part:
                return axes[0], backwards
            if not scan.reverse and not backwards:
                return axes[0], False
        raise NotExpressible("a scan that is read out of order")


def _neutral(scan: Expr) -> Expr:
    """The neutral element that a scan begins with."""
    monoid = MONOIDS[scan.monoid]
    literal = monoid.neutral if scan.dtype in FLOATS else monoid.integer_neutral
    return Expr("const", (), scan.dtype, literal=literal)


def depends_on(
    expr: Expr, before: Sequence[frozenset[int]] | Mapping[int, frozenset[int]]
) -> frozenset[int]:
    """The axes that a value depends on."""
    if expr.op == "place":
        return frozenset(expr.axes)
    found = frozenset[int]().union(*(before[arg] for arg in expr.args))
    return found - frozenset(expr.axes) if expr.op == "reduce" else found


def needed(exprs: Sequence[Expr], wanted: Sequence[int]) -> list[int]:
    """Some values and all that they are made from, in order of first use."""
    found: list[int] = []
    seen: set[int] = set()
    stack = [(number, False) for number in reversed(wanted)]
    while stack:
        number, ready = stack.pop()
        if ready:
            found.append(number)
        elif number not in seen:
            seen.add(number)
            stack.append((number, True))
            stack.extend((arg, False) for arg in reversed(exprs[number].args))
    return found
