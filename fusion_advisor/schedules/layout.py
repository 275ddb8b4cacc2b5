"""How the tensors of a region lie over its axes: strides by axis, and which axes step as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from fusion_advisor.ir.addressed import Dim, Places, View, view
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.region.axes import AxisList, Dims
from fusion_advisor.region.exprs import FOLD
from fusion_advisor.region.region import Region

_MOST_PLACES = 1 << 20
"""Places of one dimension that are looked at one by one; beyond it each counts as touched."""


@dataclass(frozen=True, slots=True)
class Access:
    """One tensor as the kernel reads or writes it.

    `dims` has the axes that each dimension walks in order; a dimension that is `pulled` instead
    has the number of its index expression there. `strides` maps axes to elements, as far as the
    access steps evenly along them; axes that are missing broadcast. Where `guard` is false nothing
    is read.
    """

    name: str
    tensor: Tensor
    dims: Dims
    strides: Mapping[int, int]
    pulled: Mapping[int, int] = field(default_factory=dict[int, int])
    guard: int | None = None

    def step(self, axis: int) -> int:
        return self.strides.get(axis, 0)

    @property
    def walks(self) -> frozenset[int]:
        """The axes that its plain dimensions walk."""
        return frozenset(axis for dim in self.dims for axis in dim)


@dataclass(frozen=True, slots=True)
class Group:
    """A run of axes, outermost first, that every tensor steps through as if they were one."""

    name: str
    axes: tuple[int, ...]
    size: int

    def step(self, access: Access) -> int:
        """Elements from one index of the group to the next, along plain dimensions."""
        return access.step(self.axes[-1]) if self.axes and self.axes[-1] in access.walks else 0


def spanned(groups: Iterable[Group]) -> tuple[int, ...]:
    """The axes of some groups, outermost first."""
    return tuple(axis for group in groups for axis in group.axes)


def access(name: str, tensor: Tensor, dims: Dims, sizes: Mapping[int, int]) -> Access:
    """A tensor walked plainly: each dimension's stride spread over the axes that make it up."""
    return Access(name, tensor, dims, _spread(tensor, dims, sizes))


def _spread(tensor: Tensor, dims: Dims, sizes: Mapping[int, int]) -> dict[int, int]:
    strides: dict[int, int] = {}
    for dim, stride in zip(dims, tensor.stride, strict=True):
        step = stride
        for axis in reversed(dim) if stride else ():  # an expanded dimension broadcasts
            strides[axis] = step
            step *= sizes[axis]
    return strides


def load_access(region: Region, number: int) -> Access:
    """How one live load walks its tensor."""
    expr = region.exprs[number]
    tensor = region.inputs[expr.input]
    dims: list[tuple[int, ...]] = []
    pulled: dict[int, int] = {}
    for d, index in enumerate(expr.indices):
        where = region.exprs[index]
        whole = prod(region.sizes[axis] for axis in where.axes) == tensor.shape[d]
        if where.op == "place" and whole:
            dims.append(where.axes)
        else:
            dims.append(())
            if where.literal != "0" or tensor.shape[d] > 1:
                pulled[d] = index
    strides = _spread(tensor, tuple(dims), region.sizes)
    for d, index in pulled.items():
        if not tensor.stride[d]:
            continue
        for axis, step in (affine(region, index) or {}).items():
            strides[axis] = strides.get(axis, 0) + step * tensor.stride[d]
    return Access(region.input_names[expr.input], tensor, tuple(dims), strides, pulled, expr.guard)


def affine(region: Region, number: int) -> dict[int, int] | None:
    """The step of an index along each axis; None where it does not step evenly."""
    expr = region.exprs[number]
    if expr.op == "const":
        return {}
    if expr.op == "place":
        steps: dict[int, int] = {}
        step = 1
        for axis in reversed(expr.axes):
            steps[axis] = step
            step *= region.sizes[axis]
        return steps
    if expr.op in ("add", "sub"):
        left, right = (affine(region, arg) for arg in expr.args)
        if left is None or right is None:
            return None
        sign = 1 if expr.op == "add" else -1
        axes = left.keys() | right.keys()
        return {axis: left.get(axis, 0) + sign * right.get(axis, 0) for axis in axes}
    factor = region.exprs[expr.args[1]].number if expr.op == "mul" else None
    if factor is not None:
        inner = affine(region, expr.args[0])
        return None if inner is None else {axis: step * factor for axis, step in inner.items()}
    return None


def accesses(region: Region) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """Loads (one for each live load, in order of use) and stores."""
    loads = tuple(load_access(region, number) for number in region.all("load"))
    stores = (access(out.name, out.tensor, out.dims, region.sizes) for out in region.outputs)
    return loads, tuple(stores)


# -- what is touched -------------------------------------------------------------------------------


def touched(
    region: Region, loads: Sequence[Access], tensor: Tensor, sizes: Mapping[int, int]
) -> list[View] | None:
    """What some pulled loads of a tensor address at certain sizes of the axes, where it lies as
    `tensor` says; None where that hangs on data."""
    found: list[View] = []
    for load in loads:
        along = _touched_by(region, load, tensor.stride, sizes)
        if along is None:
            return None
        if seen := view(tensor.offset, along):
            found.append(seen)
    return found


def _touched_by(
    region: Region, load: Access, stride: Sequence[int], sizes: Mapping[int, int]
) -> list[Dim] | None:
    """The places that one load reads along each dimension of a tensor: along several together that
    are walked along the same axes, a window that is cut say. None where that hangs on data."""
    found: dict[int, Places] = {}
    axes: dict[int, frozenset[int]] = {}
    for d, dim in enumerate(load.dims):
        if not load.tensor.stride[d]:  # an expanded dimension is one place
            found[d] = range(1)
            continue
        image: Places | None = range(prod(sizes[axis] for axis in dim))
        axes[d] = frozenset(dim)
        if d in load.pulled:
            axes[d] = region.depends[load.pulled[d]]
            image = _image(region, load.pulled[d], load.tensor.shape[d], sizes)
        if image is None:
            return None
        found[d] = image
    together = tuple(d for d in axes if any(axes[d] & axes[e] for e in axes if e != d))
    walked = sorted(frozenset[int]().union(*(axes[d] for d in together)))
    if not (together and load.pulled.keys() >= {*together} and _few(walked, sizes)):
        return [(places, stride[d]) for d, places in found.items()]
    at = _walk(walked, sizes)
    within, places = np.ones((), dtype=bool), np.zeros((), dtype=np.int64)
    for d in together:
        index, image = index_of(region, load.pulled[d], sizes)(at), found.pop(d)
        places = places + index * stride[d]
        within = within & np.isin(index, np.fromiter(image, np.int64, len(image)))
    kept = np.broadcast_to(places, np.broadcast_shapes(places.shape, within.shape))
    along = _distinct(kept[np.broadcast_to(within, kept.shape)])
    return [*((each, stride[d]) for d, each in found.items()), (along, 1)]


def _distinct(places: _Indices) -> Places:
    """Some places without repeats: a range where they have no gap."""
    found = np.unique(places)
    if found.size and found[-1] - found[0] == found.size - 1:
        return range(int(found[0]), int(found[-1]) + 1)
    return frozenset(found.tolist())


def _few(axes: Sequence[int], sizes: Mapping[int, int]) -> bool:
    """Can each place of some axes be looked at?"""
    return prod(sizes[axis] for axis in axes) <= _MOST_PLACES


_Indices = npt.NDArray[np.int64]
_At = Mapping[int, _Indices]


def _walk(axes: Sequence[int], sizes: Mapping[int, int]) -> _At:
    """Every place along some axes, each along a dimension of its own, so that what hangs on few of
    them is computed for few places."""
    grid = np.ix_(*(np.arange(sizes[axis], dtype=np.int64) for axis in axes))
    return dict(zip(axes, grid, strict=True))


def _image(region: Region, index: int, size: int, sizes: Mapping[int, int]) -> Places | None:
    """The places from 0 to `size` - 1 that an index takes; None where that hangs on values."""
    axes = sorted(region.depends[index])
    parts = [region.exprs[i] for i in reach(region, index)]
    if any(part.op == "load" or part.dtype not in ("index", "bool") for part in parts):
        return None
    steps = affine(region, index)
    if steps is not None and all(sizes[axis] == region.sizes[axis] for axis in axes):
        start = index_of(region, index, sizes)(dict.fromkeys(axes, np.zeros((), dtype=np.int64)))
        return _stepped(int(start), [(sizes[axis], steps[axis]) for axis in axes], size)
    if not _few(axes, sizes):
        return range(size)
    places = index_of(region, index, sizes)(_walk(axes, sizes))
    return _distinct(places[(places >= 0) & (places < size)])


def _stepped(start: int, walks: Sequence[tuple[int, int]], size: int) -> Places:
    """The places from 0 to `size` - 1 among those that so many steps of some width reach from
    `start` along each axis. Bits of an integer stand for them, so that a long axis costs nothing.
    """
    lowest, bits = start, 1
    for count, step in walks:
        lowest += min(step, 0) * (count - 1)
        reached = 1
        while reached < count:
            more = min(reached, count - reached)
            bits |= bits << more * abs(step)
            reached += more
    bits = (bits << lowest if lowest >= 0 else bits >> -lowest) & ((1 << size) - 1)
    if not bits:
        return range(0)
    first = (bits & -bits).bit_length() - 1
    if bits.bit_count() == bits.bit_length() - first:
        return range(first, bits.bit_length())
    return frozenset(place for place, bit in enumerate(reversed(f"{bits:b}")) if bit == "1")


def reach(region: Region, number: int) -> set[int]:
    """A value and everything that it is made from."""
    return traced([number], lambda one: region.exprs[one].args).passed


@dataclass(frozen=True, slots=True)
class Trace:
    """The values that a walk passed, and those at which it ended."""

    passed: set[int]
    ends: set[int]


def traced(wanted: Iterable[int], further: Callable[[int], Iterable[int] | None]) -> Trace:
    """Walk from some values back along `further`, which says what a value is made from, or None
    where the walk ends."""
    trace = Trace(set(), set())
    todo = list(wanted)
    while todo:
        number = todo.pop()
        if number in trace.passed or number in trace.ends:
            continue
        behind = further(number)
        if behind is None:
            trace.ends.add(number)
        else:
            trace.passed.add(number)
            todo.extend(behind)
    return trace


def index_of(region: Region, number: int, sizes: Mapping[int, int]) -> Callable[[_At], _Indices]:
    """An index as a function of places along each axis."""
    expr = region.exprs[number]
    if expr.number is not None:
        value = np.array(int(expr.number), dtype=np.int64)
        return lambda at: value
    if expr.op == "place":
        walked = [(axis, sizes[axis]) for axis in expr.axes]

        def place(at: _At) -> _Indices:
            total = np.zeros((), dtype=np.int64)
            for axis, size in walked:
                total = total * size + at[axis]
            return total

        return place
    args = [index_of(region, arg, sizes) for arg in expr.args]
    do: Callable[..., Any] = _OF_ARRAYS.get(expr.op) or FOLD[expr.op]
    return lambda at: np.asarray(do(*(arg(at) for arg in args)), dtype=np.int64)


_OF_ARRAYS: dict[str, Callable[..., Any]] = {
    "minimum": np.minimum,
    "maximum": np.maximum,
    "where": np.where,
    "and": np.minimum,
    "abs": np.abs,
    "neg": np.negative,
    "cast": np.asarray,
}
"""Operations on arrays of indices, where Python's own, which folds numbers, takes none."""


# -- groups ----------------------------------------------------------------------------------------


def leading(everything: Sequence[Access]) -> Access:
    """The tensor whose order of axes the programs follow: the one over the most axes."""
    return max(everything, key=lambda a: (len(a.strides), a.name.startswith("out")))


def ordered(axes: Sequence[int], lead: Access) -> tuple[int, ...]:
    """Axes from the largest step of the leading tensor to the smallest; strangers first."""
    return tuple(sorted(axes, key=lambda a: (a in lead.strides, -abs(lead.step(a)), a)))


def collapse(
    axes: Sequence[int], everything: Sequence[Access], region: Region, prefix: str
) -> tuple[Group, ...]:
    """Join neighbouring axes that every tensor steps through as one, and so does every place that
    is itself a value or stands in an index."""
    sizes = region.sizes
    placed = _placed(region)
    runs: list[list[int]] = []
    for axis in axes:
        if (
            runs
            and all(_follows(places, runs[-1][-1], axis) for places in placed)
            and all(_as_one(a, runs[-1][-1], axis, sizes[axis]) for a in everything)
        ):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    if len(runs) == 1:
        return (Group(prefix, tuple(runs[0]), prod(sizes[a] for a in runs[0])),)
    return tuple(
        Group(f"{prefix}_{n}", tuple(run), prod(sizes[a] for a in run))
        for n, run in enumerate(runs)
    )


def _as_one(access: Access, outer: int, inner: int, size: int) -> bool:
    walks = access.walks
    return access.step(outer) == access.step(inner) * size and (outer in walks) == (inner in walks)


def _placed(region: Region) -> set[AxisList]:
    """The axes of each place that is needed on its own: as a value, in an index or in a guard."""
    return {
        region.exprs[arg].axes
        for i in region.live
        if region.exprs[i].op != "load"
        for arg in region.exprs[i].args
        if region.exprs[arg].op == "place"
    }


def _follows(places: AxisList, outer: int, inner: int) -> bool:
    """Does a place hold neither of two axes, or the inner one right behind the outer one?"""
    if outer not in places or inner not in places:
        return outer not in places and inner not in places
    return places.index(inner) == places.index(outer) + 1


def stepped_over(
    steps: Mapping[str, tuple[Group, ...] | None], groups: Sequence[Group]
) -> tuple[Group, ...] | None:
    """The groups that lie within some that a tensor steps through as if they were one, by its
    `gaps`; None where it does not."""
    within = steps.get(groups[-1].name)
    if within is None:
        return None
    alike = all(
        steps.get(group.name) == (*groups[n + 1 :], *within) for n, group in enumerate(groups)
    )
    return within if alike else None


def gaps(access: Access, groups: Sequence[Group]) -> dict[str, tuple[Group, ...] | None]:
    """How the tensor steps along each group that its plain dimensions walk: the groups whose
    extents multiply to its step when it is dense there, or None when the step is a run-time stride.

    `groups` are all groups of the plan; the tensor's own order decides which lie within which.
    """
    present = [group for group in groups if group.axes and group.step(access)]
    present.sort(key=lambda group: -group.step(access))
    found: dict[str, tuple[Group, ...] | None] = {}
    for place, group in enumerate(present):
        later = tuple(present[place + 1 :])
        dense = not access.pulled and group.step(access) == prod(g.size for g in later)
        found[group.name] = later if dense else () if group.step(access) == 1 else None
    return found
