"""The report's JSON Schema as the repository publishes it: `schemas/report-1.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fusion_advisor.ci.findings import Policy, review
from fusion_advisor.report.formats import render
from fusion_advisor.report.schema import SCHEMA_VERSION, json_schema

from .test_report import FIELDS, TOP_LEVEL, mixed, report_of

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "schemas" / f"report-{SCHEMA_VERSION}.json"
GOLDEN = ROOT / "tests" / "cpu" / "golden" / "norm_silu_report.json"


def holds(content: Any) -> None:
    schema = json.loads(FILE.read_text(encoding="utf-8"))
    jsonschema.validate(content, schema, jsonschema.Draft202012Validator)


def test_what_is_published_is_what_reports_are(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--regen"):
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
    published = json.loads(FILE.read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(published)
    assert published == json_schema(), f"{FILE} is stale: run pytest with --regen"


def test_reports_hold_to_it() -> None:
    report = mixed()
    report.review = review(report, Policy(), Path("/"), ("base", mixed()))
    for one in (report, mixed(), report_of("aten.cos.default")):
        holds(json.loads(render(one, "json")))
    holds(json.loads(GOLDEN.read_text(encoding="utf-8")))


def test_readers_may_meet_what_they_do_not_know() -> None:
    content = json.loads(render(mixed(), "json"))
    content["later"] = 1
    content["groups"][0]["verdict"] = "perhaps"
    holds(content)


@pytest.mark.parametrize("path", ["schema_version", "groups.0.verdict", "totals.time_us"])
def test_a_value_of_another_type_does_not_hold(path: str) -> None:
    content = json.loads(render(mixed(), "json"))
    *steps, name = path.split(".")
    row = content
    for step in steps:
        row = row[int(step)] if step.isdigit() else row[step]
    row[name] = {"other": 1}
    with pytest.raises(jsonschema.ValidationError):
        holds(content)


def test_every_field_of_the_contract_is_in_it() -> None:
    schema = json_schema()
    assert set(TOP_LEVEL.split()) <= set(schema["properties"])
    known = {name for row in schema["$defs"].values() for name in row.get("properties", {})}
    assert {name for names in FIELDS.values() for name in names.split()} <= known
