"""Windows whose rows are short runs of memory: lanes side by side take a run, and each walks what
is far apart by itself.

A window of 6 x 6 x 6 holds 36 runs of 6 elements. Were all of it a row of lanes, every window would
be combined across lanes; were all of it walked, neighbouring lanes would read far apart. With a run
in neighbouring lanes, the lanes of a warp read neighbouring runs, and combine but once a window.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from fusion_advisor.region.exprs import Pool
from fusion_advisor.region.region import JOINED, Region, settle
from fusion_advisor.schedules.layout import Access, accesses


def run_of_windows(
    region: Region, inner: frozenset[int], most: int, longest: int
) -> frozenset[int]:
    """The axes of a row, of windows, that are a run of memory shorter than `longest`, where each
    lane can walk the others, of `most` places; none where they are no such windows."""
    reductions = [region.exprs[n] for n in region.all("reduce") if inner & {*region.exprs[n].axes}]
    joined = all(expr.monoid in JOINED and inner == frozenset(expr.axes) for expr in reductions)
    if not joined or any(region.all("scan")) or inner & region.kept:
        return frozenset()
    loads = [load for load in accesses(region)[0] if inner & load.strides.keys()]
    runs = {_run(load, inner, region) for load in loads}
    if len(runs) != 1:
        return frozenset()
    (run,) = runs
    far = prod(region.sizes[axis] for axis in inner - run)
    near = prod(region.sizes[axis] for axis in run)
    return run if 1 < near < longest and 1 < far <= most else frozenset()


def _run(load: Access, inner: frozenset[int], region: Region) -> frozenset[int]:
    """The axes that a tensor lies contiguous along, from its neighbouring elements on."""
    steps = {abs(load.step(axis)): axis for axis in inner}
    run: set[int] = set()
    behind = 1
    while behind in steps and steps[behind] not in run:
        run.add(steps[behind])
        behind *= region.sizes[steps[behind]]
    return frozenset(run)


def far_first(region: Region, run: frozenset[int]) -> Region:
    """The region with each reduction over a run and more axes as one over the run of what the
    others give."""
    pool = Pool(sizes=region.sizes)
    numbers: list[int] = []
    for number, expr in enumerate(region.exprs):
        label = region.labels.get(number, "")
        made = replace(expr, args=tuple(numbers[arg] for arg in expr.args))
        if expr.op == "reduce" and run < {*expr.axes}:
            axes = tuple(axis for axis in expr.axes if axis not in run)
            far = pool.add(replace(made, axes=axes), label)
            near = tuple(axis for axis in expr.axes if axis in run)
            made = replace(made, args=(far,), axes=near)
        numbers.append(pool.add(made, label))
    return settle(
        pool,
        [replace(output, value=numbers[output.value]) for output in region.outputs],
        inputs=region.inputs,
        input_names=region.input_names,
        input_dims=region.input_dims,
        sizes=region.sizes,
        pinned=region.pinned,
        results={numbers[number]: name for number, name in region.results.items()},
        bounds=region.bounds,
        free_axis=region.free_axis,
    )
