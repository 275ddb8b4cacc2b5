"""Wording of numbers and verdicts, for every format that people read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import PurePath

from fusion_advisor.fusion.verdict import GateResult
from fusion_advisor.report.schema import (
    AdviceRow,
    FindingRow,
    GroupRow,
    NodeRow,
    Report,
    SourceRow,
    WayRow,
)
from fusion_advisor.rulebook.quantities import said, told_apart


def computes(group: GroupRow) -> str:
    """Computation of a group in words; in older reports without them, its idiom."""
    return group.computes or group.pattern


def named(row: GroupRow | AdviceRow) -> str:
    """Name and place of a row: `residual + RMSNorm at model.py:94 (layers 0–31)`."""
    what = computes(row) if isinstance(row, GroupRow) else row.code
    at = f" at {short(row.sources[0])}" if row.sources else ""
    layers = row.layers if isinstance(row, GroupRow) else ""
    return f"{what}{at}" + (f" ({layers})" if layers else "")


def short(source: SourceRow) -> str:
    """Source line without the folders of its file: `model.py:94`."""
    return f"{PurePath(source.file).name}:{source.line}"


def size(count: float) -> str:
    """Format bytes in decimal units, three digits: `33.6 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def time(us: float) -> str:
    """Format microseconds; from 1000 us on in milliseconds, from 1000 ms on in seconds."""
    if abs(us) >= 1e6:
        return f"{us / 1e6:.3g} s"
    return f"{us / 1000:.3g} ms" if abs(us) >= 1000 else f"{us:.3g} µs"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else f"{100 * share:.1g} %"


def reading_and_limit(gate: GateResult) -> tuple[str, str]:
    """Reading of a gate, empty where it is unknown, and its limit."""
    if gate.measured is None:
        return "", f"{gate.comparison} {said(gate.limit)}"
    measured, limit = told_apart(gate.measured, gate.limit)
    return f"{measured} {gate.unit}", f"{gate.comparison} {limit}"


_STRUCTURAL = ("count", "share")
"""Units of gates that count findings: the finding says more than the count."""


def gate(row: GateResult | None) -> str:
    """Gate with its numbers: `traffic-saving 1.25 x, needs >= 1.5`."""
    if row is None:
        return "no gate decides"
    if row.measured is None:
        return f"{row.name}: {row.why}"
    if row.unit in _STRUCTURAL and row.why and row.outcome != "holds":
        return f"{row.name}: {row.why}"
    measured, needs = reading_and_limit(row)
    return f"{row.name} {measured}, needs {needs}"


def gain(group: GroupRow) -> str:
    """Total saving of a group."""
    repeated = f" in {len(group.instances)} instances" if len(group.instances) > 1 else ""
    return f"{time(group.impact.saved_us_total)}{repeated}"


def kernel(group: GroupRow) -> str:
    """Proof of a group's kernel: how far it is proven."""
    row = group.kernel
    parts = [row.status]
    if not verified(group):
        parts.insert(0, "NOT VERIFIED")
    if row.check is not None and row.check.passed:
        on = "Triton's interpreter" if row.check.where == "interpreter" else row.check.where
        count = len(row.check.shapes)
        shapes = f"{count} shape{'s' if count > 1 else ''}"
        parts.append(f"checked on {on} with {shapes}, {row.check.seeds} seeds")
    if row.resources is not None:
        parts.append(f"{row.resources.registers} registers, {row.resources.spill_bytes} B spilled")
    if row.why:
        parts.append(row.why)
    return "; ".join(parts)


def disagreement(group: GroupRow) -> str:
    """Measured gain of a profile, where it is outside of the predicted interval, or the verdict of
    the time model, where it differs from the verdict of the gates; else empty."""
    low, high = group.predicted.interval
    times = f"{group.predicted.speedup:.2f}x predicted ({low:.2f} to {high:.2f})"
    if group.profile and group.profile.differs:
        ran = f"the profile has {time(group.profile.unfused_us)} where"
        ran += f" {time(group.predicted.unfused_us)} were predicted"
        return f"{ran}: {group.profile.speedup:.2f}x instead of {times}"
    if group.verdict == "fuse" and not group.predicted.worthwhile:
        return f"the time model expects no gain: {times}"
    planned = group.kernel.schedule is not None
    if group.verdict != "fuse" and planned and group.predicted.worthwhile:
        return f"the time model expects a gain all the same: {times}"
    return ""


def decided(group: GroupRow) -> str:
    """Deciding gate, and the verdict of the time model where it differs."""
    return "; ".join(part for part in (gate(group.deciding), disagreement(group)) if part)


def verified(group: GroupRow) -> bool:
    """Whether a check of the group's kernel passed."""
    return group.kernel.check is not None and group.kernel.check.passed


def launches(group: GroupRow) -> str:
    """Launches of a group: `9 kernels in one`, and of one launch that is slow `1 kernel in 2`."""
    return in_place_of(group.launches, group.launches - group.impact.launches_saved)


def in_place_of(before: int, after: int) -> str:
    """Kernels of eager, and those that are launched in their place: `9 kernels in one`."""
    return f"{before} kernel{'s' * (before != 1)} in {'one' if after == 1 else after}"


def independent_candidates(report: Report) -> list[GroupRow]:
    """Candidates that are more than a part of a region that is fused anyway."""
    fused = [set(place) for group in report.groups for place in group.instances]
    return [
        row
        for row in report.candidates
        if not all(any(whole.issuperset(place) for whole in fused) for place in row.instances)
    ]


def scenario(report: Report) -> str:
    """Settings that differ from a plain forward pass in eval mode."""
    row = report.scenario
    run = f"a whole step, optimizer {row.optimizer}" if row.optimizer else row.phase
    settings = [f"{row.mode} mode", run]
    settings += [f"{row.dtype} parameters"] if row.dtype else []
    settings += [f"autocast to {row.autocast}"] if row.autocast else []
    settings += [f"batch {row.batch}"] if row.batch else []
    settings += [f"sequence {row.seq}"] if row.seq else []
    settings += [f"cache of {row.kv_len}"] if row.kv_len else []
    settings += ["symbolic sizes"] if row.dynamic else []
    return ", ".join(settings)


def notes(report: Report) -> list[tuple[str, str]]:
    """Notes that a reader needs before any figure: each with its subject."""
    condition, missed = report.totals.condition, report.not_run
    found = [("kernels run", condition)] if condition and report.groups else []
    if missed:
        others = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
        found += [("not run", f"{', '.join(missed[:_NAMED])}{others}: no launch reads from them")]
    return found


def device(report: Report) -> str:
    """Assumed speed of the device, and its source."""
    row = report.device
    figures = {
        "bandwidth": f"copy {row.bandwidth / 1e9:.0f} GB/s",
        "launch": f"a launch {time(row.launch_us)}",
    }
    return "; ".join(
        f"{figure} ({row.sources[name]})" if name in row.sources else figure
        for name, figure in figures.items()
    )


def advice(row: AdviceRow) -> str:
    """Text of an advice, and the most that following it saves."""
    saves = f"up to {time(row.saved_us)}: " if row.saved_us else ""
    return f"{saves}{row.message}"


def place(row: GroupRow | AdviceRow) -> str:
    """First line of the source, and how many more there are."""
    if not row.sources:
        return "no source"
    first = row.sources[0]
    more = f" and {len(row.sources) - 1} more" if len(row.sources) > 1 else ""
    return f"{first.file}:{first.line}{more}"


def ways(group: GroupRow) -> list[tuple[str, ...]]:
    """Measurements of a group, one per way: name, time with quartiles, share of the copy bandwidth,
    note."""
    return [_way(row) for row in group.measured.ways] if group.measured else []


def steps(report: Report) -> list[tuple[str, ...]]:
    """Measurements of the whole model, one per way, in the form of `ways`."""
    return [_way(row) for row in report.bench.model] if report.bench else []


def _way(row: WayRow) -> tuple[str, ...]:
    if row.us is None:
        return row.way, "", "", row.failure or row.absent or ""
    spread = f"{time(row.us)} ({time(row.low_us or row.us)} to {time(row.high_us or row.us)})"
    remark = "" if row.host_ahead else "the host limits"
    return row.way, spread, percent(row.share) if row.share else "", remark


def measured(group: GroupRow) -> str:
    """Measurement of a group beside its prediction."""
    found = group.measured
    if found is None or found.speedup is None:
        return "not measured"
    off = f"{100 * found.speedup_error:+.0f} %" if found.speedup_error is not None else ""
    verdict = f"measured-{found.verdict}" if found.verdict else "measured"  # not in earlier reports
    return f"{verdict}: {found.speedup:.2f}x, predicted {off} off; fastest: {found.best}"


def id_and_name(group: GroupRow) -> str:
    """Id and name of a group, marked if it was rejected."""
    rejected = "" if group.verdict == "fuse" else ", rejected"
    return f"{group.id} {named(group)}{rejected}"


def measured_rows(report: Report) -> list[GroupRow]:
    """Groups, then rejected candidates, that were measured."""
    return [row for row in (*report.groups, *report.candidates) if row.measured]


_NAMED = 4
"""Limit on the modules or inputs that a line names."""


def totals(report: Report) -> list[tuple[str, str]]:
    """Totals of the model before and after, with its bound."""
    row = report.totals
    saved = row.hbm_bytes_unfused - row.hbm_bytes_fused
    some = row.saveable_bytes and saved >= 0  # faster kernels may move more
    of = f", {percent(saved / row.saveable_bytes)} of the saveable" if some else ""
    device = report.device
    borrowed = device.times_fitted_on not in ("", device.name)
    by = f", by the {device.times_fitted_on}'s kernels" if borrowed else ""
    after = row.time_us / row.predicted_speedup if row.predicted_speedup else row.time_us
    now = f"{time(row.time_us)} measured" if report.profile else time(row.time_us)
    return [
        ("kernels", f"{row.kernels_unfused} → {row.kernels_fused}"),
        (
            "HBM bytes",
            f"{size(row.hbm_bytes_unfused)} → {size(row.hbm_bytes_fused)}"
            f" ({size(saved)} saved{of} {size(row.saveable_bytes)})"
            if of
            else f"{size(row.hbm_bytes_unfused)} → {size(row.hbm_bytes_fused)}",
        ),
        (
            "time",
            f"{now} → {time(after)} predicted{by}"
            f" ({row.predicted_speedup:.2f}x, ceiling {row.ceiling_speedup:.2f}x)"
            + (f", {row.condition}" if row.condition else ""),
        ),
        *phases(report),
        ("FLOPs", f"{row.flops:.4g}"),
        ("coverage", f"{percent(row.coverage)} of the time is in modelled ops"),
        ("peak activations", size(row.peak_activation_bytes)),
        *([("faults", said)] if (said := faults(report)) else []),
        *([("rewrites", said)] if (said := rewrites(report)) else []),
        *profile(report),
    ]


def rewrites(report: Report) -> str:
    """Saving of all rewrites, which no other figure has, and why they were not looked for; empty
    for a model without any."""
    counted = Counter(row.code for row in report.rewrites)
    names = ", ".join(f"{name} {count}" for name, count in counted.items())
    us = report.totals.rewrites_saved_us
    said = [f"{names}{f', save {time(us)}' if us else ''}, in no other figure; apply makes them"]
    why = [f"not looked for everywhere: {report.not_rewritten}"]
    return "; ".join(said * bool(names) + why * bool(report.not_rewritten))


def advised(report: Report) -> list[AdviceRow]:
    """Advice as people read it, with rewrites: what both say of a line is told once, with the
    proof of the rewrite under the id of the advice."""
    told = {name for row in report.rewrites for name in row.advice}
    rows = [row for row in report.advice if row.id not in told]
    for row in report.rewrites:
        text = f"{row.message[0].lower()}{row.message[1:]}"
        said = f"write {row.line}: {text}" if row.line else text
        name = next(iter(row.advice), row.id)
        rows.append(AdviceRow.of(row, id=name, message=said, evidence=[row.proof]))
    return sorted(rows, key=lambda row: -(row.saved_us or 0.0))


def phases(report: Report) -> list[tuple[str, str]]:
    """Totals of each phase of a training step, what forward saves, and the peak of memory."""
    rows = [
        (
            name,
            f"{time(row.time_us)}, {row.kernels_unfused} → {row.kernels_fused} kernels,"
            f" {size(row.hbm_bytes_unfused)} → {size(row.hbm_bytes_fused)}"
            f" ({row.predicted_speedup:.2f}x)",
        )
        for name, row in report.totals.by_phase.items()
    ]
    if saved := report.saved:
        most = saved[0]
        where = f" at {short(most.source)}" if most.source else ""
        total = size(sum(each.bytes for each in saved))
        largest = f"the largest {size(most.bytes)}{where}"
        rows.append(("saved", f"{total} for backward in {len(saved)} tensors, {largest}"))
    if found := report.checkpoints:
        freed = sum(each.freed_bytes for each in found)
        kept = sum(each.kept_bytes for each in found)
        again = sum(each.again_us for each in found)
        rows.append(
            (
                "checkpoint",
                f"{len(found)} x: {size(kept)} kept in place of {size(freed)}; backward computes"
                f" {time(again)} again",
            )
        )
    if held := report.memory:
        parts = ", ".join(f"{size(count)} {use}" for use, count in [*held.parts.items()][:_NAMED])
        rows.append(("memory", f"{size(held.peak_bytes)} at {held.at}: {parts}"))
    return rows


def saved(report: Report, top: int) -> list[tuple[str, ...]]:
    """Tensors kept for backward, the most bytes first: bytes, node, place, reader, leaner way."""
    return [
        (
            size(row.bytes),
            row.name,
            short(row.source) if row.source else "",
            f"for {', '.join(row.saved_by[:_NAMED])}" if row.saved_by else "",
            f"{row.alternative.action}: {size(row.alternative.saved_bytes)} less,"
            f" {time(row.alternative.extra_us)} more"
            if row.alternative
            else "",
        )
        for row in report.saved[:top]
    ]


_LINKED = {"id": "by id", "alignment": "by alignment", "sequence": "by sequence number"}
"""Ways to link a kernel to a launch."""
_WORTH_A_WORD = 0.0005
"""Share from which on something is mentioned."""


def profile(report: Report) -> list[tuple[str, str]]:
    """Profile that measured times are from: its steps, its idle time, how much of it is linked, and
    how far predictions are from it."""
    row = report.profile
    if row is None:
        return []
    alike = f"{row.steps} steps" if row.steps == row.of else f"{row.steps} of {row.of} steps"
    of = f"{row.file}, {alike} of {time(row.step_us)} on {row.device or 'an unknown GPU'}"
    among = [(row.between_us, "before the step's first kernel"),
             (row.waited_us, "after it waited for the GPU")]  # fmt: skip
    of_it = ", ".join(
        f"{time(us)} {what}" for us, what in among if us >= _WORTH_A_WORD * row.step_us
    )
    of_it = f" ({of_it})" if of_it else ""
    parts = {**row.phases, "collectives": row.collectives_us, "copies": row.copies_us}
    each = ", ".join(f"{name} {time(us)}" for name, us in parts.items() if us)
    ways = [f"{percent(row.linked.get(way, 0.0))} {how}" for way, how in _LINKED.items()
            if row.linked.get(way, 0.0) >= _WORTH_A_WORD]  # fmt: skip
    missing = [f"{percent(share)} {phase}" for phase, share in row.unlinked_share.items()
               if share >= _WORTH_A_WORD]  # fmt: skip
    phases = {node.phase for node in report.nodes}
    others = "".join(
        f", {percent(share)} of {phase}'s"
        for phase, share in row.linked_by_phase.items()
        if phase != "forward" and phase in phases
    )
    rest = f"; no launch of the graph: {', '.join(missing)}" if missing else ""
    return [
        ("profile", "; ".join([of, *row.notes])),
        ("GPU", f"busy {time(row.busy_us)}: {each}"),
        (
            "idle",
            f"{time(row.idle_us)}: {time(row.host_us)} the host had not launched{of_it},"
            f" {time(row.gaps_us)} it had",
        ),
        (
            "linked",
            f"{percent(row.forward_linked)} of the forward kernels' time{others}; of all kernels'"
            f" {', '.join(ways)}{rest}",
        ),
        *([("off by", said)] if (said := prediction_errors(report)) else []),
    ]


def prediction_errors(report: Report) -> str:
    """Error of the predicted times on this model, by class; empty without a launch of its own."""
    row = report.profile
    if row is None or row.error is None:
        return ""
    each = [f"{c.name} {percent(c.error)}" for c in row.classes if c.error is not None]
    return f"{percent(row.error)}, the median of predicted times ({', '.join(each)})"


def launch_times(report: Report, top: int) -> list[tuple[str, ...]]:
    """Launches of a profile, the longest first: name, op, predicted and measured time, how it was
    linked."""
    shared: dict[str, float] = {}
    for node in report.nodes:
        if node.measured and node.measured.within:
            owner = node.measured.within
            shared[owner] = shared.get(owner, 0.0) + node.time_us
    rows = [
        (node, node.measured.us, node.measured.by)
        for node in report.nodes
        if node.measured and node.measured.us is not None
    ]
    rows.sort(key=lambda row: -row[1])
    return [
        (
            node.name,
            node.op,
            time(node.time_us + shared.get(node.name, 0.0)),
            time(us),
            f"by {by}" + (", with others in one kernel" if node.name in shared else ""),
        )
        for node, us, by in rows[:top]
    ]


def linked(node: NodeRow) -> str:
    """Measured time of a launch in a profile, and how it was linked; empty without one."""
    found = node.measured
    if found is None:
        return ""
    if found.us is None:
        return f"in the kernel of {found.within}"
    kernels = f"{found.kernels} kernels" if found.kernels > 1 else "one kernel"
    back = "" if found.backward_us is None else f"; backward {time(found.backward_us)}"
    return f"{time(found.us)} in {kernels}, linked by {found.by}{back}"


def unlinked_times(report: Report, top: int) -> list[tuple[str, ...]]:
    """Kernels of a profile without a launch in the graph, the longest first: time, phase, kernel
    with its count, what launched it."""
    rows = report.profile.unlinked if report.profile else []
    return [
        (time(row.us), row.phase, f"{row.count} x {row.kernel}",
         " in ".join(filter(None, (row.under, row.function))))
        for row in rows[:top]
    ]  # fmt: skip


def faults(report: Report) -> str:
    """Regions that were not analysed because of faults of the tool; empty where there are none."""
    if not report.faults:
        return ""
    count = len(report.faults)
    what = "region" if count == 1 else "regions"
    each = "; ".join(
        f"{fault.why} ({', '.join(fault.nodes)})" if fault.nodes else fault.why
        for fault in report.faults
    )
    return f"{count} {what} not analysed: fault of ours: {each}"


def bottlenecks(report: Report) -> list[tuple[str, float, float, int]]:
    """Bottlenecks, the longest first, each with its microseconds, their share and the HBM bytes of
    its launches."""
    by_bound = report.totals.time_by_bound
    total = sum(by_bound.values()) or 1.0
    moved: Counter[str] = Counter()
    for node in report.nodes:
        moved[node.bound] += node.bytes_read + node.bytes_written
    ranked = sorted(by_bound.items(), key=lambda item: -item[1])
    return [(name, us, us / total, moved[name]) for name, us in ranked]


_BEYOND = {"matmul": "matrix products", "attention": "attention", "convolution": "convolutions"}
"""Names of launches that are never fused, by their pattern."""


def step_time(node: NodeRow) -> float:
    """Time of a launch in the step: as a profile has it, else as predicted."""
    return node.time_us if node.measured is None else node.measured.us or 0.0


def unfusable_launches(report: Report) -> list[tuple[str, float]]:
    """Launches that fusion cannot reach, each kind with its microseconds, the longest first."""
    times: dict[str, float] = {}
    for node in report.nodes:
        if node.bound != "free" and (name := _BEYOND.get(node.parallelism.split(" ")[0])):
            times[name] = times.get(name, 0.0) + step_time(node)
    return sorted(times.items(), key=lambda item: -item[1])


def parts(report: Report) -> list[tuple[str, float, float]]:
    """Parts of the step's time: each with its microseconds today, and with the groups fused; of a
    profile also those that no launch of the graph takes. The last is the part that fusion could
    reach and no group does."""
    before = report.totals.time_us
    after = before / report.totals.predicted_speedup if report.totals.predicted_speedup else before
    fused = {name for group in report.groups for place in group.instances for name in place}
    never = unfusable_launches(report)
    beside = [(name, us, us) for name, us in report.totals.time_by_bound.items()
              if name in ("unlinked", "backward", "optimizer", "idle")]  # fmt: skip
    rest = sum(
        step_time(node)
        for node in report.nodes
        if node.name not in fused and node.parallelism.split(" ")[0] not in _BEYOND
    )
    others = sum(us for _, us in never) + sum(us for _, us, _ in beside)
    grouped = max(before - rest - others, 0.0)
    known = [("in groups", grouped, max(grouped - (before - after), 0.0))]
    known += [(name, us, us) for name, us in never]
    return [part for part in [*known, *beside, ("left alone", rest, rest)] if part[1]]


def rejections(report: Report) -> str:
    """Count of candidates that each gate rejects: `7 candidates (compute-bound 5, on-chip 2)`; and
    those of them that the time model calls faster over its whole interval."""
    rows = independent_candidates(report)
    gates = Counter(row.deciding.name if row.deciding else "no gate" for row in rows)
    each = ", ".join(f"{name} {count}" for name, count in gates.most_common())
    faster = [row.id for row in rows if row.kernel.schedule and row.predicted.interval[0] > 1]
    all_the_same = f"; faster over the whole interval: {', '.join(faster)}" if faster else ""
    count = f"{len(rows)} candidate{'s' if len(rows) > 1 else ''}"
    return f"{count} ({each}){all_the_same}" if rows else ""


def short_products(report: Report, top: int) -> str:
    """Rejected candidates that one kernel by hand would pay for, with what it would save."""
    rows = [
        row
        for row in independent_candidates(report)
        if row.fixable and row.fixable.gate == "no-schedule"
    ]
    each = ", ".join(
        f"{time(row.impact.saved_us_total)} {row.id} {named(row)}" for row in rows[:top]
    )
    more = f" and {len(rows) - top} more" if len(rows) > top else ""
    return f"{each}{more}; no schedule writes products" if rows else ""


@dataclass(frozen=True)
class Todo:
    """One action, a fusion or advice. `saved_us` is the most that it saves of the step, None where
    nothing predicts it; `share` is of the step's time."""

    row: GroupRow | AdviceRow
    saved_us: float | None
    share: float


def todo(report: Report) -> list[Todo]:
    """Accepted groups and advice in one list, the most time first, rows without a
    prediction last; without groups that a profile has as fast as their kernels."""
    total = report.totals.time_us or 1.0
    rows = [
        Todo(row, row.impact.saved_us_total, row.impact.share)
        for row in report.groups
        if row.impact.basis != "profile" or row.impact.saved_us_total > 0
    ]
    rows += [Todo(row, row.saved_us, (row.saved_us or 0.0) / total) for row in advised(report)]
    return sorted(rows, key=lambda row: (row.saved_us is None, -(row.saved_us or 0.0)))


def action(row: GroupRow | AdviceRow) -> str:
    """Action for a row, and in how many launches and places, in one line."""
    if isinstance(row, AdviceRow):
        return remedy(row)
    places = f" in each of {len(row.instances)} places" if len(row.instances) > 1 else ""
    return f"{launches(row)}{places}: {remedy(row)}{surprise(row)}"


def surprise(row: GroupRow) -> str:
    """Measured gain of a profile where it is outside of the predicted interval; else empty."""
    if row.profile is None or not row.profile.differs:
        return ""
    return f"; {row.profile.speedup:.2f}x by the profile, {row.predicted.speedup:.2f}x predicted"


def remedy(row: GroupRow | AdviceRow) -> str:
    """Action for a row, without its places."""
    if isinstance(row, AdviceRow):
        return row.message
    if row.route == "framework":
        return f"write {row.action.code}"
    kernel = row.kernel.file or row.kernel.entry
    if kernel is None:
        return "no kernel" + (f" ({row.kernel.why})" if row.kernel.why else "")
    check = row.kernel.check
    ran = check is not None and check.shapes  # none where no case fits into the interpreter
    proof = "checked" if verified(row) else "check FAILED" if ran else "not checked"
    if row.route == "inductor":
        return f"torch.compile fuses it, or {kernel} ({proof})"
    return f"{kernel} ({proof})"


def dtype(report: Report) -> str:
    """Float dtype of most bytes of the results; empty where none is a float."""
    moved: Counter[str] = Counter()
    for node in report.nodes:
        if "float" in node.dtype:
            moved[node.dtype] += node.bytes_written
    return moved.most_common(1)[0][0] if moved else ""


def inputs(report: Report) -> str:
    """Sizes of the model's inputs: `tokens 4x2048:int64`."""
    shapes = [f"{name} {shape}" for name, shape in report.scenario.shapes.items()]
    more = f" and {len(shapes) - _NAMED} more" if len(shapes) > _NAMED else ""
    return f"{', '.join(shapes[:_NAMED])}{more}"


def setting(report: Report) -> str:
    """Mode, dtype and sizes that all figures are for."""
    known = (scenario(report), dtype(report), inputs(report))
    return "; ".join(part for part in known if part)


def reasons(report: Report, top: int) -> list[tuple[str, int]]:
    """Most frequent reasons for standing alone, without their numbers; views left out."""
    kinds: Iterable[str] = (
        row.reason.split(" (candidate")[0].split(":")[0]
        if not row.reason.startswith("no-schedule")
        else row.reason.split(" (candidate")[0]
        for row in report.ungrouped
        if not row.reason.endswith("no launch")
    )
    return Counter(kinds).most_common(top)


def cost(finding: FindingRow) -> str:
    """Cost of the change that brought a finding; empty where it is unknown."""
    if finding.cost_us is None:
        return ""
    more = f"{time(finding.cost_us)} more" if finding.cost_us > 0 else "no more"
    return f"costs {more} than the baseline"


def reviewers_note(report: Report, subject: GroupRow | AdviceRow) -> str:
    """Reviewers' note on a group or advice beside its figures: that it is new, who ignores it."""
    found = report.review.findings if report.review else []
    if any(subject.id == row.id for row in report.rewrites):
        return ""
    key = "group" if isinstance(subject, GroupRow) else "advice"
    row = next((row for row in found if getattr(row, key) == subject.id), None)
    if row is None:
        return "no finding" if report.review else ""
    if row.ignored is None:
        return ", ".join(part for part in (row.state, cost(row)) if part)
    source = row.ignored.source
    where = f" ({source.file}:{source.line})" if source else ""
    return f"ignored: {row.ignored.reason}{where}"
