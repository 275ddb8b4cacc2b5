"""Fork server: processes forked from a template that has done the slow imports (seconds); both
sides.

    with Forks([sys.executable, "-m", "some.module"], environment) as forks:
        process = forks.fork(descriptor, ...)       # poll, wait and signal it as any child

The module's part is `serve(socket, work)`. Each fork has a warden above it, which runs nothing but
what is here: whatever the fork starts and leaves, in sessions of their own too, comes to the warden
as the nearest subreaper, and ends with the fork. Linux only: elsewhere a process that has loaded
torch must not be forked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

HERE = sys.platform == "linux"
"""Whether processes can be forked on this system."""

SIGKILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Signal that kills; Windows ends a process for any signal."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_MOST_DESCRIPTORS = 16


class Fork:
    """Handle of a grandchild in the parent, with the parts of `subprocess.Popen` that `capture`
    needs; `pid` is 0 until the process has begun. A fork whose template dies was killed with it."""

    def __init__(self, news: int) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self._news = os.fdopen(news, "rb", buffering=0)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        with self._lock:
            while self.returncode is None and select.select([self._news], [], [], 0)[0]:
                line = self._news.readline()
                if not line:
                    self.returncode = -signal.SIGKILL
                elif self.pid:
                    self.returncode = int(line)
                else:
                    self.pid = int(line)
            if self.returncode is not None:
                self._news.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code. Raises subprocess.TimeoutExpired after so many seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has begun and still runs."""
        if self.poll() is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and its process group; a process that has not begun is given up. The
        warden ends the rest."""
        if self.poll() is None and not self.pid:
            with self._lock:
                self.returncode = -signal.SIGKILL
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.send_signal(signal.SIGKILL)  # it may have left its group


class Forks:
    """Template process that is forked. The end of the block ends the template, and with it
    all forks."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),), start_new_session=True, env=environment,
            )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, *descriptors: int) -> Fork:
        """Fork another process, to which `serve` hands copies of the descriptors; it begins as soon
        as the imports are done."""
        news, report_end = os.pipe()
        try:
            socket.send_fds(self._socket, [b"f"], [report_end, *descriptors])
        finally:
            os.close(report_end)
        return Fork(news)

    def __enter__(self) -> Forks:
        return self

    def end(self) -> None:
        """End the template process, and all forks with it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def __exit__(self, *_: object) -> None:
        self.end()


def end_with_parent(number: int = SIGKILL) -> None:
    """Send this process signal `number` when its parent dies (Linux): a killed parent cannot end a
    child that may run for ever."""
    if HERE:
        _prctl(_PR_SET_PDEATHSIG, number)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def serve(number: int, work: Callable[..., NoReturn]) -> None:
    """Run the template, once it has imported: fork on request. Each fork has a process group of its
    own and does `work` with the descriptors that came along, below a warden that reports how it
    ends."""
    requests, mine = socket.socket(fileno=number), os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # wardens are waited for by nobody
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, _MOST_DESCRIPTORS)
        if not message:
            return
        if not os.fork():
            end_with_parent(signal.SIGTERM)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if os.getppid() != mine:
                os._exit(0)
            requests.close()
            _begin(work, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _begin(work: Callable[..., NoReturn], news: int, *given: int) -> NoReturn:
    """Run the warden: fork the process that works, and when that process has ended, end the
    processes that it left and report."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    warden = os.getpid()
    if not (child := os.fork()):
        os.setpgid(0, 0)
        end_with_parent()
        if os.getppid() != warden:
            os._exit(0)
        os.close(news)
        work(*given)

    def end(_number: int, _frame: object) -> None:
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    with contextlib.suppress(OSError):  # it has done so itself, and left even that group
        os.setpgid(child, child)
    for descriptor in given:
        os.close(descriptor)
    _say(news, child)
    _, status = os.waitpid(child, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_children()
    _say(news, os.waitstatus_to_exitcode(status))
    os._exit(0)


def _end_children() -> None:
    """Kill this process's children until none is left: the children of each become this process's
    own then."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended:
            for child in _children():
                os.kill(child, signal.SIGKILL)  # nobody else waits for it: the number is its own
            os.waitpid(-1, 0)


def _children() -> list[int]:
    mine, found = str(os.getpid()), list[int]()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            _, parent = file.read().rpartition(b")")[2].split()[:2]
            if parent.decode() == mine:
                found.append(int(name))
    return found


def _say(news: int, number: int) -> None:
    try:
        os.write(news, b"%d\n" % number)
    except BrokenPipeError:
        return  # nobody waits for it any more
