"""Drawn modules under `torch.compile(backend="fusion_advisor")` on a GPU, with every kernel that is
accepted: two calls of each are held to float64.

    python -m benchmarks.drawn.compiled [--seed HEX] [--seconds 140] [--jobs 13]

Modules are at small sizes, so that what masks and boundaries decide is most of each. A row goes to
results/compiled.jsonl: `launched` counts the calls that Inductor makes of kernels itself, `opaque`
those of operators.
"""

# torch is partly untyped; a drawn file defines whatever it defines.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import sys
import time
from functools import partial
from typing import Any

from fusion_advisor.support.kernel_fault import cause

from ..gpu import commit, machine
from .__main__ import HERE, as_tuple, called, drawn_module, logged

RESULTS = HERE.parent / "results" / "compiled.jsonl"
_LATE = 45.0
"""Seconds for the modules that a process has begun."""

Row = dict[str, Any]


def compiled(seed: str, number: int) -> Row:
    """What came of one module: kernels that were put, calls of operators, and what failed."""
    import torch
    from torch._inductor.utils import run_and_get_code

    from fusion_advisor.dynamo.backend import fusion_advisor, last
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.verify.driver import criterion_of
    from fusion_advisor.verify.references import truth
    from fusion_advisor.verify.tolerance import compare

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.reset()
    name, file = drawn_module(seed, number, small=True)
    row = Row(module=name, kernels=0, launched=0, opaque=0, failed="")
    torch.manual_seed(0)
    model = file.Model(*file.get_init_inputs()).to(device).eval()
    inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in file.get_inputs()]
    call = torch.compile(model, backend=partial(fusion_advisor, options={"take_all": True}))

    def ran(*inputs: Any) -> tuple[Any, ...]:
        return as_tuple(call(*(x.clone() if isinstance(x, torch.Tensor) else x for x in inputs)))

    try:
        with torch.no_grad():
            known = truth(called(model), tuple(inputs))
            found, texts = run_and_get_code(ran, *inputs)
            row["opaque"] = sum(text.count("torch.ops.fusion_advisor") for text in texts)
            outcome = last()
            row["kernels"] = len(outcome.taken) if outcome else 0
            row["launched"] = row["kernels"] if not row["opaque"] else 0
            for each in (found, ran(*inputs)):
                compare(each, known, criterion_of(load_rulebook().verify), 1 << 20)
    except Exception as error:  # noqa: BLE001 a module that fails is a row
        row["failed"] = f"{type(error).__name__}: {cause(error)[:240]}"
    return row


def _share(seed: str, first: int, step: int, deadline: float) -> list[Row]:
    """One process's modules, every `step`-th, until time is up."""
    import torch._inductor.config

    torch._inductor.config.compile_threads = 1
    rows: list[Row] = []
    while time.time() < deadline:
        rows.append(compiled(seed, first + step * len(rows)))
    return rows


def main() -> int:
    """Draw, compile, log; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", default="")
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--jobs", type=int, default=13)
    options = parser.parse_args()
    seed, deadline = options.seed or commit(), time.time() + options.seconds
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        begun = [
            pool.apply_async(_share, (seed, first, options.jobs, deadline))
            for first in range(options.jobs)
        ]
        rows = [row for each in begun for row in each.get(options.seconds + _LATE)]
    row = Row(seed=seed, date=datetime.date.today().isoformat(), commit=commit())
    row |= {"machine": machine(), "modules": len(rows)}
    row |= {name: sum(each[name] for each in rows) for name in ("kernels", "launched", "opaque")}
    row["failures"] = [f"{each['module']}: {each['failed']}" for each in rows if each["failed"]]
    logged(row, RESULTS)
    return 1 if row["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
