"""Another fit of the time model changes no golden file, and no output that a page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted(file for file in ROOT.glob("tests/*/golden/**/*") if file.is_file())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TIME = re.compile(r"\d (?:µs|us|ms)\b")
HASH = re.compile(r"\b(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{16,}\b")


def held(text: str) -> list[str]:
    return [line for line in text.splitlines() if TIME.search(line) or HASH.search(line)]


@pytest.mark.parametrize("file", GOLDEN, ids=lambda file: file.name)
def test_a_golden_file_has_no_time_and_no_hash(file: Path) -> None:
    assert held(file.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_has_no_time_and_no_hash(page: Path) -> None:
    shown = re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    assert held("".join(shown)) == []
