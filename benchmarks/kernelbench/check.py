"""Checks and times emitted kernels on a GPU; writes a table.

    python -m benchmarks.kernelbench.audit FOLDER --families --no-verify --kernels kernels.jsonl
    python -m benchmarks.kernelbench.check kernels.jsonl --markdown F --json F     # on the GPU

Every kernel is checked against fp64 on the GPU with the cases that the interpreter checks and at
the graph's own sizes, then timed there beside the eager ops that it replaces: cold L2, medians. The
model's source is not needed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fusion_advisor.ir.kernel import Case, Check, Kernel
from fusion_advisor.support.codec import from_json
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import checker, submit_check

from ..gpu import clock, copy_bandwidth, heading

FULL = "the graph's sizes"
MOST_BYTES = 12_000_000_000
"""Inputs and outputs beyond this leave no room for the fp64 reference's intermediates."""
ALONE_BYTES = 600_000_000
"""Larger ones are checked one at a time: their intermediates share the GPU's memory."""


@dataclass
class Row:
    """One kernel. Times are microseconds, medians; `share` is of the copy bandwidth."""

    problem: str
    entry: str
    passed: bool = False
    failure: str = ""
    full_size: str = ""
    bytes: int = 0
    kernel_us: float = 0.0
    eager_us: float = 0.0
    share: float = 0.0
    host_us: float = 0.0
    eager_host_us: float = 0.0
    """What the host takes for a call: guards, allocation and launches; and for eager's."""
    launches: int = 1
    """Of the file; eager's are in the report."""


def main() -> None:
    arguments = _arguments()
    lines = arguments.kernels.read_text().splitlines()[:: arguments.every]
    jobs = [json.loads(line) for line in lines]
    started = time.perf_counter()
    rows = _check_all(jobs, arguments)
    print(f"checked {len(rows)} kernels in {time.perf_counter() - started:.0f} s", flush=True)
    _write(rows, 0.0, arguments)
    left = started + arguments.seconds - time.perf_counter()
    copy = _time_all(jobs, rows, time.perf_counter() + left, arguments)
    print(_write(rows, copy, arguments))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0, help="nothing begins after this")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one check")
    parser.add_argument("--every", type=int, default=1, help="only every n-th kernel")
    parser.add_argument("--device", default="h200", help="whose rules the clock has")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path, help="rewritten as results come in")
    return parser.parse_args()


def _write(rows: list[Row], copy: float, arguments: argparse.Namespace) -> str:
    text = _markdown(rows, copy)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return text


# -- checking: several children at once, each kernel with a time limit -----------------------------


def _check_all(jobs: list[dict[str, Any]], arguments: argparse.Namespace) -> list[Row]:
    """A row for each kernel, in order; the largest are checked one at a time."""
    deadline = time.perf_counter() + arguments.seconds
    own = threading.local()
    workers: list[Worker] = []
    whole = threading.Lock()
    done: list[Row] = []

    def checked(job: dict[str, Any]) -> Row:
        row = Row(job["problem"], job["kernel"]["entry"])
        if time.perf_counter() > deadline:
            row.failure = "not reached"
            return row
        if not hasattr(own, "worker"):
            own.worker = checker("gpu")
            workers.append(own.worker)
        _checked(row, _kernel(job), own.worker, arguments.limit, whole)
        done.append(row)
        if len(done) % 25 == 0:
            print(f"{len(done)} checked", flush=True)
            _write(list(done), 0.0, arguments)
        return row

    with ThreadPoolExecutor(arguments.processes) as threads:
        rows = list(threads.map(checked, jobs))
    for worker in workers:
        worker.close()
    return rows


def _checked(row: Row, kernel: Kernel, worker: Worker, limit: float, whole: threading.Lock) -> None:
    """The small cases with every distribution, the full size with the first."""

    def check(case_kernel: Kernel, seeds: int) -> Check:
        return submit_check(worker, case_kernel, seeds=seeds, timeout_s=limit)()

    small = replace(kernel, cases=tuple(case for case in kernel.cases if case.name != FULL))
    result = check(small, 5)
    full = _full(kernel)
    if result.passed and full is not None:
        with whole if _moved(full) > ALONE_BYTES else nullcontext():
            result = check(replace(kernel, cases=(full,)), 1)
        row.full_size = "checked"
        if not result.passed and "out of memory" in (result.failure or "").lower():
            row.full_size, result = "out of memory", replace(result, passed=True)
    row.passed, row.failure = result.passed, result.failure or ""


# -- timing: one child, killed when a kernel outstays its time -------------------------------------


def _time_all(
    jobs: list[dict[str, Any]], rows: list[Row], deadline: float, arguments: argparse.Namespace
) -> float:
    """Times what passed, the largest first; the copy bandwidth in bytes a second."""
    pool = _pool()
    copy = pool.submit(_copy, arguments.device).result()
    order = sorted(range(len(jobs)), key=lambda place: -_size(_kernel(jobs[place])))
    for place in order:
        row = rows[place]
        if not row.passed or time.perf_counter() > deadline:
            continue
        try:
            found = pool.submit(_timed, jobs[place], arguments.device).result(
                timeout=arguments.limit
            )
        except TimeoutError:
            row.full_size = f"not timed in {arguments.limit:g} s"
            _kill(pool)
            pool = _pool()
            continue
        if found is None:
            row.full_size = "out of memory"
            continue
        row.bytes, row.kernel_us, row.eager_us, row.host_us, row.eager_host_us = found
        row.launches = len(_kernel(jobs[place]).launches)
        row.share = row.bytes / max(row.kernel_us, 1e-9) * 1e6 / copy
        _write(rows, copy, arguments)
    pool.shutdown()
    return copy


def _pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def _kill(pool: ProcessPoolExecutor) -> None:
    for process in multiprocessing.active_children():
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _size(kernel: Kernel) -> int:
    case = _full(kernel)
    return _moved(case) if case else 0


def _kernel(job: dict[str, Any]) -> Kernel:
    return from_json(Kernel, json.dumps(job["kernel"]))


def _full(kernel: Kernel) -> Case | None:
    """The graph's own sizes, when there is room for them."""
    case = next((case for case in kernel.cases if case.name == FULL), None)
    fits = case is not None and _moved(case) <= MOST_BYTES
    return case if fits else None


def _moved(case: Case) -> int:
    return (case.loaded_bytes or 0) + (case.stored_bytes or 0)


def _copy(device: str) -> float:
    return copy_bandwidth(clock(device))


def _timed(job: dict[str, Any], device: str) -> tuple[int, float, float, float, float] | None:
    """Bytes, the times of the kernel and of eager, and the host's for both; None when the GPU's
    memory does not hold it."""
    import tempfile

    import torch

    from fusion_advisor.shipped.load import load_module
    from fusion_advisor.verify.inputs import build_inputs

    kernel = _kernel(job)
    case = _full(kernel)
    if case is None:
        return 0, 0.0, 0.0, 0.0, 0.0
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            module: Any = load_module(kernel.text, Path(folder))
            inputs = build_inputs(case, "normal", 0, "cuda")

            call, watch = getattr(module, kernel.entry), clock(device)
            times = [watch.time(partial(run, *inputs), 0).us for run in (call, module.reference)]
            hosts = (_host_us(partial(run, *inputs)) for run in (call, module.reference))
            return _moved(case), *times, *hosts
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


def _host_us(call: Callable[[], Any]) -> float:
    """What the host takes for a call, while the device waits."""
    import torch

    spent: list[float] = []
    for _ in range(7):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        began = time.perf_counter()
        for _ in range(40):
            call()
        spent.append((time.perf_counter() - began) / 40 * 1e6)
        torch.cuda.synchronize()
    return statistics.median(spent)


def _markdown(rows: list[Row], copy: float) -> str:
    """The table; `copy` in bytes a second."""
    timed = [row for row in rows if row.kernel_us]
    large = [row for row in timed if row.bytes >= 400_000_000]
    ratios = sorted(row.eager_us / row.kernel_us for row in large)
    failed = [row for row in rows if not row.passed]
    lines = [
        *heading("Emitted kernels on the GPU"),
        f"Copy {copy / 1e9:.0f} GB/s read+write.",
        f"Checked {len(rows)} kernels, {len(failed)} failed;"
        f" {sum(row.full_size == 'checked' for row in rows)} of them at the graph's own sizes.",
    ]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        shares = sorted(row.share for row in large)
        lines.append(
            f"Timed {len(timed)}; of the {len(large)} that move at least 0.4 GB: eager over kernel,"
            f" geometric mean {mean:.2f}, least {ratios[0]:.2f}; share of the copy bandwidth,"
            f" median {shares[len(shares) // 2]:.0%}, least {shares[0]:.0%}."
        )
    hosts = sorted(row.host_us for row in timed if row.launches == 1)
    if hosts:
        eager = statistics.median(row.eager_host_us / row.host_us for row in timed)
        lines.append(
            f"The host takes {statistics.median(hosts):.1f} µs for a call of one launch, guards and"
            f" allocation included, nine of ten at most {hosts[len(hosts) * 9 // 10]:.1f}; of any"
            f" call eager takes it {eager:.1f} times as long in the median."
        )
    lines += [
        "",
        "| problem | kernel | MB | µs | eager µs | ratio | share of copy | host µs | eager's |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(timed, key=lambda row: -row.bytes):
        lines.append(
            f"| {row.problem} | {row.entry} | {row.bytes / 1e6:.1f} | {row.kernel_us:.1f}"
            f" | {row.eager_us:.1f} | {row.eager_us / row.kernel_us:.2f} | {row.share:.0%}"
            f" | {row.host_us:.1f} | {row.eager_host_us:.1f} |"
        )
    lines += ["", *(f"FAILED {row.problem} {row.entry}: {row.failure}" for row in failed)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
