"""What a person sees in a terminal: its width, its colours, how far the run is."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
from pathlib import Path

import pytest

from . import spawned

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 60
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7][0-9;]*m")


def shown(tmp_path: Path, **environment: str) -> str:
    """What `analyze` writes to a terminal of 60 columns as its standard error."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    kept = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    own = {"PYTHONPATH": str(ROOT), "FUSION_ADVISOR_CACHE": str(tmp_path), "TERM": "xterm"}
    options = ("--no-verify", "--no-compile", "--device", "h200")
    with os.fdopen(its, "wb") as terminal:
        run = spawned.popen(
            [sys.executable, "-m", "fusion_advisor", "analyze", "examples/softmax.py", *options],
            cwd=ROOT, env={**kept, **own, **environment}, stderr=terminal,
        )  # fmt: skip
    parts: list[bytes] = []
    while part := _read(ours):
        parts.append(part)
    os.close(ours)
    assert run.wait() == 0
    return b"".join(parts).decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # Linux says so when the other end is closed
        return b""


@pytest.mark.parametrize("plain", [False, True], ids=["colour", "NO_COLOR"])
def test_a_narrow_terminal(tmp_path: Path, plain: bool) -> None:
    text = shown(tmp_path, **({"NO_COLOR": "1"} if plain else {}))
    assert bool(COLOUR.search(text)) != plain
    assert re.search(r"capture .*0/6", ESCAPE.sub("", text)), "no stage is shown"
    report = ESCAPE.sub("", text).partition("examples/softmax.py on ")[2]
    lines = report.splitlines()
    assert "g1 softmax at softmax.py:11" in report
    assert max(map(len, lines)) <= COLUMNS
    assert "0/6" not in report
