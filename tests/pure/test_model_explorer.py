"""Node data as Model Explorer reads it: by the exported program's nodes, in its own form."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fusion_advisor.report.formats import render
from fusion_advisor.report.schema import Report

from .test_report import mixed, report_of


def data(report: Report) -> dict[str, Any]:
    """What is rendered, which holds to what the viewer's `GraphNodeData` may have."""
    content = json.loads(render(report, "model-explorer"))
    assert set(content) == {"name", "results"}
    assert isinstance(content["name"], str)
    for result in content["results"].values():
        assert set(result) <= {"value", "bgColor"}
        assert isinstance(result["value"], int | float)
        assert re.fullmatch("#[0-9a-f]{6}", result.get("bgColor", "#000000"))
    return content


def test_each_node_has_its_time_and_its_groups_colour() -> None:
    report = mixed()
    results = data(report)["results"]
    assert set(results) == {row.name for row in report.nodes}
    times = {name: row["value"] for name, row in results.items()}
    assert times == pytest.approx({row.name: row.time_us for row in report.nodes}, abs=1e-3)
    (group,) = report.groups
    colours = {results[node]["bgColor"] for node in group.nodes}
    assert len(colours) == 1
    assert colours.isdisjoint(results[row.node]["bgColor"] for row in report.ungrouped)
    assert f"g1 cos + add {colours.pop()}" in data(report)["name"]


def test_launches_of_one_node_of_the_program_are_added() -> None:
    report = report_of("aten.cos.default", "aten.sin.default", "aten.unknown.default")
    for row in report.nodes:
        row.fx = "loss"
    (result,) = data(report)["results"].values()
    assert result["value"] == pytest.approx(sum(row.time_us for row in report.nodes), abs=1e-3)
    grouped = data(report_of("aten.cos.default", "aten.sin.default"))["results"]["n1"]
    assert result["bgColor"] == grouped["bgColor"]
