"""What pyproject.toml sets, what options set over it, and where each value is from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.ci.configuration import Settings, load_settings
from fusion_advisor.ir.scenario import InputSpec
from fusion_advisor.support.errors import UsageError

TABLE = """
[project]
name = "somebody's"

[tool.fusion-advisor]
model = "models/small.py:Small"
device = "a100-80gb"
rules = ["mine.toml"]
ignore = ["FA401"]
baseline = "base"
fail-on = ["new", "coverage=0.9"]

[tool.fusion-advisor.thresholds]
saved-us = 5

[tool.fusion-advisor.ignore-in]
"layers.*.mlp" = ["softmax"]

[tool.fusion-advisor.scenarios.prefill]
dtype = "bf16"
seq = 2048

[tool.fusion-advisor.scenarios.decode]
weight = 100
mode = "train"
input = ["x=4x128:int64"]
"""


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git working tree, whose root is the working directory."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "models").mkdir()
    for name in ("models/small.py", "mine.toml", "base"):
        (tmp_path / name).touch()
    (tmp_path / "pyproject.toml").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def origins(settings: Settings) -> dict[str, str]:
    return {".".join(setting.path): setting.origin for setting in settings.each()}


def test_without_a_table_everything_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.ruff]\n")
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = load_settings({}, {})
    assert set(origins(settings).values()) == {"default"}
    assert settings.only == "default"
    assert settings.scenarios["default"].scenario.mode == "eval"
    with pytest.raises(UsageError, match="MODEL is missing"):
        _ = settings.model


@pytest.mark.usefixtures("repository")
def test_the_table_sets_the_model_and_its_scenarios() -> None:
    settings = load_settings({}, {})
    assert settings.model == "models/small.py:Small"
    assert settings.rules == (Path("mine.toml"),)
    assert settings.values.thresholds.saved_us == 5
    assert settings.values.ignore_in == {"layers.*.mlp": ["softmax"]}
    prefill, decode = settings.scenarios.values()
    assert (prefill.weight, decode.weight) == (1, 100)
    assert (prefill.scenario.dtype, prefill.scenario.seq) == ("bfloat16", 2048)
    assert decode.scenario.mode == "train"
    assert decode.scenario.inputs == (InputSpec("x", (4, 128), "int64"),)


@pytest.mark.usefixtures("repository")
def test_every_value_has_its_origin() -> None:
    found = origins(load_settings({"device": "h200"}, {"batch": 4}))
    assert found["model"] == "pyproject.toml [tool.fusion-advisor]"
    assert found["device"] == "--device"
    assert found["thresholds.saved-us"] == "pyproject.toml [tool.fusion-advisor.thresholds]"
    assert found["thresholds.share"] == "default"
    table = "pyproject.toml [tool.fusion-advisor.scenarios.prefill]"
    assert found["scenarios.prefill.seq"] == table
    assert found["scenarios.prefill.batch"] == found["scenarios.decode.batch"] == "--batch"
    assert found["ignore-in.layers.*.mlp"] == "pyproject.toml [tool.fusion-advisor.ignore-in]"


@pytest.mark.usefixtures("repository")
def test_an_option_holds_in_every_scenario() -> None:
    settings = load_settings({"fail-on": ["accepted"]}, {"seq": 16})
    assert [table.seq for table in settings.scenarios.values()] == [16, 16]
    assert settings.values.fail_on == ["accepted"]
    assert settings.values.device == "a100-80gb"


@pytest.mark.usefixtures("repository")
def test_a_scenario_is_chosen_by_its_name() -> None:
    assert list(load_settings({}, {}, "decode").scenarios) == ["decode"]
    assert load_settings({}, {}, "decode").only == "decode"
    with pytest.raises(UsageError, match="--scenario is missing: one of prefill, decode"):
        _ = load_settings({}, {}).only
    with pytest.raises(UsageError, match="--scenario 'rain': known: prefill, decode"):
        load_settings({}, {}, "rain")


@pytest.mark.usefixtures("repository")
def test_another_model_has_none_of_the_tables_scenarios_and_baseline() -> None:
    other = load_settings({"model": "other.py"}, {})
    assert (other.model, list(other.scenarios)) == ("other.py", ["default"])
    assert other.values.baseline is None
    assert other.values.device == "a100-80gb"
    same = load_settings({"model": "./models/small.py:Small"}, {})
    assert list(same.scenarios) == ["prefill", "decode"]
    chosen = load_settings({"model": "other.py"}, {}, "decode")
    assert chosen.scenarios["decode"].weight == 100


def test_paths_are_seen_from_the_pyproject(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "models")
    settings = load_settings({}, {})
    assert settings.model == "small.py:Small"
    assert settings.rules == (Path("../mine.toml"),)
    assert settings.values.baseline == "../base"
    assert origins(settings)["device"] == "../pyproject.toml [tool.fusion-advisor]"


def test_a_table_beyond_the_working_tree_is_not_read(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "models" / ".git").mkdir()
    monkeypatch.chdir(repository / "models")
    assert load_settings({}, {}).values.device is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "modle = 'x'",
            "pyproject.toml [tool.fusion-advisor]: unknown key 'modle'; expected model",
        ),
        ("fail_on = []", "unknown key 'fail_on'; expected model"),
        ("device = 3", "pyproject.toml [tool.fusion-advisor] device: 3; expected a valid string"),
        ("fail-on = ['rain']", "[tool.fusion-advisor] fail-on: 'rain'; expected new, accepted"),
        ("timeout = 0", "[tool.fusion-advisor] timeout: 0; expected greater than 0"),
        ("thresholds = 3", "[tool.fusion-advisor] thresholds: 3; expected a table with saved-us"),
        ("thresholds.share = 2", "[tool.fusion-advisor.thresholds] share: 2; expected less than"),
        ("scenarios.a.batch = '4'", "[tool.fusion-advisor.scenarios.a] batch: '4'; expected a"),
        ("scenarios.a.dtype = 'f7'", "scenarios.a] dtype: unknown dtype 'f7'"),
        ("scenarios.a.input = ['x']", "scenarios.a] input: 'x'; expected NAME=SHAPE:DTYPE"),
        ("scenarios.a.mode = 'both'", "scenarios.a] mode: 'both'; expected 'eval' or 'train'"),
        ("scenarios.a.wieght = 2", "scenarios] a: unknown key 'wieght'; expected weight"),
        ("scenarios.'a/b'.batch = 2", "scenario 'a/b': a name has letters"),
        ("scenarios = 3", "[tool.fusion-advisor] scenarios: 3; expected a valid dict"),
        ("device =", "pyproject.toml: expected TOML"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_field(
    repository: Path, line: str, message: str
) -> None:
    (repository / "pyproject.toml").write_text(f"[tool.fusion-advisor]\n{line}\n")
    with pytest.raises(UsageError) as caught:
        load_settings({}, {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_table_that_is_none_is_told(repository: Path) -> None:
    (repository / "pyproject.toml").write_text("tool.fusion-advisor = 3\n")
    with pytest.raises(UsageError, match=r"pyproject.toml: tool.fusion-advisor: 3; expected a"):
        load_settings({}, {})


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize(
    ("options", "asked", "message"),
    [
        ({}, {"mode": "both"}, "--mode: 'both'; expected 'eval' or 'train'"),
        ({}, {"kv-len": 0}, "--kv-len: 0; expected greater than or equal to 1"),
        ({"memory": -1.0}, {}, "--memory: -1.0; expected greater than 0"),
    ],
)
def test_a_wrong_option_is_called_by_its_name(
    options: dict[str, object], asked: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        load_settings(options, asked)
    assert str(caught.value) == message


def test_of_an_exported_program_the_weight_alone_can_be_set(repository: Path) -> None:
    table = repository / "pyproject.toml"
    head = '[tool.fusion-advisor]\nmodel = "m.pt2"\n[tool.fusion-advisor.scenarios.one]\n'
    table.write_text(f'{head}weight = 7\nmode = "eval"\n')
    assert load_settings({}, {}).scenarios["one"].weight == 7
    table.write_text(f"{head}seq = 2048\n")
    with pytest.raises(UsageError, match=r"\.one\] seq: m.pt2 is as it was exported; export it so"):
        load_settings({}, {})
    with pytest.raises(UsageError, match=r"^--batch: m\.pt2 is as it was exported"):
        load_settings({"model": "m.pt2"}, {"batch": 3})
