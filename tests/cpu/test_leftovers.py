"""However a run ends, no child and no temporary file outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.ir.source_trace import Span
from fusion_advisor.support.worker import Worker, WorkerError

ABOUT_PROCESSES = True
ROOT = Path(__file__).resolve().parents[2]
HANGS = "import time\ntime.sleep(60)\n"


def started(model: Path, scratch: Path) -> subprocess.Popen[str]:
    """An analysis whose temporary files go to a folder of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}
    return subprocess.Popen(
        [sys.executable, "-m", "fusion_advisor", "analyze", str(model)],
        cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until(happened: Callable[[], object], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def left(scratch: Path) -> list[str]:
    """What is in the folder, and the processes whose temporary files would go there.

    torch keeps one cache for all of a user's processes, which is not ours to remove.
    """
    processes: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={scratch}".encode() in (process / "environ").read_bytes().split(b"\0"):
                processes.append(process.name)
        except OSError:
            continue  # it has just ended
    files = [file.name for file in scratch.iterdir()]
    return [*(name for name in files if not name.startswith("torchinductor_")), *processes]


@pytest.mark.deep
def test_after_a_run(tmp_path: Path) -> None:
    run = started(ROOT / "examples" / "softmax.py", tmp_path)
    _, said = run.communicate()
    assert run.returncode == 0, said
    assert left(tmp_path) == []


@pytest.mark.sampled(2)  # each starts Python and two workers
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    model = tmp_path / "model.py"
    model.write_text(HANGS)
    run = started(model, scratch)
    until(lambda: len(list(scratch.iterdir())) >= 2)  # both workers have their folders
    began = time.monotonic()
    run.send_signal(number)
    _, said = run.communicate()
    assert run.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}.get(number, -number)
    assert "Traceback" not in said
    until(lambda: left(scratch) == [])
    assert number == signal.SIGKILL or time.monotonic() - began < 10


def test_after_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Worker("fusion_advisor.verify.check_child", "interpreter") as worker:
        assert list(tmp_path.iterdir())
        with pytest.raises(WorkerError, match="no answer"):
            worker.submit(Span(1, 0, 1, 0), Span, timeout_s=0.01).result()
        assert list(tmp_path.iterdir()) == []
