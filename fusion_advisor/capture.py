"""Capture: MODEL and scenario in, one `Graph` out.

A model file is somebody's code. `capture` runs it in a child process under a limit of time and
memory and gets the graph back as JSON through a pipe of its own; `capture_module` does the same in
process, for a module that is already there. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fusion_advisor.errors import AdvisorError, CaptureError, UsageError
from fusion_advisor.frames import choose_from_dump
from fusion_advisor.records import Graph
from fusion_advisor.scenario import InputSpec, Limits, Scenario, parse_dtype, parse_input
from fusion_advisor.wire import graph_from_json, graph_to_json

if TYPE_CHECKING:
    import torch

    from fusion_advisor.models import Loaded

__all__ = [
    "InputSpec", "Limits", "Scenario", "capture", "capture_here", "capture_module", "capturing",
    "graph_from_json", "graph_to_json", "parse_dtype", "parse_input",
]  # fmt: skip

_POLL_SECONDS = 0.05
_DUMP_SECONDS = 1.0
_ERRORS = {"CaptureError": CaptureError, "UsageError": UsageError}


def capture(
    model: str, scenario: Scenario | None = None, limits: Limits | None = None, debug: bool = False
) -> Graph:
    """Captures MODEL in a child process.

    Raises CaptureError, one line that names file and line and what to do, for whatever the model
    does: an exception, a crash, a hang, too much memory. `debug` sends the child's output and
    traceback to standard error.
    """
    with capturing(model, scenario, limits, debug) as captured:
        return captured()


@contextmanager
def capturing(
    model: str, scenario: Scenario | None = None, limits: Limits | None = None, debug: bool = False
) -> Generator[Callable[[], Graph]]:
    """Starts the capture of MODEL; the function given waits for it, as `capture` does.

    Whoever leaves the block early ends the child.
    """
    request = json.dumps({"model": model, "scenario": asdict(scenario or Scenario())})
    read_end, write_end = os.pipe()
    with tempfile.TemporaryFile() as log, os.fdopen(read_end, "rb") as pipe:
        command = [sys.executable, "-m", "fusion_advisor.capture", str(write_end), request]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=(write_end,), start_new_session=True, env=_environment(),
        )  # fmt: skip
        os.close(write_end)
        watch = _Watch(child, limits or Limits())

        def captured() -> Graph:
            reply = pipe.read()
            code = watch.finish()
            log.seek(0)
            printed = log.read().decode(errors="replace")
            if debug:
                sys.stderr.write(printed)
            return _read_reply(reply, model, code, watch.verdict, printed)

        try:
            yield captured
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def capture_module(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    scenario: Scenario | None = None,
) -> Graph:
    """Captures a module with the inputs given, in this process. Raises CaptureError."""
    from fusion_advisor.models import HostFakeMode, Loaded

    scenario = scenario or Scenario()
    fake = _fake_mode_of(module, args, kwargs or {}) or HostFakeMode()
    was_training = module.training
    module.train(scenario.mode == "train")
    try:
        loaded = Loaded(module, args, kwargs or {}, fake, type(module).__name__)
        loaded.assumed.append(f"mode={scenario.mode}")
        return _translate(loaded, scenario, time.perf_counter())
    finally:
        module.train(was_training)


def capture_here(model: str, scenario: Scenario | None = None) -> Graph:
    """Captures MODEL in this process, without limits: what the child of `capture` does."""
    from fusion_advisor.loading import load

    if model.startswith("hf:"):
        with contextlib.suppress(ModuleNotFoundError):  # told by load, in one line
            importlib.import_module("transformers")
    scenario = scenario or Scenario()
    started = time.perf_counter()
    return _translate(load(model, scenario), scenario, started)


def _fake_mode_of(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _pytree as pytree

    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def _translate(loaded: Loaded, scenario: Scenario, started: float) -> Graph:
    """Traces what was loaded and writes its launches down."""
    import torch

    from fusion_advisor.launching import Launcher
    from fusion_advisor.tracing import from_program, launch, trace

    grad = scenario.mode == "train"
    if loaded.program is not None:
        traced = from_program(loaded.program)
    else:
        traced = trace(
            loaded.module, loaded.args, loaded.kwargs, loaded.fake,
            grad=grad, dynamic=scenario.dynamic,
        )  # fmt: skip
    autocast = getattr(torch, scenario.autocast) if scenario.autocast else None
    launcher = Launcher(autocast)
    outputs = launch(traced, launcher)
    graph = Graph(
        tuple(launcher.nodes), outputs,
        captured_by=traced.captured_by,
        graph_breaks=tuple(traced.graph_breaks),
        differs_from_eager=tuple(dict.fromkeys(traced.differs)),
        source=loaded.source,
        assumed=tuple(loaded.assumed),
    )  # fmt: skip
    if not any(node.kind == "call" for node in graph.nodes):
        raise CaptureError(
            f"{loaded.source}: the model launches no kernel; give a model that computes something"
        )
    return replace(graph, seconds=time.perf_counter() - started)


# The parent's side.


class _Watch:
    """Ends a child that outlives its limits, after asking it where it is."""

    def __init__(self, child: subprocess.Popen[bytes], limits: Limits) -> None:
        self.verdict = ""
        self._child = child
        self._limits = limits
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> int:
        """Waits for the child; its exit code."""
        self._thread.join()
        return self._child.wait()

    def _run(self) -> None:
        deadline = time.monotonic() + self._limits.seconds
        while self._child.poll() is None:
            if time.monotonic() > deadline:
                self._end(
                    f"ran longer than {self._limits.seconds:g} s; "
                    "correct the loop or raise the time limit"
                )
            elif resident_bytes(self._child.pid) > self._limits.memory_bytes:
                self._end(
                    f"used more than {self._limits.memory_bytes / 2**30:g} GiB; "
                    "build a smaller model or raise the memory limit"
                )
            time.sleep(_POLL_SECONDS)

    def _end(self, verdict: str) -> None:
        self.verdict = verdict
        self._child.send_signal(signal.SIGUSR1)
        try:
            self._child.wait(_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where /proc does not say."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _environment() -> dict[str, str]:
    """The child finds this package wherever it is, and reaches for no GPU."""
    package = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def _read_reply(reply: bytes, model: str, code: int, verdict: str, printed: str) -> Graph:
    kind, _, body = reply.partition(b"\n")
    if kind == b"graph" and not verdict:
        return graph_from_json(body)
    if kind == b"error" and not verdict:
        content = json.loads(body)
        raise _ERRORS.get(content["type"], AdvisorError)(content["message"])
    source = choose_from_dump(printed)
    where = f"{source.file}:{source.line}" if source else model
    if verdict:
        raise CaptureError(f"{where}: the model {verdict}")
    if code < 0:
        name = signal.Signals(-code).name
        raise CaptureError(f"{where}: the model crashed its process ({name}); correct it there")
    raise CaptureError(
        f"{where}: the model ended its process (exit code {code}); remove the call that exits"
    )


# The child's side.


def serve(descriptor: int, request: str) -> None:
    """Captures as the request says and writes one reply to the pipe."""
    faulthandler.enable(all_threads=False)
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)
    leave = os._exit

    def leave_with_a_trace(status: int) -> NoReturn:
        faulthandler.dump_traceback(file=2, all_threads=False)
        leave(status)

    os._exit = leave_with_a_trace  # the parent reads in the trace where the model left
    with os.fdopen(descriptor, "wb") as pipe:
        pipe.write(_answer(json.loads(request)))
        pipe.flush()
        leave(0)


def _answer(request: dict[str, Any]) -> bytes:
    scenario = _scenario(request["scenario"])
    gc.disable()  # the child lives for one capture, and collections are a tenth of its time
    try:
        # Imports are no part of the capture's seconds.
        importlib.import_module("torch._dynamo")
        importlib.import_module("torch.export._trace")
        return b"graph\n" + graph_to_json(capture_here(request["model"], scenario))
    except BaseException as error:  # noqa: BLE001 the parent tells the user, in one line
        traceback.print_exc()
        message = str(error)
        if not isinstance(error, AdvisorError):
            message = f"capture failed: {type(error).__name__}: {message or 'no message'}"
        line = re.sub(r"\s+", " ", message)
        content = {"type": type(error).__name__, "message": line}
        return b"error\n" + json.dumps(content).encode()


def _scenario(content: dict[str, Any]) -> Scenario:
    specs = tuple(
        InputSpec(item["name"], tuple(item["shape"]), item["dtype"]) for item in content["inputs"]
    )
    fields: dict[str, Any] = {**content, "inputs": specs}
    return Scenario(**fields)


if __name__ == "__main__":
    # Under its own name, so that its classes exist once.
    importlib.import_module("fusion_advisor.capture").serve(int(sys.argv[1]), sys.argv[2])
