"""`--redact`: a report to show to others, in which no word of the code is left."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.report.formats import FORMATS, render
from fusion_advisor.report.redact import redacted
from fusion_advisor.report.schema import Report, load_report

from .test_cli import QUICK, one_line, run

SECRETS = ("okapi", "zebra", "quagga", "gnu_table", "kudu", "oryx", "eland", "bongo", "impala")
MODEL = """
import torch
from torch import nn


class Quagga(nn.Module):
    def __init__(self):
        super().__init__()
        self.zebra_norm = nn.LayerNorm(256)
        self.bongo = nn.Linear(8, 8)
        self.register_buffer("gnu_table", torch.zeros(256, dtype=torch.float64))

    def forward(self, oryx_ids):
        kudu_rows = self.zebra_norm(oryx_ids * 2)
        # fusion-advisor: ignore[FA401] eland is slow anyway
        kudu_rows = kudu_rows.sigmoid() + self.gnu_table
        return kudu_rows.cumsum(-1).transpose(0, 1).contiguous()


class Impala(nn.Module):
    def __init__(self):
        super().__init__()
        self.quaggas = nn.ModuleList([Quagga(), Quagga()])

    def forward(self, oryx_ids):
        return [quagga(oryx_ids) for quagga in self.quaggas]


def get_inputs():
    return [torch.empty(512, 256)]


Model = Impala
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with words that are in nothing else, and its report."""
    found = tmp_path_factory.mktemp("quaggas")
    (found / ".git").mkdir()
    (found / "okapi.py").write_text(MODEL)
    done = run("analyze", "okapi.py:Impala", "--device", "h200", "--out", "out", "--no-compile",
               cwd=found)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return found


@pytest.fixture
def report(folder: Path) -> Report:
    return load_report(folder / "out" / "report.json")


def words(text: str) -> set[str]:
    return {word for word in SECRETS if word in text.lower()}


@pytest.mark.parametrize("name", FORMATS)
def test_no_word_of_the_code_is_left_in_any_format(report: Report, name: str) -> None:
    assert words(render(report, "json")) == {*SECRETS}, "all of them were there"
    report.graph = {"nodes": []}
    assert words(render(redacted(report), name)) == set()
    assert "/" not in "".join(_files(json.loads(render(redacted(report), "json"))))


def _files(content: Any) -> list[str]:
    if isinstance(content, list):
        return [file for each in content for file in _files(each)]
    if not isinstance(content, dict):
        return []
    own = [content["file"]] if "line" in content else []
    return own + [file for each in content.values() for file in _files(each)]


def test_all_that_is_no_word_of_the_code_stays(report: Report) -> None:
    shown = redacted(report)
    assert shown.totals == report.totals
    assert [node.op for node in shown.nodes] == [node.op for node in report.nodes]
    for one, other in zip(shown.groups, report.groups, strict=True):
        assert (one.pattern, one.fingerprint, one.gates) == (
            other.pattern, other.fingerprint, other.gates,
        )  # fmt: skip
        assert [s.line for s in one.sources] == [s.line for s in other.sources]
        assert (one.instances, one.kernel.text) == (other.instances, None)
    assert {node.module for node in shown.nodes} >= {"m1.0", "m1.1", "m1.0.m2"}, "layers are seen"
    assert {source.file for group in shown.groups for source in group.sources} == {"file1.py"}


def test_names_still_lead_from_one_place_to_the_other(report: Report) -> None:
    shown = redacted(report)
    there = {node.name for node in shown.nodes}
    assert {name for group in shown.groups for name in group.nodes} <= there
    given = {name for node in shown.nodes for name in node.inputs} - there
    assert given
    assert all(re.fullmatch(r"t\d+|x", name) for name in given)


def test_the_commands_redact_what_they_hand_out(folder: Path) -> None:
    done = run("report", "out/report.json", "--format", "html", "--redact", cwd=folder)
    assert (done.returncode, words(done.stdout)) == (0, set())
    options = ("okapi.py:Impala", "--device", "h200", *QUICK, "--redact")
    done = run("analyze", *options, "--json", "-", cwd=folder)
    assert (done.returncode, words(done.stdout)) == (0, set()), done.stderr
    assert "zebra" not in done.stdout
    for more in (("--out", "other"), ("--with-graph",)):
        refused = run("analyze", *options, *more, cwd=folder)
        assert refused.returncode == 2
        assert "--redact: kernels and graphs have the model's names" in one_line(refused)
