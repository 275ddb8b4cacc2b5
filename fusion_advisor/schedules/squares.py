"""Numbers combined from all places of tensors that lie across each other: a program has a square,
with a line of each tensor, and leaves one number. A second kernel combines those, and what lies
along the places is made by a third.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusion_advisor.region.exprs import Expr
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules import blocked, flat, row, tiled
from fusion_advisor.schedules.base import Plan, Refused, Step, power_of_two
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.layout import Group, accesses
from fusion_advisor.schedules.online import passes
from fusion_advisor.schedules.parts import Cut
from fusion_advisor.schedules.reducing import widest
from fusion_advisor.schedules.rows import laid_out
from fusion_advisor.schedules.split import in_parts
from fusion_advisor.tile.program import Name, Reduce, Tile, where

NAME = "squares"


@dataclass
class _Cut(Cut):
    """One pass over all places, cut into squares along a new axis."""

    squares: int = 1

    @property
    def count(self) -> int:
        return self.squares


def plan(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The plan in squares; Refused where results have rows of their own, where a mean of the places
    is taken off, or where all tensors lie one way."""
    space = widest(region, rulebook.schedules.flat)
    if region.space != space or any(region.all("scan")):
        raise Refused("no-schedule", "squares are combined to one number alone")
    if any(frozenset(region.exprs[n].axes) != space for n in region.all("reduce")):
        raise Refused("parallel-pattern", "the reductions run along different axes")

    def parts_of(left: Region, before: int) -> tuple[_Cut, Step]:
        return _squares(_Cut(left, space, passes(left, space)[0], 1, before), device, rulebook)

    steps, left = in_parts(region, space, parts_of, _combining, device, rulebook)
    return Plan(NAME, region, (*steps, *(_results(left, device, rulebook) if left else ())))


def _squares(cut: _Cut, device: Device, rulebook: Rulebook) -> tuple[_Cut, Step]:
    """The kernel of one pass whose programs have a square each, and the cut into as many parts."""
    region, numbers = cut.partial(), rulebook.schedules.tiled
    monoids = {region.exprs[n].monoid for n in region.all("reduce")}
    if cut.first.shifted or cut.first.moments or monoids & {"argmax", "argmin"}:
        raise Refused("no-schedule", "a square is no stretch of a row, whose elements are counted")
    if any(output.axes != cut.inner for output in cut.early):
        raise Refused("parallel-pattern", "the results span different iteration spaces")
    line, across = _sides(region, cut.inner, rulebook)
    laid = laid_out(region, line, cut.inner - line, frozenset())
    side = numbers.side.count
    rows = min(side, power_of_two(region.sizes[across]))
    block = min(side * side // rows, power_of_two(laid.length))
    warps = max(1, rows * block // (numbers.elements_per_thread.count * device.warp_size))
    cut = replace(cut, squares=-(-laid.count // rows) * -(-laid.length // block))
    laid = laid_out(cut.partial(), line, cut.inner - line, frozenset())
    order = (*(axis for axis in laid.across if axis != across), across)
    step = laid.step(NAME, device, rows=rows, block=block, warps=warps, across=order)
    return cut, replace(step, part=block, parts=Group("part", (cut.parts,), cut.count))


def _combining(
    region: Region,
    inner: frozenset[int],
    serial: frozenset[int],
    device: Device,
    rulebook: Rulebook,
) -> Step:
    """The kernel that combines the numbers of all squares: in chunks where there are many."""
    most = rulebook.schedules.split.most_parts.count
    if prod(region.sizes[axis] for axis in inner) <= most:
        return row.tile(region, inner, serial, device, rulebook)
    step = blocked.chunks(region, inner, serial, device, rulebook)
    return replace(step, block=most, warps=max(1, step.warps * most // step.block))


def _sides(region: Region, space: frozenset[int], rulebook: Rulebook) -> tuple[frozenset[int], int]:
    """The axes of one side of a square, the longest on end in one of the large tensors, and the
    axis along which another has its neighbours."""
    elements = prod(region.sizes[axis] for axis in space)
    least = rulebook.schedules.row.sector_bytes.count
    ways: dict[int, list[int]] = {}
    for load in sorted(accesses(region)[0], key=lambda load: -load.tensor.bytes):
        way = sorted(load.strides, key=lambda axis: abs(load.step(axis)))
        large = 4 * load.tensor.addressed >= elements and not load.pulled
        if large and way and region.sizes[way[0]] * load.tensor.itemsize >= least:
            ways.setdefault(way[0], way)
    if len(ways) < 2:
        raise Refused("no-schedule", "all that it reduces lies one way")
    runs = [_until(way, ways.keys() - {way[0]}) for way in ways.values()]
    line = max(runs, key=lambda run: prod(region.sizes[axis] for axis in run))
    return frozenset(line), next(axis for axis in ways if axis not in line)


def _until(way: Sequence[int], others: Collection[int]) -> Sequence[int]:
    """What comes in a way before others begin."""
    return way[: next((place for place, axis in enumerate(way) if axis in others), len(way))]


def _results(left: Region, device: Device, rulebook: Rulebook) -> tuple[Step, ...]:
    """The kernel of what lies along the places, once their reductions are known."""
    try:
        return tiled.plan(left, device, rulebook).steps
    except Refused:
        return flat.plan(left, device, rulebook).steps


class SquareBody(Body):
    """A square whose elements are combined to one number, which its program has the place of."""

    @property
    def note(self) -> str:
        return "One program combines a square to one number."

    def _levels(self) -> Iterator[tuple[tuple[Group, ...], str]]:
        for groups, linear in super()._levels():
            yield groups, "program" if linear == "part" else linear

    def _masked(self, expr: Expr, operand: Tile) -> Tile:
        return where(Name("mask"), operand, self._neutral(expr))

    def _reduce(self, expr: Expr, operand: Tile) -> Tile:
        return Reduce(expr.monoid, operand, None)
