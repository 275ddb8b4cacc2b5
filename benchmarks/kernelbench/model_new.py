"""Every problem of KernelBench as a `ModelNew`, through KernelBench's own check on a GPU.

    python -m benchmarks.kernelbench.model_new make KernelBench 2 1 --out DIR      # anywhere
    python -m benchmarks.kernelbench.model_new check KernelBench --out DIR         # on a GPU
    python -m benchmarks.kernelbench.model_new table --out DIR

KernelBench is a checkout of ScalingIntelligence/KernelBench. `make` writes DIR/made.jsonl and, for
each problem in which a group can be put, DIR/levelN_NAME.py, captured in train mode: KernelBench
builds both models and never calls `eval()`. Kernels are not checked then. `check` runs
`kernelbench.eval.eval_kernel_against_ref` on each file with FUSION_ADVISOR_STRICT=1, so that a
launcher that falls back fails, and counts the launches of Triton kernels; then, one after the
other, it times the problem in eager mode, under `torch.compile` and as `ModelNew` by KernelBench's
own `time_execution_with_cuda_event`. DIR/checked.jsonl and DIR/times.jsonl have a line for each
problem as it is done. Each part leaves out what stands in its file already. `table` makes
DIR/model_new.md of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.support.kernel_fault import cause
from fusion_advisor.workflows.patch import patch_model
from tests.cpu.in_process import captured

from ..gpu import ahead, heading

SEED = 42
"""KernelBench's own."""
MADE, CHECKED, TIMES = "made.jsonl", "checked.jsonl", "times.jsonl"
WAYS = "eager", "compile", "ours"


def make(options: argparse.Namespace) -> None:
    """A file with `ModelNew` for every problem that has a group."""
    rows = options.out / MADE
    known = {row["problem"] for row in _rows(rows)}
    files = {
        f"level{level}/{file.stem}": file
        for level in options.levels
        for file in sorted((options.folder / "KernelBench" / f"level{level}").glob("*.py"))
    }
    todo = {problem: file for problem, file in files.items() if problem not in known}
    with ThreadPoolExecutor(options.jobs) as pool:
        outs = [_file(options.out, problem) for problem in todo]
        for problem, made in zip(todo, pool.map(_apart, todo.values(), outs), strict=True):
            _append(rows, {"problem": problem, **made})


def _apart(file: Path, out: Path) -> dict[str, Any]:
    """Result of `_tried` in a process of its own: some problems draw more than the host has."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_tried, file, out).result()
        except BrokenProcessPool:
            return {"error": "its process died: out of memory?"}


def _tried(file: Path, out: Path) -> dict[str, Any]:
    """Result of `patch_model` for one problem in a folder of its own; a file with `ModelNew` that
    holds goes to `out`."""
    began = time.perf_counter()
    request = Request("", Scenario(mode="train"), device="h200", verify=False, compile=False)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder).resolve() / f"{file.stem}.py"
        shutil.copyfile(file, model)
        try:
            request = replace(request, model=str(model))
            made = patch_model(request, model.parent, captured=captured, diff=False, model_new=True)
        except Exception as error:  # noqa: BLE001 one problem fewer; its row says why
            return {"error": cause(error).replace(f"{folder}/", "")}
    if made.model_new and not made.wrong:
        out.write_text(made.model_new)
    return {
        "put": [put.finding.pattern for put in made.patch.puts],
        "guards": sorted({e.guard for put in made.patch.puts for e in put.edits if e.guard}),
        "refused": made.patch.refused,
        "unplaced": made.unplaced,
        "wrong": {said: what.replace(f"{folder}/", "") for said, what in made.wrong.items()},
        "tried": made.tried,
        "ran": made.ran or made.new_ran,
        "free_us": made.free_us,
        "saved_us": made.saved_us,
        "seconds": time.perf_counter() - began,
    }


def check(options: argparse.Namespace) -> None:
    """KernelBench's check of every file, in several processes that share the GPU, which warms the
    compilers' caches too; what ran out of memory beside others runs again alone. Then times."""
    ends = time.monotonic() + options.budget
    rows = options.out / CHECKED
    files = {
        row["problem"]: _file(options.out, row["problem"]) for row in _rows(options.out / MADE)
    }
    chosen = [p for p, file in files.items() if file.is_file() and p.startswith(options.only)]

    def left() -> dict[str, Checked]:
        done = {row["problem"] for row in _rows(rows)}
        return {
            p: (options.folder, options.out, p, options.trials) for p in chosen if p not in done
        }

    half = time.monotonic() + 0.6 * options.budget
    ahead(checked, left(), options.processes, half)
    ahead(checked, left(), 1, half)
    _timed(options, chosen, ends)


Checked = tuple[Path, Path, str, int]
"""KernelBench's folder, that of the files, a problem, and how many trials it has."""


def checked(job: Checked) -> None:
    """Append a row of KernelBench's check; a problem that runs out of memory leaves none."""
    import torch

    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    torch.set_num_threads(4)
    folder, out, problem, trials = job
    evaluation, began = _kernelbench(folder), time.perf_counter()
    given, custom = _given(folder, problem), _file(out, problem).read_text()
    row = _checked(evaluation, given, custom, trials)
    if "out of memory" in row["why"]:
        raise RuntimeError(row["why"])
    if row["correct"]:
        for run in _ways(evaluation, given, custom)[0].values():
            run()
    _append(out / CHECKED, {"problem": problem, **row, "seconds": time.perf_counter() - began})


def _timed(options: argparse.Namespace, chosen: Sequence[str], ends: float) -> None:
    """Append a row of medians in milliseconds for each problem that is correct."""
    import torch

    evaluation, rows = _kernelbench(options.folder), options.out / TIMES
    good = {row["problem"] for row in _rows(options.out / CHECKED) if row["correct"]}
    done = {row["problem"] for row in _rows(rows)}
    for problem in chosen:
        if problem in done or problem not in good or time.monotonic() > ends:
            continue
        given = _given(options.folder, problem)
        row: dict[str, Any] = {"problem": problem, "gpu": torch.cuda.get_device_name()}
        try:
            row |= _times(evaluation, given, _file(options.out, problem).read_text())
        except Exception as error:  # noqa: BLE001 one problem fewer; its row says why
            row["failed"] = f"{type(error).__name__}: {error}"[:300]
        _append(rows, row)
        torch.cuda.empty_cache()


def _times(evaluation: ModuleType, given: str, custom: str) -> dict[str, float]:
    """Median of milliseconds of each way, three rounds of ten calls, by KernelBench's clock."""
    calls, inputs = _ways(evaluation, given, custom)
    clock = evaluation.timing.time_execution_with_cuda_event
    seen: dict[str, list[float]] = {way: [] for way in calls}
    for _ in range(3):
        for way, call in calls.items():
            with contextlib.redirect_stdout(io.StringIO()):
                seen[way] += clock(call, [], num_warmup=2, num_trials=10, verbose=False)
    del inputs
    return {way: statistics.median(ms) for way, ms in seen.items()}


def _ways(
    evaluation: ModuleType, given: str, custom: str
) -> tuple[dict[str, Callable[[], Any]], list[Any]]:
    """Every way to run a problem, and its inputs, drawn on the GPU and cast as KernelBench does."""
    import torch

    torch.compiler.reset()
    original, initial, drawn = evaluation.load_original_model_and_inputs(given, {})
    new, _ = evaluation.load_custom_model_with_tempfile(custom, entry_point="ModelNew")
    device = torch.device("cuda:0")

    def on_device(values: Sequence[Any]) -> list[Any]:
        return [v.to(device, torch.float32) if isinstance(v, torch.Tensor) else v for v in values]

    with device:
        inputs, words = on_device(drawn()), on_device(initial())
    models: dict[str, Any] = {}
    for way, made in (("eager", original), ("ours", new)):
        evaluation.set_seed(SEED)
        models[way] = made(*words).to(device, torch.float32)
    models["compile"] = torch.compile(models["eager"])  # pyright: ignore[reportUnknownMemberType]

    def call(model: Any) -> Any:
        with torch.no_grad():
            return model(*inputs)

    return {way: partial(call, models[way]) for way in WAYS}, inputs


def _given(folder: Path, problem: str) -> str:
    return (folder / "KernelBench" / f"{problem}.py").read_text()


def _file(out: Path, problem: str) -> Path:
    return out / f"{problem.replace('/', '_')}.py"


def _kernelbench(folder: Path) -> ModuleType:
    """`kernelbench.eval`. Clients of language models, which it imports and the check does not use,
    may be missing."""
    for name in ("openai", "litellm", "dotenv", "requests", "tqdm"):
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = mock.MagicMock()
    sys.path.insert(0, str(folder / "src"))
    return importlib.import_module("kernelbench.eval")


def _checked(evaluation: ModuleType, original: str, custom: str, trials: int) -> dict[str, Any]:
    """What KernelBench says of one file, and which kernels were launched meanwhile."""
    import torch

    from fusion_advisor.verify.launch_counter import counted

    said = io.StringIO()
    with counted() as launched, contextlib.redirect_stdout(said):
        try:
            result = evaluation.eval_kernel_against_ref(
                original, custom, seed_num=SEED, num_correct_trials=trials, backend="triton",
                device=torch.device("cuda:0"),
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  KernelBench lets the original's pass
            result = None
            why = f"{type(error).__name__}: {error}"
        else:
            why = _why(result.metadata) if result is not None else said.getvalue()[-500:]
    torch.cuda.empty_cache()
    correct = bool(result and result.correctness)
    return {
        "compiled": bool(result and result.compiled),
        "correct": correct,
        "launched": dict(launched),
        "trials": trials,
        "why": "" if correct else why,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__,
    }


def _why(metadata: dict[str, Any]) -> str:
    parts = ("compilation_error", "runtime_error", "correctness_issue", "max_difference")
    return "; ".join(f"{name}: {metadata[name]}" for name in parts if name in metadata)[:500]


def table(options: argparse.Namespace) -> None:
    """What became of the problems, by level, and why of the rest."""
    made = _rows(options.out / MADE)
    found = {row["problem"]: row for row in _rows(options.out / CHECKED)}
    lines = [
        *heading("ModelNew of KernelBench"),
        "",
        "| level | problems tried | nothing to gain | no ModelNew | ModelNew | checked | correct "
        "| correct, kernels launched |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for level in dict.fromkeys(row["problem"].partition("/")[0] for row in made):
        mine = [row for row in made if row["problem"].startswith(f"{level}/")]
        idle = [row for row in mine if row.get("free_us") == 0]
        have = [row["problem"] for row in mine if row.get("put") and not row["wrong"]]
        seen = [found[problem] for problem in have if problem in found]
        good = [row for row in seen if row.get("correct")]
        ran = sum(bool(row["launched"]) for row in good)
        lines.append(
            f"| {level} | {len(mine)} | {len(idle)} | {len(mine) - len(idle) - len(have)} "
            f"| {len(have)} | {len(seen)} | {len(good)} | {ran} |"
        )
    lines += ["", *_speed(_rows(options.out / TIMES)), "", "## The rest, and why", ""]
    for row in made:
        problem, reasons = row["problem"], {**row.get("wrong", {})}
        if "error" in row:
            reasons["not captured"] = row["error"]
        if not row.get("put"):
            reasons |= {**row.get("refused", {}), **row.get("unplaced", {})}
        result = found.get(problem)
        if result is None and row.get("put") and not row["wrong"]:
            reasons["not checked"] = "out of time"
        elif result and not result.get("correct"):
            reasons["not correct"] = result["why"].replace("\n", " ")
        elif result and not result["launched"]:
            guards = ", ".join(f"`{guard}`" for guard in row["guards"])
            reasons["no kernel launched"] = guards or "no guard stands there"
        lines += [f"- {problem}: {what}: {why}" for what, why in reasons.items()]
    (options.out / "model_new.md").write_text("\n".join(lines) + "\n")


def _speed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Tables of medians in milliseconds: figures of each level, then a line a problem."""
    timed = [row for row in rows if "failed" not in row]
    lines = ["| level | timed | eager / ours | compile / ours | faster than eager | than compile |"]
    lines.append("|---|---|---|---|---|---|")
    for level in dict.fromkeys(row["problem"].partition("/")[0] for row in timed):
        mine = [row for row in timed if row["problem"].startswith(f"{level}/")]
        gains = {way: [row[way] / row["ours"] for row in mine] for way in ("eager", "compile")}
        means = [f"{statistics.geometric_mean(gains[way]):.3f}" for way in gains]
        wins = [f"{sum(gain > 1 for gain in gains[way])}" for way in gains]
        lines.append(f"| {' | '.join((level, str(len(mine)), *means, *wins))} |")
    lines += [
        "",
        "| problem | eager ms | compile ms | ours ms | compile / ours |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(timed, key=lambda row: row["compile"] / row["ours"]):
        times = [f"{row[way]:.3f}" for way in WAYS]
        gain = f"{row['compile'] / row['ours']:.2f}"
        lines.append(f"| {' | '.join((row['problem'], *times, gain))} |")
    lines += [f"- {row['problem']}: not timed: {row['failed']}" for row in rows if "failed" in row]
    return lines


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _append(file: Path, row: dict[str, Any]) -> None:
    line = json.dumps(row)
    print(line[:300], flush=True)
    with file.open("a") as stream:
        stream.write(f"{line}\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    making, checking, tabling = (commands.add_parser(n) for n in ("make", "check", "table"))
    for each, run in ((making, make), (checking, check), (tabling, table)):
        each.set_defaults(run=run)
        if each is not tabling:
            each.add_argument("folder", type=Path)
        each.add_argument("--out", type=Path, required=True)
    making.add_argument("levels", nargs="+")
    making.add_argument("--jobs", type=int, default=2)
    checking.add_argument("--processes", type=int, default=5)
    checking.add_argument("--budget", type=float, default=3600.0, help="seconds for all")
    checking.add_argument("--trials", type=int, default=5)
    checking.add_argument("--only", default="", help="problems whose names begin so")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    options.run(options)


if __name__ == "__main__":
    main()
