"""Gathers: elements at positions that other tensors hold. Their HBM bytes are the touched rows, at
most the table."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.ir.addressed import addressed_bytes
from fusion_advisor.ops.registry import Call, meaning_of
from fusion_advisor.region.axes import Dims, NotExpressible
from fusion_advisor.region.builder import INTEGER_DTYPES, Builder, Value


def _embedding(call: Call) -> tuple[int, int]:
    table, places = call.operand(0), call.operand(1)
    return places.bytes + min(call.out.numel * table.itemsize, table.bytes), call.out.bytes


def _gather(call: Call) -> tuple[int, int]:
    source, places = call.operand(0), call.operand(2)
    return places.bytes + min(call.out.numel * source.itemsize, source.bytes), call.out.bytes


def _index(call: Call) -> tuple[int, int]:
    source = call.operand(0)
    places = addressed_bytes(call.operands[1:])
    return places + min(call.out.numel * source.itemsize, source.bytes), call.out.bytes


@meaning_of("gather", "aten.embedding.default", inputs="raw", traffic=_embedding)
def embedding(
    b: Builder,
    table: Value,
    places: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    return b.pull(table, 0, places.id, (*places.dims, *table.dims[1:]))


@meaning_of("gather", "aten.index_select.default", inputs="raw", traffic=_gather)
def index_select(b: Builder, x: Value, dim: int, places: Value) -> Value:
    if not x.dims:
        return x
    dim %= len(x.dims)
    here = places.dims or ((),)
    return b.pull(x, dim, places.id, (*x.dims[:dim], *here, *x.dims[dim + 1 :]))


@meaning_of("gather", "aten.gather.default", inputs="raw", traffic=_gather)
def gather(b: Builder, x: Value, dim: int, places: Value, sparse_grad: bool = False) -> Value:
    """Gather along a dimension. Along the other dimensions, a shorter index takes the first
    elements."""
    if not x.dims:
        return x
    dim %= len(x.dims)
    wheres = {dim: places.id}
    for other, (mine, its) in enumerate(zip(x.dims, places.dims, strict=True)):
        if other == dim:
            continue
        if x.shape[other] == places.shape[other]:
            b.axes.unify(mine, its)
        else:
            wheres[other] = b.place(its)
    return b.pull_all(x, wheres, places.dims)


@meaning_of(
    "gather", "aten.index.Tensor", "aten._unsafe_index.Tensor", inputs="raw", traffic=_index
)
def index(b: Builder, x: Value, places: Sequence[Value | None]) -> Value:
    """Indexing by tensors. The indexed dimensions stand where the first of them stood; in front,
    when they are apart."""
    given = {dim: places for dim, places in enumerate(places) if places is not None}
    if any(value.logical not in INTEGER_DTYPES - {"uint8"} for value in given.values()):
        raise NotExpressible("an index by a mask: its size depends on data")
    common = b.broadcast([value.dims for value in given.values()])
    kept = [dim for dim in range(len(x.dims)) if dim not in given]
    first, last = min(given), max(given)
    front = first if last - first + 1 == len(given) else 0
    before: Dims = tuple(x.dims[dim] for dim in kept[:front])
    behind: Dims = tuple(x.dims[dim] for dim in kept[front:])
    wheres = {dim: wrapped(b, value, x.shape[dim]) for dim, value in given.items()}
    return b.pull_all(x, wheres, (*before, *common, *behind))


def wrapped(b: Builder, places: Value, size: int) -> int:
    """Indices with those below zero counted from the end."""
    negative = b.reckon("lt", places.id, b.whole(0))
    return b.choose(negative, b.reckon("add", places.id, b.whole(size)), places.id)
