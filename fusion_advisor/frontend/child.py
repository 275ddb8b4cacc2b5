"""Capture: MODEL and scenario in, one `Graph` out.

A model file is somebody's code. `capture` runs it in a child process under a limit of time and
memory and gets the graph back as JSON in a file of its own; `in_child` lets any function of this
package work on a model there. `capture_module` captures in process, a module that is already there.
This module imports no torch.
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
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from fusion_advisor.ir.frames import choose_from_dump, has_source, is_user, source_of_traceback
from fusion_advisor.ir.graph import Graph, Node
from fusion_advisor.ir.recording_file import names_json, recorded_graph
from fusion_advisor.ir.scenario import (
    InputSpec,
    Limits,
    Moved,
    Scenario,
    file_or_module,
    parse_dtype,
    parse_input,
)
from fusion_advisor.support import forkserver as forks
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.errors import AdvisorError, CaptureError, UsageError
from fusion_advisor.support.files import missing
from fusion_advisor.support.forkserver import Fork, Forks, end_with_parent

if TYPE_CHECKING:
    import torch

    from fusion_advisor.frontend.export import Placeholder
    from fusion_advisor.frontend.user_model import Loaded

__all__ = [
    "InputSpec", "Limits", "Scenario", "capture", "capture_here", "capture_loaded",
    "capture_module", "capturing", "in_child", "parse_dtype", "parse_input",
]  # fmt: skip

_POLL_SECONDS = 0.05
_DUMP_SECONDS = 1.0
_ERRORS = {"CaptureError": CaptureError, "UsageError": UsageError}


@dataclass(frozen=True)
class ChildJob:
    """Request to a child: a function of this package as `module:name`, and its argument."""

    function: str
    given: str


Then = Callable[["Loaded", Scenario, Graph], Graph]
"""Step that follows a capture in its process, with the model at hand."""


@dataclass(frozen=True)
class CaptureJob:
    """Request for a capture, with the arguments of `capturing`."""

    model: str
    scenario: Scenario
    trail: bool
    references: str | None
    moved: Moved | None
    mask_elements: int | None
    then: ChildJob | None


def capture(
    model: str,
    scenario: Scenario | None = None,
    limits: Limits | None = None,
    debug: bool = False,
    trail: bool = False,
    references: str | None = None,
    moved: Moved | None = None,
    then: ChildJob | None = None,
) -> Graph:
    """Captures MODEL in a child process; with the trail of its nodes on request. Emitted kernels of
    the package `references` are captured as their references, others as one operator each. What the
    model would import from the first folder of `moved` it imports from the second.

    Raises CaptureError, one line that names file and line and what to do, for whatever the model
    does: an exception, a crash, a hang, too much memory. `debug` sends the child's output and
    traceback to standard error.
    """
    asked = capturing(model, scenario, limits, debug, trail, references, moved, then=then)
    with asked as captured:
        return captured()


@contextmanager
def capturing(
    model: str,
    scenario: Scenario | None = None,
    limits: Limits | None = None,
    debug: bool = False,
    trail: bool = False,
    references: str | None = None,
    moved: Moved | None = None,
    mask_elements: int | None = None,
    then: ChildJob | None = None,
) -> Generator[Callable[[], Graph]]:
    """Starts the capture of MODEL; the function given waits for it, as `capture` does. The graph
    says what attention masks of at most so many elements hide; None: of no mask. `then` names a
    function that follows in the child: it takes the argument of `then`, and what `Then` takes.

    Whoever leaves the block early ends the child. A recording has its graph: nothing is started.
    """
    _refuse_missing(model)
    if names_json(model):
        yield lambda: recorded_graph(model)
        return
    request = CaptureJob(
        model, scenario or Scenario(), trail, references, moved, mask_elements, then
    )
    asked = ChildJob(f"{__name__}:captured_for", to_json(request))
    with in_child(asked, model, limits, debug) as answered:
        yield lambda: from_json(Graph, answered())


@contextmanager
def in_child(
    asked: ChildJob, model: str, limits: Limits | None = None, debug: bool = False
) -> Generator[Callable[[], bytes]]:
    """Start a function of this package, from JSON to JSON, that runs the code of MODEL; the
    function given waits for its result, and raises as `capture` does."""
    _refuse_missing(model)
    with _Child() as child:
        watch = _Watch(child.process, limits or Limits())
        child.ask(to_json(asked))

        def answered() -> bytes:
            code = watch.finish()
            reply = child.answer()
            printed = child.printed()
            if debug:
                sys.stderr.write(printed)
            return _read_reply(reply, model, code, watch.verdict, printed)

        yield answered


@contextmanager
def prepared() -> Generator[None]:
    """Start the process that the children of all captures in the block are forked from, if none is
    there: it imports torch once, while requests are being made."""
    if not forks.HERE or _prepares():
        yield
        return
    with Forks(_COMMAND, _environment()) as template:
        _prepared.append((template, _surroundings()))
        try:
            yield
        finally:
            _prepared.pop()


def _prepares() -> bool:
    """Whether a process is there to fork from, with this process's surroundings."""
    return any(t.alive and around == _surroundings() for t, around in _prepared[-1:])


def dismiss() -> None:
    """End the process of `prepared`, if there is one: no capture follows for now."""
    for template, _ in _prepared[-1:]:
        template.end()


def capture_module(
    module: torch.nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    scenario: Scenario | None = None,
    trail: bool = False,
    mask_elements: int | None = None,
) -> Graph:
    """Captures a module with the inputs given, in this process, as `capturing` does a model.
    Raises CaptureError."""
    from fusion_advisor.frontend.user_model import HostFakeMode, Loaded

    scenario = scenario or Scenario()
    fake = _fake_mode_of(module, args, kwargs or {}) or HostFakeMode()
    was_training = module.training
    module.train(scenario.mode == "train")
    try:
        loaded = Loaded(module, args, kwargs or {}, fake, type(module).__name__)
        loaded.assumed.append(f"mode={scenario.mode}")
        return _translate(loaded, scenario, trail, mask_elements=mask_elements)
    finally:
        module.train(was_training)


def capture_loaded(
    loaded: Loaded,
    scenario: Scenario,
    mask_elements: int | None = None,
    then: Then | None = None,
) -> Graph:
    """Capture a model that is fake already, each of its modules in its own mode. Raises
    CaptureError."""
    graph = _translate(loaded, scenario, mask_elements=mask_elements)
    return then(loaded, scenario, graph) if then else graph


def capture_here(
    model: str,
    scenario: Scenario | None = None,
    trail: bool = False,
    references: str | None = None,
    mask_elements: int | None = None,
    then: Then | None = None,
) -> Graph:
    """Captures MODEL in this process, without limits: what the child of `capturing` does."""
    from fusion_advisor.frontend.loading import load
    from fusion_advisor.frontend.signature import objects_known, signature

    if model.startswith("hf:"):
        with contextlib.suppress(ModuleNotFoundError):  # told by load, in one line
            importlib.import_module("transformers")
    scenario = scenario or Scenario()
    loaded = load(model, scenario)
    with objects_known(signature((loaded.args, loaded.kwargs))):  # as a cache that is passed
        graph = _translate(loaded, scenario, trail, references, mask_elements)
    graph = replace(graph, files=_loaded_files())
    return then(loaded, scenario, graph) if then else graph


def _loaded_files() -> tuple[str, ...]:
    """The files of loaded modules that belong to no installed package."""
    named = {getattr(module, "__dict__", {}).get("__file__") for module in [*sys.modules.values()]}
    files = (file for file in named if file and is_user(file) and os.path.isabs(file))
    return tuple(sorted(filter(has_source, files)))


def _fake_mode_of(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils import _pytree as pytree

    tensors = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    return next((t.fake_mode for t in tensors if isinstance(t, FakeTensor)), None)


def _translate(
    loaded: Loaded,
    scenario: Scenario,
    trail: bool = False,
    references: str | None = None,
    mask_elements: int | None = None,
) -> Graph:
    """Trace a loaded model and record its launches."""
    import torch

    from fusion_advisor.frontend.eager_trace import EagerTrace
    from fusion_advisor.frontend.export import from_program, launch, trace, unwrapped
    from fusion_advisor.frontend.joint import followed_by
    from fusion_advisor.frontend.masks import masks
    from fusion_advisor.frontend.source_tracer import first_paths
    from fusion_advisor.frontend.training import captured_step

    autocast = getattr(torch, scenario.autocast) if scenario.autocast else None
    if loaded.program is not None:
        traced = from_program(loaded.program)
    else:
        loss = loaded.loss if scenario.trains else None
        with followed_by(unwrapped(loaded.module)[0] if loss else loaded.module, loss):
            traced = trace(
                loaded.module, loaded.args, loaded.kwargs, loaded.fake,
                grad=scenario.gradients, dynamic=scenario.dynamic, trail=trail,
                autocast=autocast, references=references, breaks=loaded.breaks,
                hint=loaded.hint,
            )  # fmt: skip
    assumed: list[str] = []
    launched = None
    if scenario.trains:
        launched = captured_step(traced, loaded, scenario, autocast, assumed)
    if launched is None:
        launcher = EagerTrace(autocast)
        launched = launcher, launch(traced, launcher)
    launcher, outputs = launched
    nodes = tuple(launcher.nodes)
    if traced.trail:
        first = first_paths(unwrapped(loaded.module)[0])
        nodes = tuple(replace(each, module=first.get(each.module, each.module)) for each in nodes)
    graph = Graph(
        nodes, outputs,
        captured_by=traced.captured_by,
        graph_breaks=tuple(traced.graph_breaks),
        differs_from_eager=tuple(dict.fromkeys(traced.differs)),
        source=loaded.source,
        assumed=(*assumed, *loaded.assumed),
        trail=replace(traced.trail, values=launcher.values) if traced.trail else None,
        built=loaded.built,
        not_run=_not_run(loaded.module, nodes),
        unread=_unread(loaded.module, nodes),
        trained=_trained(traced.placeholders) if scenario.gradients else (),
    )  # fmt: skip
    if mask_elements is not None:
        graph = replace(graph, masks=masks(graph, mask_elements))
    if not any(node.kind == "call" for node in graph.nodes):
        raise CaptureError(
            f"{loaded.source}: the model launches no kernel; give a model that computes something"
        )
    return graph


def _not_run(module: torch.nn.Module, nodes: Sequence[Node]) -> tuple[str, ...]:
    """The topmost modules with parameters that no launch reads. () for a model that reads no
    parameter at all: it computes with what it is given."""
    from fusion_advisor.frontend.expansions import identifier

    read = {ref.node for node in nodes for ref in node.refs()}
    named = module.named_parameters(remove_duplicate=False)  # one that is tied has several names
    used = {_memory(parameter) for name, parameter in named if identifier(name) in read}
    found: list[str] = []

    def look(name: str, part: torch.nn.Module) -> None:
        own = [_memory(parameter) for parameter in part.parameters()]
        if own and used.isdisjoint(own):
            found.append(name)
            return
        for key, child in part.named_children():
            look(f"{name}.{key}" if name else key, child)

    if used:
        look("", module)
    return tuple(found)


def _unread(module: torch.nn.Module, nodes: Sequence[Node]) -> int:
    """Bytes of a model's parameters and buffers that are not among the nodes. 0 for a model of
    which none is: it computes with what it is given. A sparse tensor, which has no storage of its
    own, is left out."""
    import torch

    from fusion_advisor.frontend.expansions import identifier

    known = {node.name for node in nodes if node.kind != "call"}
    named = (module.named_parameters, module.named_buffers)
    held: dict[int, int] = {}
    used: set[int] = set()
    for name, tensor in (each for one in named for each in one(remove_duplicate=False)):
        if tensor.layout is not torch.strided:
            continue
        held[_memory(tensor)] = tensor.untyped_storage().nbytes()
        if identifier(name) in known:
            used.add(_memory(tensor))
    return sum(size for key, size in held.items() if key not in used) if used else 0


def _trained(placeholders: Sequence[Placeholder]) -> tuple[str, ...]:
    """Names of the tensors that require a gradient."""
    return tuple(each.name for each in placeholders if getattr(each.value, "requires_grad", False))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


# The parent's side.


def _refuse_missing(model: str) -> None:
    """UsageError at once where MODEL is a file that is not there, or none with a model."""
    path = file_or_module(model)
    known = model.startswith("hf:") or path.endswith((".py", ".pt2")) or names_json(model)
    there = Path(path).is_file()
    if (there and not known) or (not there and (known or "/" in path)):
        what = "a file of another kind" if there else missing(path)
        raise UsageError(
            f"{path}: {what}; give FILE.py, FILE.py:NAME, package.module:NAME, hf:config.json, "
            "FILE.pt2 or RECORDING.json"
        )


_COMMAND = (sys.executable, "-P", "-m", "fusion_advisor.frontend.child")
_prepared: list[tuple[Forks, object]] = []


def _surroundings() -> object:
    """Environment, folder and import path that a forked child inherits from its parent, to
    compare."""
    return os.getcwd(), _environment()


class _Child:
    """A process that imports what a capture needs, waits for one request and answers it."""

    def __init__(self) -> None:
        # Files, for a pipe lasts as long as any process that the model started.
        self._own = ExitStack()
        self._log = self._own.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        if forks.HERE:
            request, asking = os.pipe()
            self._request: IO[bytes] = os.fdopen(asking, "wb")
            self._reply = self._own.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            self.process = self._forked(request, self._reply.fileno())
            os.close(request)
        else:
            reply = Path(self._own.enter_context(_folder()), "reply")
            reply.touch()
            self.process = self._started(reply)
            assert self.process.stdin is not None  # it is a pipe
            self._request = self.process.stdin
            self._reply = self._own.enter_context(reply.open("rb"))

    def _forked(self, *ends: int) -> Fork:
        """A fork of the prepared process where its surroundings are the same, else of a process of
        its own."""
        if _prepares():
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                return _prepared[-1][0].fork(*ends, self._log.fileno())
        template = self._own.enter_context(Forks(_COMMAND, _environment()))
        return template.fork(*ends, self._log.fileno())

    def _started(self, reply: Path) -> subprocess.Popen[bytes]:
        """A process of its own, where processes cannot be forked; Windows passes no other
        descriptors on."""
        return subprocess.Popen(
            [*_COMMAND, str(reply)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=self._log,
            start_new_session=True, env=_environment(),
        )  # fmt: skip

    def ask(self, request: str) -> None:
        """Hand over the one request. A child that has died is reported by its missing reply."""
        with contextlib.suppress(BrokenPipeError), self._request:
            self._request.write(request.encode())

    def answer(self) -> bytes:
        """The child's reply, once the child has ended."""
        self._reply.seek(0)
        return self._reply.read()

    def printed(self) -> str:
        """Output of the child and the model, standard output and error."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._request.close()  # one that begins only now finds that nobody asks
        if self.process.poll() is None:
            _kill(self.process)
        self.process.wait()
        self._own.close()


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fusion-advisor-", ignore_cleanup_errors=True)


def _kill(child: subprocess.Popen[bytes] | Fork) -> None:
    """Ends a child, and what is left of its process group."""
    if isinstance(child, Fork):
        child.kill_group()
        return
    if not hasattr(os, "killpg"):  # Windows has no process groups
        child.kill()
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


class _Watch:
    """Ends a child that exceeds its limits, after asking the child where it is."""

    def __init__(self, child: subprocess.Popen[bytes] | Fork, limits: Limits) -> None:
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
        _kill(self._child)  # what the model started and left

    def _end(self, verdict: str) -> None:
        self.verdict = verdict
        if hasattr(signal, "SIGUSR1"):  # on Windows nothing asks it where it is
            self._child.send_signal(signal.SIGUSR1)
        try:
            self._child.wait(_DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            _kill(self._child)
        self._child.wait()


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 where /proc does not say."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _environment() -> dict[str, str]:
    """Environment of the child: it finds this package wherever it is, and no GPU."""
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}


def _read_reply(reply: bytes, model: str, code: int, verdict: str, printed: str) -> bytes:
    kind, _, body = reply.partition(b"\n")
    if kind == b"result" and not verdict:
        return body
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


def serve(reply: str) -> None:
    """Read a request from standard input, capture, and write the reply to a file."""
    end_with_parent()
    request, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # the model reads nothing
    os.close(nothing)
    binary: int = getattr(os, "O_BINARY", 0)
    _answer_one(request, os.open(reply, os.O_WRONLY | binary), _import)


def serve_forks(number: int) -> None:
    """Serve requests through a socket, each in a fork of this process."""
    end_with_parent()
    gc.disable()
    unready = _import()

    def work(request: int, reply: int, log: int) -> NoReturn:
        for output in (1, 2):
            os.dup2(log, output)
        _answer_one(request, reply, lambda: unready)

    forks.serve(number, work)


def _answer_one(request: int, reply: int, imported: Callable[[], bytes]) -> NoReturn:
    faulthandler.enable(all_threads=False)
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)
    leave = os._exit

    def leave_with_a_trace(status: int) -> NoReturn:
        faulthandler.dump_traceback(file=2, all_threads=False)
        leave(status)

    os._exit = leave_with_a_trace  # the parent reads in the trace where the model left
    gc.disable()  # the child lives for one capture, and collections are a tenth of its time
    with os.fdopen(reply, "wb") as answered:
        unready = imported()
        with os.fdopen(request, "rb") as asked:
            content = asked.read()
        if not content:
            leave(0)  # nobody asks
        answered.write(unready or _answer(from_json(ChildJob, content)))
        answered.flush()
        leave(0)


def _answer(asked: ChildJob) -> bytes:
    try:
        result: str = _function(asked)(asked.given)
        return b"result\n" + result.encode()
    except BaseException as error:  # noqa: BLE001 the parent tells the user, in one line
        return _failed(error)


def _function(asked: ChildJob) -> Callable[..., Any]:
    module, _, name = asked.function.partition(":")
    return getattr(importlib.import_module(module), name)


def captured_for(given: str) -> str:
    """Graph for a `CaptureJob`, both as JSON: what the child of `capturing` does."""
    asked = from_json(CaptureJob, given)
    if asked.moved:
        relocate(*asked.moved)
    then = partial(_function(asked.then), asked.then.given) if asked.then else None
    return to_json(
        capture_here(
            asked.model, asked.scenario, asked.trail, asked.references, asked.mask_elements, then
        )
    )


def relocate(folder: str, copy: str) -> None:
    """Make this process import from `copy` what it would import from `folder`, except for packages
    installed there."""

    def kept(path: str) -> bool:
        return "site-packages" in path or not Path(path).is_relative_to(folder)

    found = map(os.path.abspath, sys.path)
    sys.path[:] = [path if kept(path) else copy + path[len(folder) :] for path in found]


def _import() -> bytes:
    """Import what every capture needs, outside of a capture's time limit; the error, if any."""
    try:
        for module in ("torch._dynamo", "torch.export._trace", "fusion_advisor.frontend.loading"):
            importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 the parent tells the user, in one line
        return _failed(error)
    return b""


def _failed(error: BaseException) -> bytes:
    """The reply for an error, in one line."""
    traceback.print_exc()
    if isinstance(error, KeyboardInterrupt | SystemExit):  # the rest is told where it is caught
        source = source_of_traceback(error)
        where = f"{source.file}:{source.line}: " if source else ""
        error = CaptureError(f"{where}the model raised {type(error).__name__}; remove what ends it")
    message = str(error)
    if not isinstance(error, AdvisorError):
        message = f"capture failed: {type(error).__name__}: {message or 'no message'}"
    content = {"type": type(error).__name__, "message": re.sub(r"\s+", " ", message)}
    return b"error\n" + json.dumps(content).encode()


if __name__ == "__main__":
    # Under its own name, so that its classes exist once.
    module, (_, given) = importlib.import_module("fusion_advisor.frontend.child"), sys.argv
    module.serve_forks(int(given)) if given.isdigit() else module.serve(given)
