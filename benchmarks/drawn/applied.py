"""Drawn modules under `torch.compile(backend="fusion_advisor")` on Triton's interpreter, with every
kernel that is accepted: held to float64 as drawn and with every size changed.

    python -m benchmarks.drawn.applied [--seed HEX] [--count 120] [--jobs 2] [--each 120]

What is not ours runs as eager runs it. A row goes to results/applied.jsonl: `kernels` counts the
calls of kernels in the first graph of each module, `graphs` all graphs that Dynamo compiled for the
sizes; `late` names modules of which some sizes were left after `--each` seconds.
"""

# torch is partly untyped; a drawn file defines whatever it defines.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import datetime
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from ..gpu import commit
from .__main__ import HERE, Row, as_tuple, called, drawn_module, held, logged

RESULTS = HERE.parent / "results" / "applied.jsonl"


def applied(seed: str, number: int, each: float) -> Row:
    """What came of one module."""
    from fusion_advisor.verify.check_child import prepare

    prepare("interpreter")
    os.environ["FUSION_ADVISOR_STRICT"] = "1"  # a fault of ours is a failure
    import torch

    from fusion_advisor.dynamo.backend import Outcome, fusion_advisor

    torch.compiler.reset()
    torch._dynamo.config.recompile_limit = 200  # beyond, Dynamo would leave a module to eager
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    name, file = drawn_module(seed, number, small=True)
    model = file.Model(*file.get_init_inputs()).eval()
    told: list[Outcome] = []
    options = {"device": "h200", "inner": "eager"}
    backend = partial(fusion_advisor, options=options, on_outcome=told.append)
    call = torch.compile(model, backend=backend)
    row = held(called(model), lambda *x: as_tuple(call(*x)), file.get_inputs(), "applied", each)
    kernels = len(told[0].taken) if told else 0
    return {"module": name, "kernels": kernels, "graphs": len(told), **row}


def main() -> int:
    """Draw, apply, log; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", default="")
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--each", type=float, default=120)
    options = parser.parse_args()
    seed = options.seed or commit()
    with ProcessPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(partial(applied, seed, each=options.each), range(options.count)))
    row = Row(seed=seed, date=datetime.date.today().isoformat(), commit=commit())
    row["modules"] = len(rows)
    row |= {n: sum(each[n] for each in rows) for n in ("kernels", "graphs", "sizes", "unfit")}
    row["late"] = [each["module"] for each in rows if each["late"]]
    row["failures"] = [f"{each['module']}: {line}" for each in rows for line in each["failures"]]
    logged(row, RESULTS)
    return 1 if row["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
