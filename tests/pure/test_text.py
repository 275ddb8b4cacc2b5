"""The report for a terminal: what one reads first fits one screen, the rest is there on request."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console, RenderableType

from fusion_advisor.report.formats import wording
from fusion_advisor.report.formats.text import LINES, document, several
from fusion_advisor.report.schema import AdviceRow, BenchRow, CheckRow, LineRow, Report

from ..sample_reports import layered
from .test_report import mixed


def printed(shown: RenderableType, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def crowded() -> Report:
    """A report with much of everything, and everything long."""
    report = mixed()
    long = "a_name_that_does_not_end_" * 20
    (group,), (advice,) = report.groups, report.advice
    candidate = group.model_copy(update={"verdict": "reject", "instances": [["elsewhere"]]})
    report.groups = [group.model_copy(update={"id": f"g{n}"}) for n in range(300)]
    report.candidates = [candidate.model_copy(update={"id": f"c{n}"}) for n in range(300)]
    report.advice = [advice.model_copy(update={"message": long, "id": f"a{n}"}) for n in range(50)]
    report.model.source = report.totals.condition = report.device.title = long
    report.model.graph_breaks = report.not_run = report.scenario.defaults = [long] * 50
    report.scenario.shapes = {f"{long}{n}": "4x4:float32" for n in range(50)}
    report.bench = BenchRow(
        machine={}, copy_bandwidth=1.0, matmul={}, launch_us=1.0, host_launch_us=1.0, model=[],
        recommended=long, why=long, complete=False,
    )  # fmt: skip
    return report


@pytest.mark.parametrize("width", [60, 80, 100, 240])
@pytest.mark.parametrize("report", [mixed(), crowded()], ids=["mixed", "crowded"])
def test_a_summary_fits_one_screen(report: Report, width: int) -> None:
    lines = printed(document(report, top=1000), width)
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= width
    reports = {f"call {n}": report for n in range(30)}
    said = [f"{name}: a line of it" for name in reports]
    lines = printed(several(dict.fromkeys(reports, 1.0), reports, [*said, "all: one"]), width)
    assert len(lines) <= LINES


def test_a_rejected_region_that_the_whole_interval_calls_faster_is_named() -> None:
    report = mixed()
    (group,) = report.groups
    planned = group.kernel.model_copy(update={"schedule": "flat"})
    for low, said in ((1.1, "; faster over the whole interval: c1"), (0.9, "")):
        predicted = group.predicted.model_copy(update={"interval": (low, 1.6)})
        update = {"id": "c1", "verdict": "reject", "instances": [["elsewhere"]]}
        update |= {"predicted": predicted, "kernel": planned}
        report.candidates = [group.model_copy(update=update)]
        assert wording.rejections(report).partition(")")[2] == said


def test_a_kernel_that_no_check_could_run_has_not_failed() -> None:
    """Where a graph pins sizes that no interpreter gets through, nothing is known to be wrong."""
    (group,) = mixed().groups

    def said(*shapes: str) -> str:
        check = CheckRow(
            where="interpreter", shapes=[*shapes], seeds=6, max_error=0.0, eager_error=0.0,
            tolerance=0.0, passed=False, failure="why",
        )  # fmt: skip
        kernel = group.kernel.model_copy(update={"check": check, "file": "kernels/cos.py"})
        return wording.remedy(group.model_copy(update={"kernel": kernel, "route": "triton"}))

    assert said() == "kernels/cos.py (not checked)"
    assert said("4x4 float32") == "kernels/cos.py (check FAILED)"


def test_the_summary_says_what_was_asked_and_what_it_comes_to() -> None:
    report = mixed()
    text = "\n".join(printed(document(report)))
    assert "model.py on NVIDIA H200" in text
    assert "eval mode, forward; float32" in text
    assert text.count("assumed: device=h200") == 1
    assert "assumed" not in "\n".join(printed(document(report, assumed=False)))
    for name, us, share, moved in wording.bottlenecks(report):
        said = [line.split() for line in text.splitlines() if line.split()[:1] == [name]]
        figures = f"{name} {wording.time(us)} {wording.percent(share)} {wording.size(moved)}"
        assert not us or said[0][: len(figures.split())] == figures.split()
    assert "no committed measurement" not in text
    assert "n3 = " not in text, "a call of a kernel by the names of the graph's nodes"


def ids(lines: Sequence[str]) -> list[str]:
    """Of what to do, in the order of the list."""
    words = [line.split() for line in lines]
    return [word for row in words for word in row[:6] if word[:1] in "ga" and word[1:].isdigit()]


def test_fusions_and_advice_are_one_list_by_what_they_save() -> None:
    report = mixed()
    (group,) = report.groups
    saved = group.impact.saved_us_total
    row = AdviceRow(code="launch-bound", message="capture a graph", saved_us=saved * 2, sources=[])
    report.advice = [
        row.model_copy(update={"id": "a1"}),
        row.model_copy(update={"id": "a2", "saved_us": saved / 2}),
        row.model_copy(update={"id": "a3", "saved_us": None}),
    ]
    assert [todo.row.id for todo in wording.todo(report)] == ["a1", "g1", "a2", "a3"]
    assert ids(printed(document(report))) == ["a1", "g1", "a2", "a3"]


def test_what_several_scenarios_have_in_common_is_one_thing_to_do() -> None:
    reports = {"short": mixed(), "long": mixed()}
    lines = printed(several({"short": 2.0, "long": 1.0}, reports, ["short: x", "long: y", "all"]))
    text = "\n".join(lines)
    (group,) = reports["long"].groups
    assert f"{wording.time(3 * group.impact.saved_us_total)} " in text
    assert f"{wording.named(group)}, in 2 scenarios" in text
    assert ids(lines) == ["g1", "a1"]
    for name, us, share, moved in wording.bottlenecks(reports["long"]):
        figures = [name, wording.time(3 * us), wording.percent(share), wording.size(3 * moved)]
        told = " ".join(figures).split()
        assert not us or any(line.split()[: len(told)] == told for line in lines)


def test_all_the_rest_is_there_on_request() -> None:
    report = layered(2)
    report.advice = mixed().advice
    short, long = (printed(document(report, verbose=verbose)) for verbose in (False, True))
    told = [line for line in long if line.strip().startswith(("holds: ", "fails: ", "unknown: "))]
    gates = sum(len(row.gates) for row in (*report.groups, *wording.independent_candidates(report)))
    assert len(told) == gates
    assert not [line for line in short if "holds: " in line]
    for title in (
        f"Fuse: {len(report.groups)}",
        "Advice",
        "Not in a group, by reason",
        "Not modelled",
    ):
        assert title in long
        assert title not in short
    (advice,) = report.advice
    assert all(any(fact in line for line in long) for fact in advice.evidence)


def test_a_line_of_source_is_named_without_its_folders_in_the_summary_alone() -> None:
    report = mixed()
    report.groups[0].sources = [LineRow(file="/site-packages/deep/down/modeling.py", line=62)]
    short, long = (printed(document(report, verbose=verbose)) for verbose in (False, True))
    assert any("at modeling.py:62" in line for line in short)
    assert not any("/deep/" in line for line in short)
    assert any("/site-packages/deep/down/modeling.py:62" in line for line in long)
