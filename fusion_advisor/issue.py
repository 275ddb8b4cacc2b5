"""What the warps of an emitted kernel issue: instructions, and wavefronts of the L1.

A wavefront is what the L1 of a multiprocessor, which is its shared memory too, does in one clock: a
line of 128 bytes that the lanes of a request touch, or what they touch of shared memory in banks
that differ. Lanes whose elements lie a line apart or more are served four at a time. Threads hold a
tile as `tiles` says: where what they ask for lies, and through how many lanes and warps a reduction
goes, follows from that. What a thread has no places of its own for, all of them make.

What is worth how many instructions (`rules/predict.toml`, `times.issue`) was fitted on what the
hardware counted of 914 cases' kernels. What programs that share a row ask each other for is not
counted: such kernels issue a third more, and half as many wavefronts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import product
from math import gcd, log2, prod

from fusion_advisor.device import LANES_SERVED, LINE_BYTES, Device
from fusion_advisor.exprs import INDEX
from fusion_advisor.instructions import UNISSUED, instructions
from fusion_advisor.region import Region
from fusion_advisor.requests import Asked, asked, divisions, hangs, lane_of
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.joined import shares
from fusion_advisor.schedules.layout import Access, Group, evaluates, index_of
from fusion_advisor.schedules.reducing import walks
from fusion_advisor.tiles import Spread, spread

WORD_BYTES = 4
"""Of a bank of shared memory."""
BANKS = 32
UNKNOWN = 8
"""Wavefronts of a request whose places hang on data: of neighbours some lie together."""
CONFLICTS = 2
"""Wavefronts for each word that is turned, to shared memory or back."""
MOST_PLACES = 1 << 12
"""At which a guard is looked at."""
SCANNED = 14
"""Wavefronts for each vector that a warp scans: shuffles, and what warps leave each other."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What the warps of a kernel do, all together; each is worth some instructions."""

    program: float
    """Warps that begin."""
    access: float
    """Tensors that a warp reads or writes."""
    request: float
    """Vectors that it asks for."""
    masked: float
    """Elements taken one by one, each under its own mask, though neighbours lie together."""
    divided: float
    """Places that it finds by a division."""
    index: float
    """Steps to find what an index says."""
    simple: float
    """Instructions of primitives that are one or two, as they were timed alone."""
    other: float
    """Instructions of all other primitives, as they were timed alone."""
    integer: float
    """Primitives of 64-bit integers."""
    step: float
    """Places that reductions combine."""
    exchange: float
    """Values that lanes or warps give each other."""
    scanned: float
    """Vectors that warps scan."""

    def instructions(self, device: Device) -> float:
        """Of warps."""
        worth = device.times.issue
        return sum(getattr(self, f.name) * getattr(worth, f.name).value for f in fields(self))


def tally(program: Program, device: Device, *, precise: bool) -> Tally:
    """Of a kernel whose results are made in the longer forms where they are `precise`."""
    step, every = program.step, program.every
    warps = step.programs * step.warps
    parts = [part.region for part in step.phases or (step,)]
    made = [
        instructions(r, device, precise=precise, lanes=partial(program.times, r)) for r in parts
    ]
    one_by_one = sum(1 for one in every if one.whole == 1 and one.apart == 1)
    places = program.main.places * program.serial
    indices = integers = scanned = 0.0
    for region in parts:
        for number in region.live:
            expr = region.exprs[number]
            wide = any(region.exprs[one].dtype == "int64" for one in (number, *expr.args))
            if expr.op == "scan":
                scanned += program.times(region, expr.args[0]) / program.scanned_at_once
            elif expr.op in (*UNISSUED, "reduce"):
                continue
            elif expr.dtype == INDEX:
                indices += program.times(region, number)
            elif wide:
                integers += program.times(region, number)
    return Tally(
        program=warps,
        access=warps * sum(one.share for one in every),
        request=warps * sum(program.requests(one) for one in every),
        masked=warps * one_by_one * places,
        divided=warps * program.divided,
        index=warps * indices,
        simple=warps * sum(one.simple for one in made),
        other=warps * sum(one.others for one in made),
        integer=warps * integers,
        step=warps * sum(one.steps for one in made),
        exchange=warps * (program.turned + sum(one.exchanges for one in program.reductions)),
        scanned=warps * scanned,
    )


def wavefronts(program: Program) -> int:
    """Of all programs together."""
    step = program.step
    found = 1.0 + sum(program.requests(one) * program.lines(one) for one in program.every)
    found += sum(one.wavefronts for one in program.reductions) + CONFLICTS * program.turned
    vectors = program.main.places / program.scanned_at_once
    found += SCANNED * vectors * sum(1 for _ in step.region.all("scan"))
    return int(step.programs * step.warps * found)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Of one warp: values that it gives to other lanes or warps, and wavefronts that this takes."""

    exchanges: float
    wavefronts: float


class Program:
    """What a thread, or a warp, of a kernel's program has to do."""

    def __init__(self, step: Step, warp: int) -> None:
        self.step, self.warp = step, warp
        self.shares = shares(step)
        self.every = asked(step, self.shares)
        self.rows = step.rows if step.inner else 1
        self.inner = _axes(step.inner or step.outer)
        self.outer = _axes(step.outer) if step.inner else frozenset[int]()
        self.walks = walks(step.region, step.serial)

    # -- what its threads hold -----------------------------------------------------------------

    @cached_property
    def spreads(self) -> tuple[Spread, Spread]:
        """Of what lies together along rows, and across them."""
        step, widest = self.step, [1, 1]
        for one in self.every:
            if self.rows == 1 or all(self.walked(one.access)):
                side = self._lies(one.access)
                widest[side] = max(widest[side], one.width)
        return (
            spread(step.block, self.rows, widest[0], step.warps, self.warp),
            spread(self.rows, step.block, widest[1], step.warps, self.warp),
        )

    @cached_property
    def side(self) -> int:
        """Which of both the largest tensor has: 0 along rows, 1 across them."""
        _, side = min((-o.access.tensor.bytes, self._lies(o.access)) for o in self.every)
        return side

    @property
    def main(self) -> Spread:
        return self.spreads[self.side]

    @property
    def held(self) -> tuple[int, int]:
        """Places of a thread along a row, and rows."""
        held, across = self.main.held, self.main.held_across
        return (across, held) if self.side else (held, across)

    @property
    def serial(self) -> int:
        """Places that a lane walks one after the other, each time."""
        return prod(self.step.region.sizes[axis] for axis in self.step.serial)

    def walked(self, access: Access) -> tuple[bool, bool]:
        """Does an access hang on places along rows, and on rows?"""
        return hangs(self.step, access, self.inner), hangs(self.step, access, self.outer)

    def _lies(self, access: Access) -> int:
        lane = lane_of(self.step, access)
        return int(bool(self.step.inner) and self.rows > 1 and lane not in self.step.inner)

    def _held(self, access: Access) -> tuple[Spread, bool, bool, int]:
        """How an access is spread, whether it hangs on what lies together and on the rest, and on
        which side it lies. What does not hang on the whole tile is held as the tile is."""
        along, rows = self.walked(access)
        side = self._lies(access) if along and rows else self.side
        return (self.spreads[side], *((rows, along) if side else (along, rows)), side)

    # -- instructions --------------------------------------------------------------------------

    def times(self, region: Region, number: int) -> float:
        """How often a warp makes a value of a region: the kernel's, or that of a phase."""
        step, axes = self.step, region.depends[number]
        along, rows = self.held
        found = self.shares.get(number, 1.0) * (rows if axes & self.outer else 1)
        if axes & self.inner:
            found *= along * self._chunks()
        walked = axes & step.serial
        if walked:
            found *= max(self.walks.values(), default=1)
        return found * prod(region.sizes[axis] for axis in walked)

    @property
    def scanned_at_once(self) -> int:
        """Places that a thread scans by itself before its warp does."""
        return 1 if self.side else self.main.vector

    def _chunks(self) -> float:
        """Tiles that it walks along a row, or pieces that it holds."""
        step = self.step
        if step.schedule == "blocked":
            return -(-(step.part or step.length) // step.block)
        return 1.0 + step.rest / step.block

    @property
    def divided(self) -> float:
        """Divisions of one warp that find the places of its elements."""
        step, (along, rows) = self.step, self.held
        if not step.inner:
            return along * divisions(step, step.outer)
        found = 0.0 if step.in_planes else rows * divisions(step, step.outer)
        return found + along * divisions(step, step.inner)

    # -- wavefronts ----------------------------------------------------------------------------

    def requests(self, one: Asked) -> float:
        """Of one warp for one access: at each place that lanes walk, and for each chunk of a row;
        not where no lane of the warp has an element."""
        step, access = self.step, one.access
        spread, on, across, _ = self._held(access)
        found = one.share * (spread.held_across if across else 1)
        if on and (one.apart != 0 or not self._near):
            found *= spread.held / min(one.whole, spread.vector, spread.held)
        walked = [axis for axis in step.serial if hangs(step, access, frozenset((axis,)))]
        if walked:
            found *= self._again(one) * prod(step.region.sizes[axis] for axis in walked)
        if step.inner and self.walked(access)[0]:
            found *= (step.part or step.length) / step.block
        return found

    def lines(self, one: Asked) -> float:
        """Wavefronts of one request."""
        spread, on, across, side = self._held(one.access)
        found = 1.0
        if on and one.apart != 0:
            found = float(UNKNOWN) if one.apart is None else self._along(one, one.apart, spread)
        if not across or spread.lanes_across == 1:
            return found
        groups = self.step.inner if side else self.step.outer
        last = [group for group in groups if group.axes][-1:]
        pitch = one.access.tensor.itemsize * sum(abs(one.access.step(g.axes[-1])) for g in last)
        if 0 < pitch < LINE_BYTES:
            return max(found, spread.lanes_across * pitch / LINE_BYTES)
        return found * spread.lanes_across

    def _along(self, one: Asked, apart: int, spread: Spread) -> float:
        """Wavefronts of a request for what one row of lanes asks for. Windows lie further apart
        than one, and the next row of them begins elsewhere."""
        step, access, size = self.step, one.access, one.access.tensor.itemsize
        found = _lines(spread.vector * apart * size, spread.lanes)
        lane = lane_of(step, access)
        length = step.region.sizes[lane.axes[-1]]
        rows = spread.lanes * spread.vector / length
        before = [group for group in step.outer if group.axes and group is not lane]
        if apart > 1 and rows > 1 and before and not step.inner:
            pitch = abs(access.step(before[-1].axes[-1])) * size
            each = max(1.0, length * apart * size / LINE_BYTES)
            found = rows * each if pitch >= LINE_BYTES else max(1.0, rows * pitch / LINE_BYTES)
        return found * self._active(one)

    def _active(self, one: Asked) -> float:
        """The share of the lanes whose guard is true, where it hangs on few places. What is made at
        a share of the places has all of them there."""
        region, guard = self.step.region, one.access.guard
        if guard is None or one.share < 1.0 or not evaluates(region, guard):
            return 1.0
        axes = sorted(region.depends[guard])
        places = prod(region.sizes[axis] for axis in axes)
        if places > MOST_PLACES:  # as that of a window's padding, nearly all of whose lanes are in
            return 1.0
        held = index_of(region, guard, region.sizes)
        every = product(*(range(region.sizes[axis]) for axis in axes))
        return sum(held(dict(zip(axes, at, strict=True))) for at in every) / max(places, 1)

    def _again(self, one: Asked) -> int:
        """How often lanes walk the places of a load."""
        numbers = tuple(self.step.region.all("load"))
        at = next((n for n, each in zip(numbers, self.every, strict=False) if each is one), None)
        return 1 if at is None else self.walks.get(at, 1)

    @property
    def _near(self) -> bool:
        """Do all lanes lie in one run of the last group, or in two?"""
        step = self.step
        return bool(step.inner) or not step.outer or step.block <= step.outer[-1].size

    @cached_property
    def turned(self) -> float:
        """Words that a thread puts into shared memory and takes from there, of what lies across the
        rest of the tile."""
        across = [one for one in self.every if self._held(one.access)[3] != self.side]
        words = sum(one.share * one.access.tensor.itemsize / WORD_BYTES for one in across)
        return 2 * words * self.main.places

    @cached_property
    def reductions(self) -> tuple[_Reduction, ...]:
        """Along rows."""
        found: list[_Reduction] = []
        for part in self.step.phases or (self.step,):
            region = part.region
            for number in region.all("reduce"):
                operand = region.depends[region.exprs[number].args[0]]
                if (operand - region.depends[number]) & self.step.along:
                    again = region.depends[number] & part.serial
                    found.append(self._reduced(prod(region.sizes[axis] for axis in again)))
        return tuple(found)

    def _reduced(self, times: int) -> _Reduction:
        """Lanes combine theirs, then warps through shared memory, where those of a row lie
        together, and all lanes read the result there."""
        main, step = self.main, self.step
        lanes, warps, beside, apart = main.lanes, main.warps, main.lanes_across, 1
        if self.side:
            lanes, warps = main.lanes_across, main.warps_across
            beside, apart = main.lanes, main.vector
        _, kept = self.held
        lanes = min(lanes, step.block)
        warps = min(warps, max(1, step.block // lanes))
        times *= 1 + bool(step.rest or step.vector)
        shuffled = kept * log2(lanes)
        if warps == 1:
            return _Reduction(times * shuffled, times * shuffled)
        conflicts = max(1.0, beside * gcd(apart * warps, BANKS) / BANKS)
        words = self.rows * warps / (step.warps * self.warp)
        combined = max(1.0, words) * log2(warps) + 2 * words
        return _Reduction(
            times * (shuffled + 2 * kept + 2 + log2(warps)),
            times * (shuffled + 2 * kept * conflicts + combined),
        )


def _axes(groups: Sequence[Group]) -> frozenset[int]:
    return frozenset(axis for group in groups for axis in group.axes)


def _lines(apart: int, lanes: int) -> float:
    """Wavefronts of a request whose lanes begin so many bytes apart."""
    if apart >= LINE_BYTES:
        return max(1.0, lanes / LANES_SERVED)
    spanned = lanes * apart / LINE_BYTES
    if apart & (apart - 1):  # banks repeat sooner than lines
        return max(1.0, min(spanned, gcd(max(1, apart // WORD_BYTES), BANKS)))
    return max(1.0, spanned)
