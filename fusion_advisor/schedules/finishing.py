"""Reductions of reductions: what rows give is small, so it goes through memory and a finishing
kernel combines it (the mean of every row's loss, the norm of pooled channels)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from fusion_advisor.region.region import Output, Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.base import Plan, Planner, Refused
from fusion_advisor.schedules.cutting import (
    Copier,
    by_rows,
    loaded,
    piece,
    pool_of,
    reduced_again,
    space,
)
from fusion_advisor.schedules.layout import accesses, leading, ordered, reach, traced
from fusion_advisor.schedules.reducing import along_rows, widest

NAME = "finishing"


def plan(region: Region, device: Device, rulebook: Rulebook, best: Planner) -> Plan:
    """The plans of the rows and of what finishes them, each made by `best`.

    Refused when the reductions share their axes, or when what goes through memory is more than a
    finishing step.
    """
    axes = widest(region, rulebook.schedules.flat)
    apart = by_rows(region, axes, reduced_again)
    rows = along_rows(region, rulebook.schedules.flat)
    if apart is not region:  # what follows few rows is no walk of a lane
        region, rows = apart, [*apart.all("reduce"), *apart.all("scan")]
    late = {n for n in rows if frozenset(region.exprs[n].axes) != axes}
    if not late:
        raise Refused("parallel-pattern", "there is nothing to finish")
    ends = [o for o in region.outputs if late & reach(region, o.value)]
    handed = _crossing(region, rows, late, ends)
    if not handed:
        raise Refused("parallel-pattern", "the reductions run along different axes", final=True)
    return _in_two(region, handed, ends, device, rulebook, best)


def shared_first(region: Region, device: Device, rulebook: Rulebook, best: Planner) -> Plan:
    """Plan of reductions whose operands vary along fewer axes than the results, by themselves, and
    then of the results: otherwise programs walk them again for all places along the other axes.
    Refused where that is little, or where what they leave for the rest is not small."""
    common = _common(region)
    operands = {n: region.depends[region.exprs[n].args[0]] for n in region.all("reduce")}
    early = {n for n, along in operands.items() if common and not common & along}
    again = max((prod(region.sizes[a] for a in common | operands[n]) for n in early), default=0)
    if again <= rulebook.gate("parallel-pattern").number("walked_with").count:
        raise Refused("no-schedule", "programs walk little of what results have in common")

    def further(number: int) -> Iterable[int] | None:
        made = reach(region, number) | {number}
        alone = not common & region.depends[number] and not early.isdisjoint(made)
        return None if alone else region.exprs[number].args

    ends = [output for output in region.outputs if common & output.axes]
    handed = sorted(traced([output.value for output in ends], further).ends)
    return _in_two(region, handed, ends, device, rulebook, best, small=True)


def _common(region: Region) -> frozenset[int]:
    """Axes of the widest result along which the operand of some reduction does not vary."""
    space = max((frozenset(output.axes) for output in region.outputs), key=len)
    operands = (region.depends[region.exprs[n].args[0]] for n in region.all("reduce"))
    return max((space - along for along in operands), key=len, default=frozenset[int]())


def _in_two(
    region: Region,
    crossing: Sequence[int],
    ends: Sequence[Output],
    device: Device,
    rulebook: Rulebook,
    best: Planner,
    *,
    small: bool = False,
) -> Plan:
    """Plan of kernels that leave some values in memory and of those that make the `ends` of these.
    Refused where the second is more than a finishing step, or, with `small`, what lies between."""
    sizes = dict(region.sizes)
    early = [o for o in region.outputs if o not in ends]
    handed = {n: _handed(region, n, sizes) for n in crossing}
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
    again = sum(o.tensor.bytes for o in handed.values()) if small else finished.bytes_read
    share = again / max((finished if small else begun).moved, 1)
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
