"""The report as a comment on a pull request: within GitHub's limit, and nothing but a text."""

from __future__ import annotations

from dataclasses import replace

import pytest
from markdown_it import MarkdownIt

from fusion_advisor.report.formats import render
from fusion_advisor.report.formats.markdown import LIMIT
from fusion_advisor.report.schema import Report, SourceRow

from .test_report import mixed

HOSTILE = (
    "<script>alert(1)</script> | `x` ``y`` *a* [b](javascript:c) @team\n\n# h \\| \u202e www.d.e"
)


def hostile() -> Report:
    """A report in which every string that a model can choose is somebody's joke."""
    report = mixed()
    report.model.source = HOSTILE
    report.scenario.defaults = [HOSTILE]
    for row in (*report.groups, *report.candidates):
        row.pattern = row.computes = row.layers = row.action.code = row.action.text = (
            row.kernel.why
        ) = HOSTILE
        row.sources = [SourceRow(file=HOSTILE, line=1)]
        row.gates = [replace(gate, why=HOSTILE) for gate in row.gates]
    for row in report.ungrouped:
        row.reason = HOSTILE
    for row in report.advice:
        row.message = HOSTILE
    return report


def page(text: str) -> str:
    return MarkdownIt("commonmark").enable("table").render(text)


def test_a_string_of_the_model_is_a_text() -> None:
    text = render(hostile(), "md")
    shown = page(text)
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown
    assert "<em>" not in shown
    assert "<a " not in shown
    assert "<h1>h" not in shown
    assert "U+202E" in shown


def test_nobody_is_mentioned_but_in_code() -> None:
    tokens = MarkdownIt("commonmark").enable("table").parse(render(hostile(), "md"))
    words = [child for token in tokens for child in token.children or ()]
    mentions = {child.type for child in words if "@team" in child.content}
    assert mentions == {"code_inline"}
    assert any("@\u200bteam" in child.content for child in words)


@pytest.mark.parametrize("report", [mixed(), hostile()], ids=["mixed", "hostile"])
def test_every_row_has_the_cells_of_its_table(report: Report) -> None:
    shown = page(render(report, "md"))
    tables = shown.split("<table>")[1:]
    assert len(tables) >= 5
    for table in tables:
        rows = table.split("</table>")[0].split("<tr>")[1:]
        assert len({row.count("<td") + row.count("<th") for row in rows}) == 1


def test_the_detail_is_folded() -> None:
    text = render(mixed(), "md")
    open_part = text.split("<details>")[0]
    assert "cos + add at model.py:1" in open_part
    assert "FA401" not in open_part
    assert text.count("<details>") == text.count("</details>") >= 4


@pytest.mark.parametrize("count", [1, 60, 3000])
@pytest.mark.parametrize("said", ["x", "µ" * 10_000], ids=["short", "long"])
def test_a_comment_stays_within_the_limit(count: int, said: str) -> None:
    report = mixed()
    report.model.source = report.device.title = said
    (group,) = report.groups
    group.action.code = group.computes = said
    group.gates[0] = replace(group.gates[0], why=said)
    report.groups = [group.model_copy(update={"id": f"g{n}"}) for n in range(count)]
    report.candidates = [group.model_copy(update={"id": f"c{n}"}) for n in range(count)]
    report.advice = report.advice * count
    text = render(report, "md")
    assert len(text.encode()) <= LIMIT
    if count > 50:
        assert "more in the JSON report" in text
