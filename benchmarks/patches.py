"""Patches of problems of KernelBench: produced, applied with git, equal to the original as graphs,
and run beside it on numbers.

    python benchmarks/patches.py KernelBench 2 1 --out DIR [--every 3] [--no-verify]

KernelBench is a checkout of ScalingIntelligence/KernelBench. A line of JSON for each problem goes
to DIR/patches.jsonl as it is done, what stands there is left out; the diffs go to DIR, a table to
DIR/patches.md. With --every each level's problems are taken in steps of so many. Captures are made
in this process. With --no-verify kernels are not checked and nothing is run on numbers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.support.errors import AdvisorError
from fusion_advisor.workflows.patch import patched

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]
"""A line of JSON."""


def tried(file: Path, request: Request, out: Path, **asked: bool) -> Row:
    """What `patched` makes of one problem in a folder of its own, as it is `asked`; what holds of
    it goes to `out`, whose suffix is the diff's or that of a file with `ModelNew`."""
    sys.path.insert(0, str(ROOT))
    from tests.cpu.in_process import captured  # from the repository

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder).resolve() / f"{file.stem}.py"
        shutil.copyfile(file, model)
        try:
            made = patched(
                replace(request, model=str(model)), model.parent, captured=captured, **asked
            )
        except AdvisorError as error:
            return {"error": str(error).replace(f"{folder}/", "")}
    text = made.model_new if out.suffix == ".py" else made.diff
    if text and not made.wrong:
        out.write_text(text)
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


def table(rows: Sequence[Row]) -> str:
    """What became of the problems, by level, and every reason by which something was left."""
    lines = [
        "| level | problems | nothing to gain | patches that hold | run on numbers | guarded "
        "| left whole | do not hold | not captured | predicted gain that patches take |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for level in dict.fromkeys(row["problem"].partition("/")[0] for row in rows):
        mine = [row for row in rows if row["problem"].startswith(f"{level}/")]
        known = [row for row in mine if "error" not in row]
        gain = [row for row in known if row["free_us"] > 0]
        wrong = [row for row in gain if row["wrong"]]
        held = [row for row in gain if row["put"] and not row["wrong"]]
        ran = sum(row["ran"].startswith("run at") for row in held)
        guarded = sum(bool(row["guards"]) for row in held)
        saved = sum(row["saved_us"] for row in held) / (sum(row["free_us"] for row in gain) or 1)
        lines.append(
            f"| {level} | {len(mine)} | {len(known) - len(gain)} | {len(held)} | {ran} | {guarded} "
            f"| {len(gain) - len(held) - len(wrong)} | {len(wrong)} | {len(mine) - len(known)} "
            f"| {100 * saved:.1f} % |"
        )
    lines += ["", "## Left, and why", ""]
    for row in rows:
        reasons = {**row.get("refused", {}), **row.get("unplaced", {}), **row.get("wrong", {})}
        if "error" in row:
            reasons = {"not captured": row["error"]}
        if row.get("put") and row["ran"].startswith("not run"):
            reasons["on numbers"] = row["ran"]
        lines += [f"- {row['problem']}: {what}: {why}" for what, why in reasons.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("levels", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mode", default="eval", choices=("eval", "train"))
    parser.add_argument("--only", default="")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = options.out / "patches.jsonl"
    done = [json.loads(line) for line in rows.read_text().splitlines()] if rows.is_file() else []
    known = {each["problem"] for each in done}
    request = Request(
        "", Scenario(mode=options.mode), device="h200", verify=options.verify, compile=False
    )
    for level in options.levels:
        files = sorted(
            (options.folder / "KernelBench" / f"level{level}").glob(f"{options.only}*.py")
        )
        for file in files[:: options.every]:
            problem = f"level{level}/{file.stem}"
            if problem in known:
                continue
            out = options.out / f"{problem.replace('/', '_')}.patch"
            done.append({"problem": problem, **tried(file, request, out)})
            print(json.dumps(done[-1]), flush=True)
            with rows.open("a") as stream:
                stream.write(json.dumps(done[-1]) + "\n")
    (options.out / "patches.md").write_text(table(done))


if __name__ == "__main__":
    main()
