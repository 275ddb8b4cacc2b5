"""What of the predicted gain a patch places in modules that nobody has seen, and what it leaves.

    python -m benchmarks.drawn.placed [--seed HEX] [--first 0] [--count 100] [--jobs 2] [--keep DIR]

Modules are drawn small, as in `benchmarks.drawn`, and patched in a folder of their own; kernels
are neither checked nor compiled here. Of each module: the time that `analyze` predicts to save,
what the patch's calls save of it, and the reason of each group that has no place. Every seed
leaves one line in results/placed.jsonl.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..gpu import ROOT, commit
from .__main__ import HERE, LIMIT_S, Row, logged, told, written

RESULTS = HERE.parent / "results" / "placed.jsonl"


def placed(file: Path) -> Row:
    """What a patch of one module's file places, in this process."""
    import fusion_advisor as fa

    made = fa.patch(str(file), device="h200", root=str(file.parent), verify=False, compile=False)
    reasons = {**made.patch.refused, **made.unplaced}
    return {"free_us": made.free_us, "saved_us": made.saved_us, "reasons": reasons}


def seen(file: Path) -> Row:
    """The same in a process of its own, with the error of one that failed."""
    command = [sys.executable, "-m", "benchmarks.drawn.placed", "--one", str(file)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    row: Row = {"module": file.parent.name, "free_us": 0.0, "saved_us": 0.0, "reasons": {}}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return row | {"failed": f"no answer within {LIMIT_S} s"}
    if done.returncode:
        return row | {"failed": (done.stderr.strip().splitlines() or ["ended"])[-1]}
    return row | json.loads(done.stdout.splitlines()[-1])


def summed(rows: list[Row]) -> Row:
    """Shares of the gain, of all modules together and of each by itself, and reasons by number."""
    free, saved = (sum(row[key] for row in rows) for key in ("free_us", "saved_us"))
    shares = sorted(min(1.0, r["saved_us"] / r["free_us"]) for r in rows if r["free_us"] > 0)
    reasons = Counter(_kind(why) for row in rows for why in row["reasons"].values())
    return {
        "modules": len(rows),
        "with_groups": len(shares),
        "placed": round(saved / free, 3) if free else None,
        "mean_share": round(sum(shares) / len(shares), 3) if shares else None,
        "none": sum(share == 0 for share in shares),
        "reasons": dict(reasons.most_common()),
        "failed": {row["module"]: row["failed"] for row in rows if "failed" in row},
    }


def _kind(reason: str) -> str:
    """A reason without what differs from module to module: its last clause that has no number."""
    parts = [part.strip() for part in reason.split(":")]
    return next((part for part in reversed(parts) if not any(map(str.isdigit, part))), parts[-1])


def main() -> int:
    """Draw, patch, log; 1 where a patch failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", default="")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="the number of the first module")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="a folder for the modules, else a temporary one")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(placed(options.one)))
        return 0
    seed = options.seed or commit()
    if not seed:
        parser.error("--seed is missing: this is no checkout whose commit could be the seed")
    modules = range(options.first, options.first + options.count)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        files = written(seed, modules, options.keep or Path(folder))
        rows = list(pool.map(partial(told, seen), files))
    said = {"seed": seed, "date": datetime.date.today().isoformat(), "commit": commit()}
    said |= summed(rows)
    logged(said, RESULTS)
    return 1 if said["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
