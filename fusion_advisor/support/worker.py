"""Child processes that answer requests with replies: both sides of the pipe.

    with Worker("some.module") as worker:                  # the module's main() calls `serve`
        worker.submit(Job(...), Reply, timeout_s).result()  # raises WorkerError

A request is one line, the name of its record's class and the record; a reply one line, a record or
in one line what the child could not do. Children live long, because importing torch and Triton
takes seconds. One that crashes, hangs or fails to start costs one reply; the next request gets a
fresh child.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from fusion_advisor.support.codec import from_data, to_data, to_json
from fusion_advisor.support.kernel_fault import KernelFault, cause, needs_restart

_Reply = TypeVar("_Reply")

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
"""Python text that a child runs. The child imports this very package, and nothing from the current
folder. Its files lie in a folder that the parent removes, or the child itself when the parent was
killed."""


class WorkerError(Exception):
    """Raised where the child did not answer or failed: one line with the reason."""


class Worker:
    """Child process that answers requests in order. `submit` never blocks: a thread writes the
    requests, waits for the replies and restarts the child after a crash or a timeout."""

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
        self._jobs = queue.SimpleQueue[tuple[Any, type[Any], float, Future[Any]] | None]()
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._folder: Callable[[], object] | None = None
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

    def submit(self, job: Any, kind: type[_Reply], timeout_s: float) -> Future[_Reply]:
        """Future of the reply within `timeout_s` seconds; its exception is a WorkerError."""
        self.start()
        answer: Future[_Reply] = Future()
        self._jobs.put((job, kind, timeout_s, answer))
        return answer

    def close(self) -> None:
        """Answer the submitted requests, then end the child."""
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
        """End the child in the middle of its work, since nobody waits any more."""
        self._abandoned = True
        if self._child is not None:
            self._child.kill()

    def _spawn(self) -> None:
        self._pending = b""
        folder = Path(tempfile.gettempdir(), f"fusion-advisor-{secrets.token_hex(8)}")
        # Before it is there: a signal may come as soon as it is.
        self._folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(0o700)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by _stop)
        self._child = subprocess.Popen(
            (sys.executable, "-P", "-c", _START, _ROOT, str(folder), *self._arguments),
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
            self._folder()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            asked, kind, timeout_s, answer = job
            try:
                reply = self._ask(request(asked), timeout_s)
                found = reply if isinstance(reply, str) else from_data(kind, reply)
            except (WorkerError, OSError, ValueError, TypeError) as error:
                reason = f"{error}{self._last_words()}"
                self._stop()
                answer.set_exception(WorkerError(reason))
                continue
            if isinstance(found, str):
                answer.set_exception(WorkerError(found))
            else:
                answer.set_result(found)
        self._stop()

    def _ask(self, line: str, timeout_s: float) -> Any:
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
        return json.loads(reply)

    def _last_words(self) -> str:
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f" ({lines[-1].strip()})" if lines else ""


def request(job: Any) -> str:
    """Line that asks for a job."""
    return json.dumps([type(job).__name__, to_data(job)])


def serve(
    answers: Mapping[type[Any], Callable[[Any], Any]], after: Callable[[], None] | None = None
) -> None:
    """Run the child: reply to each request with the result of the function for its class, then call
    `after`.

    An exception is reported in one line. After a failure that the process does not survive, raised
    or in a reply's `failure`, the child restarts itself. The real standard output is kept for
    replies; output of an emitted file, Triton or ptxas goes to standard error.
    """
    descriptor = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(descriptor, "w", encoding="utf-8") as replies:
        for line in iter(sys.stdin.readline, ""):
            text, failure = replied(line, answers)
            replies.write(text + "\n")
            replies.flush()
            if needs_restart(failure):
                _restart(descriptor)
            if after is not None:
                after()


def replied(line: str, answers: Mapping[type[Any], Callable[[Any], Any]]) -> tuple[str, str]:
    """Line of the reply to a request line, and the failure; empty for none."""
    name, content = json.loads(line)
    kind = next(kind for kind in answers if kind.__name__ == name)
    job = from_data(kind, content)
    try:
        found = answers[kind](job)
    except Exception as error:  # noqa: BLE001 emitted files and rivals raise what they like
        text = str(error) if isinstance(error, KernelFault) else cause(error)
        failure = " ".join(text.split())
        return json.dumps(failure), failure
    return to_json(found), getattr(found, "failure", None) or ""


def _restart(descriptor: int) -> NoReturn:
    """Restart the child in its own place: a CUDA context does not survive a bad address. Its parent
    notices nothing: the pipes stay, and at most one unread request waits in them."""
    os.dup2(descriptor, 1)
    os.execv(sys.executable, sys.orig_argv)
