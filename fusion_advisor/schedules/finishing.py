"""Reductions of reductions: what rows give is small, so it goes through memory and a finishing
kernel combines it (the mean of every row's loss, the norm of pooled channels)."""

from __future__ import annotations

from collections.abc import Iterable

from fusion_advisor.region.region import Output, Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Planner, Refused
from fusion_advisor.schedules.cutting import Copier, loaded, piece, pool_of, space
from fusion_advisor.schedules.layout import accesses, leading, ordered, reach, traced
from fusion_advisor.schedules.reducing import along_rows, widest

NAME = "finishing"


def plan(region: Region, device: Device, rulebook: Rulebook, best: Planner) -> Plan:
    """The plans of the rows and of what finishes them, each made by `best`.

    Refused when the reductions share their axes, or when what goes through memory is more than a
    finishing step.
    """
    rows = along_rows(region, rulebook.schedules.flat)
    late = _late(region, rows, rulebook)
    sizes = dict(region.sizes)
    ends = [o for o in region.outputs if late & reach(region, o.value)]
    early = [o for o in region.outputs if o not in ends]
    handed = {n: _handed(region, n, sizes) for n in _crossing(region, rows, late, ends)}
    if not handed:
        raise Refused("parallel-pattern", "the reductions run along different axes", final=True)
    first = piece(
        region, pool_of(region, sizes), [*early, *handed.values()], (), sizes, region.free_axis
    )
    begun = best(first, device, rulebook)
    pool = pool_of(region, sizes)
    known = {
        number: loaded(pool, len(region.inputs) + place, output)
        for place, (number, output) in enumerate(handed.items())
    }
    copier = Copier(pool, region, known)
    outputs = [Output(copier.copied(o.value), o.dims, o.tensor, o.name) for o in ends]
    free = max(step.region.free_axis for step in begun.steps)
    second = piece(region, pool, outputs, list(handed.values()), sizes, free)
    finished = best(second, device, rulebook)
    again = finished.bytes_read
    share = again / max(begun.bytes_read + begun.bytes_written, 1)
    limit = rulebook.gate("parallel-pattern").number("finish_share").value
    if share > limit:
        why = "the reductions run along different axes"
        raise Refused("parallel-pattern", f"{why}, and {again} B go through memory between them")
    return Plan(
        f"{begun.schedule} + {finished.schedule}",
        region,
        (*begun.steps, *finished.steps),
        finish_share=max(share, begun.finish_share),
    )


def _late(region: Region, rows: list[int], rulebook: Rulebook) -> set[int]:
    """The reductions that are not along the axes of those that come first."""
    if len({frozenset(region.exprs[n].axes) for n in rows}) < 2:
        raise Refused("parallel-pattern", "there is nothing to finish")
    axes = widest(region, rulebook.schedules.flat)
    return {n for n in rows if frozenset(region.exprs[n].axes) != axes}


def _crossing(region: Region, rows: list[int], late: set[int], ends: list[Output]) -> list[int]:
    """Values that the finishing kernel takes from memory: made from early reductions alone."""

    def further(number: int) -> Iterable[int] | None:
        behind = reach(region, number)
        early = not behind.isdisjoint(rows) and not late & behind
        return None if early else region.exprs[number].args

    return sorted(traced([output.value for output in ends], further).ends)


def _handed(region: Region, number: int, sizes: dict[int, int]) -> Output:
    """A value as it lies in memory between the kernels."""
    loads, stores = accesses(region)
    axes = ordered(sorted(region.depends[number]), leading((*loads, *stores)))
    dtype = region.exprs[number].dtype
    return space(f"ws_value{number}_{number}", number, axes, dtype, sizes)
