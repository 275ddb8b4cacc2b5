"""Links between traces and graphs, held to what is true by other means; writes a table.

    python -m benchmarks.profiles.links DIR [--out DIR]

`DIR` is what `benchmarks.profiles.record` wrote. Of the eager traces each launch that `analyze
--profile` links is compared with a run in which each op had a range of its own: a link is right if
its kernels are those of the op at its place. `in order` counts, of the ten groups that take longest
by the profile, those at the same place by the CUDA events around their ops; `to events` is the
median distance of a launch's measured time to its events', of those that take 20 us and more.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import ROOT
from fusion_advisor.profile.profile import read_trace
from fusion_advisor.profile.trace import enclosing

TRACES = {
    "llama_prefill_eager": ("examples/llama_block.py", "eval"),
    "llama_prefill_compile": ("examples/llama_block.py", "eval"),
    "llama_train_eager": ("benchmarks/profiles/llama.py", "train"),
    "llama_train_compile": ("benchmarks/profiles/llama.py", "train"),
    "gpt_decode_eager": ("benchmarks/profiles/gpt.py", "eval"),
    "gpt_decode_graphs": ("benchmarks/profiles/gpt.py", "eval"),
}
LEAST_US = 20.0
"""Time from which on the events' own does not tell."""


def analysed(trace: Path, model: str, mode: str, out: Path) -> dict[str, Any]:
    """Report of a model with a trace's times."""
    report = out / f"{trace.name.partition('.')[0]}.report.json"
    command = [sys.executable, "-m", "fusion_advisor", "analyze", model, "--mode", mode]
    command += ["--profile", str(trace), "--no-verify", "--no-compile", "--json", str(report)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True)
    return json.loads(report.read_text("utf-8"))


def kernels_of_ops(ranges: Path) -> dict[int, list[str]]:
    """Kernels of each op, by the range that their launches lie in."""
    trace = read_trace(ranges)
    events = trace.on_one_device()
    calls = [trace.calls[event.correlation] for event in events]
    found: dict[int, list[tuple[float, str]]] = {}
    chains = enclosing(trace.ops, [(call.thread, call.start) for call in calls])
    for event, call, chain in zip(events, calls, chains, strict=True):
        number = next((op.name[3:] for op in chain if op.name.startswith("op#")), None)
        if number is not None:
            found.setdefault(int(number), []).append((call.start, event.name))
    return {number: [name for _, name in sorted(each)] for number, each in found.items()}


def ops_of_launches(launches: Sequence[str], ops: Sequence[str]) -> Iterator[tuple[int, range]]:
    """Yield launches of the graph with the ops that torch dispatches for them: the one of the same
    name in order, or all between two such for a launch of which torch knows the parts alone."""
    matcher = SequenceMatcher(None, launches, ops, autojunk=False)
    for tag, first, last, begin, end in matcher.get_opcodes():
        if tag == "equal":
            yield from (
                (n, range(n - first + begin, n - first + begin + 1)) for n in range(first, last)
            )
        elif last - first == 1:
            yield first, range(begin, end)


def held(name: str, report: Mapping[str, Any], folder: Path) -> str:
    """Row of the table for one eager trace."""
    ops = json.loads((folder / f"{name}.ops.json").read_text("utf-8"))
    kernels = kernels_of_ops(folder / f"{name}.ranges.json.gz")
    launches = [node for node in report["nodes"] if node["bound"] != "free"]
    active = [number for number in range(len(ops)) if kernels.get(number)]
    pairs = ops_of_launches([node["op"] for node in launches], [ops[n][0] for n in active])
    linked = right = 0
    wrong: list[str] = []
    events: dict[str, float] = {}
    far: list[float] = []
    for number, places in pairs:
        node, mine = launches[number], [active[place] for place in places]
        events[node["name"]] = sum(ops[n][1] for n in mine)
        if not (seen := node["measured"]) or seen["us"] is None:
            continue
        linked += 1
        if sorted(seen["names"]) == sorted(kernel for n in mine for kernel in kernels[n]):
            right += 1
        else:
            wrong.append(node["name"])
        if seen["us"] >= LEAST_US:
            far.append(abs(seen["us"] / events[node["name"]] - 1))
    measured = {node["name"]: (node["measured"] or {}).get("us") or 0.0 for node in launches}
    order = [ranked(report, times) for times in (measured, events)]
    same = sum(one == other for one, other in zip(*order, strict=False))
    print(name, "wrong:", ", ".join(wrong[:20]) or "none", flush=True)
    return f"{linked} | {right} | {same} of {len(order[0])} | {median(far):.1%}"


def ranked(report: Mapping[str, Any], times: Mapping[str, float]) -> list[str]:
    """The ten groups that take longest in all their places."""
    us = {
        group["id"]: sum(times.get(name, 0.0) for place in group["instances"] for name in place)
        for group in report["groups"]
    }
    return sorted(us, key=lambda each: -us[each])[:10]


def row(name: str, folder: Path, out: Path) -> str:
    """Row of the table for one trace."""
    report = analysed(folder / f"{name}.json.gz", *TRACES[name], out)
    profile = report["profile"]
    shares = ", ".join(f"{p} {share:.0%}" for p, share in profile["linked_by_phase"].items())
    checked = held(name, report, folder) if (folder / f"{name}.ops.json").exists() else " | | | "
    linked = f"{sum(profile['linked'].values()):.1%} ({shares})"
    step = f"{profile['step_us'] / 1e3:.1f}"
    return f"| {name} | {step} | {linked} | {checked} | {profile['error']:.0%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    head = ("trace", "step, ms", "GPU time linked", "links held", "right", "groups in order",
            "to events", "predictions off by")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name in TRACES:
        lines.append(row(name, options.folder, options.out))
        print(lines[-1], flush=True)
    (options.out / "profiles.md").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
