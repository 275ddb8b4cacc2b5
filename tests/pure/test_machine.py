"""What a machine can run, found out without importing torch or Triton."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.rulebook import local_gpu as machine
from fusion_advisor.support.errors import UsageError

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"


@pytest.fixture
def torch_is(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    return lambda found: monkeypatch.setattr(machine, "version", lambda package: found)


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0+cu130", "2.12.1", "2.13.0+cpu"])
def test_these_are_supported(torch_is: Callable[[str | None], None], version: str) -> None:
    torch_is(version)
    assert machine.require_torch() == ""


@pytest.mark.parametrize("version", ["2.9.1", "2.10.0+cu128", "1.13.1", "2.1.0"])
def test_an_older_torch_is_one_line(torch_is: Callable[[str | None], None], version: str) -> None:
    torch_is(version)
    with pytest.raises(UsageError) as raised:
        machine.require_torch()
    assert (
        str(raised.value) == f"torch {version}: fusion-advisor works with torch 2.11, 2.12 and 2.13"
    )


def test_a_newer_torch_is_told_and_tried(torch_is: Callable[[str | None], None]) -> None:
    torch_is("2.14.0.dev20270101+cpu")
    assert "works with torch 2.11, 2.12 and 2.13" in machine.require_torch()


def test_no_torch_is_one_line(torch_is: Callable[[str | None], None]) -> None:
    torch_is(None)
    with pytest.raises(UsageError, match="torch is not installed; fusion-advisor works with torch"):
        machine.require_torch()


def test_the_pinned_torch_is_a_supported_one() -> None:
    pinned = next(
        line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=")
    )
    assert machine.torch_fault(pinned.partition("==")[2]) == ""


def test_the_package_asks_for_those() -> None:
    project = tomllib.loads((CONSTRAINTS.parent / "pyproject.toml").read_text())["project"]
    first, last = machine.TORCH_VERSIONS[0], machine.TORCH_VERSIONS[-1]
    major, minor = last.split(".")
    assert f"torch>={first},<{major}.{int(minor) + 1}" in project["dependencies"]
    readme = (CONSTRAINTS.parent / "README.md").read_text()
    assert "torch 2.11, 2.12 and 2.13" in readme
    assert f"sm_{machine.LEAST_CAPABILITY}" in readme


def test_capabilities_are_those_that_the_driver_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\ncase "$1" in *compute_cap*) echo 7.5; echo 10.0;; esac\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    machine.gpu_capabilities.cache_clear()
    try:
        assert machine.gpu_capabilities() == (75, 100)
    finally:
        machine.gpu_capabilities.cache_clear()


def test_triton_is_not_imported_to_see_whether_it_is_there() -> None:
    code = (
        "import sys; from fusion_advisor.rulebook import local_gpu; "
        "local_gpu.has_triton(); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "fusion_advisor.rulebook.local_gpu" in done.stdout.split()
    assert "triton" not in done.stdout.split()
