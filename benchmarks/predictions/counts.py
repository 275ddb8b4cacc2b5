"""What the hardware counted of cases, and what emitted kernels issue by it."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

import torch
from cases import DEVICE, decided, read
from fitting import toml
from torch import Tensor

from fusion_advisor.device import Device, Times
from fusion_advisor.instructions import precise
from fusion_advisor.issue import Program, Tally, tally, wavefronts
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.rulefiles import load_rulebook
from fusion_advisor.schedules.base import Plan

INSTRUCTIONS = "smsp__inst_executed.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts.sum"
FIGURES = tuple(field.name for field in fields(Tally))
OUTLIER = 0.2
"""Of a logarithm: beyond it a kernel counts less."""
ROUNDS = 30


def counted(file: Path, metrics: Sequence[str]) -> dict[str, list[float]]:
    """Sums of some metrics over a case's kernels, by case, as ncu's raw page has them."""
    text = file.read_text()
    found: dict[str, list[float]] = {}
    for row in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        mark = next(value for key, value in row.items() if key.startswith("thread Domain:Push"))
        if "case:" not in mark:
            continue  # the row of units
        name = mark.split("case:")[1].split(":none")[0]
        before = found.setdefault(name, [0.0] * len(metrics))
        numbers = (float(row[metric].replace(",", "")) for metric in metrics)
        found[name] = [a + b for a, b in zip(before, numbers, strict=True)]
    return found


@dataclass(frozen=True)
class _Kernels:
    """The emitted kernels of a case: what their warps do, and what was counted of them."""

    schedule: str
    done: Sequence[float]
    """In the order of `FIGURES`."""
    wavefronts: float
    counted: Sequence[float]

    def instructions(self, worth: Sequence[float]) -> float:
        return sum(a * b for a, b in zip(self.done, worth, strict=True))


def run(arguments: argparse.Namespace) -> int:
    """Fits what is worth how many instructions, and says how far instructions and wavefronts are
    off; of the reported half it sees nothing."""
    rules = load_rulebook()
    device = rules.device(DEVICE)
    kernels = list(_kernels(arguments, device, rules))
    worth = _fitted(kernels)
    print(_table(kernels, worth))
    if arguments.out:
        arguments.out.write_text(toml(_with(device.times, worth, len(kernels))))
    return 0


def _kernels(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> Iterable[_Kernels]:
    found = counted(arguments.counts, (INSTRUCTIONS, WAVEFRONTS))
    for case in read(arguments.cases):
        if case.reported or not case.text or case.name not in found:
            continue
        plan = decided(case, device, rules).subject.plan
        if plan is not None and plan.schedule == case.schedule and not _copies(plan):
            yield _of_plan(plan, device, found[case.name])


def _copies(plan: Plan) -> bool:
    """Does it launch more than its own kernels?"""
    return any(step.copied for step in plan.steps)


def _of_plan(plan: Plan, device: Device, numbers: Sequence[float]) -> _Kernels:
    done, served = [0.0] * len(FIGURES), 0.0
    for step in plan.steps:
        program = Program(step, device.warp_size)
        each = tally(program, device, precise=precise(plan.region))
        done = [a + getattr(each, name) for a, name in zip(done, FIGURES, strict=True)]
        served += wavefronts(program)
    return _Kernels(plan.busiest.schedule, done, served, numbers)


def _fitted(kernels: Sequence[_Kernels]) -> list[float]:
    """Least squares of the share that is missing, none less than nothing, outliers weighed down."""
    counts = torch.tensor([each.counted[0] for each in kernels], dtype=torch.float64)
    done = torch.tensor([each.done for each in kernels], dtype=torch.float64) / counts[:, None]
    weights = torch.ones_like(counts)
    worth = torch.ones(len(FIGURES), dtype=torch.float64)
    for _ in range(ROUNDS):
        worth = _least_squares(done * weights[:, None], weights)
        off = (done @ worth).clamp(min=1e-9).log()
        # A count that is missed by so much counts as its logarithm does, not as its share.
        weights = ((OUTLIER / off.abs()).clamp(max=1.0) / off.exp().clamp(min=1.0)).sqrt()
    return worth.tolist()


def _least_squares(left: Tensor, right: Tensor) -> Tensor:
    """By one figure after the other, each as good as it can be without being negative."""
    curve, slope = left.T @ left, left.T @ right
    found = torch.zeros(len(slope), dtype=torch.float64)
    for _ in range(5000):
        before = found.clone()
        for i in range(len(found)):
            if curve[i, i] > 0:
                found[i] = (found[i] - (curve[i] @ found - slope[i]) / curve[i, i]).clamp(min=0.0)
        if float((found - before).abs().max()) < 1e-6:
            break
    return found


def _table(kernels: Sequence[_Kernels], worth: Sequence[float]) -> str:
    groups: dict[str, list[_Kernels]] = {"all": list(kernels)}
    for each in kernels:
        groups.setdefault(each.schedule, []).append(each)
    lines = [
        "| kernels | cases | instructions, median error | 90th | wavefronts, median error | 90th |",
        "|---|---|---|---|---|---|",
    ]
    for name, some in groups.items():
        cells: list[str] = []
        for predicted, place in ((lambda k: k.instructions(worth), 0), (lambda k: k.wavefronts, 1)):
            off = sorted(
                abs(math.log(max(predicted(k), 1.0) / max(k.counted[place], 1.0))) for k in some
            )
            cells += [
                f"{100 * (math.exp(off[int(q * (len(off) - 1))]) - 1):.0f} %" for q in (0.5, 0.9)
            ]
        lines.append(f"| {name} | {len(some)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with(times: Times, worth: Sequence[float], cases: int) -> Times:
    source = (
        f"fitted: benchmarks/predictions issued, to the instructions counted of {cases} cases,"
        f" {date.today()}, on an H200"
    )
    figures = {
        name: getattr(times.issue, name).model_copy(update={"value": value, "source": source})
        for name, value in zip(FIGURES, worth, strict=True)
    }
    return times.model_copy(update={"issue": times.issue.model_copy(update=figures)})
