"""A fault of ours in one region is that region's reason: the report of the model stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fusion_advisor.advice import run as advise
from fusion_advisor.cli.app import app
from fusion_advisor.fusion import decide
from fusion_advisor.fusion import findings as identify
from fusion_advisor.fusion import library_match as framework
from fusion_advisor.workflows import analyze as pipeline

MODEL = """
import torch
from torch import nn
from torch.nn import functional

class Model(nn.Module):
    def forward(self, x, y):
        a = functional.softmax(x * 2.0, -1)
        return a, torch.tanh(y.sin() + 1.0).cumsum(0)

def get_inputs():
    return [torch.randn(512, 1024), torch.randn(2048, 96)]

def get_init_inputs():
    return []
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    return str(file)


def run(model: str, *options: str) -> Any:
    quick = ("--device", "h200", "--no-verify", "--no-compile", "--no-cache")
    words = ["analyze", model, *quick, *options]
    return CliRunner().invoke(app, words, standalone_mode=False, catch_exceptions=False)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no such luck")


def only_softmax(original: Any) -> Any:
    """Fails where a softmax is among the launches."""

    def measure(subject: Any) -> Any:
        if any("softmax" in subject.flow.nodes[i].op for i in subject.launches):
            raise ZeroDivisionError("of this region alone")
        return original(subject)

    return measure


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", ["gate", "form", "plan", "times", "name", "mark", "op", "kernel"])
def test_a_region_that_fails_costs_that_region_alone(
    model: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match stage:
        case "gate":
            gates = {**decide.GATES}
            gates["on-chip"] = only_softmax(gates["on-chip"])
            monkeypatch.setattr(decide, "GATES", gates)
        case "form":
            monkeypatch.setattr(decide, "lower_region", broken)
        case "plan":
            monkeypatch.setattr(decide, "plan", broken)
        case "times":
            monkeypatch.setattr(decide, "fused_of", broken)
        case "name":
            monkeypatch.setattr(identify, "name_of", broken)
        case "mark":
            monkeypatch.setattr(identify, "fingerprint", broken)
        case "op":
            monkeypatch.setattr(identify, "exact", broken)
        case _:
            monkeypatch.setattr(pipeline, "emit_group", broken)
    done = run(model, "--out", str(tmp_path / "out"))
    assert done.return_value == 0, done.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    count = report["totals"]["faults"]
    assert count == len(report["faults"]) > 0
    said = "not analysed: fault of ours: a fault of fusion-advisor at test"
    for file in ("report.md", "report.sarif"):
        assert said in (tmp_path / "out" / file).read_text(), file
    assert "not analysed" in done.output
    if stage == "gate":
        (fault,) = report["faults"]
        assert any("softmax" in name for name in fault["nodes"])
        (group,) = report["groups"]
        assert not any("softmax" in name for name in group["nodes"])
        reason = {row["node"]: row["reason"] for row in report["ungrouped"]}
        assert any("of this region alone" in text for text in reason.values())


def test_a_run_may_be_made_to_fail_for_a_fault(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identify, "exact", broken)
    assert run(model).return_value == 0
    failed = run(model, "--fail-on", "fault")
    assert failed.return_value == 1
    assert "not analysed: fault of ours" in failed.output


def test_a_strict_run_ends_with_the_fault(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identify, "exact", broken)
    with pytest.raises(RuntimeError, match="no such luck"):
        run(model, "--strict")


def test_advice_that_fails_leaves_other_advice(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = advise.Advice("told", "something else", 1.0, (), ())
    monkeypatch.setattr(advise, "KINDS", {"broken": broken, "told": lambda model: [told]})
    done = run(model)
    assert "something else" in done.output
    assert "1 region not analysed" in done.output


def test_no_fault_is_told_of_where_there_is_none(model: str) -> None:
    done = run(model, "--fail-on", "fault", "--json", "-")
    assert done.return_value == 0
    assert "not analysed" not in done.stderr
    assert framework.exact is identify.exact
