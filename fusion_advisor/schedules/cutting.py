"""Cutting a region into kernels that leave results in memory for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.region.axes import Dims
from fusion_advisor.region.exprs import Expr, Pool
from fusion_advisor.region.region import JOINED, Output, Region, settle


def pool_of(region: Region, sizes: Mapping[int, int]) -> Pool:
    """A pool that begins with a region's expressions, under their own numbers."""
    pool = Pool(sizes=sizes)
    for number, expr in enumerate(region.exprs):
        pool.add(expr, region.labels.get(number, ""))
    return pool


def space(
    name: str, value: int, axes: Sequence[int], dtype: str, sizes: Mapping[int, int]
) -> Output:
    """A result that another kernel reads: dense, along some axes."""
    shape = tuple(sizes[axis] for axis in axes)
    stride = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    dims: Dims = tuple((axis,) for axis in axes)
    return Output(value, dims, Tensor(shape, stride, dtype), name)


def piece(
    region: Region,
    pool: Pool,
    outputs: Sequence[Output],
    spaces: Sequence[Output],
    sizes: Mapping[int, int],
    free_axis: int = 0,
) -> Region:
    """A part of a region, which reads what other kernels left in `spaces` behind the inputs."""
    return settle(
        pool,
        outputs,
        inputs=[*region.inputs, *(s.tensor for s in spaces)],
        input_names=[*region.input_names, *(s.name for s in spaces)],
        input_dims=[*region.input_dims, *(s.dims for s in spaces)],
        sizes=sizes,
        pinned=region.pinned,
        results={},
        bounds=region.bounds,
        free_axis=max(free_axis, region.free_axis),
    )


@dataclass
class Copier:
    """Values made anew where something that they are made from is replaced."""

    pool: Pool
    region: Region
    known: dict[int, int]

    def copied(self, number: int) -> int:
        if number not in self.known:
            expr = self.region.exprs[number]
            args = tuple(self.copied(arg) for arg in expr.args)
            label = self.region.labels.get(number, "")
            self.known[number] = self.pool.add(replace(expr, args=args), label)
        return self.known[number]


Again = Callable[[Pool, Expr, int, tuple[int, ...], str], int]
"""What reduces the results of a reduction along other axes."""


def by_rows(region: Region, inner: frozenset[int], again: Again) -> Region:
    """A region whose reductions along more than the rows `inner` reduce those first, and then
    `again` what they give; itself where there is none."""
    pool = pool_of(region, region.sizes)
    copier = Copier(pool, region, {})
    for number in sorted(region.all("reduce")):
        expr, label = region.exprs[number], region.labels.get(number, "")
        if inner < frozenset(expr.axes) and expr.monoid in JOINED:
            along = tuple(axis for axis in expr.axes if axis in inner)
            across = tuple(axis for axis in expr.axes if axis not in inner)
            value = copier.copied(expr.args[0])
            given = pool.add(replace(expr, args=(value,), axes=along), label)
            copier.known[number] = again(pool, expr, given, across, label)
    if not copier.known:
        return region
    outputs = [replace(o, value=copier.copied(o.value)) for o in region.outputs]
    return piece(region, pool, outputs, (), region.sizes)


def loaded(pool: Pool, position: int, left: Output) -> int:
    """A value that another kernel left in memory."""
    indices = tuple(pool.place(dim) for dim in left.dims)
    return pool.add(Expr("load", indices, left.tensor.dtype, input=position))


def apply(pool: Pool, op: str, *args: int) -> int:
    """A primitive of some values, in the dtype of the last; a comparison gives a bool."""
    dtype = "bool" if op in ("eq", "lt") else pool.exprs[args[-1]].dtype
    return pool.add(Expr(op, args, dtype))


def constant(pool: Pool, literal: str, dtype: str) -> int:
    """A number, as the kernel spells it."""
    return pool.add(Expr("const", (), dtype, literal=literal))


def summed(pool: Pool, value: int, axes: tuple[int, ...], label: str = "") -> int:
    """The sum of a value along some axes, in its own dtype."""
    dtype = pool.exprs[value].dtype
    return pool.add(Expr("reduce", (value,), dtype, axes=axes, monoid="sum"), label)


def converted(pool: Pool, value: int, dtype: str, label: str = "") -> int:
    """A float in another width."""
    if pool.exprs[value].dtype == dtype:
        return value
    return pool.add(Expr("cast", (value,), dtype, to=dtype), label)


def combined_parts(pool: Pool, expr: Expr, part: int, parts: int, label: str) -> int:
    """A reduction out of partial results."""
    return reduced_again(pool, expr, part, (parts,), label)


def reduced_again(pool: Pool, expr: Expr, part: int, axes: tuple[int, ...], label: str) -> int:
    """A reduction of its own results along other axes. Sums of them are made in float64: there are
    few, and eager's own sums lose less than float32 would."""
    if expr.monoid == "sum" and expr.dtype == "float32":
        total = summed(pool, converted(pool, part, "float64"), axes, label)
        return converted(pool, total, "float32")
    return pool.add(replace(expr, args=(part,), axes=axes), label)
