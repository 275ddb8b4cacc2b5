"""Ways of running one call, each in a process of its own: they prepare together, and measure in
turn."""
# torch.compile and what is called are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..gpu import ROOT
from .drawn import _asked, _cause, _cores, _line
from .step import batches, on_gpu, warmed

WAYS = ("eager", "compile", "backend", "tuned")
"""Ways of running a call: `backend` is `fusion_advisor.apply`, `tuned` that with `tune="now"`."""
OURS = WAYS[2:]
_ROUNDS = 7
_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


@dataclass
class Way:
    """One way of one call. `ms` is a step, `gpu` the GPU's part of it by the kind of kernel,
    `first` the first call's seconds, `apart` the distance to eager's result as a share of its
    length, `said` what was placed."""

    name: str
    way: str
    ms: float = 0.0
    gpu: dict[str, float] = field(default_factory=dict[str, float])
    first: float = 0.0
    apart: float = 0.0
    said: str = ""
    failure: str = ""

    @property
    def worked(self) -> float:
        """Milliseconds that the GPU works in a step."""
        return sum(self.gpu.values())


Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""What is called, and what it gets."""


# -- one way, in a process of its own --------------------------------------------------------------


def tried(row: Way, call: Call, device: str) -> Callable[[], Any]:
    """A step of a way, after its first call, which is held to eager's."""
    import torch

    import fusion_advisor as fa

    run, args, kwargs = call
    wanted = _compared(run(*args, **kwargs), device)
    done = None
    if row.way == "compile":
        run = torch.compile(run)
    elif row.way in OURS:
        done = fa.apply(run, tune="now" if row.way == "tuned" else None)
        run = done.run
    began = time.perf_counter()
    found = _compared(run(*args, **kwargs), device)
    row.first = time.perf_counter() - began
    row.apart = float((found - wanted).norm() / wanted.norm())
    if done is not None:
        rewrites = ", ".join(f"{name} x{count}" for name, count in done.rewrites.items())
        why = f" ({next(iter(done.refused.values()))})" if done.refused and not done.kernels else ""
        row.said = f"{sum(done.kernels.values())}{why}; {rewrites or 'none'}"
    return lambda: run(*args, **kwargs)


def _compared(result: Any, device: str) -> Any:
    """The first tensor of a result that is no single number, once it is there."""
    import torch

    every = [result] if hasattr(result, "shape") else result
    every = every.values() if hasattr(every, "values") else every
    found = next(each for each in every if hasattr(each, "shape") and each.dim()).float()
    if device == "cuda":
        torch.cuda.synchronize()
    return found


def serve(row: Way, prepare: Callable[[Way], Callable[[], Any]], device: str) -> None:
    """Prepare a way in this process, say so, and at each line that comes measure a batch more and
    print the row."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    measuring, others = _cores()
    os.sched_setaffinity(0, others)  # compilers that are started later have the same
    step, spent = None, list[float]()
    try:
        step = prepare(row)
    except Exception as error:  # noqa: BLE001 a way that fails is a row
        row.failure = _cause(error)
    print("ready", file=out)
    for _ in sys.stdin:
        try:
            if step is not None and not row.failure:
                if not spent:
                    os.sched_setaffinity(0, {measuring})
                    warmed(step, device)
                    row.gpu = on_gpu(step)[0] if device == "cuda" else {}
                spent += batches(step, device, rounds=1)
                row.ms = statistics.median(spent)
        except Exception as error:  # noqa: BLE001 a way that fails is a row
            row.failure = _cause(error)
        print(json.dumps(asdict(row)), file=out)


# -- all ways of a call ----------------------------------------------------------------------------


def measured(
    rows: Sequence[Way], command: Sequence[str], each: float, deadline: float, logs: Path
) -> list[Way]:
    """The ways of a call, measured by `python -m COMMAND --child ROW`; each has `each` seconds to
    prepare."""
    if time.monotonic() >= deadline:
        return [replace(row, failure="no time was left") for row in rows]
    with tempfile.TemporaryDirectory() as caches:
        running = [
            _started(row, command, Path(caches) / str(number), logs)
            for number, row in enumerate(rows)
        ]
        until = min(deadline, time.monotonic() + each)
        ready = [_line(process, until) for process in running]
        for process, said in zip(running, ready, strict=True):
            if not said:
                process.kill()
        answers = [""] * len(running)
        for _ in range(_ROUNDS):
            answers = [_asked(process, deadline) for process in running]
        for process in running:
            process.kill()
            process.wait()
    return [
        Way(**json.loads(answer))
        if answer.startswith("{")
        else replace(row, failure=_silent(process, said, each))
        for row, answer, process, said in zip(rows, answers, running, ready, strict=True)
    ]


def _silent(process: subprocess.Popen[str], said: str, each: float) -> str:
    """Why a process gave no row."""
    if process.returncode != -9:
        return f"ended with code {process.returncode}; see its log"
    return "no time was left to measure" if said else f"was not ready within {each:g} s"


def _started(row: Way, command: Sequence[str], caches: Path, logs: Path) -> subprocess.Popen[str]:
    own = {name: str(caches / folder) for name, folder in _CACHES.items()}
    log = (logs / f"{row.name}_{row.way.replace(', ', '_')}.log").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--child", json.dumps(asdict(row))],
        cwd=ROOT, env={**os.environ, **own}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip
