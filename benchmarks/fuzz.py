"""Random regions, emitted anywhere and checked against fp64 on a GPU.

    python benchmarks/fuzz.py emit --seeds 0:2000 --out regions.jsonl    # anywhere
    python benchmarks/fuzz.py check regions.jsonl --out results.jsonl      # on the GPU

`emit` draws regions from the generator of the tests (`tests/cpu/sketches.py`), one line a kernel.
`check` runs each in a process of a pool with a limit of its own, and appends its result as it
comes; at the end it says how many regions there were and how many mismatches.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Line = dict[str, Any]
LIMIT_S = 60
"""Seconds for one region, drawn or checked."""
MOST_IN_ONE_PROCESS = 50
"""Kernels; a CUDA context does not survive a bad address, nor does what its process checks then."""


class Late(Exception):
    """One region took longer than its limit."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("emit", help="draw regions and write their kernels")
    verb.set_defaults(run=_emit)
    verb.add_argument("--seeds", default="0:2000", help="FIRST:LAST, the last left out")
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--processes", type=int, default=1)
    verb = verbs.add_parser("check", help="check the kernels")
    verb.set_defaults(run=_check)
    verb.add_argument("kernels", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--processes", type=int, default=1)
    verb.add_argument("--budget", type=float, default=540.0, help="seconds, all told")
    verb.add_argument("--where", default="gpu", choices=("gpu", "interpreter"))
    verb.add_argument("--draws", type=int, default=5, help="distributions of data for each case")
    arguments = parser.parse_args()
    return arguments.run(arguments)


def _limited() -> None:
    """Raise Late in this process once the limit is over."""

    def late(*_: Any) -> None:
        raise Late(f"longer than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)


# -- emit ------------------------------------------------------------------------------------------


def _emit(arguments: argparse.Namespace) -> int:
    first, last = map(int, arguments.seeds.split(":"))
    written = 0
    with (
        arguments.out.open("w") as file,
        multiprocessing.get_context("spawn").Pool(arguments.processes) as pool,
    ):
        for lines in pool.imap(_drawn, range(first, last), chunksize=8):
            for line in lines:
                file.write(json.dumps(line) + "\n")
                written += 1
    print(f"{last - first} regions drawn, {written} kernels")
    return 0


def _drawn(seed: int) -> list[Line]:
    """The kernels of one region; a region that cannot be emitted is a line that says so."""
    sys.path.insert(0, str(ROOT))
    from fusion_advisor.codegen.emit import emit
    from fusion_advisor.support.codec import to_json
    from tests.cpu.regions import RULES
    from tests.cpu.sketches import Seeded, planned, sketched

    lines: list[Line] = []
    sketch = None
    _limited()
    try:
        sketch = sketched(Seeded(seed))
        for decision in planned(sketch):
            plan = decision.subject.plan
            assert plan is not None
            kernel = emit(decision.subject.flow, decision, "region", RULES)
            head = {"seed": seed, "schedule": plan.schedule, "calls": sketch.text}
            lines.append({**head, "kernel": json.loads(to_json(kernel))})
    except Exception as error:  # noqa: BLE001 a fault of ours, to be listed as such
        text = sketch.text if sketch else ""
        why = f"{type(error).__name__}: {error}"
        lines.append({"seed": seed, "schedule": "", "calls": text, "failure": why})
    signal.alarm(0)
    return lines


# -- check -----------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    jobs = [json.loads(text) for text in arguments.kernels.open()]
    given = [(job, arguments.where, arguments.draws) for job in jobs]
    deadline = time.monotonic() + arguments.budget
    schedules: Counter[str] = Counter()
    regions: set[int] = set()
    failures: list[Line] = []
    with (
        arguments.out.open("a") as file,
        multiprocessing.get_context("spawn").Pool(
            arguments.processes, maxtasksperchild=MOST_IN_ONE_PROCESS
        ) as pool,
    ):
        answers = pool.imap_unordered(_checked, given)
        for _ in jobs:
            try:
                result = answers.next(max(deadline - time.monotonic(), 0.0))
            except multiprocessing.TimeoutError:
                print("out of time: the rest is left out", flush=True)
                break
            file.write(json.dumps(result) + "\n")
            file.flush()
            schedules[result["schedule"]] += 1
            regions.add(result["seed"])
            if result["failure"]:
                failures.append(result)
                print(f"seed {result['seed']}: {result['failure']}", flush=True)
        pool.terminate()
    counts = ", ".join(f"{name} {count}" for name, count in schedules.most_common())
    print(
        f"{len(regions)} regions, {schedules.total()} of {len(jobs)} kernels ({counts}):"
        f" {len(failures)} mismatches"
    )
    return 1 if failures else 0


_prepared = ""


def _checked(given: tuple[Line, str, int]) -> Line:
    """One kernel held against fp64."""
    global _prepared
    job, where, draws = given
    result = {key: job[key] for key in ("seed", "schedule", "calls")} | {"failure": None}
    if "kernel" not in job:
        return result | {"failure": job["failure"]}
    sys.path.insert(0, str(ROOT))
    from fusion_advisor.ir.kernel import Kernel
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.support.codec import from_json
    from fusion_advisor.verify.check_child import check, prepare
    from fusion_advisor.verify.driver import criterion_of

    _limited()
    try:
        if not _prepared:
            prepare(where)
            _prepared = where
        kernel = from_json(Kernel, json.dumps(job["kernel"]))
        device = "cpu" if where == "interpreter" else "cuda"
        with tempfile.TemporaryDirectory() as folder:
            criterion = criterion_of(load_rulebook().verify)
            result["failure"] = check(kernel, draws, where, device, Path(folder), criterion).failure
    except Exception as error:  # noqa: BLE001 (named in the result)
        result["failure"] = f"{type(error).__name__}: {error}"
    signal.alarm(0)
    return result


if __name__ == "__main__":
    sys.exit(main())
