"""Patches of every problem of KernelBench: produced, applied with git, and equal to the original.

    python benchmarks/patches.py KernelBench 1 2 --out DIR

KernelBench is a checkout of ScalingIntelligence/KernelBench. A line of JSON for each problem goes
to DIR/patches.jsonl as it is done, the diffs to DIR, a table to DIR/patches.md. Kernels are not
checked here (`benchmarks/gpu_check.py` does that); captures are made in this process.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fusion_advisor.errors import AdvisorError
from fusion_advisor.patching import patched
from fusion_advisor.scenario import Request, Scenario

ROOT = Path(__file__).resolve().parents[1]


def tried(file: Path, out: Path, mode: Literal["eval", "train"]) -> dict[str, Any]:
    """One problem, patched in a folder of its own."""
    from tests.cpu.in_process import captured  # from the repository: `main` says where

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder).resolve() / "problem.py"
        shutil.copyfile(file, model)
        request = Request(
            str(model), Scenario(mode=mode), device="h200", verify=False, compile=False
        )
        try:
            made = patched(request, model.parent, captured)
        except AdvisorError as error:
            return {"error": str(error).replace(folder, "")}
    if made.diff:
        (out / f"{file.parent.name}_{file.stem}.patch").write_text(made.diff)
    return {
        "put": [put.finding.pattern for put in made.patch.puts],
        "refused": made.patch.refused,
        "unplaced": made.unplaced,
        "guarded": sum(bool(e.guard) for put in made.patch.puts for e in put.edits),
        "wrong": made.wrong,
        "tried": made.tried,
        "free_us": made.free_us,
        "saved_us": made.saved_us,
        "seconds": time.perf_counter() - began,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What became of the problems, by level, and every reason by which something was left."""
    lines = [
        "| level | problems | nothing to gain | patches that hold | guarded | left whole "
        "| do not hold | not captured | predicted gain that patches take |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for level in dict.fromkeys(row["problem"].partition("/")[0] for row in rows):
        mine = [row for row in rows if row["problem"].startswith(f"{level}/")]
        known = [row for row in mine if "error" not in row]
        gain = [row for row in known if row["free_us"] > 0]
        wrong = [row for row in gain if row["wrong"]]
        held = [row for row in gain if row["put"] and not row["wrong"]]
        saved = sum(row["saved_us"] for row in held) / (sum(row["free_us"] for row in gain) or 1)
        lines.append(
            f"| {level} | {len(mine)} | {len(known) - len(gain)} | {len(held)} "
            f"| {sum(row['guarded'] > 0 for row in held)} | {len(gain) - len(held) - len(wrong)} "
            f"| {len(wrong)} | {len(mine) - len(known)} | {100 * saved:.1f} % |"
        )
    lines += ["", "## Left, and why", ""]
    for row in rows:
        reasons = {**row.get("refused", {}), **row.get("unplaced", {}), **row.get("wrong", {})}
        if "error" in row:
            reasons = {"not captured": row["error"]}
        lines += [f"- {row['problem']}: {what}: {why}" for what, why in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("levels", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", default="eval", choices=("eval", "train"))
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.out / "patches.jsonl"
    for level in options.levels:
        for file in sorted((options.folder / f"level{level}").glob(f"{options.only}*.py")):
            row = {"problem": f"level{level}/{file.stem}", **tried(file, options.out, options.mode)}
            print(json.dumps(row), flush=True)
            with rows.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    every = [json.loads(line) for line in rows.read_text().splitlines()]
    (options.out / "patches.md").write_text(table(every))


if __name__ == "__main__":
    main()
