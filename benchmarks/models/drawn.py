"""Whole models that nobody has picked: a step in every way of running each; writes a table.

    python -m benchmarks.models.drawn --seed HEX [--count 12] [--each 75] [--seconds 540] [--out D]

Model types are drawn by the seed, the first eight digits of the commit that is measured, as
`benchmarks.models.dry` draws them, and built with four layers at their real width in bfloat16 on
random weights. Text is called as a tokenizer gives it: token ids and a padding mask of ones, which
half of them have a hole in one row of; the cache is the model's own. Each way of each model has a
process and empty caches of compilers of its own, several of which prepare at a time; one measures
at a time. `first` is the first call's seconds. A step is the wall time of steps that follow each
other, the median of seven batches that the ways take in turn, each on the same core: launches took
1.8 times as long on the first core of one host as on another. What a way computes is held to
eager's first result.
"""
# transformers and torch.compile are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..gpu import ROOT, heading, json_lines
from .step import batches, leading, warmed

MEASURING = "backend, measuring"
"""Our backend with `tune="now"`."""
OURS = "backend", MEASURING
WAYS = ("eager", "compile", *OURS)
SIZES = {"text": (4, 1024), "images": (16, 0), "other": (4, 0)}
"""Batch and tokens of a call by what goes in; 0 for what the model's configuration says."""
_TOGETHER = len(WAYS)
_ROUNDS = 7


@dataclass
class Row:
    """One way of one model type. `ms` is a step, `first` seconds, `apart` the distance to eager's
    result as a share of its length."""

    kind: str
    task: str
    way: str
    seed: str
    ms: float = 0.0
    first: float = 0.0
    apart: float = 0.0
    padded: bool = False
    said: str = ""
    failure: str = ""


# -- one way of one model, in a process of its own -------------------------------------------------


def child(row: Row) -> None:
    """Prepare a way, say so, and at each line that comes measure a batch more and print the
    row."""
    import torch

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_grad_enabled(False)
    step = None
    try:
        step = _prepared(row)
    except Exception as error:  # noqa: BLE001 a way that fails is a row
        row.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    print("ready", file=out)
    spent: list[float] = []
    for _ in sys.stdin:
        try:
            if step is not None and not row.failure:
                if not spent:
                    cores = sorted(os.sched_getaffinity(0))
                    os.sched_setaffinity(0, {cores[len(cores) // 2]})
                    warmed(step)
                spent += batches(step, rounds=1)
                row.ms = statistics.median(spent)
        except Exception as error:  # noqa: BLE001 a way that fails is a row
            row.failure = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(json.dumps(asdict(row)), file=out)


def _prepared(row: Row) -> Any:
    """A step of a way, after its first call."""
    import torch
    import transformers

    from benchmarks.models.dry import LAYERS, config_of, size_of
    from fusion_advisor.frontend.hf import built
    from fusion_advisor.ir.scenario import Scenario

    config = config_of(row.kind, LAYERS)
    config.dtype = torch.bfloat16
    cls = getattr(transformers, f"AutoModelFor{row.task}")
    batch, tokens = size_of(config, row.task, SIZES)
    scenario = Scenario(phase="prefill", batch=batch, seq=tokens)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model, given = built(cls, config, scenario, [])
        ids = given.get("input_ids")
        if ids is not None:
            given["attention_mask"] = torch.ones_like(ids)
            if row.padded:
                given["attention_mask"][0, : ids.shape[1] // 8] = 0
    model = model.eval()
    wanted = leading(model(**given)).float()
    step = _way(model, row.way)
    torch.cuda.synchronize()
    began = time.perf_counter()
    found = leading(step(**given)).float()
    torch.cuda.synchronize()
    row.first = time.perf_counter() - began
    if row.padded:  # what is computed at padding is nobody's
        found, wanted = found[1:], wanted[1:]
    row.apart = float((found - wanted).norm() / wanted.norm())
    row.said = _said(row.way)
    return lambda: step(**given)


def _way(model: Any, way: str) -> Any:
    import torch

    from fusion_advisor.dynamo.backend import fusion_advisor

    if way == "eager":
        return model
    if way == "compile":
        return torch.compile(model)
    options = {"tune": "now"} if way == MEASURING else {}
    return torch.compile(model, backend=partial(fusion_advisor, options=options))


def _said(way: str) -> str:
    from collections import Counter

    from fusion_advisor.dynamo.backend import last

    outcome = last()
    if way not in OURS or outcome is None:
        return ""
    made = Counter(each.name for each in outcome.rewrites)
    rewrites = ", ".join(f"{name} x{count}" for name, count in made.items())
    return outcome.why or f"{len(outcome.taken)} of {len(outcome.places)}; {rewrites or 'none'}"


# -- all of them -----------------------------------------------------------------------------------


def run(seed: str, count: int, each: float, seconds: float, out: Path) -> Iterator[Row]:
    """Yield rows of the model types that a seed draws, some processes preparing at a time, for
    `each` seconds at most."""
    from benchmarks.models.dry import drawn

    jobs = [
        Row(kind, task, way, seed, padded=number % 2 == 1 and "LM" in task)
        for number, (kind, task) in enumerate(drawn(seed)[:count])
        for way in WAYS
    ]
    deadline = time.monotonic() + seconds
    while jobs and time.monotonic() < deadline:
        wave, jobs = jobs[:_TOGETHER], jobs[_TOGETHER:]
        with tempfile.TemporaryDirectory() as caches:
            running = [(row, _start(row, Path(caches) / str(n), out)) for n, row in enumerate(wave)]
            ready = min(deadline, time.monotonic() + each)
            prepared = [_line(process, ready) for _, process in running]
            for (_, process), line in zip(running, prepared, strict=True):
                if not line:
                    process.kill()
            answers = [""] * len(running)
            for _ in range(_ROUNDS):
                for number, (_, process) in enumerate(running):
                    answers[number] = _asked(process, deadline)
            for (row, process), answer in zip(running, answers, strict=True):
                process.kill()
                if answer.startswith("{"):
                    yield Row(**json.loads(answer))
                else:
                    row.failure = f"was not ready within {each:g} s"
                    yield row
    for row in jobs:
        row.failure = "no time was left"
        yield row


def _start(row: Row, caches: Path, out: Path) -> subprocess.Popen[str]:
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
    own = {name: str(caches / folder) for name, folder in names.items()}
    log = (out / f"{row.kind}_{row.way.replace(', ', '_').replace(' ', '_')}.log").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.models.drawn", "--child", json.dumps(asdict(row))],
        cwd=ROOT, env={**os.environ, **own}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
    )  # fmt: skip


def _asked(process: subprocess.Popen[str], deadline: float) -> str:
    """The row after one batch more; "" of a process that has ended."""
    assert process.stdin is not None
    try:
        process.stdin.write("go\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _line(process, deadline)


def _line(process: subprocess.Popen[str], deadline: float) -> str:
    import select

    assert process.stdout is not None
    left = max(0.0, deadline - time.monotonic())
    seen, _, _ = select.select([process.stdout], [], [], left)
    return process.stdout.readline().strip() if seen else ""


def table(rows: Sequence[Row]) -> str:
    """The table: milliseconds of a step and seconds of the first call by the way."""
    lines = [*heading("Whole models that a seed drew"), "", *(__doc__ or "").split("\n\n")[2:3], ""]
    lines += [
        "| type | task | padding | " + " | ".join(WAYS) + " | "
        + " | ".join(f"best rival / {way}" for way in OURS) + " | first: "
        + ", ".join(WAYS[1:]) + " | apart | ours |",
        "|---" * (len(WAYS) + 6 + len(OURS)) + "|",
    ]  # fmt: skip
    ratios: dict[str, list[float]] = {way: [] for way in OURS}
    alike: list[float] = []
    failed: list[str] = []
    for kind in dict.fromkeys(row.kind for row in rows):
        at = {row.way: row for row in rows if row.kind == kind}
        failed += [f"- {kind}, {row.way}: {row.failure}" for row in at.values() if row.failure]
        if len(at) < len(WAYS) or any(row.failure for row in at.values()):
            continue
        one, best = next(iter(at.values())), min(at["eager"].ms, at["compile"].ms)
        beside = " | ".join(f"{best / at[way].ms:.3f}" for way in OURS)
        for way in OURS:
            if at[way].said.startswith("0 of ") and at[way].said.endswith("none"):
                alike.append(at["compile"].ms / at[way].ms)
            else:
                ratios[way].append(best / at[way].ms)
        said = " / ".join(at[way].said for way in OURS)
        steps = " | ".join(f"{at[way].ms:.3f}" for way in WAYS)
        first = ", ".join(f"{at[way].first:.1f}" for way in WAYS[1:])
        apart = ", ".join(f"{at[way].apart:.4f}" for way in WAYS[1:])
        lines.append(
            f"| {kind} | {one.task} | {'a hole' if one.padded else 'none'} | {steps}"
            f" | {beside} | {first} | {apart} | {said} |"
        )
    for way, found in ratios.items():
        if found:
            mean = math.exp(statistics.fmean(map(math.log, found)))
            below = sum(ratio < 0.98 for ratio in found)
            count = f"{len(found)} models with something of ours"
            lines += ["", f"{way}, {count}: {mean:.3f}, {below} below 0.98."]
    if alike:
        apart = f"{min(alike):.3f} to {max(alike):.3f} of it"
        lines += ["", f"Compile beside the same program, {len(alike)} times: {apart}."]
    return "\n".join([*lines, "", "## What failed", "", *failed]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--seed", default="")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--each", type=float, default=75.0, help="seconds to prepare, at most")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    if options.child:
        child(Row(**json.loads(options.child)))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for row in run(options.seed, options.count, options.each, options.seconds, options.out):
        said = row.failure or f"{row.ms:.3f} ms, first {row.first:.1f} s, {row.said}"
        print(f"{row.kind}, {row.way}: {said}", flush=True)
        rows.append(row)
        (options.out / "models.jsonl").write_text(json_lines(rows))
        (options.out / "drawn_models.md").write_text(table(rows))


if __name__ == "__main__":
    main()
