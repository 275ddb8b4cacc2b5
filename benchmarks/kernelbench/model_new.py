"""Every problem of KernelBench as a `ModelNew`, through KernelBench's own check on a GPU.

    python -m benchmarks.kernelbench.model_new make KernelBench 2 1 --out DIR      # anywhere
    python -m benchmarks.kernelbench.model_new check KernelBench --out DIR         # on a GPU
    python -m benchmarks.kernelbench.model_new table --out DIR

KernelBench is a checkout of ScalingIntelligence/KernelBench. `make` writes DIR/made.jsonl and, for
each problem in which a group can be put, DIR/levelN_NAME.py, captured in train mode: KernelBench
builds both models and never calls `eval()`. Kernels are not checked then. `check` runs
`kernelbench.eval.eval_kernel_against_ref` on each file with FUSION_ADVISOR_STRICT=1, so that a
launcher that falls back fails, and counts the launches of Triton kernels; DIR/checked.jsonl has a
line for each problem as it is done. Both leave out what stands in their file already. `table` makes
DIR/model_new.md of the two.
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
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.support.errors import AdvisorError
from fusion_advisor.workflows.patch import patch_model
from tests.cpu.in_process import captured

from ..gpu import heading

SEED = 42
"""KernelBench's own."""


def make(options: argparse.Namespace) -> None:
    """A file with `ModelNew` for every problem that has a group."""
    rows = options.out / "made.jsonl"
    known = {row["problem"] for row in _rows(rows)}
    request = Request("", Scenario(mode="train"), device="h200", verify=False, compile=False)
    for level in options.levels:
        for file in sorted((options.folder / "KernelBench" / f"level{level}").glob("*.py")):
            problem = f"level{level}/{file.stem}"
            if problem not in known:
                out = options.out / f"{problem.replace('/', '_')}.py"
                made = _tried(file, request, out)
                _append(rows, {"problem": problem, **made})


def _tried(file: Path, request: Request, out: Path) -> dict[str, Any]:
    """What `patch_model` makes of one problem in a folder of its own; a file with `ModelNew` that
    holds goes to `out`."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder).resolve() / f"{file.stem}.py"
        shutil.copyfile(file, model)
        try:
            request = replace(request, model=str(model))
            made = patch_model(request, model.parent, captured, diff=False, model_new=True)
        except AdvisorError as error:
            return {"error": str(error).replace(f"{folder}/", "")}
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
    """KernelBench's check of every file, in several processes that share the GPU; what ran out of
    memory beside others runs again alone."""
    rows = options.out / "checked.jsonl"
    known = {row["problem"] for row in _rows(rows)}
    made = [row["problem"] for row in _rows(options.out / "made.jsonl")]
    files = {problem: options.out / f"{problem.replace('/', '_')}.py" for problem in made}
    todo = [p for p, file in files.items() if file.is_file() and p not in known]
    todo = [problem for problem in todo if problem.startswith(options.only)]
    ends = time.monotonic() + options.budget
    lock = threading.Lock()
    again: list[str] = []

    def slot(problems: list[str], last: bool) -> None:
        worker = _Worker(options.folder, options.trials)
        while True:
            with lock:
                left = ends - time.monotonic()
                if not problems or left < 1:
                    break
                problem = problems.pop(0)
            given = options.folder / "KernelBench" / f"{problem}.py"
            row = worker.ask(given, files[problem], min(options.seconds, left))
            with lock:
                if not last and "out of memory" in row.get("why", ""):
                    again.append(problem)
                elif left > options.seconds or "not done" not in row.get("why", ""):
                    _append(rows, {"problem": problem, **row})
        worker.stop()

    threads = [threading.Thread(target=slot, args=(todo, False)) for _ in range(options.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slot(again, True)


class _Worker:
    """A child process that checks one problem after the other, and is replaced when it hangs or
    dies."""

    def __init__(self, folder: Path, trials: int) -> None:
        self._given = folder, trials
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._given), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, given: Path, file: Path, seconds: float) -> dict[str, Any]:
        began = time.perf_counter()
        self._pipe.send((given.read_text(), file.read_text()))
        try:
            answered = self._pipe.poll(seconds)
            row = self._pipe.recv() if answered else {"why": f"not done in {seconds:.0f} s"}
        except EOFError:
            answered, row = False, {"why": "its process died"}
        if not answered:
            self.stop()
            self._start()
        return {**row, "seconds": time.perf_counter() - began}

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, folder: Path, trials: int) -> None:
    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    evaluation = _kernelbench(folder)
    while True:
        original, custom = pipe.recv()
        pipe.send(_checked(evaluation, original, custom, trials))


def _kernelbench(folder: Path) -> ModuleType:
    """`kernelbench.eval`. Clients of language models, which it imports and the check does not use,
    may be missing."""
    for name in ("openai", "litellm", "dotenv", "requests", "tqdm"):
        if importlib.util.find_spec(name) is None:
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
    made = _rows(options.out / "made.jsonl")
    checked = {row["problem"]: row for row in _rows(options.out / "checked.jsonl")}
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
        seen = [checked[problem] for problem in have if problem in checked]
        good = [row for row in seen if row.get("correct")]
        ran = sum(bool(row["launched"]) for row in good)
        lines.append(
            f"| {level} | {len(mine)} | {len(idle)} | {len(mine) - len(idle) - len(have)} "
            f"| {len(have)} | {len(seen)} | {len(good)} | {ran} |"
        )
    lines += ["", "## The rest, and why", ""]
    for row in made:
        problem, reasons = row["problem"], {**row.get("wrong", {})}
        if "error" in row:
            reasons["not captured"] = row["error"]
        if not row.get("put"):
            reasons |= {**row.get("refused", {}), **row.get("unplaced", {})}
        result = checked.get(problem)
        if result is None and row.get("put") and not row["wrong"]:
            reasons["not checked"] = "out of time"
        elif result and not result.get("correct"):
            reasons["not correct"] = result["why"].replace("\n", " ")
        elif result and not result["launched"]:
            guards = ", ".join(f"`{guard}`" for guard in row["guards"])
            reasons["no kernel launched"] = guards or "no guard stands there"
        lines += [f"- {problem}: {what}: {why}" for what, why in reasons.items()]
    (options.out / "model_new.md").write_text("\n".join(lines) + "\n")


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
    checking.add_argument("--processes", type=int, default=5)
    checking.add_argument("--seconds", type=float, default=60.0, help="for each problem")
    checking.add_argument("--budget", type=float, default=3600.0, help="seconds for all")
    checking.add_argument("--trials", type=int, default=5)
    checking.add_argument("--only", default="", help="problems whose names begin so")
    options = parser.parse_args(words)
    options.out.mkdir(parents=True, exist_ok=True)
    options.run(options)


if __name__ == "__main__":
    main()
