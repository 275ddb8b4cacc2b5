"""An upgrade of the tool, played through in a repository of its user as its CI would run it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from .documents import surroundings

pytestmark = pytest.mark.deep

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "tests/fixtures/2026-11-24"
"""A model with the report and the patch of it that an early version made."""
GATE = "--no-verify --no-compile --baseline baseline.json --fail-on new --fail-on regression=0.02"

Run = Callable[..., subprocess.CompletedProcess[str]]


def tool(folder: Path, version: str, *, edited: bool) -> Path:
    """The tool as installed in one version; an edited one has another gate and another device."""
    for name in ("fusion_advisor", "rules"):
        left = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=left)
    about = folder / f"fusion_advisor-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: fusion-advisor\nVersion: {version}\n"
    )
    if edited:
        for file, was, is_now in (
            ("gates/traffic-saving.toml", "ratio = { value = 1.5", "ratio = { value = 1.4"),
            ("devices/h200.toml", "bandwidth = { value = 4800", "bandwidth = { value = 4500"),
        ):
            path = folder / "rules" / file
            text = path.read_text()
            assert text.count(was) == 1, f"{file} says no longer: {was}"
            path.write_text(text.replace(was, is_now))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a shell line in the user's repository with one version of the tool."""
    here = tmp_path / "repository"
    here.mkdir()
    shutil.copy(MADE / "model.py", here)
    shutil.copy(MADE / "report.json", here / "earliest.json")
    old = tool(tmp_path / "old", "0.1.0", edited=False)
    new = tool(tmp_path / "new", "0.2.0", edited=True)

    def run(version: str, line: str, *, code: int = 0) -> subprocess.CompletedProcess[str]:
        package = {"old": old, "new": new}[version]
        env = {**os.environ, **surroundings(here, package)}
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", line],
            cwd=here, env=env, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == code, f"$ {line}\n{done.stdout}{done.stderr}"
        return done

    return run


def test_an_upgrade_alone_fails_no_gate_and_is_taken_in_place(run: Run, tmp_path: Path) -> None:
    here = tmp_path / "repository"
    assert "fusion-advisor 0.1.0, " in run("old", "fusion-advisor --version").stdout
    run("old", "git init --quiet . && git add --all && git commit --quiet --message model")
    run("old", "fusion-advisor patch model.py --device h200 --out kernels.patch")
    run("old", "git apply kernels.patch && rm kernels.patch")
    run("old", "fusion-advisor analyze model.py --device h200 --no-verify --no-compile"
        " --with-graph --json baseline.json")  # fmt: skip
    run("old", "git add --all && git commit --quiet --message kernels")
    run("old", "fusion-advisor patch model.py --check")

    # What the user's CI runs, with the new version and nothing else changed.
    assert "0.2.0" in run("new", "fusion-advisor --version").stdout
    gate = run("new", f"fusion-advisor analyze model.py --device h200 {GATE}")
    assert "judged again" in gate.stderr
    check = run("new", "fusion-advisor patch model.py --check")
    assert "0.1.0" in check.stdout + check.stderr
    run("new", "fusion-advisor diff earliest.json baseline.json")
    assert run("new", "git status --porcelain").stdout == ""

    # The upgrade is taken: kernels are written anew where they lie, the model's source stays.
    source = (here / "model.py").read_text()
    run("new", "fusion-advisor patch model.py --device h200 --update")
    assert (here / "model.py").read_text() == source
    (kernel,) = here.glob("fused_model/exp_add.py")
    assert re.search(r"^Written by: fusion-advisor 0\.2\.0", kernel.read_text(), re.MULTILINE)
    quiet = run("new", "fusion-advisor patch model.py --check")
    assert "0.1.0" not in quiet.stdout + quiet.stderr
    run("new", f"fusion-advisor analyze model.py --device h200 {GATE}")

    # What does fail a gate: a kernel that somebody edited.
    kernel.write_text(kernel.read_text() + "\n# edited\n")
    failed = run("new", "fusion-advisor patch model.py --check", code=1)
    assert "exp_add.py" in failed.stdout + failed.stderr
