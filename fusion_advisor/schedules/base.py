"""What a schedule promises about a region before a line of it is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod

from fusion_advisor.ir.addressed import View, addressed_bytes, count_distinct, of_tensor
from fusion_advisor.ir.graph import DTYPE_BYTES, Tensor
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.launch import Extent, Grid
from fusion_advisor.schedules.layout import Access, Group, spanned, touched

DIVISOR = 16
"""What Triton looks for in the arguments of a kernel: does it divide them?"""
WORD_BYTES = 8
"""Of the words that programs exchange: two float32."""


@dataclass(frozen=True)
class Step:
    """One kernel: a region with its tile, and the traffic and on-chip bytes that follow from it.

    `outer` spans the programs and `inner` what one program holds of each row; flat kernels have
    no inner groups. `block` is the tile's extent along the inner axes (or all, when flat) and
    `rows` along the outer ones; both are powers of two. With a `part`, a program takes that many
    elements of its row, and `parts` is the axis that numbers the programs of a row. `serial` axes
    are combined one place after the other within a lane. `on_chip_bytes` is what a program
    keeps at once of `smallest_tile` elements, `registers` an estimate per thread; `read_again` the
    bytes that later passes over a row fetch from HBM again.
    """

    schedule: str
    region: Region
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    outer: tuple[Group, ...]
    inner: tuple[Group, ...]
    order: tuple[int, ...]
    rows: int
    block: int
    warps: int
    stages: int
    smallest_tile: int
    on_chip_bytes: int
    registers: int
    serial: frozenset[int] = frozenset()
    part: int = 0
    parts: Group | None = None
    rest: int = 0
    """Elements of a row's second piece, where it is held in two: a power of two up to `block`."""
    most: int = 0
    """Programs of a persistent kernel; it may have fewer."""
    read_again: int = 0
    phases: tuple[Step, ...] = ()
    """What the programs that share a row do one after the other, over the same groups; a phase with
    `parts` ends in an exchange of its results."""

    passing: bool = False
    """Whether rows are read once, of which nothing is stored: no later load finds them."""
    waiting: int = 0
    """How many kernels whose programs wait the device may run at once."""

    @property
    def sizes(self) -> dict[int, int]:
        """Every axis, that of the parts too."""
        shared = {self.parts.axes[0]: self.parts.size} if self.parts else {}
        return {**self.region.sizes, **shared}

    @property
    def along(self) -> frozenset[int]:
        """The axes of a row."""
        return frozenset(axis for group in self.inner for axis in group.axes)

    @property
    def length(self) -> int:
        """Elements of a row."""
        return prod(group.size for group in self.inner)

    def passes(self, load: Access) -> bool:
        """Whether no program reads again what a load reads, nor its neighbours in a line."""
        walked = all(load.step(axis) for group in self.outer for axis in group.axes)
        along = bool(self.inner) and load.step(self.inner[-1].axes[-1]) == 1
        return self.passing and walked and along and not load.pulled and load.guard is None

    @property
    def chunked(self) -> bool:
        """Is a row walked in chunks, once for each pass over it?"""
        return self.schedule == "blocked"

    @property
    def chunks(self) -> int:
        """Chunks of its row that a program walks."""
        return -(-(self.part or self.length) // self.block) if self.chunked else 1

    @property
    def tiles(self) -> Extent:
        """Tiles of rows, or, without rows, of elements."""
        if self.inner:
            return Extent(spanned(self.outer), self.rows, by="ROWS")
        return Extent(spanned(self.outer), self.block, by="BLOCK")

    @property
    def walkers(self) -> Extent:
        """Programs along the rows, each of which has a tile, or walks several."""
        return replace(self.tiles, most=self.most)

    @property
    def beside(self) -> Extent:
        """Programs that share a row."""
        by = "PART" if self.chunked else "COLS"
        return Extent(spanned(self.inner), self.part, by=by) if self.part else Extent(())

    @property
    def joined(self) -> bool:
        """Are all elements of a tile combined to one number?"""
        return bool(self.part) and not self.region.reduced.isdisjoint(spanned(self.outer))

    @property
    def numbered(self) -> tuple[Extent, ...]:
        """Programs that the axis of `parts` numbers, as a product: those that walk the rows, those
        that share one, or all that have a tile."""
        if self.most:
            return (self.walkers,)
        return (self.walkers, self.beside) if self.joined else (self.beside,)

    @property
    def follows(self) -> bool:
        """Whether programs that follow each other have parts of one row that follow each other, of
        results that no program shares: what lies together is in flight together. Tiles of 64 x 64
        that transpose one of two to four tensors of 12017 x 2053 took up to a third longer where
        programs followed each other down the rows."""
        return bool(self.part) and (self.joined or not (self.chunked or self.parts))

    @property
    def grid(self) -> Grid:
        """Programs along each dimension; those that wait for each other take a ticket, so that one
        dimension numbers them all."""
        if self.phases or self.follows:
            return ((self.walkers, self.beside),)
        return ((self.walkers,), (self.beside,)) if self.part else ((self.walkers,),)

    @property
    def programs(self) -> int:
        """How many programs it has."""
        return prod(extent.at(self.sizes) for dimension in self.grid for extent in dimension)

    @property
    def turns(self) -> int:
        """Tiles of rows that a program walks, one after the other."""
        return -(-self.tiles.at(self.sizes) // self.walkers.at(self.sizes))

    @property
    def lanes(self) -> int:
        """The elements that all programs hold, or wait for, at once."""
        return self.programs * self.rows * (self.block + self.rest)

    @property
    def moved(self) -> int:
        """HBM bytes."""
        return self.bytes_read + self.bytes_written

    @property
    def partial(self) -> bool:
        """Are its sums put together from partial results?"""
        walked = self.chunked or self.most or any(self.region.all("scan"))
        return bool(self.serial or self.parts or walked)

    @property
    def exchanges(self) -> tuple[Step, ...]:
        """The phases whose results the programs of a row exchange."""
        return tuple(phase for phase in self.phases if phase.parts)

    @property
    def ahead(self) -> frozenset[int]:
        """Loads, by number, of what each row has of its own, where that hangs on its place alone:
        programs that wait for each other have them on their way before."""
        if not self.phases or self.phases[-1].parts or self.phases[-1].inner != self.inner:
            return frozenset()
        last, depends = self.phases[-1], self.region.depends
        found = zip(last.region.all("load"), last.loads, strict=True)
        plain = (n for n, a in found if a.guard is None and not a.pulled)
        own = (n for n in plain if n < len(self.region.exprs) and depends[n] - self.along)
        return frozenset(n for n in own if depends[n] & self.along)

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*self.outer, *((self.parts,) if self.parts else ()), *self.inner)

    @cached_property
    def bytes_read(self) -> int:
        """HBM bytes; what hangs on data is taken as one element for each place that asks. Words
        that programs exchange are read where they were just left, in the L2."""
        return sum(self._estimate(loads) for loads in by_storage(self.loads)) + self.read_again

    @property
    def in_common(self) -> int:
        """Bytes that several of its tensors have in common: each asks for them, and all but the
        first find them in the L2."""
        apart = sum(self._estimate(loads) for loads in by_tensor(self.loads).values())
        return apart + self.read_again - self.bytes_read

    @property
    def bytes_written(self) -> int:
        return sum(access.tensor.bytes for access in self.stores)

    def _estimate(self, loads: Sequence[Access]) -> int:
        """Bytes that some loads of one storage read."""
        tensors = {load.name: load.tensor for load in loads}
        found = loaded_bytes(self.region, loads, tensors, self.region.sizes)
        if found is not None:
            return found
        asked = 0
        for name, of_one in by_tensor(loads).items():
            places = sum(prod(self.region.sizes[a] for a in self._walked(load)) for load in of_one)
            asked += min(places * tensors[name].itemsize, tensors[name].bytes)
        return min(asked, addressed_bytes(tensors.values()))

    def _walked(self, load: Access) -> frozenset[int]:
        axes = load.walks
        for index in load.pulled.values():
            axes |= self.region.depends[index]
        return axes


@dataclass(frozen=True)
class Plan:
    """The kernels that make a region, in order, and what they take together.

    Tensors that one of them leaves for the next are named `ws…`. `finish_share` is what a
    finishing kernel reads again because the reductions run along different axes, as a share of
    the bytes.
    """

    schedule: str
    region: Region
    steps: tuple[Step, ...]
    finish_share: float = 0.0

    @property
    def widest(self) -> Step:
        """The kernel that holds most on chip."""
        return max(self.steps, key=lambda step: step.on_chip_bytes)

    @property
    def on_chip_bytes(self) -> int:
        return self.widest.on_chip_bytes

    @property
    def registers(self) -> int:
        return self.widest.registers

    @property
    def busiest(self) -> Step:
        """The kernel that moves most bytes."""
        return max(self.steps, key=lambda step: step.moved)

    @property
    def launches(self) -> int:
        return len(self.steps)

    @property
    def serial(self) -> frozenset[int]:
        """Axes that lanes walk: their extents stand in the kernels."""
        return frozenset[int]().union(*(step.serial for step in self.steps))

    @property
    def bytes_read(self) -> int:
        return sum(step.bytes_read for step in self.steps)

    @property
    def bytes_written(self) -> int:
        return sum(step.bytes_written for step in self.steps)

    @property
    def moved(self) -> int:
        """HBM bytes of all kernels."""
        return self.bytes_read + self.bytes_written


Planner = Callable[[Region, Device, Rulebook], Plan]
"""Finds the plan of a part of a region; Refused when it has none."""


def words(phase: Step) -> int:
    """The words that a part of a row leaves in an exchange."""
    return -(-len(phase.stores) // 2)


def by_tensor(loads: Sequence[Access]) -> dict[str, list[Access]]:
    """Loads by the tensor that they read."""
    found: dict[str, list[Access]] = {}
    for load in loads:
        found.setdefault(load.name, []).append(load)
    return found


def by_storage(loads: Sequence[Access]) -> list[list[Access]]:
    """Loads by the memory that they read: views of one storage may have elements in common."""
    found: dict[object, list[Access]] = {}
    for load in loads:
        known = load.tensor.storage >= 0 and load.name.startswith("in")
        key = (load.tensor.storage, load.tensor.dtype) if known else load.name
        found.setdefault(key, []).append(load)
    return list(found.values())


def loaded_bytes(
    region: Region,
    loads: Sequence[Access],
    tensors: Mapping[str, Tensor],
    sizes: Mapping[int, int],
) -> int | None:
    """Distinct bytes that some loads of one storage touch, of tensors that may have other sizes
    than the graph's; None where that hangs on data. Where they are too many to tell apart, elements
    that several tensors have in common count for each."""
    apart, views = 0, list[View]()
    for name, of_one in by_tensor(loads).items():
        tensor = tensors[name]
        whole = any(not load.pulled for load in of_one)
        found = _whole(tensor) if whole else touched(region, of_one, tensor, sizes)
        if found is None:
            return None
        count = tensor.addressed if whole else count_distinct(found)
        apart += tensor.numel if count is None else count
        views += found
    if len(tensors) > 1:
        apart = min(apart, count_distinct(views) or apart)
    return apart * loads[0].tensor.itemsize


def _whole(tensor: Tensor) -> list[View]:
    found = of_tensor(tensor)
    return [found] if found else []


@dataclass(frozen=True)
class Refusal:
    """Reason why a schedule cannot serve a region. `gate` is the obstacle's name.

    `final`: it, and every other schedule, cannot serve a larger region either.
    """

    gate: str
    why: str
    final: bool = False


class Refused(Exception):
    """Raised by a schedule that cannot serve the region. What outlives the search keeps the
    `refusal` alone: an exception holds every frame that it passed, and with a model's step in
    those frames all of its tensors."""

    def __init__(self, gate: str, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.refusal = Refusal(gate, why, final)


def emission_order(region: Region) -> tuple[int, ...]:
    """Values in the order of their nodes, each load just before its first use."""
    order: list[int] = []
    placed: set[int] = set()

    def place(number: int) -> None:
        if number not in placed:
            placed.add(number)
            order.append(number)

    def needed(number: int) -> None:
        """A load with its indices, just before its first use."""
        for arg in region.exprs[number].args:
            needed(arg)
        place(number)

    for number in sorted(region.live):
        if region.exprs[number].op == "load":
            continue
        for arg in region.exprs[number].args:
            if region.exprs[arg].op == "load":
                needed(arg)
        place(number)
    for output in region.outputs:
        needed(output.value)
    return tuple(order)


def peak_bytes(region: Region, order: tuple[int, ...], extent: dict[int, int]) -> int:
    """Peak of the values alive at once, in bytes; `extent` is the elements that each value holds
    in a tile. A value that dies while the next is made shares its place; constants and sizes take
    none."""
    last: dict[int, int] = {}
    for step, number in enumerate(order):
        for arg in region.exprs[number].args:
            last[arg] = step
    alive = peak = 0
    held: set[int] = set()
    size = partial(_tile_bytes, region, extent)
    for step, number in enumerate(order):
        for arg in set(region.exprs[number].args):
            if arg in held and last[arg] == step:
                alive -= size(arg)
                held.discard(arg)
        alive += size(number)
        held.add(number)
        peak = max(peak, alive)
        if number not in last:  # stored at once
            alive -= size(number)
            held.discard(number)
    return peak


def kept_bytes(region: Region, order: tuple[int, ...], extent: dict[int, int]) -> int:
    """Bytes of the values that a tile keeps while it combines, or scans, a row: those made before
    which something behind uses, and what the scan makes. Other values go from lane to lane as they
    are made; the largest of them counts."""
    last = {arg: step for step, number in enumerate(order) for arg in region.exprs[number].args}
    made = {number: step for step, number in enumerate(order)}
    size = partial(_tile_bytes, region, extent)
    peak = max(map(size, order), default=0)
    for step, number in enumerate(order):
        if region.exprs[number].op in ("reduce", "scan"):
            waiting = (n for n in order if made[n] < step < last.get(n, -1))
            peak = max(peak, size(number) + sum(map(size, waiting)))
    return peak


def _tile_bytes(region: Region, extent: Mapping[int, int], number: int) -> int:
    """Bytes of a value in a tile; constants and sizes take none."""
    expr = region.exprs[number]
    if expr.op in ("const", "given", "size", "extent", "place") or expr.dtype == "index":
        return 0
    return extent[number] * DTYPE_BYTES[expr.dtype]


def power_of_two(count: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << max(0, count - 1).bit_length()


def staged_bytes(
    loads: Sequence[Access], walked: frozenset[int], elements: int, stages: int
) -> int:
    """Shared memory of tiles that are on their way while another is worked on: Triton keeps one
    less than it has stages."""
    moving = sum(load.tensor.itemsize for load in loads if walked & set(load.strides))
    return (stages - 1) * moving * elements


def budget_bytes(device: Device, rulebook: Rulebook) -> int:
    """What a tile may take on chip: what the gates `on-chip` and `register-spill` allow."""
    shared = device.smem_budget_bytes(rulebook.gate("on-chip").number("smem_fraction").value)
    threads = rulebook.gate("register-spill").number("max_warps").count * device.warp_size
    return min(int(shared), 4 * threads * device.multiprocessor.registers_per_thread.count)


def check_room(step: Step, device: Device, rulebook: Rulebook) -> None:
    """Refused when a row does not fit on chip."""
    room = budget_bytes(device, rulebook)
    if step.on_chip_bytes >= room:
        raise Refused("on-chip", f"a row takes {step.on_chip_bytes} B on chip, of {room} B")


def check_walks(plan: Plan, rulebook: Rulebook) -> None:
    """Refused when programs walk rows again and again, for each place along axes of the results
    that a reduction does not know."""
    most = rulebook.gate("parallel-pattern").number("walked_again").count
    for step in plan.steps:
        again = _walked_again(step)
        if again > most:
            why = f"rows would be walked again for each result: {again:.2g} elements"
            raise Refused("parallel-pattern", why)


def _walked_again(step: Step) -> int:
    """Elements that the programs of a kernel walk for a reduction beyond those of the widest
    tensor, because they are numbered by axes on which its operand does not depend."""
    region = step.region
    outer = frozenset(axis for group in step.outer for axis in group.axes)
    widest = max(access.tensor.addressed for access in (*step.loads, *step.stores))
    found = 0
    for number in region.all("reduce"):
        operand = region.depends[region.exprs[number].args[0]]
        if not outer <= operand:
            found = max(found, prod(region.sizes[a] for a in outer | operand) - widest)
    return found
