"""The file of a recording: what is in it, how MODEL names it, and what the settings make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.ci.configuration import load_settings
from fusion_advisor.ir.graph import Graph, Node, Ref, Tensor
from fusion_advisor.ir.recording_file import (
    LeftOut,
    RecordedCall,
    Recording,
    names_json,
    recorded_graph,
    recording_of,
    write_recording,
)
from fusion_advisor.support.codec import to_data
from fusion_advisor.support.errors import CaptureError, UsageError

GRAPH = Graph(
    (
        Node("x", "input", "input", outputs=(Tensor((4,), (1,), "float32", 0),)),
        Node(
            "y", "aten.sin.default", args=(Ref("x"),), outputs=(Tensor((4,), (1,), "float32", 1),)
        ),
    ),
    (Ref("y"),),
)
DATA = json.loads(json.dumps(to_data(GRAPH)))
FIRST = RecordedCall("call-1", 5, 1, "eval", False, "bfloat16", {"args": []}, DATA)
SECOND = RecordedCall("call-2", 2, 1, "train", True, None, {"args": []}, DATA)
FAILED = RecordedCall("call-3", 1, 1, "eval", True, None, {"args": []}, None, "it raised")


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """A recording `r.json` in the working directory."""
    monkeypatch.chdir(tmp_path)
    made = Recording(
        {"name": "fusion-advisor"},
        "Model",
        (FIRST, SECOND, FAILED),
        LeftOut(3, 4),
        {},
        Path("r.json"),
    )
    write_recording(made)
    return made


def test_a_recording_is_read_as_it_was_written(recorded: Recording) -> None:
    assert recording_of("r.json") == recorded
    assert recorded.total == 12
    assert [*recorded.captured] == ["call-1", "call-2"]
    assert recording_of("r.json:call-2") == replace(recorded, only="call-2")


def test_the_graph_says_what_it_is_of(recorded: Recording) -> None:
    graph = recorded_graph("r.json:call-1")
    assert (graph.nodes, graph.source) == (GRAPH.nodes, "r.json:call-1")
    assert graph.assumed == (
        "5 of 12 recorded calls of Model", "mode=eval", "gradients off", "autocast=bfloat16",
        "4 calls were not captured", "could not be captured: call-3: it raised",
    )  # fmt: skip
    with pytest.raises(UsageError, match="several calls; name one of call-1, call-2"):
        recorded_graph("r.json")


@pytest.mark.parametrize(
    ("model", "is_one"),
    [
        ("r.json", True),
        ("r.json:call-1", True),
        ("package.json:Model", False),
        ("hf:config.json", False),
        ("m.py:json", False),
    ],
)
def test_the_form_of_a_model_says_whether_it_is_a_recording(
    recorded: Recording, model: str, is_one: bool
) -> None:
    assert names_json(model) is is_one


def test_without_a_captured_call_there_is_nothing_to_judge(recorded: Recording) -> None:
    write_recording(replace(recorded, calls=(FAILED,)))
    with pytest.raises(
        CaptureError, match=r"r\.json: no call could be captured: call-3: it raised"
    ):
        recording_of("r.json")


def test_the_captured_calls_are_the_scenarios(recorded: Recording) -> None:
    settings = load_settings({"model": "r.json"}, {})
    assert settings.recorded
    first, second = settings.scenarios["call-1"], settings.scenarios["call-2"]
    assert (first.weight, first.scenario.mode, first.scenario.autocast) == (5, "eval", "bfloat16")
    assert (first.scenario.gradients, second.scenario.gradients) == (False, True)
    assert settings.model_in("call-2") == "r.json:call-2"
    assert {one.origin for one in settings.each() if one.path[:2] == ("scenarios", "call-1")} == {
        "r.json", "default",
    }  # fmt: skip


def test_one_call_is_the_only_scenario(recorded: Recording) -> None:
    for settings in (
        load_settings({"model": "r.json:call-2"}, {}),
        load_settings({"model": "r.json"}, {}, "call-2"),
    ):
        assert settings.only == "call-2"
        assert settings.model_in(settings.only) == "r.json:call-2"


def test_of_a_recorded_call_the_weight_alone_can_be_set(recorded: Recording) -> None:
    table = Path("pyproject.toml")
    head = '[tool.fusion-advisor]\nmodel = "r.json"\n[tool.fusion-advisor.scenarios.'
    table.write_text(f"{head}call-1]\nweight = 7\n")
    assert load_settings({}, {}).scenarios["call-1"].weight == 7
    table.write_text(f"{head}call-1]\nbatch = 7\n")
    with pytest.raises(UsageError, match=r"call-1\] batch: the calls in r.json are as they were"):
        load_settings({}, {})
    table.write_text(f"{head}call-9]\nweight = 7\n")
    with pytest.raises(UsageError, match=r"scenarios\] call-9: r.json has call-1, call-2"):
        load_settings({}, {})
    with pytest.raises(UsageError, match=r"--mode: the calls in r.json are as they were recorded"):
        load_settings({"model": "r.json"}, {"mode": "train"}, "call-1")


def test_a_report_is_no_recording(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"schema_version": 1}))
    assert recording_of(str(report)) is None
    assert not load_settings({"model": str(report)}, {}, folder=tmp_path).recorded
    with pytest.raises(UsageError, match="is a report, not a model"):
        recorded_graph(str(report))
