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


class Gate(Table):
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


class Pattern(Table):
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


class AdviceKind(Table):
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


class FlatSchedule(Table):
    """A program takes a block of consecutive elements."""

    block: Elements
    warps: Warps
    serial_elements: Elements
    """The most places that a lane combines one after the other."""
    unrolled_elements: Elements
    """What a thread may have on the way at once where the walk is written out."""
    serial_stride: Elements
    """How far apart neighbouring lanes may read meanwhile, in steps of a lane."""
    walked_bytes: Bytes
    """What a thread may walk of lines that hold several of its places, and how far apart rows that
    threads walk may begin."""
    walking_elements_per_thread: Elements
    """Where each place that a lane walks is in a line of its own."""
    busy: Speedup
    """How many times longer its arithmetic takes than its bytes, from which on a program has
    `busy_warps`."""
    busy_warps: Warps
    busy_most: Speedup
    """Up to which it has: more is bound by instructions, whatever is on its way."""
    busy_wide: Speedup
    """`busy` of elements of more than two bytes."""
    busy_waves: Speedup
    """How often the programs of such elements fill the device at the least, for that."""


class RowSchedule(Table):
    """A program holds whole rows on chip."""

    elements_per_thread: Elements
    walking_elements_per_thread: Elements
    """Where each lane walks places of its own, which it has on the way at once."""
    run_elements_per_thread: Elements
    """Where rows are short runs of memory, and lanes walk what is far apart."""
    unrolled_elements: Elements
    """What a thread may have on the way at once where the walk is written out."""
    sharing_elements_per_thread: Elements
    """Where rows share a program; half of it where there is little for a device's threads."""
    min_warps: Warps
    max_warps: Warps
    tile_elements: Elements
    sharing_elements: Elements
    """Of a tile of more rows than two, one behind the other."""
    single_elements: Elements
    """Of such a tile whose rows begin between whole vectors; it may have a single warp."""
    across_elements: Elements
    """Of a tile of rows that lie across contiguous memory."""
    walking_elements: Elements
    """Of the same where each lane walks places of its own."""
    programs_per_multiprocessor: Programs
    """So many, before rows share programs."""
    across_programs: Programs
    """The same where rows lie across contiguous memory."""
    first_piece: Elements
    """Rows longer than so many are held in two pieces where that saves lanes."""
    sector_bytes: Bytes
    register_target: Registers
    early_registers: Registers
    """So many at most, where all loads come before the first reduction."""
    passing_least: Share
    """Of the L2: larger tensors it is told to let go first, where results are few."""
    passing_most: Share
    """Of the L2: as long as a kernel reads no more."""
    busy_multiprocessors: Share
    """Those that have a program at least, before neighbouring rows share one, as a share."""
    reciprocal_warps: Warps
    """With more, programs that hold a row in one piece divide by its sum, but for those of the most
    warps whose row fills their tile."""
    single_bytes: Bytes
    copied_bytes: Bytes
    """Where tensors have fewer together, what all rows share is not copied for them."""
    single_registers: Registers
    """Nor where a thread's elements of its row and of all that take no more, one in each."""


class BlockedSchedule(Table):
    """A program walks its rows in chunks."""

    chunk_elements: Elements
    scan_elements: Elements
    """Longer rows are scanned in chunks, though a program could hold them."""
    scan_chunk_elements: Elements
    """Of a scan, at the least."""
    scan_chunks_elements: Elements
    """Of a scan, in the chunks of all rows together."""
    elements_per_thread: Elements
    rows_across: Rows
    stages: Stages
    l2_share: Share
    programs_resident: Programs


class PersistentSchedule(Table):
    """As many programs as the device runs at once walk the rows."""

    row_elements: Elements
    """From this length on rows are walked so, though nothing is carried."""
    tile_elements: Elements
    elements_per_thread: Elements
    max_warps: Warps
    stages: Stages
    programs_per_multiprocessor: Programs
    long_programs_per_multiprocessor: Programs
    """Where nothing is carried from row to row."""
    short_tile_elements: Elements
    """Of rows of which each has once all that is carried, of all tensors together."""
    short_elements_per_thread: Elements
    """Of such a tile at most."""
    short_warps_per_multiprocessor: Warps
    """Of all programs that walk such rows."""


class SplitSchedule(Table):
    """Several programs share a row."""

    chunk_elements: Elements
    elements_per_thread: Elements
    several_elements_per_thread: Elements
    """Of each of several tensors of four bytes and more, one chunk on its way and no masks where
    all chunks are whole."""
    long_elements_per_thread: Elements
    """Where an element takes a long function: its code is written out for each."""
    library_elements_per_thread: Elements
    """Where that is one of the math library's."""
    most_parts: Programs
    """Parts of a row that one program combines at most, before programs walk several chunks."""
    programs_per_multiprocessor: Programs


class CooperativeSchedule(Table):
    """Programs that share a row wait for each other."""

    row_elements: Elements
    """Longer rows than this are shared."""
    least_row_elements: Elements
    """Shorter ones that no program can hold are, down to so many."""
    part_bytes: Bytes
    """What a program keeps of its row, of all tensors along it together."""
    part_elements: Elements
    """The longest part."""
    least_elements: Elements
    """The shortest part, where there are few rows."""
    thread_bytes: Bytes
    """What a thread keeps of it."""
    registers: Registers
    """That a thread may have of a kernel that takes variances, so that more programs are resident
    while others wait; where it keeps no more elements than four-byte ones would be."""
    late_registers: Registers
    """That a thread may have where a part is held in two pieces."""
    unaligned_share: Count
    """By how much parts are shorter where lanes take single elements of rows that do not begin at
    16 bytes."""
    programs_per_multiprocessor: Programs
    """Wanted of all rows together, before parts grow."""
    waiting_kernels: Kernels
    """How many kernels that wait may run at once, so that one still goes on."""
    rows_at_once: Rows
    """Whose programs are resident at the least, so that some load while others wait."""


class TiledSchedule(Table):
    """A program takes a part of one or several rows."""

    elements: Elements
    elements_per_thread: Elements
    most_elements_per_thread: Elements
    """Where that lets the device hold all programs at once."""
    side: Elements
    """Of the square tile, where a tensor lies across the others."""
    least_groups: Dimensions
    """From so many dimensions on that do not join, a flat kernel loses time on index arithmetic."""


class Schedules(Table):
    """How each schedule chooses its tile."""

    flat: FlatSchedule
    row: RowSchedule
    blocked: BlockedSchedule
    cooperative: CooperativeSchedule
    persistent: PersistentSchedule
    split: SplitSchedule
    tiled: TiledSchedule


class Route(Table):
    """Who should run an accepted group."""

    inductor_max_ops: Operators


class Slower(Table):
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


class Inductor(Table):
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


class Search(Table):
    """How far the search over partitions is exact."""

    exact_nodes: Nodes
    judged_sets: Sets


class Cache(Table):
    """How many results are kept, and how many proofs of kernels."""

    entries: Count
    proofs: Count


class Capture(Table):
    """What a capture looks at beyond the graph: masks of at most so many elements."""

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
    """Of eager's own error."""
    ulps: Ulps
    """Of the result's dtype at the largest result, beside that."""
    summed_ulps: Ulps
    """Instead of `ulps` for float32 results of sums over more than `long_sum` elements."""
    long_sum: Elements
    float64_ulps: Ulps
    eager_elements: Elements
    """Of results, over which eager's error is taken at least."""


class Verify(Table):
    """How a kernel is checked."""

    criterion: CriterionRules
    seeds: Seeds
    interpreted_elements: Elements
    interpreted_rows: Rows
    costly_elements: Elements
    indexed_places: Elements
    timeout: Seconds
    niceness: Count


class Held(Table):
    """What an emitted file is held to where the model was seen at one size alone; `telling` is the
    least size that an equal number is taken to follow from."""

    telling: Elements


class Run(Table):
    """How a patched model is run on numbers beside the original; `memory` is of the limit, `dtypes`
    are those that its floats are cast to beside its own."""

    seeds: Seeds
    rows: Count
    length: Count
    dtypes: tuple[Literal["float32", "bfloat16", "float16"], ...]
    timeout: Seconds
    memory: Share


class Apply(Table):
    """What `apply` tells; under `told` of the time that analysis would save it warns."""

    told: Share


class Record(Table):
    """How a running program's calls are kept; `captured` is how many of its
    signatures at most, `apart` how far apart sizes lie that count as one."""

    captured: Count
    apart: Share


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
    """What a search on a GPU tries beside the configuration that the rules choose, and how often it
    times that."""

    knobs: Mapping[str, Knob]
    reach: Count
    """Steps along the knobs, all together, from the rules' own configuration."""
    first_step: Count
    """Doublings after which a knob that has changed nothing is left alone."""
    tried: Plans
    screened: Count
    """Rounds in which all configurations are timed in turn, and then those of each finalist beside
    the rules' own."""
    rounds: Count
    finalists: Count
    timeout: Seconds


class Rulebook(Table):
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
    """By the primitive, else `other`; of devices that have none of their own."""
    route: Route
    inductor: Inductor
    search: Search
    cache: Cache
    capture: Capture
    verify: Verify
    held: Held
    apply: Apply
    run: Run
    record: Record
    measure: Measure
    tuning: Tuning

    def tuned(self) -> Iterator[tuple[str, Number]]:
        """Every number that belongs to no gate, device, idiom or advice, by its path in the
        rules."""
        named = ("devices", "gates", "patterns", "advice")
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
    hint = did_you_mean(name, table)
    names = ", ".join(table if known is None else known)
    raise UsageError(f"unknown {kind} {name!r}: {hint}known: {names or 'none'}")
