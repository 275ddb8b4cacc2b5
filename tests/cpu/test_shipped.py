"""The runtime beside emitted kernels as a user's process has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fusion_advisor.shipped import fused_runtime
from fusion_advisor.shipped.files import write_kernel

from .generated import kernel
from .spawned import run_script


def test_an_older_runtime_is_one_line(tmp_path: Path) -> None:
    write_kernel(tmp_path / "mine" / "softmax.py", kernel("softmax").text)
    runtime = tmp_path / "mine" / "fused_runtime.py"
    runtime.write_text(runtime.read_text().replace("VERSION = 1\n", "VERSION = 0\n"))
    done = subprocess.run(
        [sys.executable, "-c", "import mine.softmax"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {runtime} is version 0 and a kernel beside it needs 1: take all files of "
        "the folder from one fusion-advisor (patch MODEL --update)"
    )


class Jit:
    """Stands for a jit function: notes its launches."""

    arg_names = ("COLS",)

    def __init__(self) -> None:
        self.calls: list[object] = []

    def __getitem__(self, grid: object) -> object:
        def launch(*arguments: object, **constants: object) -> object:
            self.calls.append((grid, arguments, constants))
            return SimpleNamespace()  # what was compiled: nothing of it may be touched

        return launch


def test_an_unknown_triton_is_launched_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_runtime, "DIRECT", False)
    monkeypatch.setattr(fused_runtime, "launched", {})
    jit, given = Jit(), torch.zeros(4)
    for _ in range(2):
        assert fused_runtime.launch(jit, (1,), (given,), (4,), COLS=4, num_warps=1) is None
    assert jit.calls == [((1,), (given, 4), {"COLS": 4, "num_warps": 1})] * 2
    assert fused_runtime.launched == {}


def test_this_triton_is_known() -> None:
    assert fused_runtime.DIRECT


INTERPRETED = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path(sys.argv[1]).parent.parent))
import torch
from mine import softmax
x = torch.randn(9, 300)
print(json.dumps(torch.allclose(softmax.softmax(x), torch.softmax(x, -1))))
"""


def test_the_interpreter_runs_an_emitted_file_as_any(tmp_path: Path) -> None:
    """Of Triton alone, `libdevice` gives None there."""
    file = tmp_path / "mine" / "softmax.py"
    write_kernel(file, kernel("softmax").text)
    assert run_script(INTERPRETED, str(file)).strip() == "true"
