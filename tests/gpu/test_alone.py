"""Emitted files by themselves, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[1] / "cpu" / "golden"


def test_a_file_checks_and_times_itself() -> None:
    done = subprocess.run(
        [sys.executable, "-I", GOLDEN / "softmax.py", "--check", "--bench"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    odd, full, *times = done.stdout.splitlines()
    assert odd.startswith("[3, 77] torch.float32: error ")
    assert full.startswith("[64, 300] torch.float32: error ")
    assert [line.split(": ")[0] for line in times] == ["softmax", "eager", "torch.compile"]
    assert all(float(line.split()[-2]) > 0 for line in times)
