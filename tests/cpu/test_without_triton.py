"""A machine without Triton, as macOS and Windows are: analysis works, kernels are not checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOFTMAX = str(ROOT / "examples" / "softmax.py")
ONCE = "emitted, not checked: Triton is not installed"

BLOCK = """
import sys
from importlib.abc import MetaPathFinder


class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Blocked())
"""

NO_FORKS = """
from fusion_advisor.support import forkserver as forks

forks.HERE = False
"""

NO_POSIX = """
import faulthandler
import os
import signal
import subprocess


class Popen(subprocess.Popen):
    def __init__(self, *args, pass_fds=(), **options):
        assert not pass_fds, "pass_fds not supported on Windows."
        super().__init__(*args, **options)


subprocess.Popen = Popen
del faulthandler.register, signal.SIGUSR1
for name in ("fork", "killpg", "setpriority", "setpgid"):
    delattr(os, name)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which Python, and every child of it, finds no Triton."""
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(BLOCK)
    return tmp_path


def run(folder: Path, *words: str, way: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": f"{folder / 'blocked'}{os.pathsep}{ROOT}", "NO_COLOR": "1",
        "FUSION_ADVISOR_CACHE": str(folder / "cache"),
    }  # fmt: skip
    return subprocess.run(
        [sys.executable, *(way or ("-m", "fusion_advisor")), *words],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_triton_is_blocked_in_here(folder: Path) -> None:
    done = run(folder, "import triton", way=("-c",))
    assert "ModuleNotFoundError: No module named 'triton'" in done.stderr


def test_analysis_works_and_says_once_that_no_kernel_is_checked(folder: Path) -> None:
    done = run(folder, "analyze", SOFTMAX, "--out", "out", "--fail-on", "unverified")
    assert done.returncode == 1, done.stderr
    assert "no check has passed for g1" in done.stderr
    assert done.stderr.count(ONCE) == 1
    report = json.loads((folder / "out" / "report.json").read_text())
    (group,) = report["groups"]
    assert group["verdict"] == "fuse"
    assert group["kernel"]["status"] == "emitted"
    assert group["kernel"]["check"] is None
    assert "@triton.jit" in (folder / "out" / "kernels" / "softmax.py").read_text()


@pytest.mark.deep
@pytest.mark.parametrize("lacks", [NO_FORKS, NO_FORKS + NO_POSIX], ids=["macos", "windows"])
def test_what_other_systems_lack_is_not_missed(folder: Path, lacks: str) -> None:
    (folder / "blocked" / "sitecustomize.py").write_text(BLOCK + lacks)
    done = run(folder, "analyze", SOFTMAX, "--json", "r.json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(ONCE) == 1
    assert json.loads((folder / "r.json").read_text())["groups"][0]["verdict"] == "fuse"
    (folder / "endless.py").write_text(
        "import time, torch\n\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n"
        "        while True:\n            time.sleep(0.1)\n\n\n"
        "def get_inputs():\n    return [torch.randn(2)]\n"
    )
    done = run(folder, "analyze", "endless.py", "--timeout", "8")
    assert done.returncode == 3, done.stderr
    assert "ran longer than 8 s" in done.stderr


@pytest.mark.deep  # nor does any run with Triton say it
def test_a_run_that_asks_for_no_check_says_nothing_of_it(folder: Path) -> None:
    done = run(folder, "analyze", SOFTMAX, "--no-verify", "--no-compile")
    assert done.returncode == 0, done.stderr
    assert ONCE not in done.stderr


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words",
    [
        ("patch", SOFTMAX, "--out", "a.patch"),
        ("bench", SOFTMAX, "--rehearse"),
    ],
)
def test_what_runs_kernels_is_one_line(folder: Path, words: tuple[str, ...]) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    done = run(folder, *words)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fusion-advisor: error: {words[0]}: runs kernels, and Triton is not")


def test_the_doctor_says_so(folder: Path) -> None:
    done = run(folder, "doctor")
    assert done.returncode == 0
    assert "kernels are not checked: Triton is not installed" in done.stdout
    assert "run on NVIDIA GPUs of sm_80 and later: not here" in done.stdout
