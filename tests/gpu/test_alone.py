"""Emitted files by themselves, on a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fusion_advisor.shipped.files import write_kernel

GOLDEN = Path(__file__).resolve().parents[1] / "cpu" / "golden"


def test_a_kernel_is_checked_and_timed(tmp_path: Path) -> None:
    write_kernel(tmp_path / "softmax.py", (GOLDEN / "softmax.py").read_text())
    done = subprocess.run(
        [sys.executable, "-I", tmp_path / "fused_runtime.py", "softmax", "--check", "--bench"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    odd, full, *times = done.stdout.splitlines()
    assert odd.startswith("softmax: [7, 65] torch.float32: error ")
    assert full.startswith("softmax: [64, 200] torch.float32: error ")
    assert [line.split(": ")[1] for line in times] == ["kernel", "eager", "torch.compile"]
    assert all(float(line.split()[-2]) > 0 for line in times)
