"""Training steps of model types that nobody has picked: what `analyze --mode train` says of each;
writes a table.

    python -m benchmarks.models.families --seed HEX [--count 10] [--verify] [--measure] [--kernels]
        [--autocast DTYPE] [--out DIR]

Model types are drawn by the seed, the first eight digits of the commit that is measured, as
`benchmarks.models.dry` draws them, and built with four layers at their real width in bfloat16 with
their own dropout; with `--autocast` in float32, a step under autocast. A step is
`model(**given).loss.backward()` without an optimizer, whose result lives as long as the step. With
`--verify` each kernel is checked on the interpreter; a column says how many of them pass. With
`--kernels` they are written to DIR/kernels.jsonl, for `benchmarks.kernelbench.check` on a GPU.
`back` is the share of backward time on lines of the user; the peak is what the analysis predicts
that eager holds. With `--measure` eager's step runs here: `held` is the peak of its second step,
`idle` what is still allocated when the model is gone, which are workspaces of libraries.
"""
# transformers is untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from fusion_advisor.frontend.hf import built
from fusion_advisor.ir.scenario import Scenario

from ..gpu import ROOT, heading, json_lines
from ..kernelbench.audit import found_in, kernels_of, write_kernels
from .dry import LAYERS, config_of, drawn, size_of

SIZES = {"text": (8, 1024), "images": (64, 0), "other": (4, 0)}
"""Batch and tokens of a call by what goes in; 0 for what the model's configuration says."""
_DEVICE = "h200"
_STEP = (
    *("--mode", "train", "--optimizer", "none", "--device", _DEVICE),
    *("--no-compile", "--no-cache", "--memory", "24"),
)


@dataclass
class Row:
    """A step of one model type. `predicted` is the bytes of its peak, at the node `at`."""

    kind: str
    task: str
    seed: str
    autocast: str = ""
    predicted: int = 0
    held: int = 0
    idle: int = 0
    at: str = ""
    back: float = 0.0
    groups: int = 0
    backward: int = 0
    kernels: int = 0
    checked: int = 0
    passed: int = 0
    refused: dict[str, str] = field(default_factory=dict[str, str])
    said: str = ""
    failure: str = ""

    @property
    def dtype(self) -> str:
        """Dtype that the model is built in."""
        return "float32" if self.autocast else "bfloat16"

    @property
    def casting(self) -> list[str]:
        """Options of a command that runs the step under autocast."""
        return ["--autocast", self.autocast] if self.autocast else []


# -- what the analysis says ------------------------------------------------------------------------


def analyzed(row: Row, seconds: float, *, verify: bool) -> Row:
    """The row with what `analyze` says of its step."""
    try:
        settings, batch, tokens = call_of(row)
    except ValueError as error:  # as of a type whose layers are named one by one
        row.failure = f"configuration: {_short([str(error)])}"
        return row
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "fusion_advisor", "analyze"]
        command += [_named(row, settings, folder), *_STEP, "--batch", str(batch)]
        command += ["--dtype", row.dtype, *row.casting]
        command += ["--seq", str(tokens)] if tokens else []
        command += ["--json", str(report), *([] if verify else ["--no-verify"])]
        done = _ran(command, seconds)
        if done is None:
            row.failure = f"analysis: no answer within {seconds:g} s"
            return row
        said = [*(done.stdout + done.stderr).splitlines(), ""]
        if not report.is_file():
            row.failure = f"analysis: {_short(said[-2:])}"
            return row
        _read(row, json.loads(report.read_text()))
        row.said = _short([said[0].removeprefix("assumed: ")])
    return row


def _ran(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | None:
    """A command that has ended, with what it printed; None where it was stopped for its time."""
    try:
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return None


def call_of(row: Row) -> tuple[Any, int, int | None]:
    """Configuration of the row's model, and the batch and tokens of its call."""
    settings = config_of(row.kind, LAYERS)
    return (settings, *size_of(settings, row.task, SIZES))


def _scenario(row: Row, batch: int, tokens: int | None) -> Scenario:
    step = Scenario(mode="train", dtype=row.dtype, step=True, optimizer="none")
    return replace(step, autocast=row.autocast or None, batch=batch, seq=tokens)


def _named(row: Row, settings: Any, folder: str) -> str:
    """Name of the row's model for a command, which reads its configuration from a folder."""
    config = Path(folder) / "config.json"
    config.write_text(settings.to_json_string(use_diff=False))
    return f"hf:{config}#AutoModelFor{row.task}"


def _read(row: Row, report: dict[str, Any]) -> None:
    """Take from a report what the row has."""
    nodes = {each["name"]: each for each in report["nodes"] if each.get("phase") == "backward"}
    spent = sum(each["time_us"] for each in nodes.values())
    told = sum(each["time_us"] for each in nodes.values() if each.get("source"))
    groups = report["groups"]
    row.back = told / spent if spent else 0.0
    row.groups, row.kernels = len(groups), sum(bool(each.get("kernel")) for each in groups)
    checks = [(each.get("kernel") or {}).get("check") for each in groups]
    row.checked = sum(check is not None for check in checks)
    row.passed = sum(check is not None and check["passed"] is True for check in checks)
    for each, check in zip(groups, checks, strict=True):
        if check and check["failure"]:
            row.refused[each["kernel"]["file"] or each["id"]] = _short([check["failure"]])
    row.backward = sum(each["nodes"][0] in nodes for each in groups)
    row.predicted, row.at = report["memory"]["peak_bytes"], report["memory"]["at"]


def _short(lines: Sequence[str]) -> str:
    """Lines in one, cut at 240 characters."""
    return " ".join(" ".join(lines).split())[:240]


# -- its kernels -----------------------------------------------------------------------------------


def emitted(row: Row) -> list[tuple[str, str]]:
    """The kernels of the row's step as JSON, each with the model type."""
    settings, batch, tokens = call_of(row)
    scenario = _scenario(row, batch, tokens)
    with tempfile.TemporaryDirectory() as folder:
        found = found_in(_named(row, settings, folder), scenario, _DEVICE)
    return [(row.kind, kernel) for kernel in kernels_of(*found)]


# -- what eager holds ------------------------------------------------------------------------------


def measured(row: Row, seconds: float) -> Row:
    """The row with what eager's step holds in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.models.families", "--seed", row.seed]
    command += ["--one", row.kind, row.task, *row.casting]
    done = _ran(command, seconds)
    if done is None:
        row.failure = f"eager: no answer within {seconds:g} s"
    elif done.returncode:
        row.failure = f"eager: {_short(done.stderr.splitlines()[-1:])}"
    else:
        row.held, row.idle = json.loads(done.stdout.splitlines()[-1])
    return row


def held(row: Row) -> tuple[int, int]:
    """Bytes that eager's second step holds at its peak, and those that outlive the model."""
    settings, batch, tokens = call_of(row)
    settings.dtype = getattr(torch, row.dtype)
    scenario = _scenario(row, batch, tokens)
    auto = getattr(transformers, f"AutoModelFor{row.task}")
    with torch.device("cuda"):
        model, given = built(auto, settings, scenario, [])
    model.train()
    dtype = getattr(torch, row.autocast) if row.autocast else None
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", dtype) if dtype else nullcontext():
            result = model(**given)
        result.loss.backward()
        torch.cuda.synchronize()
        del result
    peak = torch.cuda.max_memory_allocated()
    del model, given
    gc.collect()
    return peak, torch.cuda.memory_allocated()


# -- all of them -----------------------------------------------------------------------------------


def run(
    seed: str, count: int, *, autocast: str, seconds: float, jobs: int, verify: bool, measure: bool
) -> Iterator[Row]:
    """Yield rows of the first model types of a seed."""
    rows = [Row(kind, task, seed, autocast) for kind, task in drawn(seed)[:count]]
    for row in rows if measure else ():
        measured(row, seconds)
    rows, failed = [r for r in rows if not r.failure], [r for r in rows if r.failure]
    yield from failed
    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(partial(analyzed, seconds=seconds, verify=verify), rows)


def table(rows: Sequence[Row]) -> str:
    """The table, in GB."""
    lines = [*heading("Training steps that a seed drew"), "", *(__doc__ or "").split("\n\n")[2:3]]
    lines += [
        "",
        "| type | task | groups, of backward | kernels | pass | back | predicted peak |"
        " held | idle | predicted / held |",
    ]
    lines.append("|---" * 10 + "|")
    for row in (row for row in rows if not row.failure):
        lines.append(
            f"| {row.kind} | {row.task} | {row.groups}, {row.backward} | {row.kernels}"
            f" | {row.passed} of {row.checked} | {row.back:.3f}"
            f" | {row.predicted / 1e9:.2f} | {_held(row)} |"
        )
    refused = [
        f"- {row.kind}: `{name}`: {why}" for row in rows for name, why in row.refused.items()
    ]
    failed = [f"- {row.kind} ({row.task}): {row.failure}" for row in rows if row.failure]
    return "\n".join([*lines, "", "## What failed", "", *failed, *refused]) + "\n"


def _held(row: Row) -> str:
    if not row.held:
        return "| |"
    return f"{row.held / 1e9:.2f} | {row.idle / 1e9:.3f} | {row.predicted / row.held:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", required=True)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--autocast", default="", choices=("", "bfloat16", "float16"))
    parser.add_argument("--seconds", type=float, default=240.0, help="for one type")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--verify", action="store_true", help="check each kernel")
    parser.add_argument("--measure", action="store_true", help="eager's step on the GPU here")
    parser.add_argument("--kernels", action="store_true", help="write those of all steps")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "TASK"), help="what eager holds of it")
    options = parser.parse_args()
    if options.one:
        kind, task = options.one
        print(json.dumps(held(Row(kind, task, options.seed, options.autocast))))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for row in run(
        options.seed, options.count, autocast=options.autocast, seconds=options.seconds,
        jobs=options.jobs, verify=options.verify, measure=options.measure,
    ):  # fmt: skip
        print(json_lines([row]), end="", flush=True)
        rows.append(row)
        (options.out / "families.jsonl").write_text(json_lines(rows))
        (options.out / "families.md").write_text(table(rows))
    if options.kernels:
        spawning = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.jobs, spawning, max_tasks_per_child=1) as pool:
            each = pool.map(emitted, [row for row in rows if not row.failure])
            write_kernels(chain.from_iterable(each), options.out / "kernels.jsonl")


if __name__ == "__main__":
    main()
