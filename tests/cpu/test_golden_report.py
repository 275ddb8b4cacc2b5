"""The whole report of a small model, as a reviewer reads it. `--regen` rewrites it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import spawned

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.json"
    options = ("--device", "h200", "--no-verify", "--no-compile", "--json", file)
    done = spawned.command("analyze", "examples/norm_silu.py", *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return file


MASK = "…"
TIMES = re.compile(r"\d[\d.,]*(?= (?:µs|us|ms|%)|x\b)")
FITTED = re.compile(
    r"_us$|speedup$|hash$|fingerprint$|^(predicted|time_by_bound|impact|explained)$"
)
"""Keys of what another fit of the time model or another wording of the rules changes."""


def masked(value: Any) -> Any:
    """Without what is `FITTED`, whose keys stay."""
    if isinstance(value, list):
        return [masked(item) for item in value]
    if isinstance(value, str):
        return TIMES.sub(MASK, value)
    if not isinstance(value, dict):
        return value
    return {
        key: hidden(item) if FITTED.search(key) else masked(item) for key, item in value.items()
    }


def hidden(value: Any) -> Any:
    """Of the same types, so that the schema holds: numbers are 0."""
    if isinstance(value, dict):
        return {key: hidden(item) for key, item in value.items()}
    if isinstance(value, list):
        return [hidden(item) for item in value]
    if isinstance(value, str):
        return MASK
    return value and 0 if isinstance(value, int | float) and not isinstance(value, bool) else value


def test_report_is_the_golden_one(report: Path, golden: Callable[[str, str], None]) -> None:
    content = masked(json.loads(report.read_text()))
    for version in ("torch", "triton", "version"):
        content["tool"][version] = MASK
    golden("norm_silu_report.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def test_the_parts_of_the_time_add_up(report: Path) -> None:
    """By bottleneck as in all: what launches of a group find in the L2 is in neither."""
    totals = json.loads(report.read_text())["totals"]
    assert sum(totals["time_by_bound"].values()) == pytest.approx(totals["time_us"])


def test_markdown_is_the_golden_one(report: Path, golden: Callable[[str, str], None]) -> None:
    shown = spawned.command("report", report, "--format", "md", cwd=ROOT)
    assert shown.returncode == 0, shown.stderr
    golden("norm_silu_report.md", TIMES.sub(MASK, shown.stdout))
