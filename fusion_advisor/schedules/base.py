"""What a schedule promises about a region before a line of it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusion_advisor.ir.addressed import View, addressed_bytes, count_distinct, of_tensor
from fusion_advisor.ir.graph import DTYPE_BYTES, Tensor
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.schema import Device, Rulebook
from fusion_advisor.schedules.layout import Access, Group, reach, touched

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
    are combined one place after the other within a lane. `on_chip_bytes` is the peak of values
    alive at once at `smallest_tile` elements, `registers` an estimate per thread; `read_again` the
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
    vector: int = 0
    """Elements of a vector, where rows begin anywhere and lanes take whole vectors of them."""
    whole: bool = False
    """Do rows fill their tiles? The launcher sees where that is so, and masks then hold."""
    unmasked: bool = False
    """Do blocks of elements that are all there run without a mask? What masks the last block may
    end within a vector, so that Triton would move all of them one element at a time."""
    reciprocal: bool = True
    """Are float32 shares of a row's sum made from its reciprocal? It takes fewer instructions and
    more registers."""
    lasting: frozenset[str] = frozenset()
    """Tensors that the L2 is told to keep: so much larger than it that nothing of them is there."""
    copied: frozenset[str] = frozenset()
    """Tensors that all rows share, read from copies that begin one element apart: of one of them a
    row's lanes take whole vectors, too."""
    passing: frozenset[str] = frozenset()
    """Tensors that the L2 is told to let go first: read once, and larger than what it can keep."""
    ends: int = 0
    """Lanes of a piece of their own for what lies around whole vectors; without one, that comes
    first among the lanes."""
    rest: int = 0
    """Elements of a row's second piece, where it is held in two: a power of two up to `block`."""
    aloft: int = 1
    """Places that each lane has on the way at once, where it walks runs that lie apart."""
    in_planes: bool = False
    """Are its programs numbered along the first of two groups of rows and by tiles of the second?
    Then no lane divides to find its row."""
    beside: bool = False
    """Is it launched together with others? Its programs are then numbered by an argument."""
    most_registers: int = 0
    """That the compiler may give a thread; 0: as many as it wants."""
    most: int = 0
    """Programs of a persistent kernel; it may have fewer."""
    read_again: int = 0
    phases: tuple[Step, ...] = ()
    """What the programs that share a row do one after the other, over the same groups; a phase with
    `parts` ends in an exchange of its results."""

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

    @property
    def tiles(self) -> int:
        """Tiles of rows, or, without rows, of elements."""
        places = prod(group.size for group in self.outer)
        return -(-places // (self.rows if self.inner else self.block))

    @property
    def programs(self) -> int:
        """How many programs it has."""
        tiles = min(self.tiles, self.most or self.tiles)
        return tiles * (-(-self.length // self.part) if self.part else 1)

    @property
    def turns(self) -> int:
        """Tiles of rows that a program walks, one after the other."""
        return -(-self.tiles // min(self.tiles, self.most or self.tiles))

    @property
    def lanes(self) -> int:
        """The elements that all programs hold, or wait for, at once."""
        return self.programs * self.rows * (self.block + self.rest) * self.aloft

    @property
    def moved(self) -> int:
        """HBM bytes."""
        return self.bytes_read + self.bytes_written

    @property
    def partial(self) -> bool:
        """Are its sums put together from partial results?"""
        walked = self.schedule in ("blocked", "persistent") or any(self.region.all("scan"))
        return bool(self.serial or self.parts) or walked

    @property
    def tiled(self) -> tuple[Group, ...]:
        """The groups of rows of which a program has a tile."""
        return self.outer[1:] if self.in_planes else self.outer

    @property
    def exchanges(self) -> tuple[Step, ...]:
        """The phases whose results the programs of a row exchange."""
        return tuple(phase for phase in self.phases if phase.parts)

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
        return sum(a.tensor.bytes for a in self.stores) + self.vector * sum(self.shared.values())

    @property
    def shared(self) -> dict[str, int]:
        """The bytes of each tensor that is copied."""
        return {load.name: load.tensor.bytes for load in self.loads if load.name in self.copied}

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
    the bytes; `met` the bytes that one of several kernels in one launch finds in the L2, where
    another one has read them.
    """

    schedule: str
    region: Region
    steps: tuple[Step, ...]
    finish_share: float = 0.0
    met: int = 0

    @property
    def together(self) -> bool:
        """Are its kernels launched as one?"""
        return any(step.beside for step in self.steps)

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
        return 1 if self.together else sum(1 + len(step.copied) for step in self.steps)

    @property
    def serial(self) -> frozenset[int]:
        """Axes that lanes walk: their extents stand in the kernels."""
        return frozenset[int]().union(*(step.serial for step in self.steps))

    @property
    def bytes_read(self) -> int:
        return sum(step.bytes_read for step in self.steps) - self.met

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


class Refused(Exception):
    """This schedule cannot serve the region. `gate` is the obstacle's name.

    `final`: it, and every other schedule, cannot serve a larger region either.
    """

    def __init__(self, gate: str, why: str, *, final: bool = False) -> None:
        super().__init__(why)
        self.gate = gate
        self.why = why
        self.final = final


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


def loads_first(region: Region, order: tuple[int, ...]) -> tuple[int, ...]:
    """The same order, but that loads behind the first reduction come with those before it, so that
    they are on their way while it combines; not those that wait for another load."""
    ops = [region.exprs[number].op for number in order]
    first = next((place for place, op in enumerate(ops) if op in ("reduce", "scan")), 0)
    behind = {n: reach(region, n) for n, op in zip(order, ops, strict=True) if op == "load"}
    waiting = {n for n in behind if _made_by(region, behind[n] - {n}, "load", "reduce", "scan")}
    ahead = [place for place in range(first) if ops[place] == "load"]
    if not ahead:
        return order
    start = next((place for place in ahead if order[place] in waiting), ahead[-1] + 1)
    late = (behind[n] for n in order[first:] if n in behind and n not in waiting)
    early = frozenset[int]().union(*late)
    moved = [number for number in order[start:] if number in early]
    return (*order[:start], *moved, *(number for number in order[start:] if number not in early))


def _made_by(region: Region, numbers: Iterable[int], *ops: str) -> bool:
    """Is one of some values made by one of some operations?"""
    return any(region.exprs[number].op in ops for number in numbers)


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

    def size(number: int) -> int:
        expr = region.exprs[number]
        if expr.op in ("const", "size", "extent", "place") or expr.dtype == "index":
            return 0
        return extent[number] * DTYPE_BYTES[region.exprs[number].dtype]

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


def lasting(loads: Sequence[Access], stores: Sequence[Access], device: Device) -> frozenset[str]:
    """Tensors that the L2 does best to keep, rather than results that are as large: nothing of
    either is left there for the next kernel, and what is written goes out at once."""
    most = device.memory.l2.count
    if max(store.tensor.bytes for store in stores) <= most:
        return frozenset()
    return frozenset(load.name for load in loads if load.tensor.bytes > most)


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
