"""What holds the emitted kernels back: the hardware counters of each, below ncu; writes a table.

    ncu --nvtx --profile-from-start off --clock-control none --csv --page raw \\
        --metrics "$(python -m benchmarks.kernels.limits metrics)" --log-file counters.csv \\
        python -m benchmarks.kernels.limits launch speed.jsonl       # on the GPU; of `speed emit`
    python -m benchmarks.kernels.limits table counters.csv [--out FILE]

Counters are of one launch with warm instruction caches, and an L2 that other bytes have filled.
"""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from fusion_advisor.support.kernel_fault import cause

from ..counters import case, number, rows
from ..gpu import counted
from .patterns import patterns
from .speed import Whole

ACTIVE = "avg.pct_of_peak_sustained_active"
SHARES = {
    "HBM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "L1": f"l1tex__data_pipe_lsu_wavefronts.{ACTIVE}",
    "warps": f"sm__warps_active.{ACTIVE}",
    "issue": f"sm__inst_issued.{ACTIVE}",
    "ALU": f"sm__inst_executed_pipe_alu.{ACTIVE}",
    "FMA": f"sm__inst_executed_pipe_fma.{ACTIVE}",
    "XU": f"sm__inst_executed_pipe_xu.{ACTIVE}",
    "LSU": f"sm__inst_executed_pipe_lsu.{ACTIVE}",
}
"""Percent of what the device can do: warps of those that it can hold, `issue` of its issue slots,
the rest of a unit's throughput."""
WAITS = {
    "memory": "long_scoreboard",
    "shared memory": "short_scoreboard",
    "barrier": "barrier",
    "load queue": "lg_throttle",
    "memory queue": "mio_throttle",
    "fence": "membar",
    "sleep": "sleeping",
    "busy unit": "math_pipe_throttle",
    "operands": "wait",
    "other warp": "not_selected",
}
"""What a resident warp waits for."""
DURATION = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"
MOST_WAITS = 3
FLUSH_BYTES = 256 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verbs.add_parser("metrics").set_defaults(run=_run_metrics)
    verb = verbs.add_parser("launch")
    verb.set_defaults(run=_run_launch)
    verb.add_argument("jobs", type=Path)
    verb.add_argument("--only", default="", help="a regular expression over the names")
    verb = verbs.add_parser("table")
    verb.set_defaults(run=_run_table)
    verb.add_argument("counters", type=Path)
    verb.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    return arguments.run(arguments)


def _run_metrics(_: argparse.Namespace) -> int:
    print(",".join([DURATION, REGISTERS, *SHARES.values(), *map(_waiting, WAITS.values())]))
    return 0


def _waiting(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def _run_launch(arguments: argparse.Namespace) -> int:
    """Every pattern's kernels once, between marks that ncu sees."""
    jobs = {job["pattern"]: job for job in map(json.loads, arguments.jobs.open())}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for pattern in patterns(tiny=False):
        job = jobs.get(pattern.name)
        if job is None or not re.search(arguments.only, pattern.name):
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                whole = Whole(job, Path(folder), "cuda")
                inputs = pattern.build("cuda")
                whole(*inputs)
                flush.zero_()
                with counted(pattern.name):
                    whole(*inputs)
                del inputs
        except Exception as error:  # noqa: BLE001 listed, the rest goes on
            print(f"{pattern.name}: {cause(error)}", file=sys.stderr, flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


def _run_table(arguments: argparse.Namespace) -> int:
    text = _table(rows(arguments.counters))
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")
    return 0


def _table(kernels: Iterable[dict[str, str]]) -> str:
    """A row for each kernel, in percent; the waits are shares of the time that warps are there."""
    lines = [
        "| pattern | kernel | µs | registers | " + " | ".join(SHARES) + " | warps wait for |",
        "|---" * (len(SHARES) + 5) + "|",
    ]
    for row in kernels:
        waits = {name: number(row, _waiting(reason)) for name, reason in WAITS.items()}
        there = sum(waits.values()) + 1  # of which one issues
        most = sorted(waits, key=lambda name: -waits[name])[:MOST_WAITS]
        cells = [
            case(row),
            re.split(r"[<(]", row["Kernel Name"], maxsplit=1)[0].removeprefix("void "),
            f"{number(row, DURATION) / 1e3:.1f}",
            f"{number(row, REGISTERS):.0f}",
            *(f"{number(row, metric):.0f}" for metric in SHARES.values()),
            ", ".join(f"{name} {100 * waits[name] / there:.0f} %" for name in most),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
