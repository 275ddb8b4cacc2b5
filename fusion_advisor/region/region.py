"""The region form: what a set of nodes computes, as typed scalar values over named axes.

A builder states it; a schedule sees the resolved axes and the live values alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.region.align_axes import rename_bound
from fusion_advisor.region.axes import AxisList, Dims, NotExpressible
from fusion_advisor.region.builder import Builder, Value
from fusion_advisor.region.exprs import Expr, Pool, depends_on, needed
from fusion_advisor.region.index_range import data_below
from fusion_advisor.region.random import SHARES, STATE

JOINED = ("sum", "prod", "max", "min")
"""Monoids for which a reduction over a reduction is one reduction over the axes of both."""


@dataclass(frozen=True)
class Output:
    """A result that is stored: its value, its dimensions and its tensor."""

    value: int
    dims: Dims
    tensor: Tensor
    name: str

    @property
    def axes(self) -> frozenset[int]:
        """The axes that the result has."""
        return frozenset(axis for dim in self.dims for axis in dim)


@dataclass(frozen=True)
class Region:
    """A region with its axes resolved and dead values removed.

    `exprs` are in an order in which operands come first. `sizes` has every axis that the region
    walks along or counts; the kernel serves other sizes of an axis unless it is `pinned`.
    """

    inputs: tuple[Tensor, ...]
    input_names: tuple[str, ...]
    input_dims: tuple[Dims, ...]
    exprs: tuple[Expr, ...]
    outputs: tuple[Output, ...]
    sizes: dict[int, int]
    pinned: frozenset[int]
    labels: dict[int, str]
    results: dict[int, str]
    bounds: dict[int, tuple[AxisList, int]]
    """Inputs that are used as indices, each with the axes of which its numbers are positions, and
    the size of these in the graph."""
    depends: tuple[frozenset[int], ...]
    """The axes that each value depends on."""
    live: tuple[int, ...]
    """The values that some output needs, in order of first use."""
    free_axis: int
    """The first axis number that neither this region nor the region it was cut from uses."""

    def dims_of(self, name: str) -> Dims:
        """The dimensions of an input."""
        return self.input_dims[self.input_names.index(name)]

    def users(self) -> dict[int, list[int]]:
        """The live values that use each value, one entry for each use."""
        found: dict[int, list[int]] = {}
        for number in self.live:
            for arg in self.exprs[number].args:
                found.setdefault(arg, []).append(number)
        return found

    def all(self, op: str) -> Iterator[int]:
        """The live values of one operation."""
        return (i for i in self.live if self.exprs[i].op == op)

    @property
    def random_state(self) -> frozenset[int]:
        """The inputs that are seed and offset of random bits."""
        return frozenset(
            self.exprs[arg].input
            for kind in SHARES
            for i in self.all(kind)
            for arg in self.exprs[i].args[: len(STATE)]
        )

    @property
    def discarded(self) -> frozenset[int]:
        """The inputs that every result may do without: each element read of them is behind a guard,
        or one of the two values that a `where` chooses from."""
        certain: set[int] = set()
        waiting = [output.value for output in self.outputs]
        while waiting:
            number = waiting.pop()
            if number not in certain:
                certain.add(number)
                expr = self.exprs[number]
                waiting += expr.args[:1] if expr.op == "where" else expr.args
        read = {self.exprs[n].input for n in certain if self.exprs[n].guard is None}
        return frozenset(self.exprs[n].input for n in self.all("load")) - read

    @property
    def reduced(self) -> frozenset[int]:
        """Axes of every live reduction and scan."""
        return frozenset(
            axis for op in ("reduce", "scan") for i in self.all(op) for axis in self.exprs[i].axes
        )

    @property
    def kept(self) -> frozenset[int]:
        """Axes that some result has."""
        return frozenset[int]().union(*(output.axes for output in self.outputs))

    @property
    def space(self) -> frozenset[int]:
        """Every axis that the region iterates over."""
        return self.reduced | self.kept


def finish(builder: Builder, outputs: Sequence[tuple[Value, Tensor]]) -> Region:
    """Name and resolve axes, join reductions over nothing but reductions, and drop what no output
    needs. Seed and offset come behind the other inputs.

    Raises NotExpressible when one value would need the same axis twice (a matrix and its own
    transpose in one expression, a reduction read along its own axis).
    """
    rename_bound(builder, [value for value, _ in outputs])
    resolve = builder.axes.resolve
    for dims in builder.views:
        named = [axis for dim in dims for axis in resolve(dim)]
        if len(set(named)) != len(named):
            raise NotExpressible("a value and its own transpose in one expression")
    pool = Pool()
    numbers: list[int] = []
    results = [value.id for value, _ in outputs]
    readers = _readers(builder.exprs, results)
    joined: set[int] = set()
    state = {builder.exprs[value.id].input: value for value in builder.random_state}
    order = [n for n in range(len(builder.inputs)) if n not in state] + list(state)
    for number, expr in enumerate(builder.exprs):
        scan, element = builder.ends.get(number, (None, number))
        if scan is not None and readers[scan]:
            numbers.append(numbers[element])
            continue
        args = tuple(numbers[arg] for arg in expr.args)
        settled = replace(expr, args=args, axes=resolve(expr.axes))
        if expr.op == "load":
            settled = replace(settled, input=order.index(expr.input))
        if expr.op == "reduce" and readers[expr.args[0]] == 1:
            below = pool.exprs[args[0]]
            if _joins(settled, below):
                joined.add(args[0])
                settled = replace(settled, args=below.args, axes=(*settled.axes, *below.axes))
        numbers.append(pool.add(settled, builder.labels.get(number, "")))
    region = settle(
        pool,
        [
            Output(numbers[value.id], tuple(resolve(dim) for dim in value.dims), tensor, f"out{n}")
            for n, (value, tensor) in enumerate(outputs)
        ],
        inputs=[builder.inputs[n] for n in order],
        input_names=[f"in{n}" for n in range(len(order))],
        input_dims=[tuple(resolve(dim) for dim in builder.input_dims[n]) for n in order],
        sizes=dict(enumerate(builder.axes.sizes)),
        pinned=frozenset(resolve(tuple(builder.pinned))),
        results={numbers[number]: name for number, name in builder.results.items()},
        bounds={
            order.index(number): (resolve(axes), builder.axes.size(axes))
            for number, axes in builder.bounds.items()
        },
    )
    live = joined | set(region.live)
    for number, place in builder.pulled_below:
        combined = frozenset(region.exprs[numbers[number]].axes)
        if numbers[number] in live and combined & region.depends[numbers[place]]:
            raise NotExpressible("a reduction that is read along its own axis")
    return region


def _readers(exprs: Sequence[Expr], results: Sequence[int]) -> Counter[int]:
    """How often each value is used on the way to some results; being a result counts as a use."""
    read = (arg for number in needed(exprs, results) for arg in exprs[number].args)
    return Counter([*results, *read])


def _joins(outer: Expr, inner: Expr) -> bool:
    """Whether a reduction reads another one, which nothing else reads, and both are one reduction
    over the axes of both."""
    same = inner.op == "reduce" and inner.monoid == outer.monoid and inner.dtype == outer.dtype
    return same and outer.monoid in JOINED and not set(outer.axes) & set(inner.axes)


def settle(
    pool: Pool,
    outputs: Sequence[Output],
    *,
    inputs: Sequence[Tensor],
    input_names: Sequence[str],
    input_dims: Sequence[Dims],
    sizes: Mapping[int, int],
    pinned: frozenset[int],
    results: Mapping[int, str],
    bounds: Mapping[int, tuple[AxisList, int]],
    free_axis: int = 0,
) -> Region:
    """The region that computes some results from the expressions of a pool."""
    depends: list[frozenset[int]] = []
    for expr in pool.exprs:
        depends.append(depends_on(expr, depends))
    live = tuple(needed(pool.exprs, [output.value for output in outputs]))
    used = {axis for i in live for axis in depends[i]}
    used |= {axis for i in live for axis in pool.exprs[i].axes}
    used |= {axis for output in outputs for dim in output.dims for axis in dim}
    for number in live:
        expr = pool.exprs[number]
        if expr.op == "load":
            _check_places(pool, expr, inputs[expr.input], sizes)
        if expr.op == "reduce" and not set(expr.axes) <= depends[expr.args[0]]:
            raise NotExpressible("a reduction of a broadcast value")
    return Region(
        inputs=tuple(inputs),
        input_names=tuple(input_names),
        input_dims=tuple(input_dims),
        exprs=tuple(pool.exprs),
        outputs=tuple(outputs),
        sizes={axis: sizes[axis] for axis in sorted(used)},
        pinned=pinned,
        labels=dict(pool.labels),
        results=dict(results),
        bounds=dict(bounds),
        depends=tuple(depends),
        live=live,
        free_axis=max(free_axis, max(sizes, default=-1) + 1),
    )


def _check_places(pool: Pool, load: Expr, tensor: Tensor, sizes: Mapping[int, int]) -> None:
    """Raise NotExpressible for an index that is made from numbers without a known range."""
    for index, size in zip(load.indices, tensor.shape, strict=True):
        indirect = any(pool.exprs[n].op == "load" for n in needed(pool.exprs, [index]))
        if indirect and not data_below(pool.exprs, index, size, sizes):
            raise NotExpressible("an index that is computed from floats, or that leaves its range")
