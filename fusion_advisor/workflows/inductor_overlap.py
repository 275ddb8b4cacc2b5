"""Overlap of Inductor's kernels for the whole model with the groups that were decided on."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.measure.protocol import Apart
from fusion_advisor.report.schema import BesideRow, GroupRow, WayRow


def overlapping_kernels(
    group: GroupRow, model: Sequence[WayRow]
) -> tuple[list[BesideRow], list[Apart]]:
    """Kernels of torch.compile that have nodes of the group's first instance, and the pairs of
    parts of that instance that torch.compile left in separate kernels. Empty where it was not
    measured."""
    made = next((row for row in model if row.way == "compile"), WayRow(way="compile"))
    own = set(group.instances[0])
    kernels = [
        BesideRow(
            kernel=kernel,
            inside=[name for name in nodes if name in own],
            outside=[name for name in nodes if name not in own],
        )
        for kernel, nodes in made.covers
        if own.intersection(nodes)
    ]
    parts = [row for row in made.apart if own.issuperset((*row.first, *row.second))]
    return kernels, parts
