"""How true the predictions are: predicted against measured time, traffic and verdict.

    python -m benchmarks.predictions emit GRAPHS --out cases.jsonl      # on a CPU: analyse and emit
    python -m benchmarks.predictions time cases.jsonl --out times.jsonl # on the GPU
    python -m benchmarks.predictions count cases.jsonl                  # on the GPU, below ncu
    python -m benchmarks.predictions issued cases.jsonl --counts FILE --out rules/predict.toml
    python -m benchmarks.predictions fit cases.jsonl times.jsonl --out rules/predict.toml
    python -m benchmarks.predictions table cases.jsonl times.jsonl [--counts FILE] [--out FILE]

GRAPHS is a folder of captured graphs (`NAME.json`, as `codec.to_json` writes them, or pickles).
A case is a part of one of them that stands alone: an accepted group, a rejected candidate that has
a plan, or a single launch of either or of a memory-bound problem. The goal set, KernelBench level 1
and 2 and five families, is what `table` judges and `fit` never sees: that has the other graphs of
the folder, and a series of small patterns over many sizes (series.py).

Times are medians with quartiles, cold L2 (a buffer of five times its size is written before each
run), between events of work that was queued while the device was held, so that the host does not
limit. `time` appends every measurement as it goes: a run that is cut short keeps what it has. It
goes over all cases several times, and their median counts. Kernels of 4 to 70 MB are 4 to 17 %
faster while a device rests between them, as it does while torch.compile works: `--compiled` is for
a run of its own, of which the kernels `beside` torch.compile's are compared. `count --every` is for
the metrics that `counts.py` names; by them `issued` fits what is worth how many instructions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import cases, counts, fitting, gpu, tables


def main() -> int:
    arguments = _arguments()
    sys.setrecursionlimit(10_000)
    return arguments.run(arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("emit")
    verb.set_defaults(run=cases.run)
    verb.add_argument("graphs", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--only", default="", help="a regular expression over the names")
    verb.add_argument("--processes", type=int, default=1)
    verb = verbs.add_parser("time")
    verb.set_defaults(run=gpu.run)
    verb.add_argument("cases", type=Path)
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument("--budget", type=float, default=360.0, help="seconds, all told")
    verb.add_argument("--processes", type=int, default=12, help="that compile ahead")
    verb.add_argument("--only", default="")
    verb.add_argument("--rounds", type=int, default=2, help="over all cases, one after the other")
    verb.add_argument(
        "--compiled", action="store_true", help="torch.compile beside accepted groups"
    )
    verb.add_argument("--dry-run", action="store_true", help="on the CPU, tiny, to rehearse")
    verb = verbs.add_parser("count")
    verb.set_defaults(run=gpu.count)
    verb.add_argument("cases", type=Path)
    verb.add_argument("--kernels", type=int, default=20, help="emitted kernels at most")
    verb.add_argument("--every", action="store_true", help="all emitted kernels, however small")
    verb.add_argument("--alone", action="store_true", help="eager's launches that stand alone")
    verb.add_argument("--most", type=float, default=7e8, help="bytes of what stands alone")
    verb.add_argument("--ahead", action="store_true", help="compile them and stop, without ncu")
    verb.add_argument("--processes", type=int, default=12, help="that compile ahead")
    verb.add_argument("--budget", type=float, default=300.0, help="seconds")
    verb = verbs.add_parser("issued")
    verb.set_defaults(run=counts.run)
    verb.add_argument("cases", type=Path)
    verb.add_argument("--counts", type=Path, required=True, help="what ncu wrote for `count`")
    verb.add_argument("--alone", type=Path, help="what it wrote for `count --alone`")
    verb.add_argument("--times", type=Path, nargs="*", help="kernels' registers are in them, too")
    verb.add_argument("--out", type=Path, help="rules to write the figures into")
    for name, run in (("fit", fitting.run), ("table", tables.run)):
        verb = verbs.add_parser(name)
        verb.set_defaults(run=run)
        verb.add_argument("cases", type=Path)
        verb.add_argument("times", type=Path, nargs="+", help="later files win")
        verb.add_argument("--out", type=Path)
        if name == "fit":
            verb.add_argument("--ours", action="store_true", help="leave eager as it is")
    verb.add_argument("--counts", type=Path, help="what ncu wrote for `count`")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
