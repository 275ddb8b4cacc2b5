"""Schema of the report: the data that users and their tools rely on.

Units are in the names: `_us` are microseconds, bytes are HBM bytes. Figures of a group are of one
instance, but for `saved_us_total` and `share`. Readers accept unknown fields; a change that breaks
a reader raises SCHEMA_VERSION.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from fusion_advisor.cost.leaner import LeanerWay
from fusion_advisor.cost.lifetimes import Memory
from fusion_advisor.fusion.verdict import Fix, GateResult
from fusion_advisor.ir.faults import Fault
from fusion_advisor.profile.profile import NodeTime, Profile
from fusion_advisor.support.errors import UsageError

SCHEMA_VERSION = 1


class _Row(BaseModel):
    model_config = ConfigDict(extra="allow")

    @classmethod
    def of(cls, *records: object, **given: Any) -> Self:
        """Build a row from the given fields, and from those that some records share with it."""
        for name in cls.model_fields.keys() - given.keys():
            for record in records:
                if hasattr(record, name):
                    given[name] = getattr(record, name)
                    break
        return cls(**given)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


_Finite = Annotated[float | None, BeforeValidator(_finite)]
"""Number, None when it is not finite."""


class Tool(_Row):
    """Versions that made the report; None for a package that is not installed."""

    name: str
    version: str
    torch: str | None
    triton: str | None


class Rules(_Row):
    """Rules that made the report. `explained` has the gates by code and the idioms by name, as
    `explain` prints them."""

    version: str
    hash: str
    explained: dict[str, str] = {}


class DeviceRow(_Row):
    """Device that everything was judged for. Bandwidths are bytes a second. `sources` says where
    the device's own speed is from: `bandwidth` (of a copy), `launch` and `matmul_share`."""

    name: str
    title: str
    compute_capability: str
    bandwidth: float
    datasheet_bandwidth: float
    launch_us: float
    times_fitted_on: str = ""
    """Device whose measured kernels the predicted times follow, relative to its bandwidth."""
    peaks: dict[str, float] = {}
    """Peak FLOP/s of each unit that the nodes run on, by the unit's name in the nodes."""
    sm_count: int
    shared_memory_bytes: int
    sources: dict[str, str] = {}


def _empty(value: Any) -> bool:
    return not value


class ScenarioRow(_Row):
    """Settings that the model was captured under. None: as the model's own file has it. `defaults`
    lists the assumptions for settings that nobody gave."""

    mode: str
    phase: str
    dtype: str | None
    autocast: str | None
    batch: int | None
    seq: int | None
    kv_len: int | None
    dynamic: bool
    optimizer: str = Field(default="", exclude_if=_empty)
    """Optimizer of a training step; empty for a forward pass alone."""
    shapes: dict[str, str]
    defaults: list[str]


class ModelRow(_Row):
    source: str
    captured_by: str
    nodes: int
    graph_breaks: list[str]
    differs_from_eager: list[str]
    capture_seconds: float | None = None
    """Always None: a report is the same on each run, and a time is not (`--verbose` prints it)."""


class SourceRow(_Row):
    file: str
    line: int


class LineRow(SourceRow):
    """Source line. `text` is the line itself, without its indentation; empty where the file is not
    there."""

    text: str = ""


class NodeRow(_Row):
    """One launch or view. Tensors that exist before the graph runs have no row. `inputs` are the
    node's distinct operands; `unit` is the unit that its arithmetic runs on, with the dtype; `fx`
    is the node of the exported program that the launch belongs to."""

    name: str
    op: str
    shape: list[int]
    dtype: str
    flops: int
    bytes_read: int
    bytes_written: int
    arithmetic_intensity: float
    bound: str
    parallelism: str
    modelled: bool
    module: str
    source: SourceRow | None
    time_us: float = 0.0
    fx: str = ""
    inputs: list[str] = []
    unit: str = ""
    measured: NodeTime | None = None
    """Time in a profiler's trace; None without one, and where the trace has no such launch."""
    phase: str = Field(default="forward", exclude_if=lambda phase: phase == "forward")
    """Part of a training step: forward, loss, backward or optimizer; left out where forward."""


class TrafficRow(_Row):
    unfused_bytes: int
    fused_bytes: int
    ratio: float
    saved_bytes: int


class OnChipRow(_Row):
    """Tile and on-chip values of the plan. None: there is no plan, so no tile."""

    bytes: int | None
    budget_bytes: int


class PredictedRow(_Row):
    """Predicted times of one call with a cold L2; of a compiled kernel with its registers.
    `interval` holds the measured speed-up of 90 % of kernels; `worthwhile` is the verdict of the
    time model, whatever the gates say."""

    unfused_us: float
    fused_us: float
    speedup: float
    interval: tuple[float, float]
    worthwhile: bool = True


class ImpactRow(_Row):
    saved_us: float
    instances: int
    saved_us_total: float
    share: float
    launches_saved: int
    activation_bytes_saved: int
    rank: int
    basis: str


class GroupTimeRow(_Row):
    """Times of a group in a profiler's trace: of one instance's launches, the mean of `instances`,
    and the speed-up over them with the predicted time of its kernels. `differs`: that is outside of
    the predicted interval. `backward_us` is the time of the launches' backward pass, None where
    none is linked."""

    unfused_us: float
    instances: int
    speedup: float
    differs: bool
    backward_us: float | None = None


class ActionRow(_Row):
    text: str
    code: str


class ResourcesRow(_Row):
    """Resources of the worst launch of a kernel: registers a thread, spills and shared
    memory in bytes."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    triton: str = ""
    ptxas: str = ""


class CheckRow(_Row):
    """Check of a kernel: `where` it ran and on which `shapes`. Errors are absolute, None when not
    finite: the largest of all cases, and eager's in the same `case`. `stepped` is the largest share
    of a result's elements that only eager's own error at a rounding or a comparison excuses."""

    where: str
    shapes: list[str]
    seeds: int
    max_error: _Finite
    eager_error: _Finite
    tolerance: _Finite
    passed: bool = True
    failure: str | None = None
    case: str = ""
    stepped: float = 0.0


class KernelRow(_Row):
    """Kernel of a group. `status` is how far the kernel is proven; `why` says what keeps it there.
    `text` is the content of `file`: the JSON leaves it out, and a report that is loaded reads it
    from `file`."""

    status: str = "none"
    file: str | None = None
    entry: str | None = None
    schedule: str | None = None
    resources: ResourcesRow | None = None
    check: CheckRow | None = None
    why: str | None = None
    text: str | None = Field(default=None, exclude=True)


class WayRow(_Row):
    """Measurement of one way to compute something: microseconds of the GPU, cold L2, the median
    with its quartiles; `wall_us` is the time that a waiting caller sees.

    `share` is of the measured copy bandwidth, over the bytes that must move. Errors are the largest
    against float64; for the model they are against eager, and eager's own is how far other
    roundings move it. `failure` says why there is no time, `absent` why there is no such way here.
    """

    way: str
    us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    wall_us: float | None = None
    runs: int = 0
    host_ahead: bool = True
    share: float | None = None
    error: float | None = None
    eager_error: float | None = None
    failure: str | None = None
    absent: str | None = None


class MeasuredRow(_Row):
    """Measurements of a group on a GPU. `speedup` is eager's time over the kernel's; `fused_error`
    and `speedup_error` are the errors of the predictions, as shares of the measured figures; `best`
    is the fastest way that is right. `verdict` is the stopwatch's, on the kernel with the numbers
    of launches that a search found, and stands beside that of the gates; None where either has no
    time."""

    ways: list[WayRow]
    best: str | None
    speedup: float | None
    fused_error: float | None
    speedup_error: float | None
    verdict: Literal["faster", "slower"] | None = None


class BenchRow(_Row):
    """Whole run of `bench`: the machine, the speed that the GPU itself reaches (bytes and FLOP a
    second), the model's step in each way and which of them to use."""

    machine: dict[str, str]
    copy_bandwidth: float
    matmul: dict[str, float]
    launch_us: float
    host_launch_us: float
    model: list[WayRow]
    recommended: str
    why: str
    complete: bool = True
    own_ops: list[str] = []
    """Groups that the model's way `framework` replaces by the framework's own op."""


class GroupRow(_Row):
    """Accepted group or rejected candidate. `computes` is the computation in words, `layers` the
    numbered modules of the model that it is in; both are empty where unknown."""

    id: str
    fingerprint: str
    nodes: list[str]
    instances: list[list[str]]
    pattern: str
    verdict: str
    gates: list[GateResult]
    traffic: TrafficRow
    on_chip: OnChipRow
    predicted: PredictedRow
    impact: ImpactRow
    route: str
    action: ActionRow
    fixable: Fix | None
    kernel: KernelRow
    measured: MeasuredRow | None
    sources: list[LineRow]
    parent: str | None = None
    launches: int = 0
    computes: str = ""
    layers: str = ""
    profile: GroupTimeRow | None = None

    @property
    def code(self) -> str:
        """Code of the deciding gate; empty where none decides."""
        return self.deciding.code if self.deciding else ""

    @property
    def deciding(self) -> GateResult | None:
        """Gate that rejects: the first that fails, else the last that is unknown. For an accepted
        group the gate of the traffic that it saves."""
        if self.verdict == "fuse":
            return next((g for g in self.gates if g.name == "traffic-saving"), None)
        fails = (gate for gate in self.gates if gate.outcome == "fails")
        unknown = (gate for gate in reversed(self.gates) if gate.outcome == "unknown")
        return next(fails, None) or next(unknown, None)


class UngroupedRow(_Row):
    node: str
    reason: str


class AdviceRow(_Row):
    """Finding that is not a fusion. `saved_us` is None where nothing predicts it; `evidence` lists
    the facts behind it; `fingerprint` survives moved lines and another number of layers."""

    code: str
    message: str
    saved_us: float | None
    sources: list[LineRow]
    id: str = ""
    evidence: list[str] = []
    fingerprint: str = ""


class RewriteRow(_Row):
    """Line that means the same when it is written otherwise: `code` is the rewrite's name, which
    `explain` takes, `nodes` what it replaces, as far as that can be told, `saved_us` None where
    nothing predicts it. `proof` says what is proven and how; `line` is the Python that a person
    would write, None where there is none. `advice` are the ids of the advice that says the same of
    these lines."""

    code: str
    message: str
    nodes: list[str]
    saved_us: float | None
    proof: str
    sources: list[LineRow]
    line: str | None
    id: str
    advice: list[str] = []


class CauseRow(_Row):
    """Launches that a missing op or schedule keeps from fusing."""

    cause: str
    nodes: int
    bytes: int
    time_us: float


class _SumsRow(_Row):
    """Figures of some launches, all instances counted."""

    flops: int
    hbm_bytes_unfused: int
    hbm_bytes_fused: int
    kernels_unfused: int
    kernels_fused: int
    time_us: float
    predicted_speedup: float
    coverage: float


class PhaseRow(_SumsRow):
    """Totals of one phase of a training step. The time of the call itself is in no phase."""

    time_by_bound: dict[str, float] = {}


class SavedRow(_Row):
    """Memory that a forward pass keeps for backward: a storage, by the node that makes it.
    `saved_by` are the forward nodes whose backward reads it; `alternative` is None where none is
    known."""

    name: str
    bytes: int
    shape: list[int]
    dtype: str
    source: SourceRow | None
    saved_by: list[str]
    alternative: LeanerWay | None = None


class CheckpointRow(_Row):
    """A checkpoint of the model: the bytes that it frees and those that it keeps for that, and the
    launches of backward that compute again, with their time."""

    source: SourceRow | None
    freed_bytes: int
    kept_bytes: int
    launches: int
    again_us: float


class TotalsRow(_SumsRow):
    """Totals of the whole model, all instances counted. `ceiling_speedup` is Amdahl's: launches
    that are never fused stay, the others cost one read of their inputs and one write of the results
    that others need. `saveable_bytes` is the saving of one launch for each maximal region of
    modelled memory-bound launches, if any schedule existed: no grouping saves more."""

    saveable_bytes: int
    ceiling_speedup: float
    peak_activation_bytes: int
    time_by_bound: dict[str, float] = {}
    faults: int = 0
    """Regions that were not analysed because of a fault of the tool."""
    by_phase: dict[str, PhaseRow] = Field(default={}, exclude_if=_empty)
    """Totals of each phase of a training step; empty for a forward pass alone."""
    rewrites_saved_us: float = 0.0
    """Predicted saving of all rewrites; no other total has any of it."""
    condition: str = ""
    """Condition for the kernels of these figures to run; empty where they run in this scenario."""


class IgnoredRow(_Row):
    """Request to ignore a finding: from a comment at `source`, or from the configuration."""

    code: str
    reason: str
    source: SourceRow | None


class FindingRow(_Row):
    """Accepted group, or advice that saves time, as reviewers see it: with the code of the deciding
    gate or of the advice; the id of the other is empty.

    `state` is `new` or `known` against the baseline, empty without one. The files of `sources` are
    relative to the root of the repository, where they lie in it. `cost_us` is the cost of a new
    finding: microseconds that its modules take beyond the baseline's, or the whole step where the
    baseline has no such modules; None for a known finding.
    """

    group: str
    code: str
    state: str
    ignored: IgnoredRow | None
    sources: list[SourceRow]
    advice: str = ""
    cost_us: float | None = None

    @classmethod
    def about(
        cls,
        row: GroupRow | AdviceRow,
        sources: Sequence[SourceRow],
        state: str = "",
        ignored: IgnoredRow | None = None,
        cost_us: float | None = None,
    ) -> FindingRow:
        """Finding for a group or advice."""
        advised = isinstance(row, AdviceRow)
        return cls(
            group="" if advised else row.id, advice=row.id if advised else "", code=row.code,
            state=state, ignored=ignored, sources=[*sources], cost_us=cost_us,
        )  # fmt: skip


class UnusedRow(_Row):
    """Comment that asks to ignore a code and matches no finding, and why."""

    source: SourceRow
    code: str
    why: str


class ReviewRow(_Row):
    """Review of the report: the groups and advice that are findings under the configuration and the
    comments in the source; `below` counts those that save less than its thresholds, `unselected`
    those whose codes it does not select."""

    baseline: str | None
    findings: list[FindingRow]
    below: int
    unselected: int
    unused: list[UnusedRow]


class Report(_Row):
    """Report of one model, one scenario, one device. `search_gap` is the share by which the
    partition may be slower than the best; 0 when it is the best. `not_run` names the topmost
    modules that the scenario does not reach: no launch reads a parameter of theirs."""

    schema_version: int = SCHEMA_VERSION
    tool: Tool
    rules: Rules
    device: DeviceRow
    scenario: ScenarioRow
    model: ModelRow
    nodes: list[NodeRow]
    groups: list[GroupRow]
    candidates: list[GroupRow]
    ungrouped: list[UngroupedRow]
    advice: list[AdviceRow]
    totals: TotalsRow
    rewrites: list[RewriteRow] = []
    not_rewritten: str = Field(default="", exclude_if=_empty)
    """Reason why rewrites were not looked for, or not everywhere; empty where they were."""
    search_gap: float = 0.0
    unmodelled: list[CauseRow] = []
    no_schedule: list[CauseRow] = []
    faults: list[Fault] = []
    not_run: list[str] = []
    saved: list[SavedRow] = Field(default=[], exclude_if=_empty)
    """Memory that a training step keeps for backward, the most first."""
    checkpoints: list[CheckpointRow] = Field(default=[], exclude_if=_empty)
    """Checkpoints of the model in a training step, in the order of forward."""
    memory: Memory | None = Field(default=None, exclude_if=_empty)
    graph: dict[str, Any] | None = None
    bench: BenchRow | None = None
    profile: Profile | None = None
    review: ReviewRow | None = None

    @property
    def possible_findings(self) -> list[GroupRow | AdviceRow]:
        """Rows that may be a finding: the accepted groups, and the advice whose gain is predicted.
        Advice of earlier versions has no id, and is left out."""
        return [*self.groups, *(row for row in self.advice if row.id and row.saved_us)]

    def subject(self, finding: FindingRow) -> GroupRow | AdviceRow:
        """Group or advice of a finding."""
        rows = self.advice if finding.advice else self.groups
        return next(row for row in rows if row.id == (finding.advice or finding.group))


def json_schema() -> dict[str, Any]:
    """JSON Schema of the report, draft 2020-12. The schema allows unknown fields and values, and
    does not require fields that are newer than the first reports of this version."""
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"A report of fusion-advisor, schema_version {SCHEMA_VERSION}",
    }
    schema = _untitled(Report.model_json_schema())
    return {**head, **{key: schema[key] for key in sorted(schema)}}


def _untitled(schema: Any) -> Any:
    """Schema without the titles that repeat its fields' names."""
    if isinstance(schema, list):
        return [_untitled(item) for item in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    table = cast("dict[str, Any]", schema)
    return {k: _untitled(v) for k, v in table.items() if k != "title" or isinstance(v, dict)}


def load_report(file: Path) -> Report:
    """Read a report, with the kernels beside it. UsageError, one line, when it is missing, no
    report, or of another schema."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}; expected a report.json") from error
    except ValueError as error:
        raise UsageError(f"{file}: not JSON ({error}); expected a report.json") from error
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    version = fields.get("schema_version")
    if version is None:
        raise UsageError(f"{file}: no schema_version; expected a report of fusion-advisor")
    if version != SCHEMA_VERSION:
        raise UsageError(
            f"{file}: schema_version {version}, and this version reads {SCHEMA_VERSION};"
            " run analyze again"
        )
    try:
        report = Report.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{file}: {field}: {first['msg']}; run analyze again") from error
    for group in report.groups:
        group.kernel.text = _kernel_beside(file, group.kernel.file)
    return report


def _kernel_beside(report: Path, name: str | None) -> str | None:
    """Text of a kernel that lies in the report's own folder, None if it is not there."""
    if not name:
        return None
    folder = report.parent.resolve()
    kernel = (folder / name).resolve()
    if not kernel.is_relative_to(folder) or kernel.suffix != ".py" or not kernel.is_file():
        return None  # a report of somebody else's may name any file of this machine
    return kernel.read_text(encoding="utf-8", errors="replace")
