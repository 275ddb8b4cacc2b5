"""The rulebook: every tuned number, with its unit and source, as typed data.

A field of the rulebook has the same path in `rules/` and in Python: `rules/gates/on-chip.toml`,
`[limits] smem_fraction` is `gates.on-chip.limits.smem_fraction`. `rulefiles` reads it.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from fusion_advisor.errors import UsageError
from fusion_advisor.records import DTYPE_BYTES

Unit = Literal["tensor", "cuda", "special"]
"""Where an operator runs: tensor cores, CUDA cores, or the special function units
(transcendentals)."""

Comparison = Literal["<", "<=", ">", ">="]

UNITS: dict[str, float] = {
    "MHz": 1e6,
    "s": 1,
    "us": 1e-6,
    "B": 1,
    "KiB": 1024,
    "MiB": 1024**2,
    "GiB": 1024**3,
    "GB": 1e9,
    "GB/s": 1e9,
    "TB/s": 1e12,
    "Gbit/s": 1e9,
    "GFLOP/s": 1e9,
    "TFLOP/s": 1e12,
    "TOP/s": 1e12,
    "FLOP/B": 1,
    "share": 1,
    "x": 1,
    "bit": 1,
    "ulp": 1,
    "count": 1,
    "elements": 1,
    "multiprocessors": 1,
    "nodes": 1,
    "operators": 1,
    "plans": 1,
    "programs": 1,
    "registers": 1,
    "instructions": 1,
    "kernels": 1,
    "rows": 1,
    "dimensions": 1,
    "seeds": 1,
    "sets": 1,
    "stages": 1,
    "threads": 1,
    "warps": 1,
}
"""Each unit a rule may use, in its base unit: Hz, s, B, B/s, bit/s, FLOP/s, OP/s, or itself."""

PEAK_DTYPES = (*DTYPE_BYTES, "float8", "tf32")
"""What a peak may be given for: torch's dtypes, any float8, and float32 products in TF32."""

Tree = dict[str, Any]
"""Rules as TOML gives them."""


def table_of(value: Any) -> Tree | None:
    """A value that is a table; None for any other."""
    return cast(Tree, value) if isinstance(value, dict) else None


class _Rule(BaseModel):
    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Tree:
        expected = ", ".join(cls.model_fields)
        table = table_of(data)
        if table is None:
            raise ValueError(f"{data!r}; expected a table with {expected}")
        for key in table:
            if key not in cls.model_fields:
                raise ValueError(f"unknown field {key!r}; expected {expected}")
        return table


Text = Annotated[str, Field(min_length=1)]


class Number(_Rule):
    """A value with its unit and where it comes from."""

    value: float = Field(ge=0, allow_inf_nan=False)
    unit: Text
    source: Text

    @property
    def base(self) -> float:
        """The value in the base unit: B/s of `4.8 TB/s`, s of `2.5 us`."""
        return self.value * UNITS[self.unit]

    @property
    def count(self) -> int:
        """The value in the base unit as a whole number, rounded down."""
        return int(self.base)

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


def _in(*units: str, zero: bool = False) -> AfterValidator:
    """Accept a number in one of these units, above zero unless `zero`."""

    def check(number: Number) -> Number:
        if number.unit not in units:
            raise ValueError(f"unit {number.unit!r}; expected {' or '.join(units)}")
        if not (number.value or zero):
            raise ValueError(f"{number}; expected more than 0")
        return number

    return AfterValidator(check)


def _whole(unit: str) -> AfterValidator:
    """Accept a whole number of this unit, 1 or more."""

    def check(number: Number) -> Number:
        if number.unit != unit or not number.value.is_integer() or not number.value:
            raise ValueError(f"{number}; expected a whole number of {unit}, 1 or more")
        return number

    return AfterValidator(check)


def _known_dtype(name: str) -> str:
    if name not in PEAK_DTYPES:
        raise ValueError(f"{name!r}; expected a dtype: {', '.join(PEAK_DTYPES)}")
    return name


AnyNumber = Annotated[Number, _in(*UNITS, zero=True)]
Dtype = Annotated[str, AfterValidator(_known_dtype)]
Frequency = Annotated[Number, _in("MHz")]
Bytes = Annotated[Number, _in("B", "KiB", "MiB", "GiB", "GB")]
Bandwidth = Annotated[Number, _in("GB/s", "TB/s")]
DataRate = Annotated[Number, _in("Gbit/s")]
Rate = Annotated[Number, _in("GFLOP/s", "TFLOP/s", "TOP/s")]
Share = Annotated[Number, _in("share")]
Speedup = Annotated[Number, _in("x")]
Time = Annotated[Number, _in("us")]
Instruction = Annotated[Number, _in("instructions")]
Seconds = Annotated[Number, _in("s")]
Count = Annotated[Number, _whole("count")]
Bits = Annotated[Number, _whole("bit")]
Dimensions = Annotated[Number, _whole("dimensions")]
Elements = Annotated[Number, _whole("elements")]
Kernels = Annotated[Number, _whole("kernels")]
Nodes = Annotated[Number, _whole("nodes")]
Sets = Annotated[Number, _whole("sets")]
Operators = Annotated[Number, _whole("operators")]
Programs = Annotated[Number, _whole("programs")]
Registers = Annotated[Number, _whole("registers")]
Rows = Annotated[Number, _whole("rows")]
Seeds = Annotated[Number, _whole("seeds")]
Stages = Annotated[Number, _whole("stages")]
Threads = Annotated[Number, _whole("threads")]
Ulps = Annotated[Number, _in("ulp", zero=True)]
Warps = Annotated[Number, _whole("warps")]
Multiprocessors = Annotated[Number, _whole("multiprocessors")]


class Clock(_Rule):
    """Boost clocks; some parts run their tensor cores slower. Evidence: tests hold the peaks
    against them."""

    boost: Frequency
    tensor: Frequency


class Memory(_Rule):
    """Device memory by its datasheet, and the L2 in front of it. `bus_width` and `data_rate` are
    evidence: tests hold the bandwidth against them."""

    size: Bytes
    bandwidth: Bandwidth
    bus_width: Bits
    data_rate: DataRate
    l2: Bytes


class Multiprocessor(_Rule):
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
    warp_size: Threads


class Achieved(_Rule):
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


class Speed(_Rule):
    """How fast one kind of kernel is."""

    share: Share
    """Of the copy bandwidth."""
    elements: Rate
    """Elements a second, whatever they are: where addresses cost more than bytes."""
    latency: Time
    """What one program takes beyond moving its bytes: its first load, its reductions."""
    warp_bandwidth: Bandwidth
    """What one warp moves at most."""
    step: Time
    """What each further place takes that a program walks one after the other."""
    arithmetic: Share
    """Of the peaks that its arithmetic reaches. Emitted kernels may pass 1: their instructions were
    timed one kind at a time, and overlap."""
    least: Speedup
    """How many times what a launch takes at least: some ops are several, or walk long."""


class Instructions(_Rule):
    """What a primitive of the region form is worth, in instructions of a lane: in its short
    spelling, in that of float32 results, and in float64's."""

    fast: Instruction
    precise: Instruction | None = None
    double: Instruction | None = None

    def of(self, dtype: str, *, precise: bool) -> float:
        """For results of a dtype; `precise` where a kernel's result is float32."""
        own = self.double if dtype == "float64" else self.precise if precise else None
        return (own or self.fast).value


class Times(_Rule):
    """How long launches take (`predict`)."""

    fitted_on: Text
    """The device whose kernels the figures were fitted on."""
    call: Time
    """What a call takes beyond its launches, all caches cold."""
    eager_launch: Time
    """What a launch takes at least, among others."""
    kernel_launch: Time
    eager_warps: Count
    """Of the blocks of eager's row kernels, about."""
    eager_part: Elements
    """Of a row that a block takes where blocks share rows, about."""
    eager_passes: Mapping[str, Count]
    """How often eager's op walks rows that are longer than `eager_row`; once, if not named."""
    eager_row: Bytes
    """Rows up to here stay on chip in eager's kernels."""
    ramp: Share
    """What moving the first bytes takes more, as many as the L2 holds."""
    l2_speed: Speedup
    """How much faster what lies in the L2 is read."""
    l2_kept: Share
    """How much of the L2 keeps what was just written or read."""
    unaligned: Share
    """Of the speed where rows do not begin at 16 bytes."""
    registers: Registers
    """What a thread needs beside its share of the values alive at once."""
    registers_share: Share
    """Of the estimate for those values, what the compiler takes."""
    overlap: Speedup
    """The power in which memory's time, addresses' and arithmetic's add up: 1 is one after the
    other, many the longest alone."""
    overlap_programs: Speedup
    """Programs resident on a multiprocessor from which on the parts overlap that much."""
    short: Time
    """Below it a prediction is as uncertain as `spread_short` says, else as `spread_long` does."""
    spread_short: Share
    spread_long: Share
    eager: Mapping[str, Speed]
    """By the kind of an op's kernel, or by an op that is not as its kind is; else `other`."""
    kernel: Mapping[str, Speed]
    """By schedule, else `other`."""

    def speed(self, kind: str, op: str = "") -> Speed:
        """Of a kind such as `eager.stream` or `kernel.row`."""
        who, _, name = kind.partition(".")
        speeds = self.kernel if who == "kernel" else self.eager
        return speeds.get(op) or speeds.get(name) or speeds["other"]

    @property
    def fastest(self) -> float:
        """The largest share of all: no kernel is faster."""
        return max(s.share.value for s in (*self.eager.values(), *self.kernel.values()))

    @model_validator(mode="after")
    def _has_other(self) -> Times:
        if "other" not in self.eager or "other" not in self.kernel:
            raise ValueError("expected 'other' kinds, of eager and of kernel")
        return self


class Peaks(_Rule):
    """Dense peaks by unit and dtype."""

    tensor: Mapping[Dtype, Rate]
    cuda: Mapping[Dtype, Rate]
    special: Mapping[Dtype, Rate]


class Device(_Rule):
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

    @property
    def capability(self) -> int:
        """The compute capability as compilers spell it: 90 for 9.0."""
        return int(self.compute_capability.replace(".", ""))

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


TensorText = Annotated[str, Field(pattern=r"^\d+(x\d+)*:\w+$")]
"""A tensor as `--input` takes it: `4x128:bfloat16`."""


class Example(_Rule):
    """A function `forward` of a model, over `torch` and `F`, and the tensors it is called with."""

    code: Text
    inputs: Mapping[str, TensorText]
    why: Text | None = None
    """What makes the difference."""

    @model_validator(mode="after")
    def _is_called_with_its_inputs(self) -> Example:
        taken = [argument.arg for argument in _forward(self.code).args.args]
        if taken != list(self.inputs):
            raise ValueError(f"forward takes {', '.join(taken)}; inputs {', '.join(self.inputs)}")
        return self


def _forward(code: str) -> ast.FunctionDef:
    try:
        body = ast.parse(code).body
    except SyntaxError as error:
        raise ValueError(f"code: expected Python: {error}") from error
    match body:
        case [ast.FunctionDef(name="forward") as function]:
            return function
        case _:
            raise ValueError("code: expected one function, forward")


class Judged(Example):
    """With what a gate reads of it; None where that cannot be known."""

    measured: float | None = None


class Misnamed(Example):
    """What nearly is an idiom, with what it is `instead`."""

    instead: Text


class Gate(_Rule):
    """An obstacle: what is asked, how the measure is compared, with which limits."""

    name: str
    code: str = Field(pattern=r"^FA\d{3}$")
    order: int
    question: Text
    why: Text
    comparison: Comparison
    """The gate holds when `measured comparison limit`."""
    unit: Annotated[str, Field(min_length=1)]
    limit: Text
    """In words: which of `limits`, and what of the device."""
    limits: Mapping[str, AnyNumber]
    fix: Text
    holds: Judged
    fails: Judged | None = None
    never_fails: Text | None = None
    """Why no source fails it, where none does."""

    @model_validator(mode="after")
    def _fails_or_says_why_not(self) -> Gate:
        if (self.fails is None) == (self.never_fails is None):
            raise ValueError("expected one of 'fails' and 'never_fails'")
        return self

    def number(self, limit: str) -> Number:
        """A limit by name; UsageError when the gate has none of that name."""
        return _lookup(self.limits, limit, f"limit of gate {self.name}")


class Pattern(_Rule):
    """An idiom: what it is, who judges it, what is claimed for it."""

    name: str
    order: int
    """A region that fits several idioms is called by the first."""
    what: Text
    gates: tuple[str, ...]
    claimed: Speedup | None = None
    claimed_up_to: Speedup | None = None
    framework: Text | None = None
    """The PyTorch line that computes it in as few bytes, if there is one."""
    liger: Text | None = None
    """The same by Liger, over `liger_kernel.transformers.functional` as `liger`."""
    example: Example
    nearly: Misnamed


class AdviceKind(_Rule):
    """A finding that is not a fusion: what it is, why it costs time, what to do."""

    name: str
    order: int
    what: Text
    why: Text
    fix: Text
    saves: Text
    """What its microseconds are."""
    limits: Mapping[str, AnyNumber]

    def number(self, limit: str) -> Number:
        """A limit by name; UsageError when the kind has none of that name."""
        return _lookup(self.limits, limit, f"limit of advice {self.name}")


class FlatSchedule(_Rule):
    """A program takes a block of consecutive elements."""

    block: Elements
    warps: Warps
    serial_elements: Elements
    """The most places that a lane combines one after the other."""
    unrolled_elements: Elements
    """What a thread may have on the way at once where the walk is written out."""
    serial_stride: Elements
    """How far apart neighbouring lanes may read meanwhile, in steps of a lane."""


class RowSchedule(_Rule):
    """A program holds whole rows on chip."""

    elements_per_thread: Elements
    walking_elements_per_thread: Elements
    """Where each lane walks places of its own, which it has on the way at once."""
    sharing_elements_per_thread: Elements
    """Where rows share a program; half of it where there is little for a device's threads."""
    min_warps: Warps
    max_warps: Warps
    tile_elements: Elements
    across_elements: Elements
    """Of a tile of rows that lie across contiguous memory."""
    programs_per_multiprocessor: Programs
    """So many, before rows share programs."""
    first_piece: Elements
    """Rows longer than so many are held in two pieces where that saves lanes."""
    sector_bytes: Bytes
    register_target: Registers
    single_bytes: Bytes


class BlockedSchedule(_Rule):
    """A program walks its rows in chunks."""

    chunk_elements: Elements
    elements_per_thread: Elements
    rows_across: Rows
    stages: Stages
    l2_share: Share
    programs_resident: Programs


class PersistentSchedule(_Rule):
    """As many programs as the device runs at once walk the rows."""

    row_elements: Elements
    """From this length on rows are walked so, though nothing is carried."""
    tile_elements: Elements
    elements_per_thread: Elements
    max_warps: Warps
    stages: Stages
    programs_per_multiprocessor: Programs


class SplitSchedule(_Rule):
    """Several programs share a row."""

    chunk_elements: Elements
    elements_per_thread: Elements
    long_elements_per_thread: Elements
    """Where an element takes a function of the math library: its code is written out for each."""
    most_parts: Programs
    """Parts of a row that one program combines at most, before programs walk several chunks."""
    programs_per_multiprocessor: Programs


class CooperativeSchedule(_Rule):
    """Programs that share a row wait for each other."""

    row_elements: Elements
    """Longer rows than this are shared."""
    part_bytes: Bytes
    """What a program keeps of its row, of all tensors along it together."""
    least_elements: Elements
    """The shortest part, where there are few rows."""
    warps: Warps
    unaligned_share: Count
    """By how much parts and warps are fewer where rows do not begin at 16 bytes."""
    programs_per_multiprocessor: Programs
    """Wanted of all rows together, before parts grow."""
    waiting_kernels: Kernels
    """How many kernels that wait may run at once, so that one still goes on."""
    rows_at_once: Rows
    """Whose programs are resident at the least, so that some load while others wait."""


class TiledSchedule(_Rule):
    """A program takes a part of one or several rows."""

    elements: Elements
    elements_per_thread: Elements
    side: Elements
    """Of the square tile, where a tensor lies across the others."""
    least_groups: Dimensions
    """From so many dimensions on that do not join, a flat kernel loses time on index arithmetic."""


class Schedules(_Rule):
    """How each schedule chooses its tile."""

    flat: FlatSchedule
    row: RowSchedule
    blocked: BlockedSchedule
    cooperative: CooperativeSchedule
    persistent: PersistentSchedule
    split: SplitSchedule
    tiled: TiledSchedule


class Route(_Rule):
    """Who should run an accepted group."""

    inductor_max_ops: Operators


class Slower(_Rule):
    """How many times as long as our kernel Inductor's takes: for bfloat16 and float16, for wider
    types, and for both when it tunes its kernels by measuring them (max-autotune)."""

    narrow: Speedup
    wide: Speedup
    tuned_narrow: Speedup
    tuned_wide: Speedup

    def of(self, *, narrow: bool, tuned: bool) -> float:
        if tuned:
            return (self.tuned_narrow if narrow else self.tuned_wide).value
        return (self.narrow if narrow else self.wide).value


class Inductor(_Rule):
    """What Inductor would need for a region, by the schedule of our kernel: `row` with one
    reduction, `rows` with several that follow each other, `long` where a row does not fit into one
    program, `parts` where programs share what is reduced. `persistent` is the longest row that
    Inductor keeps on chip; `call` is the host's time for one call of our operator."""

    persistent: Elements
    call: Time
    flat: Slower
    tiled: Slower
    row: Slower
    rows: Slower
    long: Slower
    parts: Slower


class Search(_Rule):
    """How far the search over partitions is exact."""

    exact_nodes: Nodes
    judged_sets: Sets


class Cache(_Rule):
    """How many results are kept."""

    entries: Count


class Capture(_Rule):
    """What a capture looks at beyond the graph: masks of at most so many elements."""

    mask_elements: Elements


class Verify(_Rule):
    """How a kernel is checked."""

    seeds: Seeds
    margin_ulps: Ulps
    """How much more error than eager a kernel may have."""
    float64_ulps: Ulps
    partial_ulps: Ulps
    lost_ulps: Ulps
    row_slack: Speedup
    """The same for each row of at least `least_row` elements, among at most `most_rows`."""
    least_row: Elements
    most_rows: Rows
    judged_rows: Rows
    eager_draws: Seeds
    drawn_slack: Speedup
    perturbed_draws: Seeds
    roundings: Count
    interpreted_elements: Elements
    interpreted_rows: Rows
    costly_elements: Elements
    indexed_places: Elements
    timeout: Seconds
    niceness: Count


class Run(_Rule):
    """How a patched model is run on numbers beside the original; `memory` is of the limit."""

    seeds: Seeds
    rows: Count
    length: Count
    timeout: Seconds
    memory: Share


class Record(_Rule):
    """How a running program's calls are kept; `captured` is how many of its
    signatures at most."""

    captured: Count


class Measure(_Rule):
    """How a GPU is timed: `flush` in sizes of its L2, `batch` and runs in counts, `spent` in GPU
    seconds, `ahead`, `slack`, `far` and `tie` as ratios."""

    flush: Speedup
    batch: Count
    least_runs: Count
    most_runs: Count
    spent: Seconds
    ahead: Speedup
    slack: Speedup
    timeout: Seconds
    far: Speedup
    tie: Speedup
    """Times that differ by less are equal: the simpler way is recommended."""


class Rulebook(_Rule):
    """All rules. Gates and patterns stand in their `order`, devices by name."""

    version: Text
    hash: Text
    """sha256 of all rules, overlays included."""
    devices: Mapping[str, Device]
    gates: Mapping[str, Gate]
    patterns: Mapping[str, Pattern]
    advice: Mapping[str, AdviceKind]
    schedules: Schedules
    times: Times
    """Of devices that have none of their own."""
    instructions: Mapping[str, Instructions]
    """By the primitive, else `other`."""
    route: Route
    inductor: Inductor
    search: Search
    cache: Cache
    capture: Capture
    verify: Verify
    run: Run
    record: Record
    measure: Measure

    def tuned(self) -> Iterator[tuple[str, Number]]:
        """Every number that belongs to no gate, device or idiom, by its path in the rules."""
        sections = {f"schedules.{name}": section for name, section in self.schedules}
        sections |= {
            name: getattr(self, name)
            for name in (
                "times",
                "route",
                "inductor",
                "search",
                "cache",
                "capture",
                "verify",
                "run",
                "record",
                "measure",
            )
        }
        for path, section in sections.items():
            for name, number in _flat(section):
                yield f"{path}.{name}", number

    def device(self, name: str) -> Device:
        """A device by name, alias or the name its driver gives it; UsageError names the known."""
        names = {alias: d for d in self.devices.values() for alias in (d.name, *d.aliases)}
        return _lookup(names, _slug(name), "device", known=self.devices)

    def gate(self, name: str) -> Gate:
        """A gate by name or code; UsageError names the known."""
        names = {key: g for g in self.gates.values() for key in (g.name, g.code.lower())}
        return _lookup(names, _slug(name), "gate", known=self.gates)

    def pattern(self, name: str) -> Pattern:
        """An idiom by name; UsageError names the known."""
        return _lookup(self.patterns, _slug(name), "pattern")

    def advice_kind(self, name: str) -> AdviceKind:
        """A kind of advice by name; UsageError names the known."""
        return _lookup(self.advice, _slug(name), "advice")


T = TypeVar("T")


def _flat(section: BaseModel | Mapping[str, Any]) -> Iterator[tuple[str, Number]]:
    """The numbers of a section, those of its tables too, by their path."""
    for name, entry in section.items() if isinstance(section, Mapping) else section:
        if isinstance(entry, Number):
            yield name, entry
        elif isinstance(entry, BaseModel | Mapping):
            inner = cast("BaseModel | Mapping[str, Any]", entry)
            yield from ((f"{name}.{path}", number) for path, number in _flat(inner))


def _slug(name: str) -> str:
    """`NVIDIA GeForce RTX 4090` as `geforce-rtx-4090`."""
    return re.sub(r"[\s_]+", "-", name.strip().lower().removeprefix("nvidia").strip())


def _lookup(table: Mapping[str, T], name: str, kind: str, known: Iterable[str] | None = None) -> T:
    if name in table:
        return table[name]
    close = difflib.get_close_matches(name, table, n=2)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    names = ", ".join(table if known is None else known)
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {names or 'none'}")
