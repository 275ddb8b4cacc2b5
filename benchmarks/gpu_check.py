"""Checks and times emitted kernels on a GPU; writes a table.

    python benchmarks/audit.py FOLDER --families --no-verify --kernels kernels.jsonl   # anywhere
    python benchmarks/gpu_check.py kernels.jsonl --markdown F --json F                 # on the GPU

Every kernel is checked against fp64 on the GPU with the cases that the interpreter checks and at
the graph's own sizes, then timed there beside the eager ops that it replaces: cold L2, medians. The
model's source is not needed.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fusion_advisor.kernels import Case, Kernel, from_json

FULL = "the graph's sizes"
MOST_BYTES = 12_000_000_000
"""Inputs and outputs beyond this leave no room for the fp64 reference's intermediates."""


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


def main() -> None:
    arguments = _arguments()
    lines = arguments.kernels.read_text().splitlines()[:: arguments.every]
    jobs = [json.loads(line) for line in lines]
    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        rows = pool.map(_checked, jobs, chunksize=4)
    print(f"checked {len(rows)} kernels in {time.perf_counter() - started:.0f} s", flush=True)
    copy = _copy_bandwidth()
    deadline = started + arguments.seconds
    for job, row in zip(jobs, rows, strict=True):
        if row.passed and time.perf_counter() < deadline:
            _timed(job, row, copy)
    text = _markdown(rows, copy)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kernels", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=540.0, help="no timing begins after this")
    parser.add_argument("--every", type=int, default=1, help="only every n-th kernel")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _kernel(job: dict[str, Any]) -> Kernel:
    return from_json(Kernel, json.dumps(job["kernel"]))


def _full(kernel: Kernel) -> Case | None:
    """The graph's own sizes, when there is room for them."""
    case = next((case for case in kernel.cases if case.name == FULL), None)
    fits = case is not None and _moved(case) <= MOST_BYTES
    return case if fits else None


def _moved(case: Case) -> int:
    return (case.loaded_bytes or 0) + (case.stored_bytes or 0)


def _checked(job: dict[str, Any]) -> Row:
    """The small cases with every distribution, the full size with the first."""
    from fusion_advisor.checking import check

    kernel = _kernel(job)
    row = Row(job["problem"], kernel.entry)
    small = replace(kernel, cases=tuple(case for case in kernel.cases if case.name != FULL))
    with tempfile.TemporaryDirectory() as folder:
        result = check(small, 5, "gpu", "cuda", Path(folder))
        full = _full(kernel)
        if result.passed and full is not None:
            try:
                result = check(replace(kernel, cases=(full,)), 1, "gpu", "cuda", Path(folder))
                row.full_size = "checked"
            finally:
                _release()
            if not result.passed and "out of memory" in (result.failure or "").lower():
                row.full_size, result = "out of memory", replace(result, passed=True)
    row.passed, row.failure = result.passed, result.failure or ""
    return row


def _release() -> None:
    import torch

    torch.cuda.empty_cache()


def _copy_bandwidth() -> float:
    """Bytes a second that a large device copy reads and writes."""
    import torch
    from triton.testing import do_bench

    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    milliseconds: Any = do_bench(lambda: target.copy_(source), return_mode="median")
    return 2 * source.numel() * source.element_size() / milliseconds * 1e3


def _timed(job: dict[str, Any], row: Row, copy: float) -> None:
    import torch
    from triton.testing import do_bench

    from fusion_advisor.checking import build_inputs
    from fusion_advisor.emitted import load_module

    kernel = _kernel(job)
    case = _full(kernel)
    if case is None:
        return
    try:
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            module: Any = load_module(kernel.text, Path(folder))
            inputs = build_inputs(case, "normal", 0, "cuda")
            ours: Any = do_bench(
                lambda: getattr(module, kernel.entry)(*inputs), 10, 50, return_mode="median"
            )
            eager: Any = do_bench(lambda: module.reference(*inputs), 10, 50, return_mode="median")
    except torch.OutOfMemoryError:
        row.full_size = "out of memory"
        return
    finally:
        _release()
    row.bytes = _moved(case)
    row.kernel_us, row.eager_us = ours * 1e3, eager * 1e3
    row.share = row.bytes / (ours * 1e-3) / copy


def _markdown(rows: list[Row], copy: float) -> str:
    import torch
    import triton

    timed = [row for row in rows if row.kernel_us]
    large = [row for row in timed if row.bytes >= 400_000_000]
    ratios = sorted(row.eager_us / row.kernel_us for row in large)
    failed = [row for row in rows if not row.passed]
    lines = [
        "# Emitted kernels on the GPU",
        "",
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__};"
        f" copy {copy / 1e9:.0f} GB/s read+write.",
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
    lines += [
        "",
        "| problem | kernel | MB | kernel µs | eager µs | ratio | share of copy |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(timed, key=lambda row: -row.bytes):
        lines.append(
            f"| {row.problem} | {row.entry} | {row.bytes / 1e6:.1f} | {row.kernel_us:.1f}"
            f" | {row.eager_us:.1f} | {row.eager_us / row.kernel_us:.2f} | {row.share:.0%} |"
        )
    lines += ["", *(f"FAILED {row.problem} {row.entry}: {row.failure}" for row in failed)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
