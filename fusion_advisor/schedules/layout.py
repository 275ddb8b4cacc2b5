"""How the tensors of a region lie over its axes: strides by axis, and which axes step as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fusion_advisor.records import Tensor
from fusion_advisor.region import Dims, Region


@dataclass(frozen=True, slots=True)
class Access:
    """One tensor as the kernel reads or writes it. `strides` maps the axes that it depends on to
    elements; axes that are missing broadcast."""

    name: str
    tensor: Tensor
    dims: Dims
    strides: Mapping[int, int]

    def step(self, axis: int) -> int:
        return self.strides.get(axis, 0)


@dataclass(frozen=True, slots=True)
class Group:
    """A run of axes, outermost first, that every tensor steps through as if they were one."""

    name: str
    axes: tuple[int, ...]
    size: int

    def step(self, access: Access) -> int:
        """Elements from one index of the group to the next."""
        return access.step(self.axes[-1]) if self.axes else 0


def access(name: str, tensor: Tensor, dims: Dims, sizes: Mapping[int, int]) -> Access:
    """Spread each dimension's stride over the axes that make the dimension up."""
    strides: dict[int, int] = {}
    for dim, stride in zip(dims, tensor.stride, strict=True):
        step = stride
        for axis in reversed(dim) if stride else ():  # an expanded dimension broadcasts
            strides[axis] = step
            step *= sizes[axis]
    return Access(name, tensor, dims, strides)


def accesses(region: Region) -> tuple[tuple[Access, ...], tuple[Access, ...]]:
    """Loads (one for each live load, in order of use) and stores."""
    loads = tuple(
        access(
            f"in{region.exprs[i].input}",
            region.inputs[region.exprs[i].input],
            region.input_dims[region.exprs[i].input],
            region.sizes,
        )
        for i in region.live
        if region.exprs[i].op == "load"
    )
    stores = tuple(
        access(f"out{n}", output.tensor, output.dims, region.sizes)
        for n, output in enumerate(region.outputs)
    )
    return loads, stores


def leading(everything: Sequence[Access]) -> Access:
    """The tensor whose order of axes the programs follow: the one over the most axes."""
    return max(everything, key=lambda a: (len(a.strides), a.name.startswith("out")))


def ordered(axes: Sequence[int], lead: Access) -> tuple[int, ...]:
    """Axes from the largest step of the leading tensor to the smallest; strangers first."""
    return tuple(sorted(axes, key=lambda a: (a in lead.strides, -lead.step(a), a)))


def collapse(
    axes: Sequence[int], everything: Sequence[Access], region: Region, prefix: str
) -> tuple[Group, ...]:
    """Join neighbouring axes that every tensor steps through as one; an axis whose position is
    itself a value stays alone."""
    sizes = region.sizes
    counted = {
        a for i in region.live if region.exprs[i].op == "index" for a in region.exprs[i].axes
    }
    runs: list[list[int]] = []
    for axis in axes:
        if (
            runs
            and not counted & {axis, runs[-1][-1]}
            and all(
                a.step(runs[-1][-1]) == a.step(axis) * sizes[axis]
                and ((runs[-1][-1] in a.strides) == (axis in a.strides))
                for a in everything
            )
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


def gaps(access: Access, groups: Sequence[Group]) -> dict[str, tuple[Group, ...] | None]:
    """How the tensor steps along each group that it depends on: the groups whose extents multiply
    to its step when it is dense there, or None when the step is a run-time stride.

    `groups` are all groups of the plan; the tensor's own order decides which lie within which.
    """
    present = [group for group in groups if group.axes and group.step(access)]
    present.sort(key=lambda group: -group.step(access))
    found: dict[str, tuple[Group, ...] | None] = {}
    for place, group in enumerate(present):
        later = tuple(present[place + 1 :])
        dense = group.step(access) == prod(g.size for g in later)
        found[group.name] = later if dense else () if group.step(access) == 1 else None
    return found
