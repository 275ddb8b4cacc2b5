"""The builder of a region: over it an op states its meaning once.

It makes hash-consed `Expr`s: a load of a region input, a constant, a primitive of its operands, or
a reduction (a monoid over axes). Views do not make values: they relabel the dimensions of the value
that they view, so the consumer pulls its element through them.

Dimensions are tuples of axes. Axes are unified when a pointwise op lines two dimensions up and
split when a reshape needs it (`[B, G*K]` to `[B, G, K]`).

Values hold their compute dtype: float32 for the 16- and 8-bit floats, otherwise their own. Rounding
to a narrow type happens only at the source's casts (`round`) and when a result is stored.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from fusion_advisor.ir.graph import FLOATS, GivenNumber, Tensor
from fusion_advisor.region.alike import Alike
from fusion_advisor.region.axes import Axes, AxisList, Dims, NotExpressible
from fusion_advisor.region.exprs import HALVES, INDEX, Expr, Pool, depends_on, needed, rounded
from fusion_advisor.region.linear_sums import LinearSum
from fusion_advisor.region.normalised import Sum
from fusion_advisor.region.primitives import MONOIDS, PRIMITIVES
from fusion_advisor.region.random import STATE

Scalar = bool | int | float

NARROW_FLOATS = frozenset(
    {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)
FLOAT_DTYPES = NARROW_FLOATS | frozenset(FLOATS)
INTEGER_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint8"})
_LOWEST = {"uint8": 0, "int8": -(2**7), "int16": -(2**15), "int32": -(2**31), "int64": -(2**63)}
_HIGHEST = {"uint8": 255, **{dtype: ~low for dtype, low in _LOWEST.items() if low}}
CHOOSING = frozenset({"where", "maximum", "minimum", "neg", "abs"})
"""Primitives that give one of their operands, but for its sign."""
_LEAST_NORMAL = 2.0**-126
"""The smallest normal float32."""
_RANK = ("bool", "uint8", "int8", "int16", "int32", "int64", *FLOATS)


def compute_dtype(dtype: str) -> str:
    """The dtype in which a value of `dtype` is held on chip; NotExpressible for complex types."""
    if dtype in NARROW_FLOATS:
        return "float32"
    if dtype in _RANK:
        return dtype
    raise NotExpressible(f"dtype {dtype}")


def promote(*dtypes: str) -> str:
    """The widest of some compute dtypes."""
    return max(dtypes, key=_RANK.index)


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A handle on an expression seen with certain dimensions."""

    builder: Builder
    id: int
    dims: Dims
    logical: str
    """The torch dtype that eager gives this value."""

    @property
    def dtype(self) -> str:
        return self.builder.exprs[self.id].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        axes = self.builder.axes
        return tuple(axes.size(axes.resolve(dim)) for dim in self.dims)

    def __add__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("add", self, other)

    def __radd__(self, other: Scalar) -> Value:
        return self.builder.apply("add", other, self)

    def __sub__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("sub", self, other)

    def __rsub__(self, other: Scalar) -> Value:
        return self.builder.apply("sub", other, self)

    def __mul__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("mul", self, other)

    def __rmul__(self, other: Scalar) -> Value:
        return self.builder.apply("mul", other, self)

    def __truediv__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("div", self, other)

    def __rtruediv__(self, other: Scalar) -> Value:
        return self.builder.apply("div", other, self)

    def __neg__(self) -> Value:
        return self.builder.apply("neg", self)

    def __gt__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("gt", self, other)

    def __lt__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("lt", self, other)

    def __ge__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("ge", self, other)

    def __le__(self, other: Value | Scalar) -> Value:
        return self.builder.apply("le", self, other)


def floats_only(value: Value, what: str) -> None:
    """Raise NotExpressible for integers and bools; `what` names the operation in the message."""
    if value.dtype not in FLOATS:
        raise NotExpressible(what)


@dataclass(eq=False)
class Builder(Pool):
    """Makes the values of a region. `flops` counts what eager executes, before values are
    shared."""

    inputs: list[Tensor] = field(default_factory=list[Tensor])
    input_dims: list[Dims] = field(default_factory=list[Dims])
    results: dict[int, str] = field(default_factory=dict[int, str])
    """The values that are results of nodes, by the node's name."""
    axes: Axes = field(default_factory=Axes)
    flops: int = 0
    special_flops: int = 0
    applied: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Elements to which each primitive was applied, by the dtype of the elements."""
    out: Tensor | None = None
    """The first output of the node whose meaning is stated at the moment."""
    views: list[Dims] = field(default_factory=list[Dims])
    """Every list of dimensions that was made; none may name one axis twice."""
    pinned: set[int] = field(default_factory=set[int])
    """Axes whose sizes stand in an index: the kernel serves the captured sizes of these
    axes alone."""
    random_state: tuple[Value, ...] = ()
    """The values of seed and offset, once an op draws random bits."""
    given: list[GivenNumber] = field(default_factory=list[GivenNumber])
    """The numbers that the kernel is given, each once."""
    streams: int = 0
    """The number of draws of random bits so far."""
    bounds: dict[int, AxisList] = field(default_factory=dict[int, AxisList])
    """Inputs that are used as indices, each with the axes of which its numbers are positions."""

    def resolved(self, axes: AxisList) -> AxisList:
        return self.axes.resolve(axes)

    def extent_of(self, axis: int) -> int:
        return self.axes.sizes[axis]

    def fix(self, axes: AxisList) -> None:
        self.pinned.update(axes)

    def pin(self, dims: Iterable[AxisList]) -> None:
        """Restrict the kernel to the captured sizes of some dimensions."""
        for dim in dims:
            self.pinned.update(self.axes.resolve(dim))

    # -- making values -------------------------------------------------------------------------

    def _make(self, expr: Expr, dims: Dims, logical: str) -> Value:
        return self.seen(self.add(expr), dims, logical)

    def seen(self, number: int, dims: Dims, logical: str) -> Value:
        """A value: an expression with its dimensions and its torch dtype."""
        self.views.append(dims)
        return Value(self, number, dims, logical)

    def input(self, tensor: Tensor) -> Value:
        """The value of a tensor that is read from memory."""
        dims: Dims = tuple(() if size == 1 else (self.axes.new(size),) for size in tensor.shape)
        number = len(self.inputs)
        self.inputs.append(tensor)
        self.input_dims.append(dims)
        indices = tuple(self.place(dim) for dim in dims)
        return self._make(
            Expr("load", indices, compute_dtype(tensor.dtype), input=number), dims, tensor.dtype
        )

    def const(self, value: Scalar, dtype: str) -> Value:
        """A scalar; `dtype` is its torch dtype."""
        held = compute_dtype(dtype)
        if isinstance(value, GivenNumber):
            return self._number(value, held, dtype)
        if held in FLOATS:
            value = float(value)
        elif held == "bool":
            value = bool(value)
        elif not math.isfinite(value) or not _LOWEST[held] <= value <= _HIGHEST[held]:
            raise NotExpressible(f"the constant {value} in {held}")
        else:
            value = int(value)
        return self._make(Expr("const", (), held, literal=repr(value)), (), dtype)

    def _number(self, number: GivenNumber, held: str, dtype: str) -> Value:
        """A number that the kernel is given, which is a float32 there."""
        if held != "float32":
            raise NotExpressible(f"{number.name}, a float32 of the call, in {held}")
        known = [each.key for each in self.given]
        if number.key not in known:
            self.given.append(number)
            known.append(number.key)
        place, way = str(known.index(number.key)), "inverse" if number.inverse else ""
        return self._make(
            Expr("given", (), held, literal=place, to=way, captured=float(number)), (), dtype
        )

    def full(self, shape: Sequence[int], value: Scalar, dtype: str) -> Value:
        """A scalar with the shape of a tensor."""
        return self.expand(self.const(value, dtype), tuple(shape))

    def index(self, size: int) -> Value:
        """0, 1, …, size - 1 along a new dimension."""
        if size == 1:
            return self.full((1,), 0, "int64")
        axis = self.axes.new(size)
        return self.counted((axis,), ((axis,),))

    def counted(self, axes: AxisList, dims: Dims, dtype: str = "int64") -> Value:
        """The position along some axes, as an integer value of the model."""
        return self.reckoned(self.place(axes), dims, dtype)

    def reckoned(self, number: int, dims: Dims, dtype: str) -> Value:
        """A result of the index arithmetic, as a number of the model."""
        held = compute_dtype(dtype)
        return self._make(Expr("cast", (number,), held, to=held), dims, dtype)

    def index_of(self, value: Value, dim: int) -> Value:
        """The position of each element of `value` along one of its dimensions."""
        axes = _along(value, dim)
        if not axes:
            return self.const(0, "int64")
        dims: Dims = tuple(
            axes if i == dim % len(value.dims) else () for i in range(len(value.dims))
        )
        return self.counted(axes, dims)

    def random(self, kind: str, dims: Dims) -> Value:
        """Random bits as an int32 for each element, numbered in row-major order over `dims`:
        `random32` or `random16`, see `region.random`."""
        if not self.random_state:
            self.random_state = tuple(self.input(Tensor((), (), "int64")) for _ in STATE)
        place = self.place(tuple(axis for dim in dims for axis in dim))
        args = (*(value.id for value in self.random_state), place)
        drawn = Expr(kind, args, "int32", literal=str(self.streams))
        self.streams += 1
        return self._make(drawn, dims, "int32")

    # -- pointwise -----------------------------------------------------------------------------

    def apply(self, op: str, *operands: Value | Scalar) -> Value:
        """Apply a primitive to broadcast operands; scalars take the dtype of the tensors."""
        primitive = PRIMITIVES[op]
        values = [v for v in operands if isinstance(v, Value)]
        if not values:
            raise NotExpressible(f"{op} of scalars alone")
        numeric = [v for i, v in enumerate(values) if not (op == "where" and i == 0)]
        held = promote(*(v.dtype for v in numeric)) if numeric else "float32"
        if any(isinstance(x, float) for x in operands) and held not in FLOATS:
            held = "float32"
        logical = next((v.logical for v in numeric if v.dtype == held), held)
        ready: list[Value] = []
        for position, operand in enumerate(operands):
            if op == "where" and position == 0:
                assert isinstance(operand, Value)
                ready.append(self.cast(operand, "bool"))
            elif isinstance(operand, Value):
                ready.append(operand if operand.dtype == held else self.cast(operand, held))
            else:
                ready.append(self.const(operand, held))
        dims = self.broadcast([v.dims for v in ready])
        result = "bool" if primitive.result == "bool" else held
        self._count(primitive.flops, primitive.special, dims)
        op = self._multiplied(op, ready)
        self.applied[op, held] += self._extent(dims)
        if op == "mul" and self._constant(ready[1]) == 1.0 and dims == ready[0].dims:
            return replace(ready[0], logical=logical)
        return self._make(
            Expr(op, tuple(v.id for v in ready), result),
            dims,
            "bool" if result == "bool" else logical,
        )

    def _multiplied(self, op: str, operands: list[Value]) -> str:
        """The multiplication that replaces a division by a power of two: the same bits, a fifth of
        the instructions."""
        divisor = self._constant(operands[-1]) if op == "div" else None
        if divisor is None or abs(math.frexp(divisor)[0]) != 0.5:
            return op
        inverse = 1.0 / divisor
        if not _LEAST_NORMAL <= abs(inverse) <= 1.0 / _LEAST_NORMAL:
            return op
        operands[-1] = self.const(inverse, operands[-1].dtype)
        return "mul"

    def _constant(self, value: Value) -> float | None:
        """The number of a floating-point constant; None for any other value."""
        expr = self.exprs[value.id]
        known = expr.op == "const" and expr.dtype in FLOATS
        return float(expr.literal) if known else None

    def _extent(self, dims: Dims) -> int:
        return prod(self.axes.size(self.axes.resolve(dim)) for dim in dims)

    def _count(self, flops: int, special: bool, dims: Dims) -> None:
        amount = flops * self._extent(dims)
        self.flops += amount
        if special:
            self.special_flops += amount

    def broadcast(self, all_dims: Sequence[Dims]) -> Dims:
        """Line dimensions up from the right, as torch does."""
        rank = max((len(dims) for dims in all_dims), default=0)
        result: list[AxisList] = []
        for position in range(-rank, 0):
            here = [dims[position] for dims in all_dims if len(dims) >= -position]
            wide = [dim for dim in here if dim]
            for other in wide[1:]:
                if other != wide[0]:
                    self.axes.unify(wide[0], other)
            result.append(wide[0] if wide else ())
        return tuple(result)

    def cast(self, value: Value, dtype: str) -> Value:
        """Convert without rounding to a narrow type: what eager does before it computes."""
        held = compute_dtype(dtype)
        if value.dtype == held:
            return replace(value, logical=dtype)
        return self._make(Expr("cast", (value.id,), held, to=held), value.dims, dtype)

    def convert(self, value: Value, dtype: str) -> Value:
        """A cast of the source: rounds to a narrow type."""
        return self.cast(value, dtype) if value.logical == dtype else self.stored(value, dtype)

    def stored(self, value: Value, dtype: str) -> Value:
        """The value as a store of eager's leaves it: rounded where the dtype is narrow."""
        if dtype not in NARROW_FLOATS:
            return self.cast(value, dtype)
        wide = self.cast(value, "float32")
        found = self._rounded(wide.id, dtype)
        if found is None:
            found = self.add(Expr("round", (wide.id,), "float32", to=dtype))
        return self.seen(found, value.dims, dtype)

    def _rounded(self, number: int, dtype: str) -> int | None:
        """A float32 expression rounded to a narrow dtype, where that takes no instruction: what is
        rounded already, and what chooses among such values. None where it takes one."""
        expr = self.exprs[number]
        if expr.op == "load":
            return number if self.inputs[expr.input].dtype == dtype else None
        if expr.op == "round":
            return number if expr.to == dtype else None
        if expr.op == "const":
            literal = repr(rounded(float(expr.literal), dtype))
            return self.add(replace(expr, literal=literal)) if dtype in HALVES else None
        if expr.op not in CHOOSING:
            return None
        condition = expr.args[:1] if expr.op == "where" else ()
        chosen = [self._rounded(arg, dtype) for arg in expr.args[len(condition) :]]
        known = tuple(arg for arg in chosen if arg is not None)
        if len(known) < len(chosen):
            return None
        return self.add(replace(expr, args=condition + known))

    # -- reductions ----------------------------------------------------------------------------

    def reduce(
        self, monoid: str, value: Value, dims: Sequence[int], keepdim: bool = False
    ) -> Value:
        """Combine along `dims` (all of them when empty)."""
        chosen = _chosen(value, dims)
        axes = tuple(axis for d in sorted(chosen) for axis in value.dims[d])
        kept: Dims = tuple(
            () if d in chosen else dim
            for d, dim in enumerate(value.dims)
            if keepdim or d not in chosen
        )
        walked = self.axes.resolve(axes)
        if not walked:
            single = self.const(0, "int64") if monoid in ("argmax", "argmin") else value
            return replace(single, dims=kept)
        self._count(MONOIDS[monoid].flops if monoid in MONOIDS else 1, False, value.dims)
        varying = self.varying(value)
        fixed = tuple(axis for axis in walked if axis not in varying)
        if fixed:
            return replace(self._repeated(monoid, value, walked, fixed), dims=kept)
        return self._reduced(monoid, value, axes, kept)

    def _reduced(self, monoid: str, value: Value, axes: AxisList, dims: Dims) -> Value:
        if monoid == "sum" and value.dtype in FLOATS and not self.exactly:
            known = self._known_sum(value, axes)
            if known is not None:
                return self.seen(known, dims, value.logical)
            along = frozenset(self.axes.resolve(axes))
            summed = Sum(self.exprs, along, self.axes.resolve, self.depends)
            factors, divisors = summed.divided(value.id)
            if divisors:
                terms = factors[0]
                for factor in factors[1:]:
                    terms = self.add(Expr("mul", (terms, factor), value.dtype))
                found = self.add(Expr("reduce", (terms,), value.dtype, axes=axes, monoid=monoid))
                for divisor in divisors:
                    found = self.add(Expr("div", (found, divisor), value.dtype))
                return self.seen(found, dims, value.logical)
        made = Expr("reduce", (value.id,), value.dtype, axes=axes, monoid=monoid)
        if monoid in ("argmax", "argmin"):
            return self._make(replace(made, dtype="int64"), dims, "int64")
        return self._make(made, dims, value.logical)

    def _known_sum(self, value: Value, axes: AxisList) -> int | None:
        """A sum of terms that are counted, or that logarithms are taken out of; None of others."""
        summed = LinearSum(self, axes, self.depends(needed(self.exprs, [value.id])))
        counted = summed.counted(value.id)
        if counted is not None:
            return counted
        apart = summed.apart(value.id)
        if apart is None:
            return None
        left = self.seen(apart.terms, value.dims, value.logical)
        found = self._reduced("sum", left, axes, ()).id
        length = summed.length(value.dtype)
        for logarithm, sign in apart.logarithms:
            times = self.add(Expr("mul", (length, logarithm), value.dtype))
            found = self.add(Expr(sign, (found, times), value.dtype))
        return found

    def _repeated(self, monoid: str, value: Value, walked: AxisList, fixed: AxisList) -> Value:
        """Reduce a value that is constant along some of the reduced axes."""
        left = tuple(axis for axis in walked if axis not in fixed)
        if monoid in ("argmax", "argmin") and not left:
            return self.const(0, "int64")
        if monoid not in ("max", "min", "sum"):
            raise NotExpressible(f"a reduction ({monoid}) of a broadcast value")
        found = self._reduced(monoid, value, left, ()) if left else value
        if monoid != "sum":
            return found
        times = (
            self._make(Expr("size", (), "float32", axes=fixed), (), "float32")
            if value.dtype in FLOATS
            else self.reckoned(self.add(Expr("extent", (), INDEX, axes=fixed)), (), value.dtype)
        )
        factor = self.cast(times, value.dtype)
        return self._make(Expr("mul", (found.id, factor.id), value.dtype), (), value.logical)

    def varying(self, value: Value) -> frozenset[int]:
        """The unsplit axes that a value depends on."""
        return self.depends(needed(self.exprs, [value.id]))[value.id]

    def depends(self, numbers: Iterable[int]) -> dict[int, frozenset[int]]:
        """The unsplit axes that each of some values depends on; operands come first."""
        found: dict[int, frozenset[int]] = {}
        for number in numbers:
            expr = self.exprs[number]
            found[number] = depends_on(replace(expr, axes=self.axes.resolve(expr.axes)), found)
        return found

    def scan(self, monoid: str, value: Value, dim: int) -> Value:
        """Combine along one dimension, up to and including each position."""
        axes = self.axes.resolve(_along(value, dim))
        if not axes:
            return value
        self._count(1, False, value.dims)
        varying = self.varying(value)
        if monoid == "sum" and not varying & set(axes):
            so_many = self.reckon("add", self.place(axes), self.whole(1))
            times = self.reckoned(so_many, value.dims, value.logical)
            repeated = Expr("mul", (value.id, times.id), value.dtype)
            return self._make(repeated, value.dims, value.logical)
        if not set(axes) <= varying:
            raise NotExpressible("a scan of a broadcast value")
        made = Expr("scan", (value.id,), value.dtype, axes=axes, monoid=monoid)
        return self._make(made, value.dims, value.logical)

    def extent(self, value: Value, dims: Sequence[int]) -> Value:
        """The number of elements along `dims` as a scalar."""
        axes = tuple(axis for d in sorted(_chosen(value, dims)) for axis in value.dims[d])
        return self._make(Expr("size", (), "float32", axes=axes), (), "float32")

    def count(self, value: Value, dims: Sequence[int]) -> Value:
        """The number of elements along `dims`, in the dtype of the value."""
        return self.cast(self.extent(value, dims), value.dtype)

    def mean(self, value: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
        """The mean along `dims` (of all elements when empty)."""
        return self.reduce("sum", value, dims, keepdim) / self.count(value, dims)

    # -- views ---------------------------------------------------------------------------------

    def permute(self, value: Value, order: Sequence[int]) -> Value:
        rank = len(value.dims)
        return replace(value, dims=tuple(value.dims[d % rank] for d in order))

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Regroup the elements in row-major order."""
        pool = [axis for dim in value.dims for axis in self.axes.resolve(dim)]
        result: list[AxisList] = []
        for size in shape:
            taken: list[int] = []
            have = 1
            while have < size:
                if not pool:
                    raise NotExpressible("a reshape of a broadcast value")
                axis = pool.pop(0)
                extent = self.axes.sizes[axis]
                if size % (have * extent) == 0:
                    taken.append(axis)
                    have *= extent
                else:
                    head, tail = self.axes.split(axis, size // have)
                    taken.append(head)
                    pool.insert(0, tail)
                    have = size
            result.append(tuple(taken))
        if pool:
            raise NotExpressible("a reshape of a broadcast value")
        return replace(value, dims=tuple(result))

    def expand(self, value: Value, shape: Sequence[int]) -> Value:
        """Broadcast to `shape` (-1 keeps a size); the new dimensions get axes of their own."""
        dims = ((),) * (len(shape) - len(value.dims)) + value.dims
        grown = tuple(
            (self.axes.new(size),) if not dim and size not in (1, -1) else dim
            for dim, size in zip(dims, shape, strict=True)
        )
        self.views.append(grown)
        return replace(value, dims=grown)

    # -- views that move elements --------------------------------------------------------------

    def pull(
        self, value: Value, dim: int, where: int, dims: Dims, guard: int | None = None
    ) -> Value:
        """The value with `where` as the index of one of its dimensions."""
        return self.pull_all(value, {dim: where}, dims, guard)

    def pull_all(
        self, value: Value, wheres: Mapping[int, int], dims: Dims, guard: int | None = None
    ) -> Value:
        """The value with new indices for some of its dimensions, all replaced at once."""
        places: dict[int, int] = {}
        for dim, where in wheres.items():
            axes = self.axes.resolve(value.dims[dim])
            if len(axes) > 1 or not self._is_data(where):
                self.pinned.update(axes)
            self.bound(where, axes)
            places |= self._places(axes, where)
        return self.seen(self.pulled(value.id, places, guard), dims, value.logical)

    def _is_data(self, index: int) -> bool:
        """Whether an index stands in memory, or a constant in its place, so that no size is in
        it."""
        expr = self.exprs[index]
        if expr.op == "where":
            chosen = [arg for arg in expr.args[1:] if self.exprs[arg].op != "const"]
            return bool(chosen) and all(map(self._is_data, chosen))
        return expr.op == "load" or (expr.op == "cast" and self._is_data(*expr.args))

    def bound(self, index: int, axes: AxisList) -> None:
        """Record that the numbers an index is made from must be positions along some axes."""
        size = self.axes.size
        for number in needed(self.exprs, [index]):
            expr = self.exprs[number]
            if expr.op == "load":
                known = self.bounds.get(expr.input, axes)
                self.bounds[expr.input] = min(known, axes, key=size)

    def _places(self, axes: AxisList, where: int) -> dict[int, int]:
        """The position along each of some axes, from one linear index over them."""
        found: dict[int, int] = {}
        inside = 1
        for axis in reversed(axes):
            size = self.axes.sizes[axis]
            here = self.reckon("floordiv", where, self.whole(inside))
            found[axis] = here if axis == axes[0] else self.reckon("mod", here, self.whole(size))
            inside *= size
        return found

    def new_axis(self, size: int) -> AxisList:
        """A dimension for a pulled value; its size is a literal of the kernel."""
        if size == 1:
            return ()
        axis = self.axes.new(size)
        self.pinned.add(axis)
        return (axis,)

    def slice(self, value: Value, dim: int, start: int, step: int, size: int) -> Value:
        """`size` elements along one dimension, `step` apart."""
        dim %= len(value.dims)
        axes = self.axes.resolve(value.dims[dim])
        whole = self.axes.size(axes)
        if (start, step, size) == (0, 1, whole):
            return value
        if step == 1 and size > 1 and not (whole % size or start % size):
            if len(axes) == 1:
                self.pinned.add(axes[0])
                axes = self.axes.split(axes[0], whole // size)
            tails = [axes[n:] for n in range(1, len(axes)) if self.axes.size(axes[n:]) == size]
            if tails:
                self.pinned.update(axes)
                head = self._places(axes[: -len(tails[0])], self.whole(start // size))
                dims = _with(value.dims, dim, tails[0])
                return self.seen(self.pulled(value.id, head), dims, value.logical)
        kept = self.new_axis(size)
        apart = self.reckon("mul", self.place(kept), self.whole(step))
        where = self.reckon("add", apart, self.whole(start))
        return self.pull(value, dim, where, _with(value.dims, dim, kept))

    def cat(self, values: Sequence[Value], dim: int) -> Value:
        """Concatenate values along a dimension."""
        dim %= len(values[0].dims)
        sizes = [value.shape[dim] for value in values]
        others = self._lined_up(values, dim)
        if len(values) == 1:
            return values[0]
        parts: list[tuple[int | None, int]] = []
        if len(set(sizes)) == 1:
            (which,), inner = self.new_axis(len(values)), values[0].dims[dim]
            self.pin([inner])
            for value in values:
                self.axes.unify(inner, value.dims[dim])

            def chosen(numbers: Sequence[int]) -> int:
                guards = [
                    self.reckon("eq", self.place((which,)), self.whole(position))
                    for position in range(len(numbers))
                ]
                pairs = zip(guards, numbers, strict=True)
                return self._first_of([(g, self.pulled(n, {}, g, every=True)) for g, n in pairs])

            alike = Alike(self, which, self.axes.resolve, chosen)
            found = alike.value(tuple(value.id for value in values))
            return self.seen(found, _with(others, dim, (which, *inner)), values[0].logical)
        joined, start = self.new_axis(sum(sizes)), 0
        for value, size in zip(values, sizes, strict=True):
            where = self.reckon("sub", self.place(joined), self.whole(start))
            guard = self.within(where, size, start > 0, start + size < sum(sizes))
            axes = self.axes.resolve(value.dims[dim])
            self.pinned.update(axes)
            places = self._places(axes, where)
            parts.append((guard, self.pulled(value.id, places, guard, every=size == 1)))
            start += size
        found = self._first_of(parts)
        return self.seen(found, _with(others, dim, joined), values[0].logical)

    def _first_of(self, parts: Sequence[tuple[int | None, int]]) -> int:
        """The first of some values whose condition holds; the last one's always does."""
        *first, (_, found) = parts
        for guard, part in reversed(first):
            found = self.choose(guard, part, found)
        return found

    def _lined_up(self, values: Sequence[Value], dim: int) -> Dims:
        """The common dimensions of values that are concatenated along `dim`."""
        rest = [_with(value.dims, dim, ()) for value in values]
        return self.broadcast(rest)

    def within(self, where: int, size: int, below: bool = True, above: bool = True) -> int | None:
        """The condition that an index lies from 0 to `size` - 1; None where it always does. `below`
        and `above` say on which sides it may be outside."""
        low = self.reckon("ge", where, self.whole(0)) if below else None
        high = self.reckon("lt", where, self.whole(size)) if above else None
        return self.both(low, high)


def _along(value: Value, dim: int) -> AxisList:
    """The axes of a dimension. A scalar has none: eager treats it as a vector of one element."""
    return value.dims[dim] if value.dims else ()


def _chosen(value: Value, dims: Sequence[int]) -> set[int]:
    """The dimensions that some numbers name; all dimensions where there are no numbers."""
    rank = len(value.dims)
    return {d % rank for d in dims} if dims and rank else set(range(rank))


def _with(dims: Dims, dim: int, axes: AxisList) -> Dims:
    """The dimensions with one of them replaced."""
    return (*dims[:dim], axes, *dims[dim + 1 :])
