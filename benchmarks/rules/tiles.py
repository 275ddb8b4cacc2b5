"""Kernels of drawn modules in every tile nearby: where the numbers of `rules/schedules/` are from.

    python -m benchmarks.rules.tiles SEED:COUNT ... [--seconds 500] [--jobs 15] [--out FILE]

Each accepted group's kernel is written in the tile that the rules choose, in those with a half to
an eighth or twice the rows, half to four times the length, and 4 to 128 elements a thread, and by
the next two schedules; all are compiled ahead, in parallel, and then timed in turn while nothing
else runs: medians, a cold L2. A row a kernel goes to FILE: the tile that was chosen, the time of
each in microseconds, and what the kernel reads.

The numbers of 2026-11-26 are of d0d0d0d1:75 d0d0d0d2:70 d0d0d0d3:100 d0d0d0d4:100 d0d0d0d5:100
d0d0d0d6:60; of the last four, kernels that are tiled or blocked, lie across memory, or have rows
that are long or of float32. These seeds serve for no other figure.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from fusion_advisor.codegen.emit import attempt
from fusion_advisor.fusion.decide import Decision, judge
from fusion_advisor.measure.search import contenders
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.select import Planned

from ..drawn.times import built
from ..gpu import ahead

WRITTEN = Path("build/tiles")
MOST = 36
"""Tiles of a kernel, the nearest to the rules' own first."""
WARP = 32


def tiles(step: Step) -> Iterator[Step]:
    """A kernel's step in other tiles, the nearest first."""
    rows = {step.rows * 2 >> n for n in range(5)} - {0} if step.inner else {step.rows}
    whole = step.schedule == "row"
    blocks = {step.block} if whole else {step.block * 4 >> n for n in range(4)} - {0}
    stages = {step.stages, 1, 3} if step.chunked else {step.stages}
    found: list[tuple[int, Step]] = []
    for high, block, each, staged in product(rows, blocks, (4, 8, 16, 32, 64, 128), stages):
        warps = high * block // (each * WARP)
        other = replace(
            step, rows=high, block=block, part=step.part and block, warps=warps, stages=staged
        )
        far = sum(
            abs(one.bit_length() - two.bit_length())
            for one, two in ((high, step.rows), (block, step.block), (warps, step.warps))
        )
        if 1 <= warps <= WARP and other != step:
            found.append((far, other))
    found.sort(key=lambda pair: pair[0])
    yield from (other for _, other in found[:MOST])


def others(decision: Decision) -> list[Decision]:
    """Decisions on the same group with other plans: the next schedules', and other tiles."""
    planned = decision.subject.planned
    assert planned is not None
    own, plans = planned.plans[0], list(planned.plans[1:3])
    if len(own.steps) == 1:
        plans += [replace(own, steps=(other,)) for other in tiles(own.steps[0])]
    found = (judge(replace(decision.subject, planned=Planned((plan,), ()))) for plan in plans)
    return [each for each in found if each.accepted]


def write(job: tuple[str, int]) -> None:
    """Write and compile every tile of each kernel of one module."""
    import torch

    from fusion_advisor.dynamo import measured
    from fusion_advisor.dynamo.backend import fusion_advisor

    os.environ["FUSION_ADVISOR_CACHE"] = str(WRITTEN / "cache" / f"{job[0]}-{job[1]}")
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    name, model, inputs = built(*job)

    def searched(self: Any, flow: Any, place: Any, own: Any, runs: Any) -> None:
        def emitted(decision: Decision) -> Any:
            return attempt(flow, decision, place.name, self.rulebook)

        every = contenders(place.decision, own, emitted, others(place.decision))
        ran = [each for each in every if not runs._failure(each.kernel)]
        (step, *_) = place.decision.subject.plan.steps
        row = {
            "module": name, "kernel": place.name, "chosen": every[0].configuration,
            "rows": [group.size for group in step.outer], "length": step.length,
            "reads": [[a.tensor.dtype, a.tensor.shape, a.tensor.stride] for a in step.loads],
            "writes": [[a.tensor.dtype, a.tensor.shape, a.tensor.stride] for a in step.stores],
        }  # fmt: skip
        kept = row, ran, measured._operands(flow, place)
        (WRITTEN / f"{name}.{place.name}.pickle").write_bytes(pickle.dumps(kept))

    measured.Stopwatch._searched = searched  # pyright: ignore[reportAttributeAccessIssue]
    options = {"inner": "eager", "tune": "now"}
    torch.compile(model, dynamic=False, backend=partial(fusion_advisor, options=options))(*inputs)


def main() -> int:
    """Write, compile, time."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("seeds", nargs="+", metavar="SEED:COUNT")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=WRITTEN / "tiles.jsonl")
    options = parser.parse_args()
    began = time.monotonic()
    (WRITTEN / "cache").mkdir(parents=True, exist_ok=True)
    drawn = (each.split(":") for each in options.seeds)
    jobs = {f"{seed}:{n}": (seed, n) for seed, count in drawn for n in range(int(count))}
    ahead(write, jobs, options.jobs, began + 0.6 * options.seconds)

    import torch

    from fusion_advisor.dynamo.measured import on_gpu

    rulebook, gpu = load_rulebook(), torch.device("cuda", 0)
    with options.out.open("a", encoding="utf-8") as log:
        for file in sorted(WRITTEN.glob("*.pickle")):
            if time.monotonic() > began + options.seconds:
                break
            row, ran, tensors = pickle.loads(file.read_bytes())
            runs: Any = on_gpu(tensors, rulebook, rulebook.device(options.device), gpu, None)
            if runs is None:
                continue
            series = runs.timed([each.kernel for each in ran], 3).series
            times = {
                each.configuration: round(statistics.median(one.us), 2)
                for each, one in zip(ran, series, strict=True)
                if one.us
            }
            log.write(json.dumps({**row, "us": times}) + "\n")
            runs.clock.release()
    return 0


if __name__ == "__main__":
    sys.exit(main())
