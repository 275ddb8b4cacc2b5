"""The report for code scanning: valid SARIF, at the user's lines, without repeating itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fusion_advisor.report.formats import render
from fusion_advisor.report.schema import (
    FindingRow,
    IgnoredRow,
    Report,
    ReviewRow,
    SourceRow,
)
from fusion_advisor.rulebook.explain import entry, explanation
from fusion_advisor.rulebook.load import load_rulebook

from .test_report import mixed

SCHEMA = json.loads((Path(__file__).parent / "schemas" / "sarif-2.1.0.json").read_text())
LINES = [SourceRow(file="src/my model.py", line=3), SourceRow(file="src/my model.py", line=7)]
COMMENT = IgnoredRow(
    code="FA401", reason="fused by hand", source=SourceRow(file="src/my model.py", line=3)
)
SETTING = IgnoredRow(code="FA401", reason="ignored by the configuration", source=None)


def reviewed(*findings: tuple[str, IgnoredRow | None]) -> Report:
    """A report whose one group is a finding with each of these states and ignores."""
    report = mixed()
    report.review = ReviewRow(
        baseline="base.json",
        findings=[
            FindingRow(group="g1", code="FA401", state=state, ignored=ignored, sources=LINES)
            for state, ignored in findings
        ],
        below=0,
        unselected=0,
        unused=[],
    )
    return report


def run_of(report: Report) -> dict[str, Any]:
    """The one run of what is rendered, which holds to the schema."""
    content = json.loads(render(report, "sarif"))
    jsonschema.validate(content, SCHEMA, jsonschema.Draft7Validator)
    (run,) = content["runs"]
    return run


def test_the_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"version": "2.1.0", "runs": [{}]}, SCHEMA)


def test_what_is_new_is_a_result_and_what_is_known_is_none() -> None:
    run = run_of(reviewed(("new", None), ("known", None), ("known", COMMENT)))
    (result,) = run["results"]
    assert (result["ruleId"], result["baselineState"]) == ("FA401", "new")
    assert result["message"]["text"].startswith("cos + add: 3 kernels in one would save ")
    assert run_of(reviewed())["results"] == []


def test_what_is_new_says_what_it_costs_and_not_what_the_place_could_save() -> None:
    report = reviewed(("new", None))
    assert report.review
    report.review.findings[0].cost_us = 600.0
    (result,) = run_of(report)["results"]
    said = result["message"]["text"]
    assert said.startswith(
        "cos + add: costs 600 µs more than the baseline. 3 kernels in one would do"
    )
    assert "save" not in said.replace("traffic-saving", "")
    report.review.findings[0] = FindingRow(
        group="", advice="a1", code="hidden-copy", state="new", ignored=None, sources=LINES,
        cost_us=-1.0,
    )  # fmt: skip
    (result,) = run_of(report)["results"]
    assert result["message"]["text"].startswith("hidden-copy: costs no more than the baseline: ")


def test_a_result_stands_at_the_users_lines() -> None:
    (result,) = run_of(reviewed(("new", None)))["results"]
    places = [*result["locations"], *result["relatedLocations"]]
    assert [p["physicalLocation"]["region"]["startLine"] for p in places] == [3, 7]
    assert {json.dumps(p["physicalLocation"]["artifactLocation"]) for p in places} == {
        '{"uri": "src/my%20model.py", "uriBaseId": "SRCROOT"}'
    }


def test_a_file_outside_the_repository_has_a_whole_uri() -> None:
    report = mixed()
    result, advice = run_of(report)["results"]
    assert advice["ruleId"] == "hidden-copy"
    place = result["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "file:///elsewhere/model.py"}
    assert "baselineState" not in result


def test_the_rules_help_is_what_explain_says() -> None:
    run = run_of(reviewed(("new", None)))
    (rule,) = run["tool"]["driver"]["rules"]
    rulebook = load_rulebook()
    text = explanation(rulebook, entry(rulebook, "FA401"))
    assert rule["id"] == "FA401"
    assert rule["help"]["text"] == text
    assert text in rule["help"]["markdown"]
    assert rule["shortDescription"]["text"] == text.splitlines()[0]
    assert run["results"][0]["ruleIndex"] == 0


def test_advice_is_a_result_of_its_own_rule() -> None:
    report = mixed()
    run = run_of(report)
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    result = run["results"][1]
    assert rules["hidden-copy"]["name"] == "hidden-copy"
    assert result["message"]["text"].startswith("hidden-copy: up to ")
    assert result["partialFingerprints"]["computation/v1"] == report.advice[0].fingerprint
    assert result["properties"]["savedMicroseconds"] == report.advice[0].saved_us


def test_what_is_ignored_is_suppressed() -> None:
    by_comment, by_setting = run_of(reviewed(("new", COMMENT), ("new", SETTING)))["results"]
    (suppression,) = by_comment["suppressions"]
    assert (suppression["kind"], suppression["justification"]) == ("inSource", "fused by hand")
    assert suppression["location"]["physicalLocation"]["region"] == {"startLine": 3}
    (suppression,) = by_setting["suppressions"]
    assert suppression == {"kind": "external", "justification": "ignored by the configuration"}


def test_a_fingerprint_is_the_computations() -> None:
    report = reviewed(("new", None))
    (result,) = run_of(report)["results"]
    assert result["partialFingerprints"]["primaryLocationLineHash"] == report.groups[0].fingerprint
    report.review.findings[0].sources = LINES[1:]  # type: ignore[union-attr]
    (moved,) = run_of(report)["results"]
    assert moved["partialFingerprints"] == result["partialFingerprints"]


def test_scenarios_are_categories_of_their_own() -> None:
    one, other = mixed(), mixed()
    other.scenario.phase = "decode"
    ids = [run_of(report)["automationDetails"]["id"] for report in (one, other)]
    assert len(set(ids)) == 2
    assert all(name.endswith("/") for name in ids)


def test_a_message_makes_no_links() -> None:
    report = reviewed(("new", None))
    report.groups[0].action.text = "see [here](http://x) \\"
    (result,) = run_of(report)["results"]
    assert r"see \[here\](http://x) \\" in result["message"]["text"]


def test_where_the_time_model_expects_no_gain_it_is_a_note() -> None:
    report = reviewed(("new", None))
    report.groups[0].predicted.worthwhile = False
    assert run_of(report)["results"][0]["level"] == "note"


def test_advice_of_an_earlier_version_which_has_no_id_is_no_result() -> None:
    report = mixed()
    for row in report.advice:
        row.id = ""
    codes = {row.code for row in report.advice}
    assert not codes & {result["ruleId"] for result in run_of(report)["results"]}
