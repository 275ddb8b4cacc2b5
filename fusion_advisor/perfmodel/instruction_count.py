"""Instruction count of an emitted kernel's warps, and wavefronts of the L1.

A wavefront is what the L1 of a multiprocessor, which is its shared memory too, does in one clock.
Threads hold a tile as `blocked_layout` says: where what they ask for lies, and through how many
lanes and warps a reduction goes, follows from that. What a thread has no places of its own for, all
of them make.

What is worth how many instructions (`rules/predict.toml`, `times.issue`) was fitted on what the
hardware counted of 1006 cases' kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from math import gcd, log2, prod

from fusion_advisor.perfmodel.blocked_layout import Spread, spread
from fusion_advisor.perfmodel.coalescing import AccessPattern, asked, divisions, hangs, lane_of
from fusion_advisor.region.instruction_mix import instructions
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import LANES_SERVED, LINE_BYTES, Device
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.layout import Access, Group
from fusion_advisor.schedules.reducing import walks

WORD_BYTES = 4
BANKS = 32
"""Banks of words in the L1 and in shared memory, which are one memory."""
UNKNOWN = 8
"""Wavefronts of a request whose places depend on data: some neighbours lie together."""
CONFLICTS = 2
"""Wavefronts for each word that is transposed, to shared memory or back."""
SCANNED = 14
"""Wavefronts for each vector that a warp scans: shuffles, and what warps leave each other."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Totals of the actions of a kernel's warps; each action costs some instructions."""

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
    simple: float
    """Instructions of primitives that are one or two, as they were timed alone."""
    other: float
    """Instructions of all other primitives, as they were timed alone."""
    step: float
    """Places that reductions combine."""
    exchange: float
    """Values that lanes or warps give each other."""
    scanned: float
    """Vectors that warps scan."""

    def instructions(self, device: Device) -> float:
        """Instructions of warps."""
        worth = device.times.issue
        return sum(getattr(self, f.name) * getattr(worth, f.name).value for f in fields(self))


def tally(program: Program, device: Device, *, precise: bool) -> Tally:
    """Tally of a kernel whose results are computed in the longer forms where they are `precise`."""
    step, every = program.step, program.every
    warps = step.programs * step.warps * step.turns
    parts = [part.region for part in step.phases or (step,)]
    made = [
        instructions(r, device, precise=precise, lanes=partial(program.times, r)) for r in parts
    ]
    one_by_one = sum(1 for one in every if one.whole == 1 and one.apart == 1)
    places = program.main.places * program.serial
    scanned = sum(
        program.times(region, region.exprs[number].args[0]) / program.scanned_at_once
        for region in parts
        for number in region.all("scan")
    )
    return Tally(
        program=step.programs * step.warps,
        access=warps * len(every),
        request=warps * sum(program.requests(one) for one in every),
        masked=warps * one_by_one * places,
        divided=warps * program.divided,
        simple=warps * sum(one.simple for one in made),
        other=warps * sum(one.others for one in made),
        step=warps * sum(one.steps for one in made),
        exchange=warps * (program.turned + sum(one.exchanges for one in program.reductions)),
        scanned=warps * scanned,
    )


def wavefronts(program: Program) -> int:
    """Wavefronts of all programs together."""
    step = program.step
    found = 1.0 + sum(program.requests(one) * program.lines(one) for one in program.every)
    found += sum(one.wavefronts for one in program.reductions) + CONFLICTS * program.turned
    vectors = program.main.places / program.scanned_at_once
    found += SCANNED * vectors * sum(1 for _ in step.region.all("scan"))
    return int(step.programs * step.warps * step.turns * found)


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Reduction of one warp: values that it gives to other lanes or warps, and the
    wavefronts of that."""

    exchanges: float
    wavefronts: float


class Program:
    """Work of a thread, or a warp, of a kernel's program."""

    def __init__(self, step: Step, warp: int) -> None:
        self.step, self.warp = step, warp
        self.every = asked(step)
        self.rows = step.rows if step.inner else 1
        self.inner = _axes(step.inner or step.outer)
        self.outer = _axes(step.outer) if step.inner else frozenset[int]()
        self.walks = walks(step.region, step.serial)

    # -- what its threads hold -----------------------------------------------------------------

    @cached_property
    def spreads(self) -> tuple[Spread, Spread]:
        """Spread of the groups that lie together along rows, and across them."""
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
        """Side of the largest tensor: 0 along rows, 1 across them."""
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
        """Whether an access depends on places along rows, and on rows."""
        return hangs(self.step, access, self.inner), hangs(self.step, access, self.outer)

    def _lies(self, access: Access) -> int:
        """Side of an access, along rows or across them: as memory follows; across where it follows
        neither."""
        step, lane = self.step, lane_of(self.step, access)
        if not step.inner or self.rows == 1:
            return 0
        apart = bool(lane.axes) and all(self.walked(access)) and access.step(lane.axes[-1]) != 1
        return int(lane not in step.inner or (apart and not access.pulled))

    def _held(self, access: Access) -> tuple[Spread, bool, bool, int]:
        """Spread of an access, whether it depends on the axes that lie together and on the rest,
        and its side. An access that does not depend on the whole tile is held as the tile is."""
        along, rows = self.walked(access)
        side = self._lies(access) if along and rows else self.side
        return (self.spreads[side], *((rows, along) if side else (along, rows)), side)

    # -- instructions --------------------------------------------------------------------------

    def times(self, region: Region, number: int) -> float:
        """Number of times that a warp computes a value of a region: the kernel's region, or
        a phase's."""
        step, axes = self.step, region.depends[number]
        along, rows = self.held
        found = rows if axes & self.outer else 1.0
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
        """Tiles that the program walks along a row, or pieces that it holds."""
        step = self.step
        return step.chunks + step.rest / step.block

    @property
    def divided(self) -> float:
        """Divisions of one warp that find the places of its elements."""
        step, (along, rows) = self.step, self.held
        if not step.inner:
            return along * divisions(step, step.outer)
        found = rows * divisions(step, step.outer)
        return found + along * divisions(step, step.inner)

    # -- wavefronts ----------------------------------------------------------------------------

    def requests(self, one: AccessPattern) -> float:
        """Requests of one warp for one access: at each place that lanes walk, and for each chunk of
        a row; none where no lane of the warp has an element."""
        step, access = self.step, one.access
        spread, on, across, _ = self._held(access)
        found = float(spread.held_across if across else 1)
        if on:
            found *= spread.held / min(one.whole, spread.vector, spread.held)
        walked = [axis for axis in step.serial if hangs(step, access, frozenset((axis,)))]
        if walked:
            found *= self._again(one) * prod(step.region.sizes[axis] for axis in walked)
        if step.inner and self.walked(access)[0]:
            found *= (step.part or step.length) / step.block
        return found

    def lines(self, one: AccessPattern) -> float:
        """Wavefronts of one request."""
        spread, on, across, _ = self._held(one.access)
        rows = spread.lanes_across if across else 1
        if one.apart is None and on:
            return float(UNKNOWN)
        lanes, apart = (spread.lanes, one.apart or 0) if on else (1, 0)
        itemsize = one.access.tensor.itemsize
        width = (min(one.whole, spread.vector) if on else 1) * itemsize
        return float(wavefronts_of(apart * spread.vector * itemsize, lanes, width, rows))

    def _again(self, one: AccessPattern) -> int:
        """Number of times that lanes walk the places of a load."""
        numbers = tuple(self.step.region.all("load"))
        at = next((n for n, each in zip(numbers, self.every, strict=False) if each is one), None)
        return 1 if at is None else self.walks.get(at, 1)

    @cached_property
    def turned(self) -> float:
        """Words that a thread transposes through shared memory, for accesses that lie across the
        rest of the tile."""
        across = [one for one in self.every if self._held(one.access)[3] != self.side]
        words = sum(one.access.tensor.itemsize / WORD_BYTES for one in across)
        return 2 * words * self.main.places

    @cached_property
    def reductions(self) -> tuple[_Reduction, ...]:
        """Reductions along rows."""
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
        times *= 1 + bool(step.rest)
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


def wavefronts_of(apart: int, lanes: int, width: int, rows: int = 1) -> int:
    """Wavefronts of one request of rows of lanes, whose elements of `width` bytes lie so many bytes
    apart. Some lanes are looked up together: of 8 bytes half a warp, of 16 a quarter. Of these some
    lines are looked up at a time, and words in one bank follow each other, as do those of rows."""
    words = max(1, width // WORD_BYTES)
    near = min(lanes, max(1, BANKS // words))
    beside = max(1, min(rows, BANKS // words // near))
    common = gcd(apart // WORD_BYTES, BANKS)
    banks = BANKS // common * min(common, words)
    met = -(-near * words // banks) if apart >= WORD_BYTES else 1
    lines = min(near, -(-((near - 1) * apart + width) // LINE_BYTES))
    served = max(met * beside, -(-lines * beside // LANES_SERVED))
    return -(-lanes // near) * -(-rows // beside) * served


def _axes(groups: Sequence[Group]) -> frozenset[int]:
    return frozenset(axis for group in groups for axis in group.axes)
