"""What an earlier run came to is taken only while nothing that it was made from has changed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor import cache
from fusion_advisor.cache import Outcome, cache_folder, find, keep
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.rulefiles import load_rulebook
from fusion_advisor.scenario import Request, Scenario

from .test_report import mixed

RULES = load_rulebook()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a model, which imports another, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.py", "parts.py"):
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path / "model.py"


def kept(model: Path, rules: Rulebook = RULES, /, **options: object) -> tuple[Path, Request]:
    """A folder with an entry for a request."""
    request = replace(Request("model.py"), **options)  # type: ignore[arg-type]
    folder = model.parent / "cache"
    outcome = Outcome(mixed(), {"softmax": "text\n"}, {"nodes": []})
    files = [str(model), str(model.parent / "parts.py")]
    keep(folder, request, rules, outcome, files, time.time() + 1)
    return folder, request


def test_what_was_kept_is_found(model: Path) -> None:
    folder, request = kept(model)
    found = find(folder, request, RULES)
    assert found == Outcome(mixed(), {"softmax": "text\n"}, {"nodes": []})
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["model.py", "parts.py"])
def test_a_file_that_changed_is_a_miss(model: Path, name: str) -> None:
    folder, request = kept(model)
    file = model.parent / name
    file.write_text("x = 2\n")
    assert find(folder, request, RULES) is None
    file.write_text("x = 1\n")
    assert find(folder, request, RULES) is not None
    file.unlink()
    assert find(folder, request, RULES) is None


@pytest.mark.parametrize(
    "options",
    [
        {"model": "parts.py"},
        {"scenario": Scenario(batch=2)},
        {"device": "a100-80gb"},
        {"verify": False},
        {"folder": "kernels"},
        {"command": "fusion-advisor emit model.py"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_request_is_a_miss(model: Path, options: dict[str, object]) -> None:
    folder, request = kept(model)
    assert find(folder, replace(request, **options), RULES) is None  # type: ignore[arg-type]


def test_other_rules_and_versions_are_a_miss(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, request = kept(model)
    overlay = tmp_path / "mine.toml"
    overlay.write_text("[gates.traffic-saving.limits.ratio]\nvalue = 2\nunit='x'\nsource='me'\n")
    assert find(folder, request, load_rulebook([overlay])) is None
    monkeypatch.setattr(cache, "_installed", lambda: ["torch-99.dist-info"])
    assert find(folder, request, RULES) is None


def test_another_working_directory_is_a_miss(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, request = kept(model)
    (model.parent / "below").mkdir()
    monkeypatch.chdir(model.parent / "below")
    assert find(folder, request, RULES) is None


def test_a_file_written_during_the_run_keeps_nothing(model: Path) -> None:
    outcome = Outcome(mixed(), {}, {})
    folder = model.parent / "cache"
    keep(folder, Request("model.py"), RULES, outcome, [str(model)], time.time() - 60)
    assert find(folder, Request("model.py"), RULES) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {}}', '{"files": 3}', "\0"])
def test_an_entry_that_cannot_be_read_is_a_miss(model: Path, text: str) -> None:
    folder, request = kept(model)
    (file,) = folder.glob("*.json")
    file.write_text(text)
    assert find(folder, request, RULES) is None


def test_a_folder_of_another_user_is_a_miss(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, request = kept(model)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert find(folder, request, RULES) is None


def test_a_folder_that_cannot_be_made_keeps_nothing(model: Path) -> None:
    (model.parent / "cache").write_text("a file")
    folder, request = kept(model)
    assert find(folder, request, RULES) is None


def test_the_least_recently_used_entries_go_first(model: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "few.toml"
    overlay.write_text('[cache]\nentries = { value = 2, unit = "count", source = "a test" }\n')
    few = load_rulebook([overlay])
    folder, first = kept(model, few, device="a100-80gb")
    (file,) = folder.glob("*.json")
    os.utime(file, (1, 1))
    _, second = kept(model, few, device="h100")
    assert find(folder, first, few) is not None
    os.utime(next(f for f in folder.glob("*.json") if f != file), (2, 2))
    _, third = kept(model, few, device="l4")
    assert [find(folder, r, few) is None for r in (first, second, third)] == [False, True, False]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSION_ADVISOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/fusion-advisor")
    monkeypatch.setenv("FUSION_ADVISOR_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


def test_an_entry_is_json(model: Path) -> None:
    folder, _ = kept(model)
    (file,) = folder.glob("*.json")
    assert set(json.loads(file.read_text())) == {"files", "report", "kernels", "graph"}
