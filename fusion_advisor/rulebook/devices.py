"""Devices: what a GPU has, what it reaches, and how long its launches take, as the rules say."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from fusion_advisor.ir.graph import DTYPE_BYTES
from fusion_advisor.rulebook.quantities import (
    Bandwidth,
    Bits,
    Bytes,
    Count,
    DataRate,
    Elements,
    Frequency,
    Instruction,
    Multiprocessors,
    Number,
    Rate,
    Registers,
    Share,
    Speedup,
    Table,
    Text,
    Threads,
    Time,
    Warps,
)
from fusion_advisor.support.errors import UsageError

Unit = Literal["tensor", "cuda", "special"]
"""The unit that runs an operator: tensor cores, CUDA cores, or the special function units
(transcendentals)."""

SECTOR_BYTES = 32
"""Bytes of a sector, the least that the L2 reads or writes of a line."""
LINE_BYTES = 128
"""Bytes of a line of the L1 and of the L2."""

VECTOR_BYTES = 16
"""Bytes of the widest access of a thread."""

REGISTERS_AT_ONCE = 8
"""Registers that are allocated to a thread at a time: 256 a warp (CUDA's occupancy calculator)."""

PEAK_DTYPES = (*DTYPE_BYTES, "float8", "tf32")
"""Dtypes that a peak may be given for: torch's, any float8, and float32 products in TF32."""


def _known_dtype(name: str) -> str:
    if name not in PEAK_DTYPES:
        raise ValueError(f"{name!r}; expected a dtype: {', '.join(PEAK_DTYPES)}")
    return name


Dtype = Annotated[str, AfterValidator(_known_dtype)]


class ClockRates(Table):
    """Boost clocks; some parts run their tensor cores slower. Evidence: tests hold the peaks
    against them."""

    boost: Frequency
    tensor: Frequency


class DeviceMemory(Table):
    """Device memory by its datasheet, and the L2 in front of it. `bus_width` and `data_rate` are
    evidence: tests hold the bandwidth against them."""

    size: Bytes
    bandwidth: Bandwidth
    bus_width: Bits
    data_rate: DataRate
    l2: Bytes


class PeerLink(Table):
    """Link to the other GPUs of a host, one way."""

    bandwidth: Bandwidth


class Multiprocessor(Table):
    """Capacity of one multiprocessor, and the number of multiprocessors. `threads` and
    `threads_per_block` are evidence: tests compare `warps` with them."""

    count: Multiprocessors
    shared_memory: Bytes
    shared_memory_per_block: Bytes
    budget_of: Literal["block", "multiprocessor"]
    """Owner of the shared memory of which the on-chip gate takes a share: a block or a
    multiprocessor."""
    registers: Registers
    registers_per_thread: Registers
    threads: Threads
    threads_per_block: Threads
    warps: Warps
    blocks: Count
    warp_size: Threads

    def holds(self, warps: int, registers: float) -> int:
        """Resident blocks of a kernel, by warps a block and registers a thread: at least one."""
        thread = max(1, ceil(registers / REGISTERS_AT_ONCE)) * REGISTERS_AT_ONCE
        fit = self.registers.count // (warps * self.warp_size.count * thread)
        return max(1, min(self.warps.count // warps, fit, self.blocks.count))


class Achieved(Table):
    """Share of the datasheet's speed that kernels reach: a measurement, or a share with its source.
    A calibration replaces the share."""

    bandwidth: Bandwidth | None = None
    bandwidth_share: Share | None = None
    matmul_share: Share
    launch: Time

    @model_validator(mode="after")
    def _some_bandwidth(self) -> Achieved:
        if self.bandwidth is None and self.bandwidth_share is None:
            raise ValueError("expected bandwidth (measured) or bandwidth_share")
        return self

    @property
    def copied(self) -> Number:
        """The number that the copy bandwidth follows from: the measured one where there is one."""
        found = self.bandwidth or self.bandwidth_share
        assert found is not None
        return found


class Speed(Table):
    """Speed of one kind of launch."""

    share: Share
    """Share of the copy bandwidth that the kind reaches."""
    element: Instruction | None = None
    """Instructions of a lane for each element that it walks, beside scalar operations; of emitted
    kernels these are counted."""
    wait: Time | None = None
    """Time of each further wait of a program for its loads; None where programs wait once."""
    arithmetic: Share | None = None
    """Share of the device's peak that products reach; None where there are none."""


class Allocated(Table):
    """Estimate of the registers of a thread of an emitted kernel before compilation."""

    least: Registers
    """Registers of any kernel."""
    alive: Share
    """Registers for each value that is estimated to be alive at once."""


class Reduction(Table):
    """Grid and block sizes of eager's reductions to fewer elements."""

    threads: Count
    """Threads of a block at most, its vector lanes counted."""
    unrolled: Count
    """Positions, or neighbouring results, that a thread loads at once."""
    least: Count
    """Positions a thread at least: with few blocks, several blocks share a result as long as
    threads have so many, and the warps of a block as long as each lane of a warp has."""
    most: Count
    """Positions a thread from which on the warps of a block, and blocks, share a result."""


class Times(Table):
    """Figures of the time model (`perfmodel`)."""

    fitted_on: Text
    """Device whose launches the figures were fitted on."""
    call: Time
    """Time of a call beyond its launches, with cold caches."""
    launch: Time
    """Floor of one launch among others."""
    latency: Time
    """Time of a program beside its further waits: its first load, its reductions."""
    first: Time
    """Wait of the first bytes read, where there are many."""
    first_bytes: Bytes
    """Bytes of which the first wait is half of `first`."""
    absorbed: Share
    """Share of the time saved on the first bytes written, as many as the L2 holds."""
    l2_speed: Speedup
    """Bandwidth of the L2 over that of the memory."""
    l2_kept: Share
    """Share of the L2 that keeps what was just written or read."""
    torn: Speedup
    """Factor on the time of bytes of sectors beside the elements that a program takes of them."""
    halved: Share
    """Share of its time that a line takes longer each time it is halved among programs."""
    sectors: Rate
    """Scattered elements a second that the L2 reads or writes one by one."""
    wave: Time
    """Wait between waves where a multiprocessor holds one program."""
    overlap: Speedup
    """Power p in which the parts of a launch add up: 1 adds them, a large p takes the longest."""
    primitive: Share
    """Issue slots for each instruction of a scalar operation (`rules/instructions.toml`)."""
    step: Instruction
    """Instructions for each place that a reduction combines."""
    request: Instruction
    """Instructions for each load or store of a warp, its address included."""
    chained: Time
    """Time of an instruction of a scan's combination, which waits for the one before."""
    registers: Allocated
    eager_threads: Count
    """Threads of a block of eager's layer norms, and of softmaxes of short rows."""
    eager_short: Elements
    """Elements of the longest row of a softmax that one warp has."""
    eager_reduction: Reduction
    steady: tuple[str, ...]
    """Kinds whose times are known best."""
    spread: Share
    """How far off 90 % of predicted speed-ups are at most, where all of eager's launches are of
    `steady` kinds: half the width of their interval."""
    spread_other: Share
    """The same where some are of another kind."""
    kinds: Mapping[str, Speed]
    """Speeds by the kind of launch: of eager's by how they walk memory, and `kernel`; for what is
    not named, `other`."""

    def speed(self, kind: str) -> Speed:
        """Speed of a kind, or of `other`."""
        return self.kinds.get(kind) or self.kinds["other"]

    @property
    def fastest(self) -> float:
        """The largest share of the copy bandwidth: no kernel is faster."""
        return max(speed.share.value for speed in self.kinds.values())

    @model_validator(mode="after")
    def _has_other(self) -> Times:
        if "other" not in self.kinds or "kernel" not in self.kinds:
            raise ValueError("expected the kinds 'kernel' and 'other'")
        return self


class Instructions(Table):
    """Instructions of a lane for one primitive: in its short form, in the form for float32 results,
    and in float64."""

    fast: Instruction
    precise: Instruction | None = None
    double: Instruction | None = None

    def of(self, dtype: str, *, precise: bool) -> float:
        """Instructions for results of a dtype; `precise` where the kernel has a float32 result."""
        own = self.double if dtype == "float64" else self.precise if precise else None
        return (own or self.fast).value


class Peaks(Table):
    """Dense peaks by unit and dtype."""

    tensor: Mapping[Dtype, Rate]
    cuda: Mapping[Dtype, Rate]
    special: Mapping[Dtype, Rate]


class Device(Table):
    """A GPU."""

    name: str
    title: Text
    aliases: tuple[str, ...] = ()
    compute_capability: str = Field(pattern=r"^\d+\.\d+$")
    clock: ClockRates
    memory: DeviceMemory
    multiprocessor: Multiprocessor
    achieved: Achieved
    peaks: Peaks
    link: PeerLink | None = None
    times: Times
    instructions: Mapping[str, Instructions]

    @property
    def capability(self) -> int:
        """The compute capability as compilers spell it: 90 for 9.0."""
        return int(self.compute_capability.replace(".", ""))

    def worth(self, primitive: str, dtype: str, *, precise: bool) -> float:
        """Instructions of a lane for one primitive of the region form."""
        own = self.instructions.get(primitive, self.instructions["other"])
        return own.of(dtype, precise=precise)

    @property
    def sm_count(self) -> int:
        return self.multiprocessor.count.count

    @property
    def warp_size(self) -> int:
        return self.multiprocessor.warp_size.count

    @property
    def datasheet_bandwidth(self) -> float:
        """HBM or GDDR bandwidth by the datasheet, B/s."""
        return self.memory.bandwidth.base

    @property
    def bandwidth(self) -> float:
        """Copy bandwidth, read plus write, B/s; times are predicted with it."""
        if self.achieved.bandwidth is not None:
            return self.achieved.bandwidth.base
        assert self.achieved.bandwidth_share is not None
        return self.datasheet_bandwidth * self.achieved.bandwidth_share.value

    @property
    def launch_us(self) -> float:
        """Floor of one queued kernel on the GPU's timeline, us."""
        return self.achieved.launch.value

    @property
    def shared_memory_bytes(self) -> int:
        """Shared memory of which the on-chip gate takes a share, B (`budget_of`)."""
        sm = self.multiprocessor
        return (sm.shared_memory_per_block if sm.budget_of == "block" else sm.shared_memory).count

    def smem_budget_bytes(self, fraction: float) -> int:
        """`fraction` of the shared memory, B, rounded down."""
        return int(fraction * self.shared_memory_bytes)

    def peak(self, unit: Unit, dtype: str) -> Number:
        """The dense peak of `unit` in `dtype`, as the number that stands in the rules.
        UsageError when `dtype` is unknown."""
        place, rate = self.place(unit, dtype)
        rates: Mapping[str, Number] = getattr(self.peaks, place)
        return rates[rate]

    def place(self, unit: Unit, dtype: str) -> tuple[Unit, str]:
        """The unit and dtype whose rate applies.

        A dtype that the unit lacks runs elsewhere: IEEE float32 and float64 products on the CUDA
        cores (torch's default for matrix products; convolutions ask for `tf32`), float8 products
        without float8 cores as float16, 16-bit and float8 arithmetic without its own rate as
        float32, other integers as int32, float64 transcendentals in software on the CUDA cores.
        UsageError when `dtype` is unknown.
        """
        place: tuple[Unit, str] | None = (unit, dtype) if dtype in PEAK_DTYPES else None
        while place is not None:
            if place[1] in getattr(self.peaks, place[0]):
                return place
            place = _runs_as(*place)
        raise UsageError(f"device {self.name} has no {unit} peak for dtype {dtype!r}")

    def peak_flops(self, unit: Unit, dtype: str) -> float:
        """`peak` in FLOP/s (OP/s for integers and transcendentals)."""
        return self.peak(unit, dtype).base

    @property
    def special_rate(self) -> float:
        """Transcendentals that the special function units deliver, OP/s."""
        return self.peak_flops("special", "float32")

    def ridge(self, unit: Unit, dtype: str) -> float:
        """The arithmetic intensity where peak and datasheet bandwidth meet, FLOP/B."""
        return self.peak_flops(unit, dtype) / self.datasheet_bandwidth


def _runs_as(unit: Unit, dtype: str) -> tuple[Unit, str] | None:
    """Unit and dtype that run `dtype` on a device whose `unit` has no rate for it; None where there
    is none."""
    if dtype.startswith("complex"):
        return unit, "float64" if dtype == "complex128" else "float32"
    if dtype.startswith("float8_"):
        return unit, "float8"
    if unit == "special" and dtype != "float32":
        return ("cuda", "float64") if dtype == "float64" else ("special", "float32")
    if unit == "tensor":
        narrow = {"uint8": "int8", "float8": "float16", "bfloat16": "float16"}
        return ("tensor", narrow[dtype]) if dtype in narrow else ("cuda", dtype)
    wide = "float32" if "float" in dtype or dtype == "tf32" else "int32"
    return None if unit == "special" or dtype in ("float64", wide) else ("cuda", wide)
