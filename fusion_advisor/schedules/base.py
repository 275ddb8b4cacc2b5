"""What a schedule promises about a region before a line of it is written."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.records import DTYPE_BYTES
from fusion_advisor.region import Region
from fusion_advisor.schedules.layout import Access, Group


@dataclass(frozen=True)
class Plan:
    """A schedule with its tile, and the traffic and on-chip bytes that follow from it.

    `outer` spans the programs and `inner` what one program holds of each row; flat schedules have
    no inner groups. `block` is the tile's extent along the inner axes (or all, when flat) and
    `rows` along the outer ones; both are powers of two. `on_chip_bytes` is the peak of values
    alive at once at `smallest_tile` elements. `finish_share` is what a finishing step reads again,
    as a share of the bytes.
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
    finish_share: float = 0.0
    launches: int = 1

    @property
    def bytes_read(self) -> int:
        return sum(a.tensor.bytes for a in self.loads)

    @property
    def bytes_written(self) -> int:
        return sum(a.tensor.bytes for a in self.stores)

    @property
    def programs(self) -> int:
        total = 1
        for group in self.outer:
            total *= group.size
        return -(-total // (self.rows if self.inner or self.rows > 1 else self.block))


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

    for number in sorted(region.live):
        if region.exprs[number].op == "load":
            continue
        for arg in region.exprs[number].args:
            if region.exprs[arg].op == "load":
                place(arg)
        place(number)
    for output in region.outputs:
        place(output.value)
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

    def size(number: int) -> int:
        if region.exprs[number].op in ("const", "size", "index"):
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
