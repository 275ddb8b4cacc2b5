"""The region form: what a set of nodes computes, as typed scalar values over named axes.

An op states its meaning once, over a `Builder`. The builder makes hash-consed `Expr`s: a load of a
region input, a constant, a primitive of its operands, or a reduction (a monoid over axes). Views do
not make values: they relabel the dimensions of the value that they view, so the consumer pulls its
element through them.

Dimensions are tuples of axes. Axes are unified when a pointwise op lines two dimensions up and
split when a reshape needs it (`[B, G*K]` to `[B, G, K]`); a schedule sees the resolved axes alone.

Values hold their compute dtype: float32 for the 16- and 8-bit floats, otherwise their own. Rounding
to a narrow type happens only at the source's casts (`round`) and when a result is stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fusion_advisor.primitives import MONOIDS, PRIMITIVES
from fusion_advisor.records import Tensor

AxisList = tuple[int, ...]
Dims = tuple[AxisList, ...]
Scalar = bool | int | float

NARROW_FLOATS = frozenset(
    {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}
)
FLOAT_DTYPES = NARROW_FLOATS | {"float32", "float64"}
INTEGER_DTYPES = frozenset({"int64", "int32", "int16", "int8", "uint8"})
_LOWEST = {"uint8": 0, "int8": -(2**7), "int16": -(2**15), "int32": -(2**31), "int64": -(2**63)}
_HIGHEST = {"uint8": 255, **{dtype: ~low for dtype, low in _LOWEST.items() if low}}
_RANK = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")


class NotExpressible(Exception):
    """The region form has no place for this; the message says for what.

    `final`: no larger set of nodes has one either.
    """

    def __init__(self, why: str, *, final: bool = True) -> None:
        super().__init__(why)
        self.final = final


def compute_dtype(dtype: str) -> str:
    """The dtype in which a value of `dtype` is held on chip; NotExpressible for complex types."""
    if dtype in NARROW_FLOATS:
        return "float32"
    if dtype in _RANK:
        return dtype
    raise NotExpressible(f"dtype {dtype}")


def promote(*dtypes: str) -> str:
    """The wider of some compute dtypes."""
    return max(dtypes, key=_RANK.index)


class Axes:
    """Union-find over axes that can also be split into factors, outermost first."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._parent: list[int] = []
        self._parts: dict[int, AxisList] = {}

    def new(self, size: int) -> int:
        self.sizes.append(size)
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, axis: int) -> int:
        while self._parent[axis] != axis:
            self._parent[axis] = self._parent[self._parent[axis]]
            axis = self._parent[axis]
        return axis

    def resolve(self, axes: AxisList) -> AxisList:
        """The unsplit representatives that stand for these axes, outermost first."""
        found: list[int] = []
        for axis in axes:
            representative = self.root(axis)
            if representative in self._parts:
                found.extend(self.resolve(self._parts[representative]))
            else:
                found.append(representative)
        return tuple(found)

    def size(self, axes: AxisList) -> int:
        total = 1
        for axis in axes:
            total *= self.sizes[axis]
        return total

    def split(self, axis: int, outer: int) -> AxisList:
        """Split an unsplit representative into `outer` × the rest."""
        size = self.sizes[axis]
        if size % outer:
            raise NotExpressible(f"a reshape that cuts a dimension of {size} at {outer}")
        parts = (self.new(outer), self.new(size // outer))
        self._parts[axis] = parts
        return parts

    def unify(self, left: AxisList, right: AxisList) -> None:
        """Make two factorisations of the same extent one; NotExpressible if they do not nest."""
        one, other = list(self.resolve(left)), list(self.resolve(right))
        while one and other:
            a, b = one.pop(0), other.pop(0)
            if a == b:
                continue
            if self.sizes[a] == self.sizes[b]:
                self._parent[b] = a
            elif self.sizes[a] > self.sizes[b]:
                head, tail = self.split(a, self.sizes[b])
                self._parent[b] = head
                one.insert(0, tail)
            else:
                head, tail = self.split(b, self.sizes[a])
                self._parent[a] = head
                other.insert(0, tail)
        if one or other:
            raise NotExpressible("dimensions whose sizes do not match")


@dataclass(frozen=True, slots=True)
class Expr:
    """One value. `op`: `load`, `const`, `index`, `size`, `round`, `cast`, `reduce`, or a primitive.

    A load has the number of its `input`; a constant its `literal`; an index, a size and a reduction
    their `axes`; a reduction its `monoid`; a round and a cast the dtype they go `to`.
    """

    op: str
    args: tuple[int, ...]
    dtype: str
    input: int = -1
    literal: str = ""
    axes: AxisList = ()
    monoid: str = ""
    to: str = ""


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


@dataclass(eq=False)
class Builder:
    """Makes the values of one region. `flops` counts what eager executes, before any sharing."""

    inputs: list[Tensor] = field(default_factory=list[Tensor])
    input_dims: list[Dims] = field(default_factory=list[Dims])
    exprs: list[Expr] = field(default_factory=list[Expr])
    labels: dict[int, str] = field(default_factory=dict[int, str])
    results: dict[int, str] = field(default_factory=dict[int, str])
    """Values that are a node's own result, by the name of the node."""
    axes: Axes = field(default_factory=Axes)
    flops: int = 0
    special_flops: int = 0
    out: Tensor | None = None
    """The first output of the node whose meaning is being stated."""
    label: str = ""
    views: list[Dims] = field(default_factory=list[Dims])
    """Every dimension list that was made: none may name one axis twice."""
    _ids: dict[Expr, int] = field(default_factory=dict[Expr, int])

    # -- making values -------------------------------------------------------------------------

    def _make(self, expr: Expr, dims: Dims, logical: str) -> Value:
        found = self._ids.get(expr)
        if found is None:
            found = len(self.exprs)
            self._ids[expr] = found
            self.exprs.append(expr)
            if self.label:
                self.labels[found] = self.label
        self.views.append(dims)
        return Value(self, found, dims, logical)

    def input(self, tensor: Tensor) -> Value:
        """A tensor read from memory."""
        dims: Dims = tuple(() if size == 1 else (self.axes.new(size),) for size in tensor.shape)
        number = len(self.inputs)
        self.inputs.append(tensor)
        self.input_dims.append(dims)
        return self._make(
            Expr("load", (), compute_dtype(tensor.dtype), input=number), dims, tensor.dtype
        )

    def const(self, value: Scalar, dtype: str) -> Value:
        """A scalar; `dtype` is its torch dtype."""
        held = compute_dtype(dtype)
        if held in ("float32", "float64"):
            value = float(value)
        elif held == "bool":
            value = bool(value)
        elif not math.isfinite(value) or not _LOWEST[held] <= value <= _HIGHEST[held]:
            raise NotExpressible(f"the constant {value} in {held}")
        else:
            value = int(value)
        return self._make(Expr("const", (), held, literal=repr(value)), (), dtype)

    def full(self, shape: Sequence[int], value: Scalar, dtype: str) -> Value:
        """A scalar seen with a shape."""
        return self.expand(self.const(value, dtype), tuple(shape))

    def index(self, size: int, dtype: str = "int64") -> Value:
        """0, 1, …, size - 1 along a new dimension."""
        if size == 1:
            return self.full((1,), 0, dtype)
        axis = self.axes.new(size)
        return self._make(Expr("index", (), dtype, axes=(axis,)), ((axis,),), dtype)

    def index_of(self, value: Value, dim: int) -> Value:
        """The position of each element of `value` along one of its dimensions."""
        axes = value.dims[dim]
        if not axes:
            return self.const(0, "int64")
        dims: Dims = tuple(
            axes if i == dim % len(value.dims) else () for i in range(len(value.dims))
        )
        return self._make(Expr("index", (), "int64", axes=axes), dims, "int64")

    # -- pointwise -----------------------------------------------------------------------------

    def apply(self, op: str, *operands: Value | Scalar) -> Value:
        """A primitive over broadcast operands; scalars take the dtype of the tensors."""
        primitive = PRIMITIVES[op]
        values = [v for v in operands if isinstance(v, Value)]
        if not values:
            raise NotExpressible(f"{op} of scalars alone")
        numeric = [v for i, v in enumerate(values) if not (op == "where" and i == 0)]
        held = promote(*(v.dtype for v in numeric)) if numeric else "float32"
        if any(isinstance(x, float) for x in operands) and held not in ("float32", "float64"):
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
        return self._make(
            Expr(op, tuple(v.id for v in ready), result),
            dims,
            "bool" if result == "bool" else logical,
        )

    def __getattr__(self, name: str) -> Callable[..., Value]:
        """`b.exp(x)` is the primitive `exp`; Python keywords carry a trailing underscore."""
        op = name.rstrip("_")
        if op in PRIMITIVES:
            return lambda *operands: self.apply(op, *operands)
        raise AttributeError(name)

    def _count(self, flops: int, special: bool, dims: Dims) -> None:
        amount = flops
        for dim in dims:
            amount *= self.axes.size(self.axes.resolve(dim))
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
        if dtype in NARROW_FLOATS and value.logical != dtype:
            wide = self.cast(value, "float32")
            source = self.exprs[wide.id]
            if source.op == "load" and self.inputs[source.input].dtype == dtype:
                return replace(wide, logical=dtype)
            return self._make(Expr("round", (wide.id,), "float32", to=dtype), value.dims, dtype)
        return self.cast(value, dtype)

    def named(self, value: Value, dtype: str) -> Value:
        """The same value under the dtype that eager returns."""
        return self.cast(value, dtype)

    # -- reductions ----------------------------------------------------------------------------

    def reduce(
        self, monoid: str, value: Value, dims: Sequence[int], keepdim: bool = False
    ) -> Value:
        """Combine along `dims` (all of them when empty)."""
        rank = len(value.dims)
        chosen = {d % rank for d in dims} if dims else set(range(rank))
        axes = tuple(axis for d in sorted(chosen) for axis in value.dims[d])
        kept: Dims = tuple(
            () if d in chosen else dim
            for d, dim in enumerate(value.dims)
            if keepdim or d not in chosen
        )
        if not self.axes.resolve(axes):
            return replace(value, dims=kept)
        self._count(MONOIDS[monoid].flops if monoid in MONOIDS else 1, False, value.dims)
        return self._make(
            Expr("reduce", (value.id,), value.dtype, axes=axes, monoid=monoid), kept, value.logical
        )

    def extent(self, value: Value, dims: Sequence[int]) -> Value:
        """The number of elements along `dims` as a scalar."""
        rank = len(value.dims)
        chosen = sorted({d % rank for d in dims}) if dims else list(range(rank))
        axes = tuple(axis for d in chosen for axis in value.dims[d])
        return self._make(Expr("size", (), "float32", axes=axes), (), "float32")

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


@dataclass(frozen=True)
class Output:
    """A result that is stored: which value, under which dimensions and as which tensor."""

    value: int
    dims: Dims
    tensor: Tensor


@dataclass(frozen=True)
class Region:
    """A region with its axes resolved and dead values removed.

    `exprs` are in an order in which operands come first; `loads[i]` belongs to `inputs[i]`.
    """

    inputs: tuple[Tensor, ...]
    input_dims: tuple[Dims, ...]
    exprs: tuple[Expr, ...]
    outputs: tuple[Output, ...]
    sizes: dict[int, int]
    labels: dict[int, str]
    results: dict[int, str]
    depends: tuple[frozenset[int], ...]
    """The axes on which each value depends."""
    live: tuple[int, ...]
    """The values that an output needs, in order of first use."""

    @property
    def reduced(self) -> frozenset[int]:
        """Axes of every live reduction."""
        return frozenset(
            axis for i in self.live if self.exprs[i].op == "reduce" for axis in self.exprs[i].axes
        )


def finish(builder: Builder, outputs: Sequence[tuple[Value, Tensor]]) -> Region:
    """Resolve axes and drop what no output needs.

    Raises NotExpressible when one value would need the same axis twice (a matrix and its own
    transpose in one expression).
    """
    resolve = builder.axes.resolve
    for dims in builder.views:
        named = [axis for dim in dims for axis in resolve(dim)]
        if len(set(named)) != len(named):
            raise NotExpressible("a value and its own transpose in one expression")

    def settled(expr: Expr) -> Expr:
        return replace(expr, axes=resolve(expr.axes)) if expr.axes else expr

    exprs = tuple(settled(expr) for expr in builder.exprs)
    input_dims = tuple(tuple(resolve(dim) for dim in dims) for dims in builder.input_dims)
    depends: list[frozenset[int]] = []
    for expr in exprs:
        if expr.op == "load":
            axes = frozenset(axis for dim in input_dims[expr.input] for axis in dim)
        elif expr.op == "index":
            axes = frozenset(expr.axes)
        else:
            axes = frozenset[int]().union(*(depends[arg] for arg in expr.args))
            if expr.op == "reduce":
                if not set(expr.axes) <= axes:
                    raise NotExpressible("a reduction of a broadcast value")
                axes -= frozenset(expr.axes)
        depends.append(axes)

    live: list[int] = []
    seen: set[int] = set()

    def visit(start: int) -> None:
        stack = [(start, False)]
        while stack:
            number, ready = stack.pop()
            if ready:
                live.append(number)
            elif number not in seen:
                seen.add(number)
                stack.append((number, True))
                stack.extend((arg, False) for arg in reversed(exprs[number].args))

    results = tuple(
        Output(value.id, tuple(resolve(dim) for dim in value.dims), tensor)
        for value, tensor in outputs
    )
    for result in results:
        visit(result.value)
    used = {axis for i in live for axis in depends[i]}
    used |= {axis for i in live if exprs[i].op == "reduce" for axis in exprs[i].axes}
    used |= {axis for i in live if exprs[i].op == "size" for axis in exprs[i].axes}
    used |= {axis for result in results for dim in result.dims for axis in dim}
    return Region(
        inputs=tuple(builder.inputs),
        input_dims=input_dims,
        exprs=exprs,
        outputs=results,
        sizes={axis: builder.axes.sizes[axis] for axis in used},
        labels=dict(builder.labels),
        results=dict(builder.results),
        depends=tuple(depends),
        live=tuple(live),
    )
