"""Ways of running one call, each in a process of its own with empty caches of compilers: they
prepare together, and measure in turn, each on the same core, on which nothing else runs. Each round
has another order: a GPU is slower behind a way that heats it than behind one that lets it rest."""
# torch.compile and what is called are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle, islice, permutations
from pathlib import Path
from typing import Any, TypeVar

from ..gpu import ROOT
from .step import batches, on_gpu, warmed

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


Row = TypeVar("Row", bound=Way)


# -- one way, in a process of its own --------------------------------------------------------------


def serve(row: Row, prepare: Callable[[Row], Callable[[], Any]], device: str = "cuda") -> None:
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


def _cores() -> tuple[int, set[int]]:
    """The core on which this process measures, one for each GPU, and those on which nothing
    measures."""
    cores = sorted(os.sched_getaffinity(0))
    first = len(cores) // 2
    every = cores[first : first + 8]
    mine = every[int(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) % len(every)]
    others = set(cores) - set(every[: max(1, len(cores) // 8)])
    return mine, others or {mine}


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


# -- all ways of a call ----------------------------------------------------------------------------


def measured(
    rows: Sequence[Row],
    command: Sequence[str],
    each: float,
    deadline: float,
    logs: Path,
    gpu: int | None = None,
) -> list[Row]:
    """The ways of a call, measured by `python -m COMMAND --child ROW`, on a GPU if one is named;
    each has `each` seconds to prepare."""
    if time.monotonic() >= deadline:
        return [replace(row, failure="no time was left") for row in rows]
    with tempfile.TemporaryDirectory() as caches:
        running = [
            _started(row, command, Path(caches) / str(number), logs, gpu)
            for number, row in enumerate(rows)
        ]
        until = min(deadline, time.monotonic() + each)
        ready = [_line(process, until) for process in running]
        for process, said in zip(running, ready, strict=True):
            if not said:
                process.kill()
        answers = [""] * len(running)
        for order in _orders(len(running)):
            for number in order:
                answers[number] = _asked(running[number], deadline)
        for process in running:
            process.kill()
            process.wait()
    return [
        type(row)(**json.loads(answer))
        if answer.startswith("{")
        else replace(row, failure=_silent(process, said, each))
        for row, answer, process, said in zip(rows, answers, running, ready, strict=True)
    ]


def _orders(count: int) -> list[tuple[int, ...]]:
    """The order of the ways in each round: each behind each other one, as far as rounds go."""
    every = list(permutations(range(count)))
    random.Random(0).shuffle(every)
    return list(islice(cycle(every), _ROUNDS))


def _silent(process: subprocess.Popen[str], said: str, each: float) -> str:
    """Why a process gave no row."""
    if process.returncode != -9:
        return f"ended with code {process.returncode}; see its log"
    return "no time was left to measure" if said else f"was not ready within {each:g} s"


def _started(
    row: Way, command: Sequence[str], caches: Path, logs: Path, gpu: int | None
) -> subprocess.Popen[str]:
    own = {name: str(caches / folder) for name, folder in _CACHES.items()}
    own |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    log = (logs / f"{row.name}_{row.way}.log").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", *command, "--child", json.dumps(asdict(row))],
        cwd=ROOT, env={**os.environ, **own}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip


def _asked(process: subprocess.Popen[str], deadline: float) -> str:
    """The row after one batch more; "" of a process that has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _line(process, deadline)


def _line(process: subprocess.Popen[str], deadline: float) -> str:
    import select

    assert process.stdout is not None
    left = max(0.0, deadline - time.monotonic())
    seen, _, _ = select.select([process.stdout], [], [], left)
    return process.stdout.readline().strip() if seen else ""
