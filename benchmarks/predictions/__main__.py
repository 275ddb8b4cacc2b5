"""How true the predictions are: predicted against measured time and verdict, on drawn modules.

    python -m benchmarks.predictions emit SEED ... --count 75 --out cases.jsonl  # here
    python -m benchmarks.predictions time cases.jsonl --out times.jsonl          # on the GPU
    python -m benchmarks.predictions fit cases.jsonl times.jsonl --out rules/predict.toml
    python -m benchmarks.predictions ablate cases.jsonl times.jsonl CASES TIMES
    python -m benchmarks.predictions table cases.jsonl times.jsonl [--out FILE]

A case is a part of a module of `draw.py` that stands alone: an accepted group, a rejected candidate
that has a plan, or a single launch. What `fit` sees is of seeds that serve for no figure; `table`
judges others, whose seed is a commit's. `ablate` fits on the first two files without one term of
the model at a time, and says what that costs on the other two.

Times are medians with quartiles, cold L2 (a buffer of five times its size is written before each
run), between events of work that was queued while the device was held, so that the host does not
limit. `time` appends every measurement as it goes: a run that is cut short keeps what it has.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import cases, fitting, gpu, tables


def main() -> int:
    arguments = _arguments()
    sys.setrecursionlimit(10_000)
    return arguments.run(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("emit")
    verb.set_defaults(run=cases.run)
    verb.add_argument("seeds", nargs="+")
    verb.add_argument("--count", type=int, default=75, help="modules of each seed")
    verb.add_argument("--operators", type=int, default=0, help="operators alone, of each seed")
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--processes", type=int, default=2)
    verb = verbs.add_parser("time")
    verb.set_defaults(run=gpu.run)
    verb.add_argument("cases", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--budget", type=float, default=360.0, help="seconds, all told")
    verb.add_argument("--processes", type=int, default=12, help="that compile ahead")
    verb.add_argument("--only", default="", help="a regular expression over the names")
    verb.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, to rehearse")
    for name, run in (("fit", fitting.run), ("table", tables.run)):
        verb = verbs.add_parser(name)
        verb.set_defaults(run=run)
        verb.add_argument("cases", type=Path)
        verb.add_argument("times", type=Path, nargs="+", help="later files win")
        verb.add_argument("--out", type=Path)
        verb.add_argument("--device", default=cases.DEVICE, help="that the times are of")
    verb = verbs.add_parser("ablate")
    verb.set_defaults(run=fitting.ablate)
    verb.add_argument("files", type=Path, nargs=4, help="cases and times to fit, and to judge by")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
