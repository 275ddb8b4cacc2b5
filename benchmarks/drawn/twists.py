"""What each twist of the schedules is worth on modules that nobody has seen.

    python -m benchmarks.drawn.twists [--seed HEX] [--count 300] [--seconds 900] [--jobs 14]

Each accepted group of each drawn module is emitted as it is, and again with one twist at a time
taken out of the planner or of the bodies. Where the text differs, the twist applies, and both
kernels are timed in turn on the graph's own sizes. A twist stays where it applies to at least 3 of
300 modules and gains 5 % or more in the median of those; a row of results/twists.md each.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..gpu import ahead, clock, commit, heading
from .__main__ import HERE, drawn_module

RESULTS = HERE.parent / "results"
LEAST_MODULES, LEAST_GAIN = 3, 1.05
SCHEDULES = "fusion_advisor.schedules"

Taken = tuple[str, str, Any]
"""What stands in the place of a part of the planner: module (and class), name, replacement."""


def _none(*_: Any, **__: Any) -> dict[Any, Any]:
    return {}


def _zero(*_: Any, **__: Any) -> int:
    return 0


def _false(*_: Any, **__: Any) -> bool:
    return False


class Around:
    """Replacement that is made of what it stands in for."""

    def __init__(self, make: Any) -> None:
        self.make = make


def _plain_parts(original: Any) -> Any:
    """Parts of rows without a rule for what they compute."""
    return lambda laid, stages, rules: (rules.schedules.split.elements_per_thread.count, stages)


def _refused(*_: Any, **__: Any) -> Any:
    from fusion_advisor.schedules.base import Refused

    raise Refused("no-schedule", "taken out")


TWISTS: dict[str, tuple[Taken, ...]] = {
    "second piece of a row": (("row", "_rest", _zero),),
    "lengths of rows told": (("addresses.Addresses", "_divided", lambda self: []),),
    "squares across memory": (("tiled", "across_axis", lambda *_: None),),
    "tiles for numbers of rows": (("tiled", "_loads_for_rows", _false),),
    "parts of rows that wait": (("select", "_waits", _false),),
    "one more (log1p, expm1)": (("body", "one_more", _none),),
    "sums that are at least one": (("body", "at_least_one", _none),),
    "moments and rescaled sums in one pass": (("online", "_moments", lambda *_: None),
                                              ("online", "_rescaled", lambda *_: None),
                                              ("online", "_shifted", lambda *_: None)),
    "narrow while programs wait": (("cooperative_body._Along", "_narrow", _false),),
    "half threads for long functions": (("blocked", "_of_parts", Around(_plain_parts)),),
    "rows that share a program": (("row", "_rows", lambda laid, block, coalesced, *_: coalesced),),
    **{f"schedule: {name}": ((name, "plan", _refused),)
       for name in ("tiled", "cooperative", "carried", "split", "blocked", "finishing")},
}  # fmt: skip


def _holder(where: str) -> Any:
    module, _, inside = where.partition(".")
    found = importlib.import_module(f"{SCHEDULES}.{module}")
    return getattr(found, inside) if inside else found


@contextmanager
def without(twist: str) -> Generator[None]:
    """The planner and the bodies without one twist."""
    before: list[Taken] = []
    for where, name, other in TWISTS[twist]:
        holder = _holder(where)
        known = holder.__dict__[name]
        before.append((where, name, known))
        setattr(holder, name, other.make(known) if isinstance(other, Around) else other)
    try:
        yield
    finally:
        for where, name, known in reversed(before):
            setattr(_holder(where), name, known)


def written(seed: str, number: int) -> dict[str, Any]:
    """The kernels of one module: of each accepted group as it is, and without each twist that
    makes a difference; None where nothing else serves the group."""
    import torch

    import fusion_advisor as fa
    from fusion_advisor.codegen.emit import attempt
    from fusion_advisor.rulebook.load import load_rulebook
    from fusion_advisor.schedules.select import plan

    torch.set_num_threads(1)
    rules = load_rulebook()
    name, source = drawn_module(seed, number)
    found: dict[str, Any] = {"module": name, "groups": []}
    graph = fa.capture(source.Model().eval(), source.get_inputs())
    fused = fa.fuse(graph, "h200")
    for group in fused.groups:
        whole = attempt(fused.flow, group.decision, "kernel", rules, full_size=True)
        if isinstance(whole, str):
            continue
        subject = group.decision.subject
        region = subject.expressed.region
        variants: dict[str, Any] = {}
        for twist in TWISTS:
            with without(twist):
                other = plan(region, subject.device, rules)
                decision = replace(group.decision, subject=replace(subject, planned=other))
                made = attempt(fused.flow, decision, "kernel", rules, full_size=True)
            if isinstance(made, str):
                variants[twist] = None
            elif _code(made.text) != _code(whole.text):
                variants[twist] = made
        schedule = subject.plan.schedule
        found["groups"].append({"schedule": schedule, "kernel": whole, "variants": variants})
    return found


def _code(text: str) -> str:
    """A file behind its docstring."""
    return text.split('"""', 2)[2]


def prepared(folder: str, job: tuple[str, int]) -> None:
    """Write one module's kernels to a folder, and run each once: Triton's cache is warm then."""
    import pickle

    import torch

    from fusion_advisor.codegen.test_inputs import at_full_size
    from fusion_advisor.verify.inputs import build_inputs

    torch.set_grad_enabled(False)
    made = written(*job)
    for group in made["groups"]:
        inputs = build_inputs(at_full_size(group["kernel"]), "normal", 0, "cuda")
        for kernel in (group["kernel"], *filter(None, group["variants"].values())):
            try:
                _call(kernel)(*inputs)
            except Exception as error:  # noqa: BLE001 one kernel fewer; its line says why
                print(made["module"], type(error).__name__, str(error)[:200], flush=True)
        del inputs
        torch.cuda.empty_cache()
    (Path(folder) / f"{job[1]:03d}.pickle").write_bytes(pickle.dumps(made))


def _call(kernel: Any) -> Any:
    from fusion_advisor.shipped.load import load_module, process_folder

    return getattr(load_module(kernel.text, process_folder()), kernel.entry)


def timed(folder: Path, device: str, deadline: float, rounds: int) -> list[dict[str, Any]]:
    """Every kernel and those without a twist in turn: a row each."""
    import pickle

    import torch

    from fusion_advisor.codegen.test_inputs import at_full_size
    from fusion_advisor.verify.inputs import build_inputs

    torch.set_grad_enabled(False)
    rows, watch = list[dict[str, Any]](), clock(device)
    for file in sorted(folder.glob("*.pickle")):
        if time.monotonic() > deadline:
            break
        made = pickle.loads(file.read_bytes())
        for number, group in enumerate(made["groups"]):
            kernels = {"": group["kernel"], **group["variants"]}
            row = {"module": made["module"], "group": number, "schedule": group["schedule"]}
            inputs = build_inputs(at_full_size(group["kernel"]), "normal", 0, watch.device)
            calls: dict[str, Any] = {}
            for twist, kernel in kernels.items():
                try:
                    if kernel is not None:
                        calls[twist] = partial(_call(kernel), *inputs)
                        calls[twist]()
                except Exception as error:  # noqa: BLE001 its row says so
                    calls.pop(twist, None)
                    print(made["module"], twist, str(error)[:200], flush=True)
            series = watch.turns(list(calls.values()), rounds)
            us = {twist: statistics.median(each) for twist, each in zip(calls, series, strict=True)}
            without = {twist: us.get(twist) for twist in group["variants"]}
            rows.append({**row, "us": us.get(""), "without": without})
            del inputs, calls
            watch.release()
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a twist."""
    modules = len({row["module"] for row in rows})
    lines = [
        f"{len(rows)} groups of {modules} modules.",
        "",
        "| twist | modules | without: median | least to most | no other way | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for twist in TWISTS:
        applies = [row for row in rows if twist in row["without"] and row["us"]]
        ratios = sorted(
            row["without"][twist] / row["us"] for row in applies if row["without"][twist]
        )
        alone = sum(row["without"][twist] is None for row in applies)
        count = len({row["module"] for row in applies})
        middle = statistics.median(ratios) if ratios else float("nan")
        stays = count >= LEAST_MODULES and (middle >= LEAST_GAIN or 2 * alone > len(applies))
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else ""
        verdict = "stays" if stays else "goes"
        lines.append(f"| {twist} | {count} | {middle:.3f} | {spread} | {alone or ''} | {verdict} |")
    return lines


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", default=commit())
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        jobs = {f"{n:03d}": (options.seed, n) for n in range(options.count)}
        limit = began + 0.6 * options.seconds
        ahead(partial(prepared, folder), jobs, options.jobs, limit)
        print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)
        rows = timed(Path(folder), options.device, began + options.seconds, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "twists.jsonl").open("w") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")
    lines = [*heading("Twists of the schedules, on drawn modules"), "", *table(rows)]
    (options.out / "twists.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
