"""Report as SARIF 2.1.0, for code scanning: a result for each finding that is new.

Without a baseline every finding is a result. A finding that comments or the configuration ask to
ignore is suppressed, not left out.
"""

from __future__ import annotations

import json
import re
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import quote

from fusion_advisor.report.formats import wording
from fusion_advisor.report.schema import (
    AdviceRow,
    FindingRow,
    GroupRow,
    IgnoredRow,
    Report,
    SourceRow,
)

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
ROOT = "SRCROOT"
"""Placeholder for the repository's root, which the reader of the paths fills in."""

Json = dict[str, Any]


def render(report: Report) -> str:
    """Render one run, with a category of its own for each model, device and scenario."""
    shown = [row for row in findings(report) if row.state != "known"]
    codes = list(dict.fromkeys(row.code for row in shown))
    driver: Json = {
        "name": report.tool.name,
        "semanticVersion": report.tool.version,
        "rules": [_rule(report, code) for code in codes],
    }
    run: Json = {
        "tool": {"driver": driver},
        "automationDetails": {"id": _category(report)},
        "originalUriBaseIds": {ROOT: {"description": {"text": "The root of the repository."}}},
        "results": [_result(row, codes.index(row.code), report.subject(row)) for row in shown],
    }
    if report.faults:
        run["invocations"] = [_invocation(report)]
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1) + "\n"


def _invocation(report: Report) -> Json:
    """Invocation of a run that ended, with the regions that it did not analyse."""
    said = f"{wording.faults(report)}."
    notes = [{"level": "error", "message": {"text": _plain(said)}}]
    return {"executionSuccessful": True, "toolExecutionNotifications": notes}


def findings(report: Report) -> list[FindingRow]:
    """Findings that reviewers see; without a review all rows that save time, by the paths
    in the report."""
    if report.review:
        return report.review.findings
    return [FindingRow.about(row, row.sources) for row in report.possible_findings]


def _category(report: Report) -> str:
    """Category of the run, where runs of one category replace each other; it ends where the id of
    the run would begin."""
    setting = f"{report.device.name}, {wording.scenario(report)}"
    return f"{report.tool.name}/{report.model.source}/{setting}/"


def _rule(report: Report, code: str) -> Json:
    """Rule of a gate or a kind of advice, in the words of `explain`."""
    text = report.rules.explained.get(code, code)
    title, _, body = text.partition("\n")
    return {
        "id": code,
        "name": title.partition(":")[0].removeprefix(code).strip() or code,
        "shortDescription": {"text": title},
        "fullDescription": {"text": " ".join(body.split()) or title},
        "help": {"text": text, "markdown": f"```text\n{text}\n```"},
        "defaultConfiguration": {"level": "warning"},
        "properties": {"tags": ["performance"], "precision": "high"},
    }


def _result(row: FindingRow, rule: int, subject: GroupRow | AdviceRow) -> Json:
    places = [_location(source) for source in row.sources]
    result: Json = {
        "ruleId": row.code,
        "ruleIndex": rule,
        **(_grouped(row, subject) if isinstance(subject, GroupRow) else _advised(row, subject)),
        "locations": places[:1],
        "relatedLocations": [{"id": n, **place} for n, place in enumerate(places[1:], 1)],
        "partialFingerprints": {
            "primaryLocationLineHash": subject.fingerprint,
            "computation/v1": subject.fingerprint,
        },
    }
    if row.state:
        result["baselineState"] = row.state
    if row.ignored:
        result["suppressions"] = [_suppression(row.ignored)]
    return result


def _grouped(row: FindingRow, group: GroupRow) -> Json:
    return {
        "level": "warning" if group.predicted.worthwhile else "note",
        "message": {"text": _message(row, group)},
        "properties": {"savedMicroseconds": group.impact.saved_us_total, "idiom": group.pattern},
    }


def _advised(row: FindingRow, advice: AdviceRow) -> Json:
    said = wording.cost(row)
    said = f"{said}: {advice.message}" if said else wording.advice(advice)
    facts = "".join(f" {fact}." for fact in advice.evidence)
    return {
        "level": "warning",
        "message": {"text": _plain(f"{advice.code}: {said}.{facts}")},
        "properties": {"savedMicroseconds": advice.saved_us},
    }


def _message(row: FindingRow, group: GroupRow) -> str:
    """Message of a finding: what it is, its cost or else its possible saving, and the action."""
    share = wording.percent(group.impact.share)
    saves = f"{wording.launches(group)} would save {wording.gain(group)}, {share} of the step"
    if cost := wording.cost(row):
        saves = f"{cost}. {wording.launches(group)} would do"
    text = (
        f"{wording.computes(group)}: {saves}. {wording.gate(group.deciding)}. {group.action.text}"
    )
    return _plain(text)


def _plain(text: str) -> str:
    """Escape a text so that no bracket begins a link."""
    return re.sub(r"[\[\]\\]", r"\\\g<0>", text)


def _location(source: SourceRow) -> Json:
    path = PurePosixPath(source.file)
    place: Json = (
        {"uri": f"file://{quote(source.file)}"}
        if path.is_absolute()
        else {"uri": quote(source.file), "uriBaseId": ROOT}
    )
    region = {"startLine": source.line}
    return {"physicalLocation": {"artifactLocation": place, "region": region}}


def _suppression(ignored: IgnoredRow) -> Json:
    suppression: Json = {
        "kind": "inSource" if ignored.source else "external",
        "justification": ignored.reason,
    }
    return {**suppression, "location": _location(ignored.source)} if ignored.source else suppression
