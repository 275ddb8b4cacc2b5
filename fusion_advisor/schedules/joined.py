"""Values that are parts of a joined one (`cat`), of which each row lies in one.

Which part a row lies in hangs on its place alone, so a program whose rows lie in one part makes
that one, however many parts there are. A load of each part, all but one masked, would ask for as
many registers, and for as many instructions in each lane.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import gcd, prod

from fusion_advisor.region.exprs import AxisList
from fusion_advisor.region.random import SHARES
from fusion_advisor.region.region import Region
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.layout import (
    Access,
    Group,
    Trace,
    evaluates,
    index_of,
    reach,
    traced,
)
from fusion_advisor.tile.program import Block, If, Tile

MOST_PLACES = 1 << 16
"""Places along the joined axes that are looked at one by one."""
_OF_A_WHOLE_ROW = ("reduce", "scan", *SHARES)


@dataclass(frozen=True, slots=True)
class Joined:
    """Along `axes` together, the place from which on each value is the part: `parts`, in their
    order. No load that it is made of is masked by where its part ends."""

    axes: AxisList
    parts: tuple[tuple[int, int], ...]


def joined(
    region: Region,
    loads: Sequence[Access],
    along: frozenset[int],
    fixed: Collection[int],
) -> dict[int, Joined]:
    """Values that are one of several by the place of a row, by number: choices that no place along
    a row, on the axes `along`, decides. `loads` are all of the region, in its order; `fixed` the
    axes that the kernel serves no other sizes of."""
    accesses = dict(zip(region.all("load"), loads, strict=True))
    found: dict[int, Joined] = {}
    within: set[int] = set()
    for number in sorted(region.live, reverse=True):  # the whole before its parts
        if number in within or region.exprs[number].op != "where":
            continue

        def further(one: int) -> tuple[int, ...] | None:
            expr = region.exprs[one]
            told = expr.op == "where" and not region.depends[expr.args[0]] & along
            return expr.args[1:] if told and evaluates(region, expr.args[0]) else None

        choices = traced([number], further)
        if _alike(region, choices.ends, accesses, along):
            one = _by_place(region, number, choices, accesses, fixed)
            if one is not None:
                found[number] = one
                within |= choices.passed
    return found


def rows_in_a_part(one: Joined, outer: Sequence[Group], fixed: Collection[int]) -> int:
    """The power of two of rows, counted from a multiple of it, that always lie in one part; 0 where
    the joined axes are no group of the rows."""
    place = next((n for n, group in enumerate(outer) if group.axes == one.axes), None)
    if place is None:
        return 0
    behind = prod(group.size for group in outer[place + 1 :] if {*group.axes} <= {*fixed})
    together = gcd(outer[place].size, *(start for start, _ in one.parts)) * behind
    return together & -together


def rows_together(
    found: Iterable[Joined], outer: Sequence[Group], rows: int, fixed: Collection[int]
) -> int:
    """Of `rows` that could share a program as many as lie in one part of each joined value, unless
    that makes more programs than the parts spare loads."""
    for one in found:
        most = rows_in_a_part(one, outer, fixed)
        if most and rows < most * len(one.parts):
            rows = min(rows, most)
    return rows


def shares(step: Step) -> dict[int, float]:
    """Of the places at which values of a kernel stand, the share at which they are made, where that
    is not 1: of what one part of a joined value alone needs, that part; of choices between parts,
    none."""
    region, found = step.region, dict[int, float]()
    for number, one in in_one_part(step, region.pinned | step.serial).items():
        whole = prod(region.sizes[axis] for axis in one.axes)
        parts = {value for _, value in one.parts}
        found |= dict.fromkeys(_made_of(region, [number], parts) - parts, 0.0)
        results = [output.value for output in region.outputs]
        for place, (start, value) in enumerate(one.parts):
            end = one.parts[place + 1][0] if place + 1 < len(parts) else whole
            own = reach(region, value) - _made_of(region, results, {value})
            found |= dict.fromkeys({value, *own}, (end - start) / whole)
    return found


def _made_of(region: Region, values: Iterable[int], cut: Collection[int]) -> set[int]:
    """Some values and what they are made from, not looking behind those at which it is `cut`."""
    trace = traced(values, lambda n: None if n in cut else region.exprs[n].args)
    return trace.passed | trace.ends


def in_one_part(step: Step, fixed: Collection[int]) -> dict[int, Joined]:
    """Joined values of which all rows of a program lie in one part."""
    if not step.inner or step.serial or step.phases:
        return {}
    found = joined(step.region, step.loads, step.along, fixed)
    return {
        number: one
        for number, one in found.items()
        if rows_in_a_part(one, step.outer, fixed) >= step.rows
    }


def _alike(
    region: Region, parts: Collection[int], accesses: Mapping[int, Access], along: frozenset[int]
) -> bool:
    """Are values made of single elements, over the same axes?"""
    spans: set[tuple[bool, bool]] = set()
    for part in parts:
        made_of = reach(region, part)
        if any(region.exprs[n].op in _OF_A_WHOLE_ROW for n in made_of):
            return False
        loads = [accesses[n] for n in made_of if region.exprs[n].op == "load"]
        walked = frozenset[int]().union(*(load.strides for load in loads))
        spans.add((bool(walked & along), bool(walked - along)))
    return len(spans) == 1 and all(inner for inner, _ in spans)


def _by_place(
    region: Region,
    number: int,
    choices: Trace,
    accesses: Mapping[int, Access],
    fixed: Collection[int],
) -> Joined | None:
    """The choice as runs of places, one for each value; None where it hangs on other axes, or where
    a part has loads that are masked within it."""
    guards = {value: _guards(region, value, accesses) for value in choices.ends}
    conditions = {region.exprs[choice].args[0] for choice in choices.passed}
    asked = conditions.union(*guards.values())
    axes = tuple(sorted(frozenset[int]().union(*(region.depends[n] for n in asked))))
    if not {*axes} <= {*fixed} or not all(evaluates(region, n) for n in asked):
        return None
    if prod(region.sizes[axis] for axis in axes) > MOST_PLACES:
        return None
    holds = {number: index_of(region, number, region.sizes) for number in asked}
    values: list[int] = []
    for places in product(*(range(region.sizes[axis]) for axis in axes)):
        at, value = dict(zip(axes, places, strict=True)), number
        while value in choices.passed:
            condition, this, other = region.exprs[value].args
            value = this if holds[condition](at) else other
        if not all(holds[guard](at) for guard in guards[value]):
            return None
        values.append(value)
    runs = [list(run) for _, run in groupby(range(len(values)), key=values.__getitem__)]
    whole = len(runs) == len(choices.ends)
    return Joined(axes, tuple((run[0], values[run[0]]) for run in runs)) if whole else None


def _guards(region: Region, value: int, accesses: Mapping[int, Access]) -> set[int]:
    loads = (accesses[n] for n in reach(region, value) if region.exprs[n].op == "load")
    return {load.guard for load in loads if load.guard is not None}


def searched(place: Tile, starts: Sequence[tuple[int, Block]]) -> Block:
    """Blocks of which one is done: the last that starts at a place or before; found by halves."""
    if len(starts) == 1:
        return starts[0][1]
    half = len(starts) // 2
    before, behind = starts[:half], starts[half:]
    return (If(place < behind[0][0], searched(place, before), searched(place, behind)),)
