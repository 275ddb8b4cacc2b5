"""What every run on a GPU shares: its clock, what stands above its table, kernels run once ahead.

    python -m benchmarks.FOLDER[.SCRIPT] ...      # in the root of a checkout, here and on the GPU

A table says by which command, on what, at which commit and when it was made (`heading`); times are
those of `fusion_advisor.measure.clocks`: medians, a cold L2, the host out of the way.
"""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import datetime
import json
import multiprocessing
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as Late
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fusion_advisor.support.kernel_fault import cause

if TYPE_CHECKING:
    from fusion_advisor.measure.clocks import Clock

Job = TypeVar("Job")

ROOT = Path(__file__).resolve().parents[1]
COPIED_BYTES = 4 << 30
"""Read and written by the copy that shares are of: beyond any cache."""


def commit() -> str:
    """The first eight digits of the checkout's commit; empty outside of one."""
    head = ["git", "rev-parse", "HEAD"]
    return subprocess.run(head, cwd=ROOT, check=False, capture_output=True, text=True).stdout[:8]


def machine() -> str:
    """The GPU, or that there is none, and the versions."""
    import torch
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{name}, torch {torch.__version__}, triton {triton.__version__}"


def heading(title: str) -> list[str]:
    """The first lines of a table: its title, this command, the machine, the commit, the day."""
    words = [getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0]), *sys.argv[1:]]
    command = shlex.join(["python", "-m", words[0].removesuffix(".__main__"), *words[1:]])
    today = datetime.datetime.now(datetime.UTC).date()
    where = f"{machine()}; commit {commit() or 'unknown'}, {today}."
    return [f"# {title}", "", f"    {command}", "", where]


def json_lines(rows: Iterable[Any]) -> str:
    """Rows of a table, each a dataclass, as a line of JSON each."""
    return "".join(f"{json.dumps(asdict(row))}\n" for row in rows)


def clock(device: str, *, dry: bool = False) -> Clock:
    """The GPU's clock by a device's rules; the host's on a rehearsal."""
    from fusion_advisor.measure.clocks import DeviceClock, HostClock
    from fusion_advisor.measure.driver import timing_rules
    from fusion_advisor.rulebook.load import load_rulebook

    rules = load_rulebook()
    return HostClock() if dry else DeviceClock(timing_rules(rules, rules.device(device)))


def copy_bandwidth(clock: Clock, nbytes: int = COPIED_BYTES) -> float:
    """Bytes a second that a large copy reads and writes."""
    import torch

    source = torch.randn(nbytes // 8, device=clock.device)
    target = torch.empty_like(source)
    us = clock.time(partial(target.copy_, source), 0).us
    del source, target
    clock.release()
    return nbytes / us * 1e6


def resources(modules: Iterable[Any]) -> str:
    """Registers and spills as the driver counts them, of each kernel: `168/0, 40/0`."""
    found: list[str] = []
    for value in (value for module in modules for value in vars(module).values()):
        for cache in list((getattr(value, "device_caches", None) or {}).values()):
            kernels = cache[0] if isinstance(cache, tuple) else cache
            for kernel in getattr(kernels, "values", list)():
                registers = getattr(kernel, "n_regs", None)
                if registers is not None:
                    found.append(f"{registers}/{getattr(kernel, 'n_spills', '?')}")
    return ", ".join(found)


def lost(why: str) -> bool:
    """Does a failure say that the device is gone for this process?"""
    return "CUDA error" in why or "illegal memory" in why


def ahead(
    run: Callable[[Job], object], jobs: Mapping[str, Job], processes: int, deadline: float
) -> dict[str, str]:
    """Run every job once in processes of their own: Triton's cache is warm afterwards, and one
    that takes its device down does so there. Why, by name, where one failed; what has not ended
    by `deadline` of the monotonic clock is given up, and is no failure."""
    failed: dict[str, str] = {}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(max(1, min(processes, len(jobs))), mp_context=context)
    pending = {name: pool.submit(_once, run, job) for name, job in jobs.items()}
    for name, answer in pending.items():
        try:
            why = answer.result(timeout=max(0.1, deadline - time.monotonic()))
        except Late:
            continue
        except BrokenProcessPool as error:
            why = f"ahead of time: {type(error).__name__}"
        if why:
            failed[name] = why
    if any(not answer.done() for answer in pending.values()):  # a worker hangs
        workers: Iterable[Any] = (getattr(pool, "_processes", None) or {}).values()
        for worker in list(workers):
            worker.kill()
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"ran {len(jobs)} once ahead; failed: {failed}", flush=True)
    return failed


_gone = False


def _once(run: Callable[[Job], object], job: Job) -> str:
    """Empty, or why it failed. A process whose device is lost passes the rest by."""
    global _gone
    import torch

    if _gone:
        return ""
    try:
        with torch.no_grad():
            run(job)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception as error:  # noqa: BLE001 the parent records it
        _gone = lost(why := cause(error))
        return why
    return ""


@contextmanager
def counted(name: str) -> Generator[None]:
    """What is launched within is what ncu counts, as `case:NAME`; see `counters`."""
    import torch

    runtime: Any = torch.cuda.cudart()
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push(f"case:{name}")
    runtime.cudaProfilerStart()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        runtime.cudaProfilerStop()
        torch.cuda.nvtx.range_pop()
