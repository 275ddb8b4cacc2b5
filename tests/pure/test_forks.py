"""Processes that are forked: how each ends, and what is left of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fusion_advisor.support.forkserver import HERE, Fork, Forks

pytestmark = pytest.mark.skipif(not HERE, reason="processes are forked on Linux alone")

TEMPLATE = """
import os, signal, sys, time
from fusion_advisor.support.forkserver import end_with_parent, serve

def work(asked, answer):
    told = os.read(asked, 100).decode()
    if told == "pid":
        os.write(answer, str(os.getpid()).encode())
    if told == "child":
        os.write(answer, str(os.getpid() if os.fork() else os.getppid()).encode())
    if told in ("hang", "child"):
        time.sleep(60)
    if told == "kill":
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(int(told) if told.isdigit() else 0)

{before}
end_with_parent()
serve(int(sys.argv[1]), work)
"""


def templates(before: str = "") -> Forks:
    return Forks([sys.executable, "-c", TEMPLATE.format(before=before)], os.environ)


class Asked:
    """A fork, and the ends of the pipes that it was given."""

    def __init__(self, forks: Forks, what: str) -> None:
        (asked, mine), (self._answer, answer) = os.pipe(), os.pipe()
        self.fork: Fork = forks.fork(asked, answer)
        os.write(mine, what.encode())
        for end in (asked, mine, answer):
            os.close(end)

    def answer(self) -> str:
        with os.fdopen(self._answer, "rb") as file:
            return file.read(100).decode()


def until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def runs(pid: int) -> bool:
    """Not so a process that has ended and that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_ends_with_its_own_code() -> None:
    with templates() as forks:
        asked = [Asked(forks, what) for what in ("0", "3", "kill", "pid", "250")]
        assert [each.fork.wait(30) for each in asked] == [0, 3, -signal.SIGTERM, 0, 250]
        assert int(asked[3].answer()) == asked[3].fork.pid
        assert len({each.fork.pid for each in asked}) == 5
        assert forks.alive


def test_one_that_hangs_is_killed_with_what_it_started() -> None:
    with templates() as forks:
        hanging = Asked(forks, "child").fork
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(0.2)
        until(lambda: hanging.pid)
        hanging.kill_group()
        assert hanging.wait(30) == -signal.SIGKILL
        hanging.kill_group()
        assert hanging.poll() == -signal.SIGKILL
        assert Asked(forks, "4").fork.wait(30) == 4


def test_signals_reach_it() -> None:
    with templates() as forks:
        hanging = Asked(forks, "hang").fork
        until(lambda: hanging.poll() is None and hanging.pid)
        hanging.send_signal(signal.SIGUSR1)
        assert hanging.wait(30) == -signal.SIGUSR1
        hanging.send_signal(signal.SIGUSR1)


def test_with_the_template_all_end() -> None:
    with templates() as forks:
        hanging = Asked(forks, "hang").fork
        until(lambda: hanging.poll() is None and hanging.pid)
    assert hanging.wait(30) == -signal.SIGKILL
    until(lambda: not runs(hanging.pid))


def test_one_that_has_not_begun_is_given_up() -> None:
    with templates("time.sleep(60)") as forks:
        waiting = Asked(forks, "0").fork
        assert waiting.poll() is None
        waiting.send_signal(signal.SIGUSR1)
        waiting.kill_group()
        assert waiting.wait(30) == -signal.SIGKILL


def test_a_template_that_cannot_start() -> None:
    with templates("sys.exit('no')") as forks:
        until(lambda: not forks.alive)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            Asked(forks, "0")
