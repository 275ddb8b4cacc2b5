"""What an earlier run captured is taken only while nothing that it was made from has changed."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fusion_advisor.ci.cache import find_graph, keep_graph
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.ir.kernel import Check, Compiled
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support import kept as kept_files
from fusion_advisor.support.codec import to_data
from fusion_advisor.verify.proofs import Proofs

from .test_report import chain

RULES = load_rulebook()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a model, which imports another, in the working directory."""
    monkeypatch.chdir(tmp_path)
    for name in ("model.py", "parts.py"):
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path / "model.py"


GRAPH = Graph(chain("aten.cos.default"), (Ref("n1"),), source="model.py")


def kept(model: Path, rules: Rulebook = RULES, /, **options: object) -> tuple[Path, Request]:
    """A cache with the graph of a request's model."""
    request = replace(Request("model.py"), **options)  # type: ignore[arg-type]
    folder = model.parent / "cache"
    files = [str(model), str(model.parent / "parts.py")]
    keep_graph(folder, request, rules, to_data(GRAPH), files, time.time() + 1)
    return folder, request


def test_what_was_kept_is_found(model: Path) -> None:
    folder, request = kept(model)
    assert find_graph(folder, request, RULES) == GRAPH
    assert (folder / "graphs").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["model.py", "parts.py"])
def test_a_file_that_changed_is_a_miss(model: Path, name: str) -> None:
    folder, request = kept(model)
    file = model.parent / name
    file.write_text("x = 2\n")
    assert find_graph(folder, request, RULES) is None
    file.write_text("x = 1\n")
    assert find_graph(folder, request, RULES) is not None
    file.unlink()
    assert find_graph(folder, request, RULES) is None


@pytest.mark.parametrize(
    "options",
    [
        {"model": "parts.py"},
        {"scenario": Scenario(batch=2)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_request_is_a_miss(model: Path, options: dict[str, object]) -> None:
    folder, request = kept(model)
    assert find_graph(folder, replace(request, **options), RULES) is None  # type: ignore[arg-type]


def test_other_rules_and_versions_are_a_miss(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, request = kept(model)
    overlay = tmp_path / "mine.toml"
    overlay.write_text(
        '[capture]\nmask_elements = { value = 2, unit = "elements", source = "a test" }\n'
    )
    assert find_graph(folder, request, load_rulebook([overlay])) is None
    monkeypatch.setattr(kept_files, "installed", lambda: ("torch-99.dist-info",))
    assert find_graph(folder, request, RULES) is None


def test_another_working_directory_is_a_miss(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, request = kept(model)
    (model.parent / "below").mkdir()
    monkeypatch.chdir(model.parent / "below")
    assert find_graph(folder, request, RULES) is None


def test_a_file_written_during_the_run_keeps_nothing(model: Path) -> None:
    folder, files = model.parent / "cache", [str(model)]
    keep_graph(folder, Request("model.py"), RULES, to_data(GRAPH), files, time.time() - 60)
    assert find_graph(folder, Request("model.py"), RULES) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": {}}', '{"files": 3}', "\0"])
def test_an_entry_that_cannot_be_read_is_a_miss(model: Path, text: str) -> None:
    folder, request = kept(model)
    (file,) = (folder / "graphs").glob("*.json")
    file.write_text(text)
    assert find_graph(folder, request, RULES) is None


def test_a_folder_of_another_user_is_a_miss(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, request = kept(model)
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert find_graph(folder, request, RULES) is None


def test_a_folder_that_cannot_be_made_keeps_nothing(model: Path) -> None:
    (model.parent / "cache").write_text("a file")
    folder, request = kept(model)
    assert find_graph(folder, request, RULES) is None


def test_the_least_recently_used_entries_go_first(model: Path, tmp_path: Path) -> None:
    overlay = tmp_path / "few.toml"
    overlay.write_text('[cache]\nentries = { value = 2, unit = "count", source = "a test" }\n')
    few = load_rulebook([overlay])
    folder, first = kept(model, few, scenario=Scenario(batch=1))
    (file,) = (folder / "graphs").glob("*.json")
    os.utime(file, (1, 1))
    _, second = kept(model, few, scenario=Scenario(batch=2))
    assert find_graph(folder, first, few) is not None
    os.utime(next(f for f in (folder / "graphs").glob("*.json") if f != file), (2, 2))
    _, third = kept(model, few, scenario=Scenario(batch=3))
    assert [find_graph(folder, r, few) is None for r in (first, second, third)] == [
        False,
        True,
        False,
    ]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSION_ADVISOR_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert kept_files.cache_folder() == Path("/somewhere/fusion-advisor")
    monkeypatch.setenv("FUSION_ADVISOR_CACHE", "/mine")
    assert kept_files.cache_folder() == Path("/mine")


def test_an_entry_is_json(model: Path) -> None:
    folder, _ = kept(model)
    (file,) = (folder / "graphs").glob("*.json")
    assert set(json.loads(file.read_text())) == {"files", "graph"}


@pytest.mark.parametrize(
    "options",
    [{"device": "a100-80gb"}, {"verify": False}, {"folder": "kernels"}, {"command": "another"}],
    ids=lambda options: next(iter(options)),
)
def test_a_graph_serves_every_device_and_output(model: Path, options: dict[str, object]) -> None:
    folder, request = kept(model)
    other = replace(request, **options)  # type: ignore[arg-type]
    assert find_graph(folder, other, RULES) == GRAPH


def test_of_a_configuration_the_content_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "config.json"
    file.write_text('{"hidden_size": 64}')
    request, folder = Request("hf:config.json"), tmp_path / "cache"
    keep_graph(folder, request, RULES, to_data(GRAPH), [], time.time() + 1)
    assert find_graph(folder, request, RULES) == GRAPH
    file.write_text('{"hidden_size": 128}')
    assert find_graph(folder, request, RULES) is None


def test_what_passed_is_not_proven_again(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path / "proofs", 2)
    check = Check("softmax", "interpreter", True, ("4 x 8",), 6, 1e-7, 1e-7, 2e-7)
    proofs.keep("job", check)
    assert proofs.find(Check, "job") == check
    assert proofs.find(Check, "another") is None
    assert proofs.find(Compiled, "job") is None
    proofs.keep("job", Compiled("softmax"))
    assert proofs.find(Compiled, "job") == Compiled("softmax")


@pytest.mark.parametrize(
    "proof",
    [
        Check("softmax", "interpreter", False, failure="no answer within 180 s"),
        Check("softmax", "cuda:NVIDIA H200", True),
        Compiled("softmax", failure="ptxas"),
    ],
)
def test_what_failed_or_ran_on_a_gpu_is_proven_again(
    tmp_path: Path, proof: Check | Compiled
) -> None:
    proofs = Proofs(tmp_path / "proofs", 2)
    proofs.keep("job", proof)
    assert proofs.find(type(proof), "job") is None


def test_a_proof_that_cannot_be_read_is_made_again(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path / "proofs", 2)
    proofs.keep("job", Compiled("softmax"))
    (file,) = (tmp_path / "proofs").iterdir()
    for text in ("", "{", "3", "[]", '"{}"', '"x"'):
        file.write_text(text)
        assert proofs.find(Compiled, "job") is None


def test_proofs_that_were_used_least_recently_go_first(tmp_path: Path) -> None:
    proofs = Proofs(tmp_path / "proofs", 2)
    for number in range(3):
        proofs.keep(str(number), Compiled(str(number)))
        for at, file in enumerate(sorted((tmp_path / "proofs").iterdir(), key=_age)):
            os.utime(file, (at + 1, at + 1))
    assert [proofs.find(Compiled, str(n)) is None for n in range(3)] == [True, False, False]


def _age(file: Path) -> float:
    return file.stat().st_mtime
