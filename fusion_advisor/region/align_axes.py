"""Aligns the axes that reductions bind with axes of the results.

A reduction binds axes of its own. Where its operand lacks an axis of the results, and a bound axis
has the same size, the bound axis may be renamed to it: a mean over rows of 8192, added to rows of
8192 of another tensor, is then laid out as a softmax is. Where several axes of a result that follow
each other have together the size of a bound axis, the bound axis is split into those: a norm of 96
elements before their 48 pairs are rotated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fusion_advisor.region.axes import AxisList
from fusion_advisor.region.builder import Builder, Value
from fusion_advisor.region.exprs import needed


def rename_bound(builder: Builder, results: Sequence[Value]) -> None:
    """Unify the axes of each reduction that no result has with axes of the results made of it, the
    innermost first: all of these, or none. No value may then depend on one axis in two ways."""
    resolve = builder.axes.resolve
    every = _kept(builder, results)
    made = [needed(builder.exprs, [value.id]) for value in results]
    bound = dict[AxisList, dict[int, Value]]()
    for number, value in enumerate(results):
        for n in made[number]:
            if builder.exprs[n].op == "reduce":
                bound.setdefault(resolve(builder.exprs[n].axes), {})[number] = value
    live = needed(builder.exprs, [value.id for value in results])
    for axes in sorted(bound):
        own = [*bound[axes].values()]
        kept = _kept(builder, own)
        sizes = {builder.axes.sizes[axis] for axis in kept}
        missing = tuple(axis for axis in axes if axis not in every)
        apart = all(other == axes or not {*other} & {*missing} for other in bound)
        if not apart or not missing:
            continue
        if all(builder.axes.sizes[a] in sizes for a in missing):
            _rename(builder, missing, kept, _together(builder, live))
        elif len(axes) == 1:
            runs = {run for value in own for run in _runs(map(resolve, value.dims))}
            _split(builder, axes[0], sorted(runs), _together(builder, live))


def _kept(builder: Builder, results: Iterable[Value]) -> AxisList:
    """Axes of some results, the innermost of each first."""
    dims = (dim for value in results for dim in value.dims[::-1])
    return tuple(dict.fromkeys(a for dim in dims for a in builder.axes.resolve(dim)[::-1]))


def _rename(
    builder: Builder, axes: AxisList, kept: AxisList, together: Mapping[int, frozenset[int]]
) -> None:
    """Unify each axis with an axis of the results that has the same size and that no value uses
    together with it."""
    sizes, named = builder.axes.sizes, dict[int, int]()
    for axis in reversed(axes):
        met = together.get(axis, frozenset())
        free = (a for a in kept if sizes[a] == sizes[axis] and a not in met | {*named.values()})
        found = next(free, None)
        if found is None:
            return
        named[axis] = found
    for axis, found in named.items():
        builder.axes.unify((found,), (axis,))


def _runs(dims: Iterable[AxisList]) -> Iterator[AxisList]:
    """Axes that follow each other, two and more, within the dimensions of a result or across."""
    axes = [axis for dim in dims for axis in dim]
    for first in range(len(axes)):
        yield from (tuple(axes[first:end]) for end in range(first + 2, len(axes) + 1))


def _split(
    builder: Builder, axis: int, runs: Sequence[AxisList], together: Mapping[int, frozenset[int]]
) -> None:
    """Unify an axis with axes that follow each other in a result and have together its size, where
    no value uses the axis together with one of those."""
    met, size = together.get(axis, frozenset()), builder.axes.sizes[axis]
    fits = (run for run in runs if builder.axes.size(run) == size and not {*run} & met)
    if found := next(fits, None):
        builder.axes.unify(found, (axis,))


def _together(builder: Builder, live: Sequence[int]) -> dict[int, frozenset[int]]:
    """Map each axis to the axes that occur with it in one value, or in its dimensions."""
    resolve = builder.axes.resolve
    viewed = (frozenset(axis for dim in dims for axis in resolve(dim)) for dims in builder.views)
    found: dict[int, frozenset[int]] = {}
    for axes in {*builder.depends(live).values(), *viewed}:
        for axis in axes:
            found[axis] = found.get(axis, frozenset()) | axes
    return found
