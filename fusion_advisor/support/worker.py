"""Child processes that answer lines with lines: both sides of the pipe.

They live long, because importing torch and Triton takes seconds. A child that crashes, hangs or
fails to start costs one answer; the next job gets a fresh child.
"""

from __future__ import annotations

import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

_ROOT = str(Path(__file__).resolve().parents[2])
_START = """
import importlib, shutil, sys, tempfile
root, tempfile.tempdir, module, *arguments = sys.argv[1:]
sys.path.append(root)
try:
    importlib.import_module(module).main(*arguments)
finally:
    shutil.rmtree(tempfile.tempdir, ignore_errors=True)
"""
"""The child imports this very package, and nothing from the current folder. Its files lie in a
folder that the parent removes, or the child itself when the parent was killed."""


class WorkerError(Exception):
    """The child did not answer: one line with the reason."""


class Worker:
    """A child process that answers lines with lines, in order.

    `submit` never blocks: a thread writes the jobs, waits for the answers and restarts the
    child after a crash or a timeout.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        niceness: int = 0,
    ):
        self._arguments = (module, *arguments)
        self._niceness = niceness
        self._environment = {**os.environ, **(environment or {})}
        self._jobs: queue.SimpleQueue[tuple[str, float, Future[str]] | None] = queue.SimpleQueue()
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._abandoned = False
        self._pending = b""
        self._thread: threading.Thread | None = None

    def start(self) -> Worker:
        """Launch the child; it imports what it needs while the caller goes on."""
        if self._thread is None:
            self._spawn()
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        return self

    def submit(self, line: str, timeout_s: float) -> Future[str]:
        """The answer to come within `timeout_s` seconds; its exception is a WorkerError."""
        self.start()
        answer: Future[str] = Future()
        self._jobs.put((line, timeout_s, answer))
        return answer

    def close(self) -> None:
        """Answer what was submitted, then end the child."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> Worker:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.abandon()
        self.close()

    def abandon(self) -> None:
        """Nobody waits any more: end the child in what it is doing."""
        self._abandoned = True
        if self._child is not None:
            self._child.kill()

    def _spawn(self) -> None:
        self._pending = b""
        self._folder = tempfile.TemporaryDirectory(
            prefix="fusion-advisor-", ignore_cleanup_errors=True
        )
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _stop)
        self._child = subprocess.Popen(
            (sys.executable, "-P", "-c", _START, _ROOT, self._folder.name, *self._arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._environment,
        )
        if hasattr(os, "setpriority"):
            os.setpriority(os.PRIO_PROCESS, self._child.pid, self._niceness)

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout, self._errors):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # unwritten bytes for a child that is gone
        if self._folder is not None:
            self._folder.cleanup()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            line, timeout_s, answer = job
            try:
                answer.set_result(self._ask(line, timeout_s))
            except (WorkerError, OSError) as error:
                reason = f"{error}{self._last_words()}"
                self._stop()
                answer.set_exception(WorkerError(reason))
        self._stop()

    def _ask(self, line: str, timeout_s: float) -> str:
        if not self._abandoned and (self._child is None or self._child.poll() is not None):
            self._stop()
            self._spawn()
        if self._abandoned:
            raise WorkerError("nobody waits for it")
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line.encode() + b"\n")
        child.stdin.flush()
        descriptor = child.stdout.fileno()
        while b"\n" not in self._pending:
            ready, _, _ = select.select([descriptor], [], [], timeout_s)
            if not ready:
                raise WorkerError(f"no answer within {timeout_s:g} s")
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                raise WorkerError(f"the child ended with status {child.wait()}")
            self._pending += chunk
        reply, _, self._pending = self._pending.partition(b"\n")
        return reply.decode()

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""


_answers_descriptor = 1


@contextmanager
def protocol() -> Generator[tuple[Iterator[str], Callable[[str], None]], None, None]:
    """The child's side: job lines in, and a function that answers one.

    The real standard output is kept for answers; whatever an emitted file, Triton or ptxas
    prints goes to standard error.
    """
    global _answers_descriptor
    _answers_descriptor = os.dup(1)
    answers = os.fdopen(_answers_descriptor, "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(line: str) -> None:
        answers.write(line + "\n")
        answers.flush()

    with answers:
        yield iter(sys.stdin.readline, ""), answer


def restart() -> NoReturn:
    """The child begins anew in its own place: a CUDA context does not survive a bad address.

    Its parent notices nothing: the pipes stay, and at most one unread job waits in them.
    """
    os.dup2(_answers_descriptor, 1)
    os.execv(sys.executable, sys.orig_argv)
