"""An earlier report that a later one is compared with.

A report by another version of this tool or by other rules says little of a change in the model.
Such a report is judged again from its graph, where the graph is in it or beside it; else only facts
are compared, bytes and launches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.faults import Faults
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.report.assemble import assemble
from fusion_advisor.report.diff import made_by, same_tool_and_rules
from fusion_advisor.report.schema import Report, load_report
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_data


@dataclass(frozen=True)
class Baseline:
    """A report by its name; `note` is a line for people where another version or other
    rules made it."""

    name: str
    report: Report
    note: str = ""


def made_comparable(old: Baseline, new: Report, rulebook: Rulebook) -> Baseline:
    """An earlier report made comparable with one of these rules: itself where these rules made
    both, else judged again, else its facts alone."""
    report = old.report
    if same_tool_and_rules(report, new):
        return old
    why = judge_again(report, Path(old.name), rulebook)
    if isinstance(why, Report):
        note = f"baseline {old.name}: made by {made_by(report)}: judged again from its graph"
        return Baseline(old.name, why, note)
    return Baseline(
        old.name, report,
        f"baseline {old.name}: made by {made_by(report)}, and {why}: compared by bytes and "
        "launches alone; make it again with analyze --out, or --json with --with-graph",
    )  # fmt: skip


def judge_again(report: Report, file: Path, rulebook: Rulebook) -> Report | str:
    """The report that this version and these rules give for the graph of an earlier one; the
    reason, where the graph is missing or another's."""
    found = _graph(report, file)
    if isinstance(found, str):
        return found
    try:
        graph = from_data(Graph, found)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "its graph cannot be read"
    if not {row.name for row in report.nodes} <= {node.name for node in graph.nodes}:
        return "the graph is another report's"
    if report.device.name not in rulebook.devices:
        return f"these rules know no device {report.device.name}"
    faults = Faults()
    flow = dataflow(graph, rulebook.device(report.device.name))
    found = fuse(flow, rulebook, faults)
    asked = Scenario(mode="train" if report.scenario.mode == "train" else "eval")
    again = assemble(flow, found, {}, asked, (), rulebook, faults)
    again.scenario = report.scenario
    return again


def _graph(report: Report, file: Path) -> Mapping[str, Any] | str:
    """The graph in a report or in the same folder; the reason, where there is none."""
    if report.graph is not None:
        return report.graph
    try:
        found: Any = json.loads((file.parent / "graph.json").read_text(encoding="utf-8"))
    except OSError:
        return "no graph.json is beside it"
    except ValueError:
        return "its graph.json is not JSON"
    return cast("dict[str, Any]", found) if isinstance(found, dict) else "its graph.json is none"


def load_baseline(file: Path) -> Baseline:
    """A report by the name of its file. UsageError as `load_report` raises it."""
    return Baseline(str(file), load_report(file))
