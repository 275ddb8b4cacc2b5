"""Data of the HTML page: the report's rows in columns, and its numbers and verdicts in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fusion_advisor.fusion.verdict import GateResult
from fusion_advisor.report.formats import wording
from fusion_advisor.report.formats.repeats import label, repeats
from fusion_advisor.report.schema import AdviceRow, GroupRow, KernelRow, NodeRow, Report


def page_data(report: Report) -> dict[str, Any]:
    """Build the page's data. Nodes stand by their position, groups and candidates in one list by
    theirs. Bytes are HBM bytes, `us` microseconds; a group's figures are of one instance where they
    do not say total."""
    place = {node.name: i for i, node in enumerate(report.nodes)}
    apart = {row.id for row in wording.independent_candidates(report)}
    return {
        "model": report.model.source,
        "headline": _headline(report),
        "setting": _setting(report),
        "about": _about(report),
        "totals": wording.totals(report),
        "parts": wording.parts(report),
        "bottlenecks": wording.bottlenecks(report),
        "traffic": _traffic(report),
        "roofs": {
            "bandwidth": report.device.bandwidth,
            "datasheet": report.device.datasheet_bandwidth,
            "peaks": report.device.peaks,
        },
        "nodes": _nodes(report, place),
        "groups": [
            *(_group(report, row, place, "fuse") for row in report.groups),
            *(
                _group(report, row, place, "reject" if row.id in apart else "part")
                for row in report.candidates
            ),
        ],
        "repeats": [
            {
                "start": repeat.start,
                "length": repeat.length,
                "count": repeat.count,
                "label": label(report.nodes, repeat),
            }
            for repeat in repeats(report.nodes)
        ],
        "todo": _todo(report),
        "bench": _bench(report),
        "profiled": report.profile is not None,
    }


def _headline(report: Report) -> str:
    """Headline: the groups to fuse with their saving, and the advice that saves more than
    any group."""
    row = report.totals
    first = next(iter(wording.todo(report)), None)
    advised = ""
    if first is not None and isinstance(first.row, AdviceRow) and first.saved_us:
        advised = f" First {first.row.code}, worth up to {wording.time(first.saved_us)}."
    if not report.groups:
        return f"Nothing here is worth fusing.{advised}"
    count = len(report.groups)
    saved = row.hbm_bytes_unfused - row.hbm_bytes_fused
    after = row.time_us / row.predicted_speedup if row.predicted_speedup else row.time_us
    return (
        f"Fuse {count} group{'s' if count > 1 else ''}: {wording.time(row.time_us)} →"
        f" {wording.time(after)} predicted ({row.predicted_speedup:.2f}x),"
        f" {row.kernels_unfused} → {row.kernels_fused} kernels,"
        f" {wording.size(saved)} less through HBM"
        + (f", {row.condition}." if row.condition else ".")
        + advised
    )


def _setting(report: Report) -> list[tuple[str, str]]:
    """Setting that all figures are for, shown before everything else."""
    rows = [
        ("device", report.device.title),
        ("mode", wording.scenario(report)),
        ("dtype", wording.dtype(report)),
        ("inputs", wording.inputs(report)),
        ("assumed", "; ".join(report.scenario.defaults)),
        *wording.notes(report),
    ]
    return [(name, value) for name, value in rows if value]


def _todo(report: Report) -> list[dict[str, Any]]:
    """Actions, ranked; a fusion by the position of its group, advice with all its fields."""
    places = {row.id: i for i, row in enumerate(report.groups)}
    rows: list[dict[str, Any]] = []
    for number, todo in enumerate(wording.todo(report), 1):
        row = todo.row
        advised = isinstance(row, AdviceRow)
        rows.append(
            {
                "id": row.id or f"a{number}",
                "group": -1 if advised else places[row.id],
                "name": row.code if advised else wording.computes(row),
                "savedUs": todo.saved_us,
                "share": todo.share,
                "action": wording.remedy(row),
                "note": wording.reviewers_note(report, row),
                "place": wording.place(row),
                "short": wording.short(row.sources[0]) if row.sources else "",
                "evidence": row.evidence if advised else [],
                "sources": _lines(row.sources) if advised else [],
            }
        )
    return rows


def _about(report: Report) -> list[tuple[str, str]]:
    """Run of the tool: model, device and version."""
    tool, rules = report.tool, report.rules
    rows = [
        ("device", f"{report.device.title}; {wording.device(report)}"),
        ("inputs", ", ".join(f"{name} {shape}" for name, shape in report.scenario.shapes.items())),
        ("captured by", report.model.captured_by),
        ("graph breaks", "; ".join(report.model.graph_breaks)),
        ("differs from eager", "; ".join(report.model.differs_from_eager)),
        (
            "made by",
            f"{tool.name} {tool.version}, torch {tool.torch or 'missing'},"
            f" Triton {tool.triton or 'missing'}, rules {rules.version} {rules.hash[:12]}",
        ),
    ]
    return [(name, value) for name, value in rows if value]


def _traffic(report: Report) -> dict[str, Any]:
    """Steps from the bytes of today to those after fusing, the largest first."""
    row = report.totals
    steps = [
        {"group": i, "bytes": group.traffic.saved_bytes * len(group.instances)}
        for i, group in enumerate(report.groups)
    ]
    steps.sort(key=lambda step: -step["bytes"])
    return {
        "before": row.hbm_bytes_unfused,
        "after": row.hbm_bytes_fused,
        "saveable": row.saveable_bytes,
        "steps": steps,
    }


# -- nodes -----------------------------------------------------------------------------------------


def _nodes(report: Report, place: Mapping[str, int]) -> dict[str, Any]:
    """Node table with a column per field. A column of repeated values is a list of values and a
    position for each node."""
    rows = report.nodes
    grouped = {
        name: i
        for i, group in enumerate(report.groups)
        for instance in group.instances
        for name in instance
    }
    reasons = {row.node: row.reason for row in report.ungrouped}
    return {
        "name": [row.name for row in rows],
        "op": _coded(row.op for row in rows),
        "shape": _coded(_shape(row) for row in rows),
        "bound": _coded(row.bound for row in rows),
        "unit": _coded(row.unit for row in rows),
        "module": _coded(row.module for row in rows),
        "source": _coded(f"{s.file}:{s.line}" if (s := row.source) else "" for row in rows),
        "reason": _coded(reasons.get(row.name, "") for row in rows),
        "flops": [row.flops for row in rows],
        "read": [row.bytes_read for row in rows],
        "written": [row.bytes_written for row in rows],
        "us": [float(f"{row.time_us:.5g}") for row in rows],
        "measured": [_measured_us(row) for row in rows] if report.profile else [],
        "linked": [wording.linked(row) for row in rows] if report.profile else [],
        "group": [grouped.get(row.name, -1) for row in rows],
        "inputs": [[place[name] for name in row.inputs if name in place] for row in rows],
    }


def _measured_us(row: NodeRow) -> float | None:
    us = row.measured.us if row.measured else None
    return None if us is None else float(f"{us:.5g}")


def _coded(values: Iterable[str]) -> dict[str, list[Any]]:
    known: dict[str, int] = {}
    codes = [known.setdefault(value, len(known)) for value in values]
    return {"values": list(known), "codes": codes}


def _shape(row: NodeRow) -> str:
    return f"{'×'.join(map(str, row.shape)) or 'scalar'} {row.dtype}" if row.dtype else ""


# -- groups ----------------------------------------------------------------------------------------


def _group(report: Report, row: GroupRow, place: Mapping[str, int], kind: str) -> dict[str, Any]:
    """Group, or rejected candidate; a `part` lies within a region that is fused anyway."""
    instances = [[place[name] for name in names if name in place] for names in row.instances]
    low, high = row.predicted.interval
    deciding = row.deciding
    return {
        "id": row.id,
        "name": wording.computes(row),
        "layers": row.layers,
        "title": wording.named(row),
        "kind": kind,
        "route": row.route,
        "parent": row.parent,
        "instances": instances,
        "flops": sum(report.nodes[i].flops for i in instances[0]) if instances else 0,
        "launches": row.launches,
        "left": row.launches - row.impact.launches_saved,
        "unfusedBytes": row.traffic.unfused_bytes,
        "fusedBytes": row.traffic.fused_bytes,
        "savedBytes": row.traffic.saved_bytes * len(row.instances),
        "ratio": row.traffic.ratio,
        "unfusedUs": row.predicted.unfused_us,
        "fusedUs": row.predicted.fused_us,
        "speedup": row.predicted.speedup,
        "interval": [low, high],
        "profiledUs": row.profile.unfused_us if row.profile else None,
        "savedUs": row.impact.saved_us_total,
        "share": row.impact.share,
        "decidedBy": deciding.name if deciding else "",
        "decided": wording.decided(row),
        "disagreement": wording.disagreement(row),
        "action": row.action.text,
        "code": "" if row.route == "triton" else row.action.code,
        "fixable": row.fixable.change if row.fixable else "",
        "onChip": row.on_chip.bytes,
        "budget": row.on_chip.budget_bytes,
        "gates": [_gate(gate) for gate in row.gates],
        "kernel": _kernel(row),
        "place": wording.place(row),
        "short": wording.short(row.sources[0]) if row.sources else "",
        "sources": _lines(row.sources),
        "measured": _measured(row),
    }


def _gate(gate: GateResult) -> dict[str, Any]:
    measured, needs = wording.reading_and_limit(gate)
    return {
        "code": gate.code,
        "name": gate.name,
        "outcome": gate.outcome,
        "measured": measured or "unknown",
        "needs": needs,
        "why": gate.why,
    }


def _kernel(group: GroupRow) -> dict[str, Any]:
    row: KernelRow = group.kernel
    return {
        "status": row.status,
        "said": wording.kernel(group),
        "verified": wording.verified(group),
        "file": row.file or row.entry or "",
        "schedule": row.schedule or "",
        "text": row.text,
    }


def _measured(row: GroupRow) -> dict[str, Any] | None:
    if row.measured is None:
        return None
    medians = {way.way: way.us for way in row.measured.ways}
    return {
        "speedup": row.measured.speedup,
        "eagerUs": medians.get("eager"),
        "us": medians.get("kernel"),
        "said": wording.measured(row),
        "ways": wording.ways(row),
    }


def _bench(report: Report) -> dict[str, Any] | None:
    bench = report.bench
    if bench is None:
        return None
    machine = ", ".join(f"{name} {value}" for name, value in bench.machine.items())
    return {
        "machine": f"{machine}; copy {bench.copy_bandwidth / 1e9:.0f} GB/s",
        "ways": wording.steps(report),
        "said": f"{bench.recommended}; {bench.why}",
        "complete": bench.complete,
    }


def _lines(sources: Sequence[Any]) -> list[dict[str, str]]:
    return [
        {"place": f"{row.file}:{row.line}", "short": wording.short(row), "text": row.text}
        for row in sources
    ]
