"""What the hardware counted of cases, and what emitted kernels issue by it."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from fusion_advisor.perfmodel.instruction_count import Program, Tally, tally, wavefronts
from fusion_advisor.perfmodel.model import Work, walked
from fusion_advisor.perfmodel.workload import eager_works
from fusion_advisor.region.instruction_mix import precise
from fusion_advisor.rulebook.devices import Allocated, Device, Times
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.quantities import Number
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules.base import Plan

from ..counters import case as case_of
from ..counters import number, rows
from .cases import DEVICE, decided, read
from .fitting import COUNTED, names, timed, toml

INSTRUCTIONS = "smsp__inst_executed.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts.sum"
FIGURES = tuple(field.name for field in fields(Tally))
OUTLIER = 0.2
"""Of a logarithm: beyond it a kernel counts less."""
ROUNDS = 30


def counted(file: Path, metrics: Sequence[str]) -> dict[str, list[float]]:
    """Sums of some metrics over a case's kernels, by case, as ncu's raw page has them."""
    found: dict[str, list[float]] = {}
    for row in rows(file):
        before = found.setdefault(case_of(row), [0.0] * len(metrics))
        numbers = (number(row, metric) for metric in metrics)
        found[case_of(row)] = [a + b for a, b in zip(before, numbers, strict=True)]
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
    worth = _worth(*zip(*((each.done, 0.0, each.counted[0]) for each in kernels), strict=True))
    print(_table(kernels, worth))
    times = _with(device.times, worth, len(kernels))
    if arguments.times:
        times = times.model_copy(update={"registers": _registers(arguments, device, rules)})
    if arguments.alone:
        times, table = _of_eager(times, list(_launches(arguments, device, rules)), device)
        print(table)
    if arguments.out:
        arguments.out.write_text(toml(times))
    return 0


def _kernels(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> Iterable[_Kernels]:
    found = counted(arguments.counts, (INSTRUCTIONS, WAVEFRONTS))
    for name, plan in _plans(arguments.cases, found, device, rules):
        yield _of_plan(plan, device, found[name])


def _plans(
    file: Path, wanted: Container[str], device: Device, rules: Rulebook
) -> Iterable[tuple[str, Plan]]:
    """Of the cases with a kernel that the fit may see, where the plan still has its schedule."""
    for case in read(file):
        if case.text and not case.reported and case.name in wanted:
            plan = decided(case, device, rules).subject.plan
            if plan is not None and plan.schedule == case.schedule:
                yield case.name, plan


def _of_plan(plan: Plan, device: Device, numbers: Sequence[float]) -> _Kernels:
    done, served = [0.0] * len(FIGURES), 0.0
    for step in plan.steps:
        program = Program(step, device.warp_size)
        each = tally(program, device, precise=precise(plan.region))
        done = [a + getattr(each, name) for a, name in zip(done, FIGURES, strict=True)]
        served += wavefronts(program)
    return _Kernels(plan.busiest.schedule, done, served, numbers)


def _worth(
    done: Sequence[Sequence[float]], given: Sequence[float], counts: Sequence[float]
) -> list[float]:
    """What each thing that is `done` is worth beside what is `given`: least squares of the share of
    the counts that is missing, none less than nothing, outliers weighed down."""
    counted = torch.tensor(counts, dtype=torch.float64)
    shares = torch.tensor(done, dtype=torch.float64) / counted[:, None]
    known = torch.tensor(given, dtype=torch.float64) / counted
    weights = torch.ones_like(counted)
    worth = torch.ones(shares.shape[1], dtype=torch.float64)
    for _ in range(ROUNDS):
        worth = _least_squares(shares * weights[:, None], (1.0 - known) * weights)
        off = (shares @ worth + known).clamp(min=1e-9).log()
        # A count that is missed by so much counts as its logarithm does, not as its share.
        weights = ((OUTLIER / off.abs()).clamp(max=1.0) / off.exp().clamp(min=1.0)).sqrt()
    return worth.tolist()


def _least_squares(left: Tensor, right: Tensor) -> Tensor:
    """No figure is negative: one after the other, what would be the most so is nothing."""
    found = torch.zeros(left.shape[1], dtype=torch.float64)
    free = left.abs().sum(0) > 0
    while free.any():
        some = torch.linalg.lstsq(left[:, free], right[:, None], driver="gelsd").solution[:, 0]
        if bool((some >= 0).all()):
            found[free] = some
            break
        free[free.nonzero()[int(some.argmin())]] = False
    return found


def _registers(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> Allocated:
    """What threads have registers for, of kernels that were timed."""
    known = {
        name: kernel.compiled
        for (name, way), kernel in timed(arguments.times).items()
        if way == "kernel" and kernel.compiled
    }
    done: list[tuple[float, ...]] = []
    counts: list[float] = []
    for name, plan in _plans(arguments.cases, known, device, rules):
        if len(known[name]) != len(plan.steps):
            continue
        for step, (count, spills) in zip(plan.steps, known[name], strict=True):
            if not spills:
                done.append((step.registers, 1, bool(step.serial), len(step.stores)))
                counts.append(count)
    alive, least, serial, store = _worth(done, [0.0] * len(done), counts)
    source = (
        f"fitted: benchmarks/predictions issued, to the registers of {len(done)} kernels as the"
        f" driver counts them, {date.today()}"
    )
    return Allocated(
        alive=Number(value=round(alive, 2), unit="share", source=source),
        least=Number(value=round(least), unit="registers", source=source),
        serial=Number(value=round(serial), unit="registers", source=source),
        store=Number(value=round(store), unit="registers", source=source),
    )


@dataclass(frozen=True)
class _Launch:
    """A launch of eager's alone, and the instructions that were counted of it."""

    work: Work
    counted: float


def _launches(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> Iterable[_Launch]:
    found = counted(arguments.alone, (INSTRUCTIONS,))
    for case in read(arguments.cases):
        if case.launches == 1 and not case.reported and case.name in found:
            subject = decided(case, device, rules).subject
            (work,) = eager_works(subject.flow, subject.launches)
            yield _Launch(work, found[case.name][0])


def _of_eager(times: Times, launches: Sequence[_Launch], device: Device) -> tuple[Times, str]:
    """Times with what was counted of each kind of eager's, and how far that is off."""
    kinds: dict[str, list[_Launch]] = {}
    for launch in launches:
        for _, name in names(launch.work):
            kinds.setdefault(name, []).append(launch)
    speeds = dict(times.eager)
    lines = [
        "| eager's kernels | launches | instructions, median error | 90th |",
        "|---|---|---|---|",
    ]
    for name, some in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        if name not in speeds or name == "other":
            continue
        done = [tuple(walked(each.work, device).values()) for each in some]
        given = [float(each.work.instructions) for each in some]
        worth = _worth(done, given, [each.counted for each in some])
        source = f"counted: benchmarks/predictions issued, {len(some)} launches, {date.today()}"
        speeds[name] = speeds[name].model_copy(
            update={
                figure: Number(value=value, unit="instructions", source=source) if value else None
                for figure, value in zip(COUNTED, worth, strict=True)
            }
        )
        sums = [sum(a * b for a, b in zip(row, worth, strict=True)) for row in done]
        off = [
            abs(math.log((total + known) / each.counted))
            for total, known, each in zip(sums, given, some, strict=True)
        ]
        lines.append(f"| {name} | {len(some)} | {_percent(off, 0.5)} | {_percent(off, 0.9)} |")
    return times.model_copy(update={"eager": speeds}), "\n".join(lines)


def _percent(off: Sequence[float], share: float) -> str:
    """What a share of some logarithms is below."""
    return f"{100 * (math.exp(sorted(off)[int(share * (len(off) - 1))]) - 1):.0f} %"


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
            off = [abs(math.log(max(predicted(k), 1.0) / max(k.counted[place], 1.0))) for k in some]
            cells += [_percent(off, share) for share in (0.5, 0.9)]
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
