"""Patched sources beside their rivals, on modules that nobody has seen.

    python -m benchmarks.drawn.patched make DIR [--seed HEX] [--count 100] [--jobs 2]   # anywhere
    python -m benchmarks.drawn.patched time DIR [--seconds 560] [--jobs 14]             # on a GPU
    python -m benchmarks.drawn.patched table [SEED ...]

`make` draws modules at their full sizes, patches each in a repository of its own and leaves the
patched ones in DIR; kernels are neither checked nor compiled there. `time` runs a module as drawn,
under `torch.compile` (default, and max-autotune without CUDA graphs) and, patched, in eager mode:
medians, a cold L2, the host hidden. The patched one is held to a float64 run, and no kernel may
fall back. Rows go to results/patched.jsonl, one a module, those without a patch among them; a run
goes on where the last one of its seed ended.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from fusion_advisor.support.kernel_fault import cause

from ..gpu import ahead, clock, commit, copy_bandwidth, machine
from .__main__ import HERE, Row, loaded, patch, repository, told
from .times import built, held, in_turn, latest, rivals, rows_of, table

RESULTS = HERE.parent / "results" / "patched.jsonl"
MADE = "made.jsonl"
PATCHED = "patched"


def made(file: Path) -> Row:
    """A module's file, patched where it lies."""
    repository(file)
    row: Row = {"module": file.stem, "failures": patch(file, "--no-verify", "--no-compile")}
    edit = file.with_name("x.patch")
    row["patched"] = edit.is_file() and edit.stat().st_size > 0
    if row["patched"]:
        subprocess.run(["git", "apply", edit.name], cwd=file.parent, check=True)
    shutil.rmtree(file.parent / ".git")
    return row


def make(folder: Path, seed: str, count: int, jobs: int) -> None:
    """Draw and patch what is not there yet."""
    log, draw = folder / MADE, loaded(HERE / "draw.py", "draw")
    have, files = {row["number"] for row in rows_of(log)}, dict[int, Path]()
    for number in set(range(count)) - have:
        name, text = draw.drawn(seed, number, False)
        files[number] = folder / name / f"{name}.py"  # after which its package is named
        shutil.rmtree(folder / name, ignore_errors=True)
        files[number].parent.mkdir(parents=True)
        files[number].write_text(text)
    with ThreadPoolExecutor(jobs) as pool:
        rows = pool.map(partial(told, made), files.values())
        for number, row in zip(files, rows, strict=True):
            with log.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"seed": seed, "number": number, **row}) + "\n")


def calls(folder: Path, name: str, model: Any) -> dict[str, Any]:
    """Every way to run a module, its patched source last, with the weights of `model`."""
    source = loaded(folder / name / f"{name}.py", f"patched_{name}")
    edited = source.Model().to("cuda").eval()
    edited.load_state_dict(model.state_dict())
    return {**rivals(model), PATCHED: edited}


def run_once(job: tuple[Path, str, int]) -> None:
    """Compile every way of one module."""
    import torch

    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    torch.set_grad_enabled(False)
    torch.set_num_threads(1)
    torch.compiler.reset()
    folder, *drawing = job
    name, model, inputs = built(*drawing)
    for call in calls(folder, name, model).values():
        call(*inputs)


def timed(job: tuple[Path, str, int], watch: Any, bandwidth: float) -> Row:
    """Times and errors of one module's ways."""
    import torch

    torch.compiler.reset()
    folder, *drawing = job
    name, model, inputs = built(*drawing)
    ready, said = held(model, inputs, calls(folder, name, model), (PATCHED,))
    return {"module": name, **said, **in_turn(ready, model, inputs, watch, bandwidth)}


def measure(folder: Path, seconds: float, jobs: int, device: str) -> list[Row]:
    """Time what `make` left, in the order of the drawing; the rows of its seed."""
    import torch

    os.environ["FUSION_ADVISOR_STRICT"] = "1"
    began, found = time.monotonic(), rows_of(folder / MADE)
    seed = found[0]["seed"]
    have = {row["number"] for row in rows_of(RESULTS) if row["seed"] == seed}
    left = [row for row in found if row["number"] not in have]
    drawings = {row["module"]: (folder, seed, row["number"]) for row in left if row["patched"]}
    failed = ahead(run_once, drawings, jobs, began + 0.5 * seconds)
    torch.set_grad_enabled(False)
    watch = clock(device)
    bandwidth = copy_bandwidth(watch)
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    for row in left:
        if time.monotonic() > began + seconds:
            break
        name = row["module"]
        if name in drawings:
            try:
                row |= timed(drawings[name], watch, bandwidth)
            except Exception as error:  # noqa: BLE001 one module fewer; its row says why
                row["failed"] = cause(error)[:240]
        row |= {"ahead": failed.get(name, ""), "date": day, "machine": machine()}
        with RESULTS.open("a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")
        watch.release()
    return [row for row in rows_of(RESULTS) if row["seed"] == seed]


def main() -> int:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("make", "time", "table"))
    parser.add_argument(
        "named", nargs="*", help="DIR; seeds, for a table (default: the last three)"
    )
    parser.add_argument("--seed", default="")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--device", default="h200")
    options = parser.parse_args()
    if options.what == "table":
        rows = latest(rows_of(RESULTS), options.named)
    elif len(options.named) != 1:
        parser.error(f"{options.what} takes one folder")
    elif options.what == "make":
        make(Path(options.named[0]), options.seed or commit(), options.count, options.jobs)
        return 0
    else:
        rows = measure(Path(options.named[0]), options.seconds, options.jobs, options.device)
    ran = [
        {k: v for k, v in row.items() if k != PATCHED or v is not True}  # it fell back: eager ran
        for row in rows
        if row[PATCHED]
    ]
    print("\n".join(table(ran, (PATCHED,))))
    print(
        f"\nNothing to patch in {sum(not row['patched'] for row in rows)} of {len(rows)} modules."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
