"""A baseline that another version or other rules made fails nothing by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fusion_advisor.ci.baseline import Baseline, judge_again, load_baseline, made_comparable
from fusion_advisor.ci.conditions import Condition, violation
from fusion_advisor.ci.findings import Policy, review
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.report.diff import compare
from fusion_advisor.report.formats import render
from fusion_advisor.report.schema import Report
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support.codec import to_data

from .test_report import chain, report_of_graph

RULES = load_rulebook()
GATES = [Condition("new"), Condition("regression"), Condition("regression-time")]


def graph_of(*ops: str) -> Graph:
    nodes = chain(*ops)
    return Graph(nodes, (Ref(nodes[-1].name),), source="model.py")


ONE, TWO = graph_of("aten.cos.default"), graph_of("aten.cos.default", "aten.cos.default")


def aged(graph: Graph) -> Report:
    """A report whose rules were others, which accepted nothing and counted on more time."""
    report = report_of_graph(graph)
    report.tool.version, report.rules.hash = "0.0.1", "0" * 64
    report.groups = []
    report.totals.time_us /= 2
    return report


def left(folder: Path, report: Report, graph: Graph | None) -> Baseline:
    """What an `analyze --out` left in a folder."""
    (folder / "report.json").write_text(render(report, "json"), encoding="utf-8")
    if graph is not None:
        (folder / "graph.json").write_text(json.dumps(to_data(graph)), encoding="utf-8")
    return load_baseline(folder / "report.json")


def failures(new: Report, baseline: Baseline) -> list[str]:
    new.review = review(new, Policy(), Path("/"), (baseline.name, baseline.report))
    found = (violation(condition, new, baseline.report) for condition in GATES)
    return [why for why in found if why]


def test_what_the_same_judge_made_is_taken_as_it_is(tmp_path: Path) -> None:
    old = left(tmp_path, report_of_graph(ONE), ONE)
    assert made_comparable(old, report_of_graph(TWO), RULES) is old


def test_other_rules_are_judged_again_from_the_graph_beside(tmp_path: Path) -> None:
    new, old = report_of_graph(TWO), left(tmp_path, aged(TWO), TWO)
    assert failures(new, Baseline("as it is", report_of_graph(ONE))), "the gates do fail"
    found = made_comparable(old, new, RULES)
    assert found.note.endswith("with rules 00000000: judged again from its graph")
    assert [row.fingerprint for row in found.report.groups] == [new.groups[0].fingerprint]
    assert found.report.totals == new.totals
    assert failures(new, found) == []
    assert [f.state for f in new.review.findings if new.review] == ["known"]


def test_a_change_of_the_model_still_fails_beside_one_judged_again(tmp_path: Path) -> None:
    new = report_of_graph(TWO)
    found = made_comparable(left(tmp_path, aged(ONE), ONE), new, RULES)
    told = failures(new, found)
    assert told[0].startswith("not in the baseline: g1")
    assert told[1] == "HBM bytes grew by 100 %, launches grew by 100 %, allowed 0 %"
    assert told[2].startswith("time grew by ")


def test_a_graph_within_the_report_does(tmp_path: Path) -> None:
    report = aged(TWO)
    report.graph = to_data(TWO)
    found = made_comparable(left(tmp_path, report, None), report_of_graph(TWO), RULES)
    assert found.note.endswith("judged again from its graph")


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (None, "no graph.json is beside it"),
        ("{", "its graph.json is not JSON"),
        ("[]", "its graph.json is none"),
        ("{}", "its graph cannot be read"),
        (json.dumps(to_data(ONE)), "the graph is another report's"),
    ],
)
def test_without_its_graph_facts_are_compared_and_one_line_says_so(
    tmp_path: Path, graph: str | None, why: str
) -> None:
    if graph is not None:
        (tmp_path / "graph.json").write_text(graph, encoding="utf-8")
    new = report_of_graph(TWO)
    found = made_comparable(left(tmp_path, aged(TWO), None), new, RULES)
    assert f"and {why}: compared by bytes and launches alone" in found.note
    assert "\n" not in found.note
    assert failures(new, found) == []
    (tmp_path / "bare").mkdir()
    less = made_comparable(left(tmp_path / "bare", aged(ONE), None), new, RULES)
    assert failures(new, less) == ["HBM bytes grew by 100 %, launches grew by 100 %, allowed 0 %"]


def test_a_device_that_these_rules_lack_is_said() -> None:
    report = aged(TWO)
    report.graph, report.device.name = to_data(TWO), "mine"
    assert judge_again(report, Path("report.json"), RULES) == "these rules know no device mine"


def test_a_comparison_says_that_others_judged() -> None:
    first, *_ = compare(aged(TWO), report_of_graph(TWO))
    assert first.startswith("not the same judge: h200 by fusion-advisor 0.0.1 with rules 00000000")
