"""The rulebook: every tuned number, with its unit and source, as typed data.

A field of the rulebook has the same path in `rules/` and in Python: `rules/gates/on-chip.toml`,
`[limits] smem_fraction` is `gates.on-chip.limits.smem_fraction`. `load` reads it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import BaseModel, Field, model_validator

from fusion_advisor.rulebook.devices import Device, Instructions, Times
from fusion_advisor.rulebook.quantities import (
    AnyNumber,
    Bytes,
    Count,
    Dimensions,
    Elements,
    Kernels,
    Nodes,
    Number,
    Operators,
    Plans,
    Programs,
    Registers,
    Rows,
    Seconds,
    Seeds,
    Sets,
    Share,
    Speedup,
    Stages,
    Table,
    Text,
    Time,
    Ulps,
    Warps,
)
from fusion_advisor.support.errors import UsageError, did_you_mean

Comparison = Literal["<", "<=", ">", ">="]


TensorText = Annotated[str, Field(pattern=r"^\d+(x\d+)*:\w+$")]
"""A tensor as `--input` takes it: `4x128:bfloat16`."""


class Example(Table):
    """A function `forward` of a model, over `torch` and `F`, and the tensors it is called with."""

    code: Text
    inputs: Mapping[str, TensorText]
    why: Text | None = None
    """The difference that decides."""

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
    """An example with the measure that a gate reads of it; None where the measure is unknown."""

    measured: float | None = None


class Misnamed(Example):
    """An example that is nearly an idiom, with the idiom that it is `instead`."""

    instead: Text


class Gate(Table):
    """An obstacle: its question, its comparison, and its limits."""

    name: str
    code: str = Field(pattern=r"^FA\d{3}$")
    order: int
    question: Text
    why: Text
    comparison: Comparison
    """The gate holds when `measured comparison limit`."""
    unit: Annotated[str, Field(min_length=1)]
    limit: Text
    """The limit in words: which of `limits`, and which property of the device."""
    limits: Mapping[str, AnyNumber]
    fix: Text
    holds: Judged
    fails: Judged | None = None
    never_fails: Text | None = None
    """The reason that no source fails the gate, where there is none."""

    @model_validator(mode="after")
    def _fails_or_says_why_not(self) -> Gate:
        if (self.fails is None) == (self.never_fails is None):
            raise ValueError("expected one of 'fails' and 'never_fails'")
        return self

    def number(self, limit: str) -> Number:
        """A limit by name; UsageError when the gate has none of that name."""
        return _lookup(self.limits, limit, f"limit of gate {self.name}")


class Pattern(Table):
    """An idiom: its definition, its reference, and what is claimed for it."""

    name: str
    order: int
    """Rank: a region that fits several idioms gets the name of the first."""
    what: Text
    gates: tuple[str, ...]
    claimed: Speedup | None = None
    claimed_up_to: Speedup | None = None
    framework: Text | None = None
    """The PyTorch call that computes the idiom in as few bytes, if there is one."""
    liger: Text | None = None
    """Liger's call for the idiom, over `liger_kernel.transformers.functional` as `liger`."""
    example: Example
    nearly: Misnamed


class AdviceKind(Table):
    """A finding that is not a fusion: its definition, its cost, its remedy."""

    name: str
    order: int
    what: Text
    why: Text
    fix: Text
    saves: Text
    """Meaning of the microseconds that the finding gives."""
    limits: Mapping[str, AnyNumber]

    def number(self, limit: str) -> Number:
        """A limit by name; UsageError when the kind has none of that name."""
        return _lookup(self.limits, limit, f"limit of advice {self.name}")


class RewriteKind(AdviceKind):
    """A rewrite of Dynamo's graph, told as advice is."""

    proof: Text
    """Way in which it is known that the graph means the same."""


class FlatSchedule(Table):
    """Flat: a program takes a block of consecutive elements."""

    block: Elements
    warps: Warps
    single_elements_per_thread: Elements
    """Elements of a thread at most, where the number of elements makes accesses short."""
    serial_elements: Elements
    """Positions that a lane combines in sequence, at most."""
    unrolled_elements: Elements
    """Loads of a thread in flight where its walk is unrolled."""
    serial_stride: Elements
    single_serial_stride: Elements
    single_serial_bytes: Bytes
    """Distance of neighbouring lanes' loads during a walk at most, in steps of a lane."""
    walked_bytes: Bytes
    """Bytes that a thread may walk of lines that hold several of its positions; and the distance of
    the rows that threads walk, at most."""
    walking_elements_per_thread: Elements
    """Elements of a thread where each position that a lane walks is in a line of its own."""


class RowSchedule(Table):
    """Row: a program holds whole rows on chip."""

    elements_per_thread: Elements
    walking_elements_per_thread: Elements
    """Elements of a thread whose lanes each walk positions of their own, all in flight at once."""
    unrolled_elements: Elements
    """Loads of a thread in flight where its walk is unrolled."""
    max_warps: Warps
    longest_row: Elements
    """Elements of a row with results along it that one program holds, at most."""
    tile_bytes: Bytes
    """Bytes of the widest tensor in a tile of contiguous rows."""
    across_elements: Elements
    """Elements of a tile of rows that lie across contiguous memory, at most."""
    line_bytes: Bytes
    """Bytes of each position of such rows in a tile, at most."""
    across_elements_per_thread: Elements
    """Elements of a thread there."""
    single_elements_per_thread: Elements
    """Elements of a thread in a tile of one stored row that comes one element at a time, where it
    is short or several tensors have such rows."""
    combined_elements: Elements
    combined_elements_per_thread: Elements
    """Elements of a tile, and of a thread, where rows of one tensor are read and no result has
    elements along them."""
    waiting_elements: Elements
    """Length of such a row from which on parts of it take less time, where its reductions follow
    one another."""
    walking_elements: Elements
    """Elements of a tile whose lanes each walk positions of their own."""
    programs_per_multiprocessor: Programs
    """Programs a multiprocessor that are kept before rows share programs."""
    across_programs: Programs
    """Programs a multiprocessor that are kept where rows lie across contiguous memory."""
    first_piece: Elements
    """Length beyond which rows are held in two pieces where that saves lanes."""
    pieced_warps: Warps
    overlapped_warps: Warps
    """Warps of a program beyond which fewer are taken where more bytes are on their way then."""
    bytes_on_the_way: Bytes
    """Bytes of rows that programs of one multiprocessor load, of which no more are wanted."""
    passing_caches: Speedup
    """Capacities of the L2 that are read at most where its lines are given up before others."""
    other_registers: Registers
    """Registers of a thread beside those for what it keeps of its row."""
    crossed_warps: Warps
    """Warps of a program, at the least, whose rows lie across those of another operand."""
    sector_bytes: Bytes
    register_target: Registers
    busy_multiprocessors: Share
    """Share of the multiprocessors that keep a program before neighbouring rows share one."""


class BlockedSchedule(Table):
    """Blocked: a program walks its rows in chunks."""

    chunk_elements: Elements
    scan_elements: Elements
    """Row length beyond which scans go in chunks, though a program could hold the row."""
    scan_across: Elements
    """The same where rows lie across memory, and the elements of a chunk of each row there."""
    scan_rows: Rows
    """Neighbouring rows of a program that scans one position of each at a time."""
    few_scans: Rows
    """Rows across memory that are few: a walk of one position after another would wait for each."""
    few_scans_across: Elements
    few_scans_elements_per_thread: Elements
    """Elements of a chunk of each of few rows, and of a thread, where a combination is long or an
    element has 16 bits."""
    scan_chunk_elements: Elements
    """Elements of a chunk of a scan, at least."""
    scan_chunks_elements: Elements
    """Elements of the chunks of all rows of a scan together."""
    elements_per_thread: Elements
    steady_elements_per_thread: Elements
    """Elements of a thread where one walk reduces a row, and nothing is stored along it."""
    rows_across: Rows
    programs_per_multiprocessor: Programs
    across_elements_per_thread: Elements
    """Programs a multiprocessor that are kept before neighbouring rows share programs, and elements
    of a thread, where rows across memory are walked several times."""
    rows_once: Rows
    once_programs: Programs
    once_elements_per_thread: Elements
    """Rows across memory of a program that walks them once, programs a multiprocessor that are kept
    before parts of rows take their place, and elements of a thread."""
    stages: Stages
    staged_bytes: Bytes
    """Bytes of an access to rows across memory, from which on chunks are on their way in stages."""
    mixed_rows: Rows
    mixed_elements: Elements
    mixed_elements_per_thread: Elements
    """Tile of rows that lie along contiguous memory in one tensor and across it in another."""
    halved_line: Share
    """Cost of each halving of a line of memory among programs, as a share of its bytes."""
    torn_sector: Speedup
    """Cost of a sector that is taken and not used, in sectors that are."""
    worth_holding: Elements
    """Row length up to which a program holds rows for that cost that it would walk twice or rescale
    otherwise."""
    l2_share: Share
    programs_resident: Programs


class PersistentSchedule(Table):
    """Persistent: as many programs as the device runs at once walk the rows."""

    tile_elements: Elements
    elements_per_thread: Elements
    max_warps: Warps
    stages: Stages
    programs_per_multiprocessor: Programs
    short_tile_elements: Elements
    """Elements of a tile of rows, of all carried tensors together."""
    short_elements_per_thread: Elements
    """Elements a thread of such a tile, at most."""
    short_warps_per_multiprocessor: Warps
    """Warps a multiprocessor of all programs that walk such rows, or narrow ones."""
    narrow_bytes: Bytes
    """Bytes at a multiple of which narrow rows begin, at most."""
    narrow_tile_elements: Elements
    narrow_elements_per_thread: Elements


class SplitSchedule(Table):
    """Split: several programs share a row."""

    chunk_elements: Elements
    elements_per_thread: Elements
    several_elements_per_thread: Elements
    """Elements a thread of each of several tensors of wide elements, with one chunk in flight."""
    several_bytes: Bytes
    """Width of such elements, at least."""
    long_elements_per_thread: Elements
    """Elements a thread where an element takes a long function, whose code is repeated for each."""
    library_elements_per_thread: Elements
    """Elements a thread where that function is the math library's."""
    most_parts: Programs
    """Parts of a row that one program combines, before programs walk several chunks."""
    programs_per_multiprocessor: Programs


class CooperativeSchedule(Table):
    """Cooperative: programs that share a row wait for each other."""

    least_row_elements: Elements
    """Row length beyond which rows that no program holds are shared."""
    part_bytes: Bytes
    """Bytes of its row that a program keeps, of all tensors along it together."""
    part_elements: Elements
    """Elements of the longest part."""
    least_elements: Elements
    """Elements of the shortest part, where there are few rows."""
    thread_bytes: Bytes
    """Bytes that a thread keeps of its part."""
    programs_per_multiprocessor: Programs
    """Programs a multiprocessor, of all rows together, that are wanted before parts grow."""
    waiting_kernels: Kernels
    """Kernels with waiting programs that may run at once without a deadlock."""
    rows_at_once: Rows
    """Rows whose programs are resident at least, so that some load while others wait."""


class TiledSchedule(Table):
    """Tiled: a program takes a part of one or several rows."""

    elements: Elements
    elements_per_thread: Elements
    side: Elements
    across_elements: Elements
    """Longest side and elements of the tile where a tensor lies across the others."""
    across_elements_per_thread: Elements
    least_groups: Dimensions
    """Dimensions that do not merge, from which on a flat kernel loses time on index arithmetic."""
    row_loads: Count
    row_filled: Share
    """Numbers of a row that are loaded, and share of a tile's lanes along it that have elements,
    from which on a flat kernel, which loads those for each element, takes longer."""


class Schedules(Table):
    """The numbers by which each schedule chooses its tile."""

    flat: FlatSchedule
    row: RowSchedule
    blocked: BlockedSchedule
    cooperative: CooperativeSchedule
    persistent: PersistentSchedule
    split: SplitSchedule
    tiled: TiledSchedule


class Route(Table):
    """The numbers that decide who should run an accepted group."""

    inductor_max_ops: Operators


class Slower(Table):
    """Time of Inductor's kernel over the time of ours: for bfloat16 and float16, for wider types,
    and for both when Inductor tunes by measuring (max-autotune)."""

    narrow: Speedup
    wide: Speedup
    tuned_narrow: Speedup
    tuned_wide: Speedup

    def of(self, *, narrow: bool, tuned: bool) -> float:
        if tuned:
            return (self.tuned_narrow if narrow else self.tuned_wide).value
        return (self.narrow if narrow else self.wide).value


class InductorRules(Table):
    """Time of Inductor's kernel for a region, relative to ours, by the schedule of our kernel:
    `row` with one reduction, `rows` with several that follow each other, `long` where a row does
    not fit into one program, `parts` where programs share a reduction. `persistent` is the longest
    row that Inductor keeps on chip; `call` is the host's time for one call of our operator; `kept`
    is how much more a kernel may keep in memory in a training step, of what it reads and writes.
    A kernel that is predicted to save less than `least` is Inductor's. On a GPU the backend times a
    kernel that was worth at least `timed`, and leaves it where it takes `tolerated` times as long
    as it was worth; where it times Inductor's kernel, too, it tries what is predicted to take less
    than `doubted` times as long, and the kernels of a graph stay where it takes less than `whole`
    of its time without them."""

    persistent: Elements
    call: Time
    kept: Share
    timed: Time
    tolerated: Speedup
    doubted: Speedup
    least: Time
    whole: Share
    flat: Slower
    tiled: Slower
    row: Slower
    rows: Slower
    long: Slower
    parts: Slower


class Search(Table):
    """The bounds within which the search over partitions is exact."""

    exact_nodes: Nodes
    judged_sets: Sets


class Cache(Table):
    """How many results are kept, how many proofs of kernels, and how many configurations that a GPU
    chose."""

    entries: Count
    proofs: Count
    tuned: Count


class Capture(Table):
    """Limits on the work of a capture beyond the graph: masks of at most so many elements."""

    mask_elements: Elements


class CriterionRules(Table):
    """How far from float64 a result may be: the one rule for kernels, rivals and patched models.

    `question`, `holds`, `whole` (of integers and booleans) and `reason` say it in words."""

    name: ClassVar[str] = "criterion"
    question: Text
    holds: Text
    whole: Text
    reason: Text
    factor: Speedup
    """Factor of eager's own error."""
    ulps: Ulps
    """Ulps of the result's dtype at the largest result, added to that."""
    summed_ulps: Ulps
    """Ulps in place of `ulps` for float32 results of sums over more than `long_sum` elements."""
    long_sum: Elements
    float64_ulps: Ulps
    eager_elements: Elements
    """Elements of results over which eager's error is taken, at least."""
    decided: Share
    """Share of a result's elements that an emitted file's own check lets fall on the other side of
    a step, where what decides may have another last bit than eager's."""


class Verify(Table):
    """The numbers by which a kernel is checked."""

    criterion: CriterionRules
    seeds: Seeds
    interpreted_elements: Elements
    interpreted_rows: Rows
    costly_elements: Elements
    indexed_places: Elements
    timeout: Seconds
    niceness: Count


class HeldRules(Table):
    """Limits on an emitted file where the model was seen at one size alone; `telling` is the least
    size from which an equal number is taken to follow."""

    telling: Elements


class PairRules(Table):
    """Limits on a group's backward: `launchers` are the kernel files that it may take, `more_kept`
    the share of eager's bytes that it may keep beyond them, as statistics of rows."""

    launchers: Count
    more_kept: Share


class Workspaces(Table):
    """Memory that PyTorch keeps for cuBLAS, for each thread that launches products: `products`, and
    `products_wide` on devices whose compute capability is in `wide`."""

    products: Bytes
    products_wide: Bytes
    wide: tuple[str, ...]

    def of(self, device: Device) -> int:
        """Bytes of a thread on a device."""
        wide = device.compute_capability in self.wide
        return round((self.products_wide if wide else self.products).base)


class PatchRules(Table):
    """Least saving of a group, as a share of the step, for which `patch` edits a source."""

    share: Share


class RunRules(Table):
    """How a patched model is run on numbers beside the original; `memory` is of the limit, `dtypes`
    are those that its floats are cast to beside its own."""

    seeds: Seeds
    rows: Count
    length: Count
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...]
    timeout: Seconds
    memory: Share


class Apply(Table):
    """Thresholds of `apply`: it warns when it saves less than the share `told` of the saving that
    analysis predicts."""

    told: Share


class Record(Table):
    """How a running program's calls are kept; `captured` is how many of its
    signatures at most, `apart` how far apart sizes lie that count as one."""

    captured: Count
    apart: Share


class ProfileRules(Table):
    """When a trace is taken for one of the model: at least the share `linked` of the graph's
    predicted time is in it."""

    linked: Share


class Measure(Table):
    """How a GPU is timed: `flush` in sizes of its L2, `batch` and runs in counts, `spent` in GPU
    seconds, `ahead`, `slack` and `tie` as ratios."""

    flush: Speedup
    batch: Count
    least_runs: Count
    most_runs: Count
    spent: Seconds
    ahead: Speedup
    slack: Speedup
    timeout: Seconds
    tie: Speedup
    """Times that differ by less are equal: the simpler way is recommended."""


class Knob(Table):
    """Numbers of one schedule that change together from one configuration to the next: doubled or
    halved, stages one more or one less; `what` of the kernel that changes."""

    schedule: Literal["flat", "row", "blocked", "cooperative", "persistent", "split", "tiled"]
    numbers: tuple[Text, ...]
    what: Text


class Tuning(Table):
    """Configurations that a search on a GPU tries beside the rules' own, and how often it
    times each."""

    knobs: Mapping[str, Knob]
    reach: Count
    """Steps along the knobs, all together, from the rules' configuration."""
    first_step: Count
    """Doublings after which a knob without effect is left alone."""
    tried: Plans
    screened: Count
    """Rounds in which all configurations are timed in turn; after these, each finalist beside the
    rules' own."""
    rounds: Count
    finalists: Count
    timeout: Seconds
    offered: Plans
    """Plans that the backend tries of one kernel, `compiled` at a time, for `spent` in one graph;
    of a kernel that takes at least `least`, on operands that take `memory` of what is free. Other
    processes of a group wait for rank 0's choices, `waited` at the most."""
    spent: Seconds
    waited: Seconds
    least: Time
    compiled: Count
    memory: Share


class Rulebook(Table):
    """All rules. Gates and patterns stand in their `order`, devices by name."""

    version: Text
    hash: Text
    """sha256 of all rules, overlays included."""
    devices: Mapping[str, Device]
    gates: Mapping[str, Gate]
    patterns: Mapping[str, Pattern]
    advice: Mapping[str, AdviceKind]
    rewrites: Mapping[str, RewriteKind]
    schedules: Schedules
    times: Times
    """Figures of the time model for devices that have none of their own."""
    instructions: Mapping[str, Instructions]
    """Instructions by the primitive, else `other`, for devices that have none of their own."""
    route: Route
    inductor: InductorRules
    search: Search
    cache: Cache
    capture: Capture
    verify: Verify
    held: HeldRules
    pairs: PairRules
    workspaces: Workspaces
    apply: Apply
    patch: PatchRules
    run: RunRules
    record: Record
    profile: ProfileRules
    measure: Measure
    tuning: Tuning

    def tuned(self) -> Iterator[tuple[str, Number]]:
        """Every number outside gates, devices, idioms, advice and rewrites, by its path in the
        rules."""
        named = ("devices", "gates", "patterns", "advice", "rewrites")
        return _flat({name: section for name, section in self if name not in named})

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
    """The numbers of a section and of its tables, by their path."""
    for name, entry in section.items() if isinstance(section, Mapping) else section:
        if isinstance(entry, Number):
            yield name, entry
        elif isinstance(entry, BaseModel | Mapping):
            inner = cast("BaseModel | Mapping[str, Any]", entry)
            yield from ((f"{name}.{path}", number) for path, number in _flat(inner))


def _slug(name: str) -> str:
    """A driver's name as the rules spell it: `geforce-rtx-4090` for `NVIDIA GeForce RTX 4090`."""
    return re.sub(r"[\s_]+", "-", name.strip().lower().removeprefix("nvidia").strip())


def _lookup(table: Mapping[str, T], name: str, kind: str, known: Iterable[str] | None = None) -> T:
    if name in table:
        return table[name]
    hint = did_you_mean(name, table)
    names = ", ".join(table if known is None else known)
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {names or 'none'}")
