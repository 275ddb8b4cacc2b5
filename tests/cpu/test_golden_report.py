"""The whole report of a small model, as a reviewer reads it. `--regen` rewrites it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.json"
    subprocess.run(
        f"{sys.executable} -m fusion_advisor analyze examples/norm_silu.py --device h200"
        f" --no-verify --no-compile --json {file}".split(),
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return file


def test_report_is_the_golden_one(report: Path, golden: Callable[[str, str], None]) -> None:
    content = json.loads(report.read_text())
    for version in ("torch", "triton", "version"):
        content["tool"][version] = "…"
    golden("norm_silu_report.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def test_the_parts_of_the_time_add_up(report: Path) -> None:
    """By bottleneck as in all: what launches of a group find in the L2 is in neither."""
    totals = json.loads(report.read_text())["totals"]
    assert sum(totals["time_by_bound"].values()) == pytest.approx(totals["time_us"])


def test_markdown_is_the_golden_one(report: Path, golden: Callable[[str, str], None]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "fusion_advisor", "report", str(report), "--format", "md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    golden("norm_silu_report.md", shown.stdout)
