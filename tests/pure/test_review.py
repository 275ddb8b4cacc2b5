"""What reviewers are told of a report: comments, configuration, thresholds and a baseline."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.ci.findings import Policy, review, unused_in_all
from fusion_advisor.report.schema import LineRow, NodeRow, Report, ReviewRow, SourceRow
from fusion_advisor.support.errors import UsageError

from .test_report import mixed, report_of

HERE = Path("/repository")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose `src` is the working directory."""
    folder = tmp_path / "src"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def report_at(*lines: int, module: str = "", ops: int = 2) -> Report:
    """One group of launches that stand on these lines of model.py, in one module."""
    report = report_of(*["aten.cos.default"] * ops)
    (group,) = report.groups
    group.sources = [SourceRow(file="model.py", line=line) for line in lines]
    for node in report.nodes:
        node.module = module
        node.source = group.sources[0] if group.sources else None
    return report


def ignored(row: ReviewRow) -> list[str]:
    return [f.ignored.reason for f in row.findings if f.ignored]


def test_every_group_is_a_finding_by_default() -> None:
    report = report_at(4, 5)
    row = review(report, Policy(), Path.cwd())
    assert [(f.group, f.code, f.state, f.ignored) for f in row.findings] == [
        ("g1", "FA401", "", None)
    ]
    assert (row.baseline, row.below, row.unselected, row.unused) == (None, 0, 0, [])


def test_advice_is_a_finding_where_its_gain_is_predicted() -> None:
    report = mixed()
    told = [(f.advice, f.group, f.code) for f in review(report, Policy(), Path.cwd()).findings]
    assert told == [("", "g1", "FA401"), ("a1", "", "hidden-copy")]
    least = Policy(least_us=(report.advice[0].saved_us or 0.0) + 1)
    assert review(report, least, Path.cwd()).below >= 1
    (finding,) = review(report, Policy(select=("hidden-copy",)), Path.cwd()).findings
    assert finding.advice == "a1"
    report.advice[0].saved_us = None
    assert [f.advice for f in review(report, Policy(), Path.cwd()).findings] == [""]


def test_a_comment_sets_advice_aside(sources: Path) -> None:
    report = mixed()
    report.advice[0].sources = [LineRow(file="model.py", line=2)]
    (sources / "model.py").write_text(
        "x\ny.contiguous()  # fusion-advisor: ignore[hidden-copy] once\n"
    )
    row = review(report, Policy(), Path.cwd())
    assert ignored(row) == ["once"]
    assert row.unused == []


def test_advice_that_the_baseline_gives_is_known(sources: Path) -> None:
    for change in ({"fingerprint": "another"}, {"sources": []}):
        old = mixed()
        old.advice = [old.advice[0].model_copy(update=change)]
        (finding,) = (
            f
            for f in review(mixed(), Policy(), Path.cwd(), ("base.json", old)).findings
            if f.advice
        )
        assert finding.state == "known", change


def test_lines_are_seen_from_the_root_of_the_repository(sources: Path) -> None:
    (finding,) = review(report_at(4), Policy(), sources.parent).findings
    assert finding.sources == [SourceRow(file="src/model.py", line=4)]
    (finding,) = review(report_at(4), Policy(), sources / "elsewhere").findings
    assert finding.sources == [SourceRow(file=str(sources / "model.py"), line=4)]


@pytest.mark.parametrize(
    ("model", "files"),
    [
        ("models/small.py:Small", ["src/models/small.py"]),
        ("hf:configs/small.json#AutoModel", ["src/configs/small.json"]),
        ("small.pt2", ["src/small.pt2"]),
        ("package.module:name", []),
    ],
)
def test_a_group_without_a_line_stands_at_the_models_file(
    sources: Path, model: str, files: list[str]
) -> None:
    report = report_at()
    report.model.source = model
    (finding,) = review(report, Policy(), sources.parent).findings
    assert finding.sources == [SourceRow(file=file, line=1) for file in files]


@pytest.mark.parametrize("code", ["FA401", "traffic-saving", "pointwise-chain"])
def test_a_comment_on_one_of_its_lines_ignores_a_group(sources: Path, code: str) -> None:
    text = f"\n\n\nx = 1\ny = 2  # fusion-advisor: ignore[{code}] once a day\n"
    (sources / "model.py").write_text(text)
    row = review(report_at(4, 5), Policy(), sources.parent)
    assert ignored(row) == ["once a day"]
    (finding,) = row.findings
    assert finding.ignored
    assert finding.ignored.source == SourceRow(file="src/model.py", line=5)
    assert row.unused == []


def test_comments_that_hold_for_nothing_are_told(sources: Path) -> None:
    (sources / "model.py").write_text(
        "x = 1  # fusion-advisor: ignore[FA401] another line\n"
        "y = 2  # fusion-advisor: ignore[softmax,FA401] another code\n"
        "z = 3  # fusion-advisor: ignore[FA401]\n"
    )
    row = review(report_at(2, 3), Policy(), sources.parent)
    assert ignored(row) == ["another code"]
    told = [(u.source.line, u.code, u.why.split(":")[0]) for u in row.unused]
    assert told == [
        (1, "FA401", "holds for no finding"),
        (2, "softmax", "holds for no finding"),
        (3, "FA401", "gives no reason"),
    ]


def test_a_comment_that_one_scenario_uses_is_used(sources: Path) -> None:
    (sources / "model.py").write_text(
        "x = 1  # fusion-advisor: ignore[FA401] in decode\n"
        "y = 1  # fusion-advisor: ignore[FA401] in none\n"
    )
    rows = [review(report_at(line), Policy(), sources.parent) for line in (1, 5)]
    assert [u.source.line for u in unused_in_all(rows)] == [2]


def test_codes_are_selected_and_ignored() -> None:
    report = report_at(4)
    assert review(report, Policy(select=("softmax",)), HERE).unselected == 1
    assert review(report, Policy(select=("softmax",)), HERE).findings == []
    assert len(review(report, Policy(select=("FA401",)), HERE).findings) == 1
    row = review(report, Policy(ignore=("pointwise-chain",)), HERE)
    assert ignored(row) == ["ignored by the configuration"]


@pytest.mark.parametrize(
    ("module", "pattern", "holds"),
    [
        ("layers.0.mlp", "layers.*.mlp", True),
        ("layers.0.mlp.act", "layers.*.mlp", True),
        ("layers.0.norm", "layers.*.mlp", False),
        ("layers.0.mlp_norm", "layers.*.mlp", False),
        ("", "*", True),
    ],
)
def test_a_module_is_ignored_with_all_beneath_it(module: str, pattern: str, holds: bool) -> None:
    row = review(report_at(4, module=module), Policy(ignore_in={pattern: ("FA401",)}), HERE)
    assert bool(ignored(row)) is holds
    row = review(report_at(4, module=module), Policy(ignore_in={pattern: ("softmax",)}), HERE)
    assert not ignored(row)


def test_a_group_that_reaches_out_of_a_module_is_told() -> None:
    report = report_at(4, module="head")
    nodes: list[NodeRow] = report.nodes
    nodes[0].module = "body"
    assert not ignored(review(report, Policy(ignore_in={"head": ("FA401",)}), HERE))


def test_what_saves_too_little_is_no_finding() -> None:
    report = report_at(4)
    impact = report.groups[0].impact
    least = Policy(least_us=impact.saved_us_total, least_share=impact.share)
    assert review(report, least, HERE).below == 0
    for policy in (
        Policy(least_us=impact.saved_us_total * 1.01),
        Policy(least_share=impact.share * 1.01),
    ):
        row = review(report, policy, HERE)
        assert (row.findings, row.below) == ([], 1)


def test_what_the_baseline_accepts_is_known() -> None:
    report = report_at(4)
    row = review(report, Policy(), HERE, ("base.json", report_at(400)))
    assert [f.state for f in row.findings] == ["known"]
    assert row.baseline == "base.json"
    other = report_at(90, ops=3)
    assert [f.state for f in review(other, Policy(), HERE, ("b", report)).findings] == ["new"]


def test_a_group_whose_shapes_changed_in_place_is_known() -> None:
    old, new = report_at(4, ops=2), report_at(4, ops=3)
    assert old.groups[0].fingerprint != new.groups[0].fingerprint
    assert [f.state for f in review(new, Policy(), HERE, ("b", old)).findings] == ["known"]


def test_what_was_rejected_before_is_new() -> None:
    old, new = report_at(4), report_at(4)
    old.candidates, old.groups = old.groups, []
    old.candidates[0].verdict = "reject"
    assert [f.state for f in review(new, Policy(), HERE, ("b", old)).findings] == ["new"]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("device.name", "a100", "it is of a100, and this report of h200"),
        ("scenario.phase", "decode", "its phase is decode, and that of this report forward"),
    ],
)
def test_a_baseline_that_was_judged_otherwise_is_refused(
    field: str, value: str, message: str
) -> None:
    old = report_at(4)
    row, name = field.split(".")
    setattr(getattr(old, row), name, value)
    with pytest.raises(UsageError, match=f"^baseline base.json: {message}.*; make it again"):
        review(report_at(4), Policy(), HERE, ("base.json", old))


@pytest.mark.parametrize(
    ("field", "value"), [("rules.hash", "0123456789"), ("tool.version", "0.0")]
)
def test_nothing_is_new_beside_what_another_judge_made(field: str, value: str) -> None:
    old = report_at(90, ops=3)
    row, name = field.split(".")
    setattr(getattr(old, row), name, value)
    (finding,) = review(report_at(4), Policy(), HERE, ("base.json", old)).findings
    assert finding.state == ""
