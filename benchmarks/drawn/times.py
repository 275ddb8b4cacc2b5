"""Kernels beside their rivals, on modules that nobody has seen: whole modules as region graphs.

    python -m benchmarks.drawn.times [--seed HEX] [--count 40] [--seconds 560] [--jobs 14]
    python -m benchmarks.drawn.times --table [SEED ...]

Each module of `draw.py` runs under eager, under `torch.compile` (default, and max-autotune without
CUDA graphs), under our backend in that last mode, in which it measures its choices, too (before
2026-11-27 in the default mode: `backend`), and with our kernels alone (`inner="eager"`: every
accepted group, the rest as eager launches it), in the rules' configuration and in one that the GPU
chose (`tune="now"`). Ours are held to a float64 run, then all are timed in turn: medians, a cold
L2, the host hidden. Everything is compiled ahead, in parallel; what a stopwatch chose meanwhile is
forgotten, and chosen again while nothing else runs. `predicted` is what `analyze` says of the
module as eager runs it (before 2026-11-30 what the backend said of its graph, where a batch norm is
five launches and a dead cast none).

The seed is the first eight digits of the commit that is measured. Rows go to results/times.jsonl,
one a module, and a run goes on where the last one of its seed and commit ended. `--table` says what
came of the last three seeds, or of those named; modules that eager ends in under 100 us count for
nothing: there the host decides.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fusion_advisor.support.kernel_fault import cause

from ..gpu import ahead, clock, commit, copy_bandwidth, machine
from .__main__ import HERE, as_tuple, called, drawn_module

RESULTS = HERE.parent / "results" / "times.jsonl"
LEAST_US = 100
RIVALS = ("eager", "compile", "max-autotune")
BACKEND, OURS, TUNED, BEFORE = "measured backend", "ours", "tuned", "backend"
OWN = (OURS, TUNED, BACKEND)
MEASURING = "max-autotune-no-cudagraphs"

Row = dict[str, Any]


def rivals(model: Any) -> dict[str, Callable[..., Any]]:
    """Every way to run a model without kernels of ours, not compiled yet."""
    import torch

    compiled = (torch.compile(model, dynamic=False, mode=mode) for mode in (None, MEASURING))
    return dict(zip(RIVALS, (model, *compiled), strict=True))


def ways(model: Any) -> dict[str, Callable[..., Any]]:
    """Every way to run a model, not compiled yet."""
    import torch

    from fusion_advisor.dynamo.backend import fusion_advisor

    def ours(tune: str) -> Any:
        options = {"inner": "eager", "tune": tune}
        return torch.compile(model, dynamic=False, backend=partial(fusion_advisor, options=options))

    whole = torch.compile(model, dynamic=False, backend=fusion_advisor, mode=MEASURING)
    return {**rivals(model), BACKEND: whole, OURS: ours("off"), TUNED: ours("now")}


def built(seed: str, number: int) -> tuple[str, Any, tuple[Any, ...]]:
    """The name, the model and the inputs of a module, on the GPU."""
    import torch

    name, source = drawn_module(seed, number)
    torch.manual_seed(0)
    with torch.device("cuda"):
        inputs = tuple(each.cuda() for each in source.get_inputs())
    return name, source.Model().cuda().eval(), inputs


def run_once(job: tuple[str, int]) -> None:
    """Compile every way of one module."""
    import torch

    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    os.environ["FUSION_ADVISOR_CACHE"] = tempfile.mkdtemp()  # chosen again while nothing else runs
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    torch.compiler.reset()
    _, model, inputs = built(*job)
    for call in ways(model).values():
        call(*inputs)


def forget_choices() -> int:
    """Remove what Inductor chose by a stopwatch; how many there were."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    found = list(Path(cache_dir()).rglob("*.best_config"))
    for file in found:
        file.unlink()
    return len(found)


def timed(job: tuple[str, int], watch: Any, bandwidth: float) -> Row:
    """Times and errors of one module's ways."""
    import torch

    import fusion_advisor as fa
    from fusion_advisor import backend

    torch.compiler.reset()
    name, model, inputs = built(*job)
    row: Row = {"module": name}
    calls, said = held(model, inputs, ways(model), OWN)
    row |= said
    if outcome := backend.last():
        row["tuned to"] = [place.why for place in outcome.taken if "tuned" in place.why]
        row["placed"], row["accepted"] = len(outcome.taken), len(outcome.places)
        row["schedules"] = [place.name for place in outcome.taken]
    totals = fa.analyze(model, inputs, verify=False, compile=False).totals
    row["predicted"] = [totals.time_us, totals.time_us / totals.predicted_speedup]
    return row | in_turn(calls, model, inputs, watch, bandwidth)


def held(
    model: Any, inputs: tuple[Any, ...], ways: Mapping[str, Callable[..., Any]], own: Sequence[str]
) -> tuple[dict[str, Callable[[], Any]], Row]:
    """Calls of each way that runs, and why another does not; those of our `own` are held to a
    float64 run."""
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.verify.driver import criterion_of
    from fusion_advisor.verify.references import truth
    from fusion_advisor.verify.tolerance import compare

    calls, row, known = dict[str, Callable[[], Any]](), Row(), None
    try:
        known = truth(called(model), inputs)
    except Exception as error:  # noqa: BLE001 some ops have no float64: said in the row
        row["unchecked"] = cause(error)[:160]
    criterion = criterion_of(load_rulebook().verify)
    for way, call in ways.items():
        try:
            found = as_tuple(call(*inputs))
            calls[way] = partial(call, *inputs)
            if known is not None and way in own:
                compare(found, known, criterion, 1 << 20)
        except Exception as error:  # noqa: BLE001 a way that fails is a fact of the row
            row[f"{way} failed"] = cause(error)[:240]
    return calls, row


def in_turn(
    calls: Mapping[str, Callable[[], Any]],
    model: Any,
    inputs: tuple[Any, ...],
    watch: Any,
    bandwidth: float,
) -> Row:
    """Time of each call in us, and of a copy of all that the model reads and writes."""
    tensors = (*inputs, *as_tuple(model(*inputs)), *model.parameters(), *model.buffers())
    moved = sum({id(t): t.nbytes for t in tensors}.values())
    watch.release()
    series = watch.turns(list(calls.values()), 3)
    times = {way: statistics.median(us) for way, us in zip(calls, series, strict=True)}
    return {"copy_us": moved / bandwidth * 1e6, **times}


# --- what came of it -----------------------------------------------------------------------------


def table(rows: Sequence[Row], own: Sequence[str] = (*OWN, BEFORE)) -> list[str]:
    """A line a module, then the figures."""
    beside = " | ".join(f"best rival / {way}" for way in own)
    lines = [
        f"| module | {' | '.join((*RIVALS, *own))} | {beside} | % of copy | off |",
        "|---|" + "---|" * (len(RIVALS) + 2 * len(own) + 2),
    ]
    ratios: dict[str, list[float]] = {way: [] for way in own}
    shares, off = list[float](), list[float]()
    for row in rows:
        if row.get("eager", 0) < LEAST_US:
            continue
        ours = row.get(own[0], row["eager"])
        best = min(row[way] for way in RIVALS if way in row)
        beside = {way: best / row.get(way, ours) for way in own if way in row or way == own[0]}
        for way, ratio in beside.items():
            ratios[way].append(ratio)
        shares.append(100 * row["copy_us"] / ours)
        said = ""
        if row.get("placed") and "predicted" in row:
            unfused, fused = row["predicted"]
            wrong = (unfused / fused) / (row["eager"] / ours)
            off.append(max(wrong, 1 / wrong) - 1)
            said = f"{100 * off[-1]:.0f} %"
        cells = [f"{row[way]:.1f}" if way in row else "" for way in (*RIVALS, *own)]
        cells += [f"{beside[way]:.2f}" if way in beside else "" for way in own]
        marks = "" if row.get("placed", own[0] in row) else " (nothing placed)"
        marks += f" ({row[f'{own[0]} failed']})" if f"{own[0]} failed" in row else ""
        lines.append(
            f"| {row['module']}{marks} | {' | '.join(cells)} | {shares[-1]:.0f} | {said} |"
        )
    for way, found in ratios.items():
        if not found:
            continue
        mean = math.exp(statistics.fmean(map(math.log, found)))
        at_least = {least: sum(r >= least for r in found) / len(found) for least in (0.97, 0.95)}
        near = ", ".join(f"at least {least} in {100 * at:.0f} %" for least, at in at_least.items())
        lines += [
            "",
            f"Best rival over {way}, {len(found)} modules: geometric mean {mean:.3f}, {near},"
            f" below 0.85 in {sum(ratio < 0.85 for ratio in found)}.",
        ]
    if shares:
        lines += ["", f"{statistics.median(shares):.0f} % of copy in the median, by rule."]
    if len(off) > 1:
        lines.append(
            f"Predicted speed-up off by {100 * statistics.median(off):.0f} % in the median,"
            f" {100 * statistics.quantiles(off, n=10)[-1]:.0f} % at the 90th percentile."
        )
    return lines


def main() -> int:
    """Draw, time, log."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", default="")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", nargs="*", metavar="SEED")
    options = parser.parse_args()
    if options.table is not None:
        print("\n".join(table(latest(rows_of(options.out), options.table))))
        return 0
    began, seed = time.monotonic(), options.seed or commit()
    known: Mapping[str, Any] = {
        "seed": seed,
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
    }
    have = {
        row["number"]
        for row in rows_of(options.out)
        if row["seed"] == seed and row["commit"] == known["commit"]
    }
    jobs = {f"{n}": (seed, n) for n in range(options.count) if n not in have}
    failed = ahead(run_once, jobs, options.jobs, began + 0.5 * options.seconds)
    print(f"ahead in {time.monotonic() - began:.0f} s; choices: {forget_choices()}", flush=True)
    import torch

    torch.set_grad_enabled(False)
    watch = clock(options.device)
    bandwidth = copy_bandwidth(watch)
    for key, job in jobs.items():
        if time.monotonic() > began + options.seconds:
            break
        try:
            row = timed(job, watch, bandwidth)
        except Exception as error:  # noqa: BLE001 one module fewer; its row says why
            row = {"module": key, "failed": cause(error)[:240]}
        row |= {"number": job[1], "ahead": failed.get(key, ""), **known}
        with options.out.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        watch.release()
    print("\n".join(table([row for row in rows_of(options.out) if row["seed"] == seed])))
    return 0


def rows_of(file: Path) -> list[Row]:
    """Rows of a file; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def latest(rows: Sequence[Row], seeds: Sequence[str]) -> list[Row]:
    """Rows of some seeds, or of the last three."""
    chosen = seeds or list(dict.fromkeys(row["seed"] for row in rows))[-3:]
    return [row for row in rows if row["seed"] in chosen]


if __name__ == "__main__":
    sys.exit(main())
