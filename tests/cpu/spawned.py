"""Python processes that begin with torch imported: forks in place of what `Popen` would start.

Most of what a command or a check costs in a test is the import of torch and Triton, in two or three
processes. `popen` takes such commands as `[sys.executable, "-P", "-m", "module", ...]` and
`[..., "-c", ...]` and has them run in a fork of a process that has imported what they need; what
these start in turn is forked in the same way. Other commands go to `subprocess`. Each of them has
its own environment, folder and descriptors, and nothing of the test's process.

Processes as users start them are tested by test_same_bytes, test_docs, test_wheel and others.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.support import forkserver, worker

HERE = Path(__file__).resolve()
EXAMPLE = HERE.parents[2] / "examples" / "softmax.py"
IMPORTED = {
    "commands": (
        "torch._dynamo", "torch.export._trace", "fusion_advisor.cli.app",
        "fusion_advisor.frontend.loading", "fusion_advisor.workflows.patch",
        "fusion_advisor.verify.compile_child", "fusion_advisor.ci.policy",
        "fusion_advisor.report.formats.text", "rich.console",
    ),
    "interpreter": (
        "torch._dynamo", "torch.export._trace", "torch._inductor.compile_fx",
        "transformers.modeling_utils", "fusion_advisor.dynamo.backend",
        "fusion_advisor.measure.child", "fusion_advisor.sourcepatch.trial_child",
    ),
}  # fmt: skip
"""Modules of each process that is forked: for commands, captures and kernels that are compiled, and
for kernels that Triton's interpreter runs, whose mode is fixed when Triton is imported."""
INTERPRETED = (
    "fusion_advisor.measure.child", "fusion_advisor.sourcepatch.trial_child",
    "fusion_advisor.verify.check_child",
)  # fmt: skip
"""Workers that run kernels; on a GPU where their words say `gpu`."""
_FREE = 200
"""Descriptors from here on collide with none that a command names."""
_telling: dict[str, socket.socket] = {}
"""To the processes that are forked, in one of their forks."""


class Spawned:
    """What the package asks of a `Popen`: a process, and the pipes that were asked for."""

    def __init__(self, fork: forkserver.Fork, stdin: IO[bytes] | None, stdout: IO[bytes] | None):
        self._fork, self.stdin, self.stdout = fork, stdin, stdout
        while fork.poll() is None and not fork.pid:
            time.sleep(0.001)
        self.pid = fork.pid

    def poll(self) -> int | None:
        return self._fork.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._fork.wait(timeout)

    def kill(self) -> None:
        self._fork.send_signal(forkserver.SIGKILL)


@functools.cache
def _template(name: str) -> forkserver.Forks:
    """It ends with this process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON")}
    if name == "interpreter":
        environment["TRITON_INTERPRET"] = "1"
    environment["PYTHONPATH"] = str(HERE.parents[2])
    # forkserver's own `subprocess`, which `install` replaces, is not the one to start it
    started, forkserver.subprocess = forkserver.subprocess, subprocess
    try:
        return forkserver.Forks([sys.executable, "-W", "ignore", str(HERE), name], environment)
    finally:
        forkserver.subprocess = started


def begin() -> None:
    """Start the processes that are forked: they end with the thread that has started them."""
    _sockets()


def _sockets() -> dict[str, socket.socket]:
    return _telling or {name: _template(name)._socket for name in IMPORTED}


def _template_for(words: Sequence[str], how: str, environment: Mapping[str, str]) -> str:
    if how == "-m":
        return "commands"
    runs = not {*INTERPRETED}.isdisjoint(words) and "gpu" not in words
    return "interpreter" if runs or environment.get("TRITON_INTERPRET") == "1" else "commands"


def _fork(name: str, *descriptors: int) -> forkserver.Fork:
    sockets = _sockets()
    others = [sockets[name].fileno() for name in IMPORTED]
    news, told = os.pipe()
    try:
        socket.send_fds(sockets[name], [b"f"], [told, *others, *descriptors])
    finally:
        os.close(told)
    return forkserver.Fork(news)


def popen(
    command: Sequence[str],
    *,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    pass_fds: Sequence[int] = (),
    start_new_session: bool = False,
) -> Any:
    """As `subprocess.Popen`; of a process of its own where `command` is none for a fork."""
    words = [str(word) for word in command]
    options = [word for word in words[1:3] if word == "-P"]
    how = words[1 + len(options)] if len(words) > 1 + len(options) else ""
    if words[0] != sys.executable or how not in ("-c", "-m"):
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=env, cwd=cwd,
            pass_fds=pass_fds, start_new_session=start_new_session,
        )  # fmt: skip
    environment = dict(os.environ if env is None else env)
    job = {
        "how": how, "words": words[2 + len(options) :], "safe": bool(options),
        "folder": str(cwd or Path.cwd()), "environment": environment,
        "descriptors": list(pass_fds),
    }  # fmt: skip
    with contextlib.ExitStack() as ours:
        asked = ours.enter_context(tempfile.TemporaryFile("w+"))
        json.dump(job, asked)
        asked.flush()
        asked.seek(0)
        opened: list[IO[bytes] | None] = []
        ends: list[int] = []
        for number, given in enumerate((stdin, stdout, stderr)):
            if given == subprocess.PIPE:
                reading, writing = os.pipe()
                theirs, mine = (reading, writing) if number == 0 else (writing, reading)
                opened.append(os.fdopen(mine, "wb" if number == 0 else "rb"))
                ours.callback(os.close, theirs)
            elif given == subprocess.DEVNULL or given is None:
                opened.append(None)
                theirs = os.open(os.devnull, os.O_RDWR)
                ours.callback(os.close, theirs)
            else:
                opened.append(None)
                theirs = given.fileno()
            ends.append(theirs)
        name = _template_for(words, how, environment)
        fork = _fork(name, asked.fileno(), *ends, *pass_fds)
        return Spawned(fork, opened[0], opened[1])


def run(
    command: Sequence[str], *, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with what it prints captured as text."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        code = popen(command, stdout=out, stderr=err, cwd=cwd, env=env).wait()
        out.seek(0), err.seek(0)
        said, complained = (file.read().decode() for file in (out, err))
    return subprocess.CompletedProcess(command, code, said, complained)


def command(
    *words: str | Path, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What `fusion-advisor` does with some words, with variables besides this process's."""
    called = [sys.executable, "-m", "fusion_advisor", *map(str, words)]
    return run(called, cwd=cwd, env={**os.environ, **(env or {})})


def run_script(script: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """What a script prints under Triton's interpreter unless the environment says another way; it
    has to end well."""
    own = {**os.environ, "TRITON_INTERPRET": "1", **environment}
    done = run([sys.executable, "-c", script, *arguments], cwd=folder or Path.cwd(), env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_program(name: str, *arguments: str, folder: Path | None = None, **environment: str) -> str:
    """What a program beside the tests prints, run as a script by `run_script`."""
    script = f"import runpy; runpy.run_path({str(HERE.with_name(name))!r}, run_name='__main__')"
    return run_script(script, *arguments, folder=folder, **environment)


def facts_by(
    name: str, folder: Path | None = None, wanted: Sequence[str] = (), **environment: str
) -> dict[str, Any]:
    """Facts of each scenario of a program beside the tests, of the `wanted` ones if any are named,
    by the scenario's name: the JSON of the last line that the program prints, all in one process
    of its own."""
    printed = run_program(name, *wanted, folder=folder, **environment)
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def install() -> Callable[[], None]:
    """The package's children are forks from now on; what undoes that."""
    before = worker.subprocess, forkserver.subprocess
    names = {name: getattr(subprocess, name) for name in ("PIPE", "DEVNULL", "TimeoutExpired")}
    worker.subprocess = forkserver.subprocess = types.SimpleNamespace(Popen=popen, **names)

    def undo() -> None:
        worker.subprocess, forkserver.subprocess = before

    return undo


# -- the other side -------------------------------------------------------------------------------


def _work(*given: int) -> NoReturn:
    # At its end a process takes operators of torch's away, one by one: those of the process that is
    # forked go with this one anyway.
    weakref.finalize._registry.clear()
    for name in IMPORTED:
        first, *given = given
        _telling[name] = socket.socket(fileno=fcntl.fcntl(first, fcntl.F_DUPFD, _FREE))
        os.close(first)
    asked, *given = given
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD, _FREE) for number in given]
    with os.fdopen(asked) as file:
        job = json.load(file)
    for number in given:
        os.close(number)
    for number, place in zip(moved, (0, 1, 2, *job["descriptors"]), strict=True):
        os.dup2(number, place)
        os.close(number)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    code = _ended(job)
    threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(BrokenPipeError, ValueError):
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def _ended(job: dict[str, Any]) -> int:
    """The exit code of what was asked for."""
    what, *arguments = job["words"]
    importlib.invalidate_caches()
    path = os.environ.get("PYTHONPATH", "")
    first = [] if job["safe"] else [job["folder"] if job["how"] == "-m" else ""]
    sys.path[:0] = [*first, *filter(None, path.split(os.pathsep))]
    sys.argv = ["-c", *arguments]
    install()
    try:
        if job["how"] == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(what, "<string>", "exec"), vars(main))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 as Python ends: its trace is printed
        traceback.print_exc()
        return 1
    return 0


def _serve(name: str, number: int) -> None:
    """The life of the process that is forked."""
    forkserver.end_with_parent()
    for module in IMPORTED[name]:
        importlib.import_module(module)
    from triton.runtime.cache import triton_key

    load_rulebook()
    triton_key()  # a hash of all of Triton's files, which each compilation asks for
    if name == "commands":  # the first capture fills caches that all others read
        importlib.import_module("tests.cpu.in_process").captured(str(EXAMPLE), Scenario())
    forkserver.serve(number, _work)


if __name__ == "__main__":
    importlib.import_module("tests.cpu.spawned")._serve(sys.argv[1], int(sys.argv[2]))
