"""What the host takes for a call of an emitted kernel: guards, allocation and launches.

    python benchmarks/host_time.py FILE... [--out host_time.md]

Each FILE is an emitted one, called with its own small inputs, so often that the device keeps up:
medians of batches, in microseconds, beside those of eager's launches and of `x + x`, the least that
a result of this host costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.support.load_kernel_file import lasting_folder, load_module

BATCHES, CALLS = 31, 200


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "host_time.py: needs a GPU to launch on, and there is none here\n")
    with torch.no_grad():
        text = table([row(file) for file in asked.files])
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


def row(file: Path) -> str:
    """A line of the table for an emitted file."""
    module: Any = load_module(file.read_text(encoding="utf-8"), lasting_folder())
    inputs = [*module.drawn(module.SMALL, "cuda")]
    call: Callable[..., Any] = getattr(module, file.stem)
    results: Any = call(*inputs)
    count = 1 if isinstance(results, torch.Tensor) else len(results)
    ours, eager = (host_us(partial(each, *inputs)) for each in (call, module.reference))
    return f"| {file.stem} | {len(inputs)} | {count} | {ours:.1f} | {eager:.1f} |"


def host_us(call: Callable[[], Any]) -> float:
    """The median of batches, the device waited for after each."""
    for _ in range(CALLS):
        call()
    times: list[float] = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(times)


def table(rows: list[str]) -> str:
    """With what the host is: the time of `x + x`."""
    x = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    least = host_us(lambda: x + x)
    head = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: `x + x` takes {least:.1f} us."
    )
    titles = "| kernel | inputs | results | us | eager's launches, us |\n|---|---|---|---|---|"
    return "\n".join([head, "", titles, *rows])


if __name__ == "__main__":
    main()
