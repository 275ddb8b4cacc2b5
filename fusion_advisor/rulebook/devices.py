"""A GPU as the rules have it: what it has, what it reaches, how long its launches take."""

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
"""Where an operator runs: tensor cores, CUDA cores, or the special function units
(transcendentals)."""

SECTOR_BYTES = 32
"""Of a line, that the L2 gives or takes at least."""
LINE_BYTES = 128
"""Of a line of the L1, which is what a request of a warp is served by."""
LANES_SERVED = 4
"""That the L1 serves a clock where their elements lie a line apart or more: 8.2 wavefronts for 32
lanes (counted on an H200, 2026-11-23)."""

VECTOR_BYTES = 16
"""The widest access of a thread."""

REGISTERS_AT_ONCE = 8
"""That a multiprocessor gives a thread: 256 a warp (CUDA's occupancy calculator)."""

PEAK_DTYPES = (*DTYPE_BYTES, "float8", "tf32")
"""What a peak may be given for: torch's dtypes, any float8, and float32 products in TF32."""


def _known_dtype(name: str) -> str:
    if name not in PEAK_DTYPES:
        raise ValueError(f"{name!r}; expected a dtype: {', '.join(PEAK_DTYPES)}")
    return name


Dtype = Annotated[str, AfterValidator(_known_dtype)]


class Clock(Table):
    """Boost clocks; some parts run their tensor cores slower. Evidence: tests hold the peaks
    against them."""

    boost: Frequency
    tensor: Frequency


class Memory(Table):
    """Device memory by its datasheet, and the L2 in front of it. `bus_width` and `data_rate` are
    evidence: tests hold the bandwidth against them."""

    size: Bytes
    bandwidth: Bandwidth
    bus_width: Bits
    data_rate: DataRate
    l2: Bytes


class Multiprocessor(Table):
    """What one multiprocessor holds, and how many there are. `threads` and `threads_per_block` are
    evidence: tests hold `warps` against them."""

    count: Multiprocessors
    shared_memory: Bytes
    shared_memory_per_block: Bytes
    budget_of: Literal["block", "multiprocessor"]
    """Whose shared memory the on-chip gate takes its share of."""
    registers: Registers
    registers_per_thread: Registers
    threads: Threads
    threads_per_block: Threads
    warps: Warps
    blocks: Count
    warp_size: Threads

    def holds(self, warps: int, registers: float) -> int:
        """Blocks of so many warps at a time, whose threads have so many registers: at least one."""
        thread = max(1, ceil(registers / REGISTERS_AT_ONCE)) * REGISTERS_AT_ONCE
        fit = self.registers.count // (warps * self.warp_size.count * thread)
        return max(1, min(self.warps.count // warps, fit, self.blocks.count))


class Achieved(Table):
    """What kernels reach of the datasheet: measured, or a share with where it was taken from. A
    calibration laid over a share leaves that without effect."""

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
        """What the copy bandwidth follows from as it stands in the rules: measured where it was."""
        found = self.bandwidth or self.bandwidth_share
        assert found is not None
        return found


class Speed(Table):
    """How fast one kind of kernel is."""

    share: Share
    """Of the copy bandwidth."""
    ramp: Share
    """What reading the first bytes takes more, as many as the L2 holds."""
    latency: Time
    """What one program takes beyond moving its bytes: its first load, its reductions."""
    step: Time
    """What each further place takes that a program walks one after the other; of eager's kernels,
    what each round of loads takes."""
    arithmetic: Share
    """Of the peak that its instructions reach; those of emitted kernels are counted."""
    least: Speedup
    """How many times what a launch takes at least: some ops are several, or walk long."""
    overlap: Speedup
    """The power in which memory's time, addresses' and arithmetic's add up: 1 is one after the
    other, many the longest alone."""


class EagerSpeed(Speed):
    """Of a kind of eager's. What its warps issue was counted by the hardware, where it was."""

    warp: Instruction | None = None
    """Of a warp, whatever it has to do."""
    round: Instruction | None = None
    """Each time that it waits for loads."""
    tap: Instruction | None = None
    """For each load from the L1."""
    element: Instruction | None = None
    """For each element of its lanes, beside the primitives of a pointwise kernel."""
    near: Time
    """What a block waits for a load from the L1."""
    unaligned: Share
    """Of the share that is left where rows do not begin at 16 bytes."""


class KernelSpeed(Speed):
    """Of a kind of ours."""

    warp_bandwidth: Bandwidth
    """What one warp moves at most."""


class Issue(Table):
    """What the warps of an emitted kernel issue, in instructions for each (`issue.Tally`)."""

    program: Instruction
    access: Instruction
    request: Instruction
    masked: Instruction
    divided: Instruction
    index: Instruction
    simple: Share
    other: Share
    integer: Instruction
    step: Instruction
    exchange: Instruction
    scanned: Instruction
    shared: Instruction


class Allocated(Table):
    """Registers of a thread of an emitted kernel, as far as they are known before it is compiled:
    the sum of these."""

    least: Registers
    """Of any kernel."""
    alive: Share
    """Of the estimate for the values alive at once, what the compiler takes."""
    store: Registers
    """For each tensor that is written."""
    serial: Registers
    """Where lanes walk places by themselves."""


class Reduction(Table):
    """How eager's reductions to fewer elements spread over blocks."""

    threads: Count
    """Of a block at most, with those that its threads' vectors stand for."""
    unrolled: Count
    """Places, or neighbouring results, that a thread asks for at once."""
    least: Count
    """Places for each thread: where blocks are few, several share a result while threads have so
    many; the warps of a block do where each lane of a warp would have so many for each."""
    most: Count
    """Places for each thread, from which on the warps of a block share a result, and blocks."""


class Pointwise(Table):
    """How eager's pointwise kernels spread over blocks: elements of each thread."""

    threads: Count
    """Of a block."""
    contiguous: Count
    """Where all tensors lie alike."""
    cast: Count
    """Where types differ."""
    wide: Count
    """Where tensors lie otherwise, of 4 bytes and more."""
    narrow: Count
    """Of fewer bytes."""


NARROW = "_narrow"
"""Ends the names of kernels that read elements of less than four bytes: as many bytes take more
instructions, and a thread has fewer on their way."""


class Times(Table):
    """How long launches take (`perfmodel`)."""

    fitted_on: Text
    """The device whose kernels the figures were fitted on."""
    call: Time
    """What a call takes beyond its launches, all caches cold."""
    eager_launch: Time
    """What a launch takes at least, among others."""
    kernel_launch: Time
    eager_warps: Count
    """Of the blocks of eager's row kernels, about."""
    eager_short: Mapping[str, Elements]
    """Ops whose rows below so many elements have one warp each."""
    eager_held: Mapping[str, Elements]
    """Ops whose rows below so many elements a block holds in registers."""
    eager_blocks: Mapping[str, Count]
    """Warps of the blocks of some ops, each of which has a row."""
    eager_registers: Mapping[str, Registers]
    """Of a thread of eager's kernels that have so many that they limit how many blocks a
    multiprocessor holds: by the kernel, and what its threads hold at once (`Blocks.held`)."""
    eager_reduction: Reduction
    eager_pointwise: Pointwise
    eager_passes: Mapping[str, Count]
    """How often eager's op walks rows that are longer than `eager_row`; once, if not named."""
    eager_row: Bytes
    """Rows up to here stay on chip in eager's kernels."""
    blocks: Rate
    """Programs that the device begins a second, whatever they do."""
    last: Time
    """What each round takes of the block of eager's that puts the others' results together."""
    absorbed: Share
    """What writing the first bytes takes less, as many as the L2 holds."""
    first: Time
    """What the first bytes read wait for, where there are many."""
    first_bytes: Bytes
    """So few wait for half of it."""
    l2_speed: Speedup
    """How much faster what lies in the L2 is read."""
    found: Share
    """Of a round of loads of eager's, what falls away where the L2 has what they ask for."""
    l2_kept: Share
    """How much of the L2 keeps what was just written or read."""
    chained: Time
    """What a program waits for each of the reductions that it makes one after the other."""
    fetched: Time
    """What a warp of an emitted kernel waits for a thousand instructions, as they come."""
    tail: Share
    """Of what a program takes, what those beyond whole waves keep the device from ending."""
    wave: Time
    """What programs of a second wave, where a multiprocessor holds one, wait for the first."""
    hiding: Count
    """Programs of a multiprocessor that hide each other's reductions."""
    torn: Share
    """Of what sectors hold beside the elements that a program takes of them, what moves too."""
    wavefronts: Rate
    """Wavefronts of the L1s of all multiprocessors."""
    sectors: Rate
    """Elements that the L2 gives or takes one by one, because their neighbours lie apart."""
    issue: Issue
    registers: Allocated
    short: Time
    """Below it a prediction is as uncertain as `spread_short` says, else as `spread_long` does."""
    spread_short: Share
    spread_long: Share
    eager: Mapping[str, EagerSpeed]
    """By the kind of an op's kernel, or by an op that is not as its kind is; else `other`."""
    kernel: Mapping[str, KernelSpeed]
    """By schedule, else `other`."""

    def speed(self, kind: str, op: str = "") -> EagerSpeed | KernelSpeed:
        """Of a kind such as `eager.stream` or `kernel.row`, or of one of its kernels."""
        return self._speeds(kind)[self.named(kind, op)]

    def named(self, kind: str, op: str = "") -> str:
        """What has figures: the kernel, the same one for wider elements, the kind, or `other`."""
        return next((name for name in _names(kind, op) if name in self._speeds(kind)), "other")

    def registers_of(self, kind: str, op: str = "", held: int = 0) -> int:
        """Of a thread of one of eager's kernels that holds so much at once; 0 where they limit
        nothing."""
        known = self.eager_registers
        keys = (key for name in _names(kind, op) for key in (f"{name}_{held}", name))
        return next((known[key].count for key in keys if key in known), 0)

    def _speeds(self, kind: str) -> Mapping[str, EagerSpeed] | Mapping[str, KernelSpeed]:
        return self.kernel if kind.startswith("kernel") else self.eager

    @property
    def fastest(self) -> float:
        """The largest share of all: no kernel is faster."""
        return max(s.share.value for s in (*self.eager.values(), *self.kernel.values()))

    @model_validator(mode="after")
    def _has_other(self) -> Times:
        if "other" not in self.eager or "other" not in self.kernel:
            raise ValueError("expected 'other' kinds, of eager and of kernel")
        return self


def _names(kind: str, op: str) -> tuple[str, ...]:
    """A kernel, the same one for wider elements, its kind."""
    return op, op.removesuffix(NARROW), kind.partition(".")[2]


class Instructions(Table):
    """What a primitive of the region form is worth, in instructions of a lane: in its short
    spelling, in that of float32 results, and in float64's."""

    fast: Instruction
    precise: Instruction | None = None
    double: Instruction | None = None

    def of(self, dtype: str, *, precise: bool) -> float:
        """For results of a dtype; `precise` where a kernel's result is float32."""
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
    clock: Clock
    memory: Memory
    multiprocessor: Multiprocessor
    achieved: Achieved
    peaks: Peaks
    times: Times
    instructions: Mapping[str, Instructions]

    @property
    def capability(self) -> int:
        """The compute capability as compilers spell it: 90 for 9.0."""
        return int(self.compute_capability.replace(".", ""))

    def worth(self, primitive: str, dtype: str, *, precise: bool) -> float:
        """A primitive of the region form, in instructions of a lane."""
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
        """What a copy reaches, read plus write, B/s: the figure that times are predicted with."""
        if self.achieved.bandwidth is not None:
            return self.achieved.bandwidth.base
        assert self.achieved.bandwidth_share is not None
        return self.datasheet_bandwidth * self.achieved.bandwidth_share.value

    @property
    def launch_us(self) -> float:
        """What one queued kernel takes of the GPU's timeline at least, us."""
        return self.achieved.launch.value

    @property
    def shared_memory_bytes(self) -> int:
        """The shared memory that the on-chip gate takes its share of, B (`budget_of`)."""
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
    """Where `dtype` runs on a device whose `unit` has no rate for it; None at the end."""
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
