"""`benchmarks/`: every result has a page, every command a module, every folder its line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "benchmarks"
PAGES = [ROOT / "README.md", HERE / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = sorted(file for file in HERE.rglob("*.py"))
README = (HERE / "README.md").read_text()


@pytest.mark.parametrize("result", sorted((HERE / "results").iterdir()), ids=lambda f: f.name)
def test_a_result_is_named_by_a_page(result: Path) -> None:
    assert any(f"{result.name}`" in page.read_text() for page in PAGES)


def test_a_result_that_is_named_is_there() -> None:
    for file in (*PAGES, *SCRIPTS, *sorted((ROOT / "rules").rglob("*.toml"))):
        for name in re.findall(r"benchmarks/results/([\w.]+\w)", file.read_text()):
            assert (HERE / "results" / name).is_file(), f"{file.relative_to(ROOT)} names {name}"


def test_a_command_that_is_named_is_there() -> None:
    named: set[str] = set()
    for file in (*PAGES, *SCRIPTS, ROOT / "Makefile"):
        named |= set(re.findall(r"-m (benchmarks\.[a-z_.]*[a-z_])", file.read_text()))
    assert len(named) > 8
    for module in named:
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").is_file() or (place / "__main__.py").is_file(), module


def test_a_folder_is_a_question_that_the_page_has() -> None:
    folders = {file.parent.name for file in SCRIPTS if file.parent != HERE}
    assert folders == set(re.findall(r"^\| `(\w+)/` \|", README, re.MULTILINE))
