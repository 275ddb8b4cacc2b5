"""Fit the figures of the time model to what was measured."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fusion_advisor.fusion.decide import Decision, fused_of
from fusion_advisor.perfmodel.model import Work, call_us, launch_us
from fusion_advisor.perfmodel.workload import eager_works, fused_works
from fusion_advisor.rulebook.devices import Device, Speed, Times
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.quantities import Number
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_json

from .cases import DEVICE, Case, decided, read
from .gpu import Timed


@dataclass(frozen=True)
class Sample:
    """What was measured of a case, and what it is predicted from: `fused` is empty for a case
    without a kernel, times are 0 where there is none."""

    case: Case
    eager: tuple[Work, ...]
    fused: tuple[Work, ...]
    eager_us: float
    kernel_us: float
    compiled_us: float
    beside_us: float
    """The kernel's, when torch.compile's was measured."""
    failure: str
    decision: Decision


def samples(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> list[Sample]:
    """Every case that was timed, predicted as the rules are now; a case whose plan is of another
    schedule than the kernel that was timed is left out."""
    known = timed(arguments.times)
    found_samples: list[Sample] = []
    for case in read(arguments.cases):
        eager = known.get((case.name, "eager"))
        if eager is None or not eager.us:
            continue
        kernel, compiled, beside = (
            known.get((case.name, way)) for way in ("kernel", "compiled", "beside")
        )
        registers = tuple(each[0] for each in kernel.compiled) if kernel else ()
        decision = replace(decided(case, device, rules), registers=registers)
        subject, plan = decision.subject, decision.subject.plan
        if case.text and (plan is None or plan.schedule != case.schedule):
            continue
        found_samples.append(
            Sample(
                case,
                eager_works(subject.flow, subject.launches),
                fused_works(fused_of(subject, registers), device) if case.text else (),
                eager.us,
                kernel.us if kernel else 0.0,
                compiled.us if compiled else 0.0,
                beside.us if beside else 0.0,
                kernel.failure if kernel else "",
                decision,
            )
        )
    return found_samples


def timed(files: Iterable[Path]) -> dict[tuple[str, str], Timed]:
    """What was measured last, by case and way: of several rounds the median."""
    found: dict[tuple[str, str], Timed] = {}
    for file in files:
        rounds: dict[tuple[str, str], list[Timed]] = {}
        for line in file.read_text().splitlines():
            one = from_json(Timed, line)
            rounds.setdefault((one.name, one.way), []).append(one)
        for key, several in rounds.items():
            found[key] = replace(several[-1], us=median(one.us for one in several))
    return found


FITTED = f"fitted: benchmarks/predictions, {date.today()}, on an H200"
SHARED = (
    "call", "eager_launch", "last", "blocks", "sectors", "first", "first_bytes", "absorbed",
    "l2_speed", "found", "wave", "wavefronts",
)  # fmt: skip
"""Figures of all kinds that eager's kernels hang on, too."""
GLOBAL = (
    *SHARED, "kernel_launch", "chained", "torn", "fetched",
)  # fmt: skip
"""Those and our kernels'."""
CHOSEN = ("eager_warps", "eager_row", "short")
ALIKE = ("share", "ramp", "latency", "step", "arithmetic", "least", "overlap")
"""Figures of a kind, of whomever."""
FIGURES = {
    "eager": (*ALIKE, "near", "unaligned"),
    "kernel": (*ALIKE, "warp_bandwidth"),
}
COUNTED = ("warp", "round", "tap", "element")
"""Figures of eager's kinds that `issued` finds."""
KEPT = (0.6,)
"""Shares of the L2 to try."""
MOST_ABSORBED = 0.8
"""Of what is written, that the L2 may take in at once."""
MOST_FOUND = 0.8
"""Of a round of loads, that the L2 may spare."""
MOST_LAUNCHES = 6
"""That one operator of eager's may be worth at least."""
STEPS = 60
LEAST_GAIN = 1e-3
"""Of a step, in squared logarithms of one sample: below it figures that hardly matter would go on
without end."""
MOST_STEP = 0.7
"""Of a logarithm at once."""
MOST_DAMPING = 1e6
DAMPED = 4.0
"""How many times less after a step that was good, or more after one that was not."""
NEAR = 1.001
"""How many times as large a figure is where the slope is taken."""
LEAST, MOST = 1e-4, 1e4
"""Of a figure that has no bounds."""
MOST_OVERLAP = 12.0
"""The power that adds parts up: beyond it the longest alone counts."""
LEAST_SAMPLES = 3
"""Of a kind or an op, to have figures of its own."""
OUTLIER = 0.15
"""Of a logarithm: beyond it a residual counts linearly."""
PULL = {"eager": 0.1, "kernel": 6.0}
"""What a figure's distance costs from the mean of the other kinds', in squared logarithms of one
sample: chosen, as is the weight, by leaving out problems in turn. Eager's kinds are kernels of as
many hands; ours are spelled alike."""
NETWORK_WEIGHT = 2.0
"""Of a case of the goal set's half, or of another network."""
SERIES_WEIGHT = 0.25
"""Of a case of the series, which has many at sizes that models have not."""
KERNEL_WEIGHT = 3.0
"""How many times as much a case counts that has a kernel: those are what a plan is judged by."""

Point = tuple[tuple[Work, ...], float, float]
"""What a call does, the microseconds that it took, and its weight."""


def run(arguments: argparse.Namespace) -> int:
    """Least squares on logarithms of time; what is reported is left out."""
    rules = load_rulebook()
    fitted: list[tuple[float, Device]] = []
    for share in KEPT:
        device = _with(rules.device(DEVICE), "l2_kept", share)
        seen = [s for s in samples(arguments, device, rules) if not s.case.reported]
        points: list[Point] = [(s.eager, s.eager_us, _weight(s)) for s in seen]
        points += [(s.fused, s.kernel_us, _weight(s)) for s in seen if s.kernel_us]
        device = _own_kinds(device, points)
        loss, found = _fitted(device, points, ours=arguments.ours)
        device = _untimed_as_before(found, device, points)
        print(f"l2_kept {share}: {loss / len(points):.5f} a sample, of {len(points)}", flush=True)
        fitted.append((loss, _with_spreads(device, seen)))
    device = min(fitted, key=lambda pair: pair[0])[1]
    text = toml(device.times)
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text)
    return 0


def _weight(sample: Sample) -> float:
    weight = SERIES_WEIGHT if sample.case.of_series else NETWORK_WEIGHT
    return weight * (KERNEL_WEIGHT if sample.case.text else 1.0)


def _with(device: Device, name: str, value: float) -> Device:
    """The device with another figure; `name` as in the rules: `call`, `kernel.row.share`."""
    times = device.times
    if "." not in name:
        number = getattr(times, name).model_copy(update={"value": value, "source": FITTED})
        return device.model_copy(update={"times": times.model_copy(update={name: number})})
    who, kind, figure = name.split(".")
    speeds: dict[str, Speed] = dict(getattr(times, who))
    number = getattr(speeds[kind], figure).model_copy(update={"value": value, "source": FITTED})
    speeds[kind] = speeds[kind].model_copy(update={figure: number})
    return device.model_copy(update={"times": times.model_copy(update={who: speeds})})


def _value(device: Device, name: str) -> float:
    found: Any = device.times
    for part in name.split("."):
        found = found[part] if isinstance(found, Mapping) else getattr(found, part)
    return found.value


def _own_kinds(device: Device, points: Sequence[Point]) -> Device:
    """Figures for every kind of kernel, and every op of a kind of few, that was timed often: at
    first those that it had before."""
    counts: dict[tuple[str, str], int] = {}
    before: dict[tuple[str, str], Speed] = {}
    for works, _, _ in points:
        found = {key: work for work in works for key in names(work)}
        for (who, name), work in found.items():
            counts[who, name] = counts.get((who, name), 0) + 1
            before[who, name] = device.times.speed(work.kind, work.op if name == work.op else "")
    speeds = {"eager": dict(device.times.eager), "kernel": dict(device.times.kernel)}
    for (who, name), count in counts.items():
        if count >= LEAST_SAMPLES:
            speeds[who].setdefault(name, before[who, name])
    return device.model_copy(update={"times": device.times.model_copy(update=speeds)})


def _untimed_as_before(device: Device, before: Device, points: Sequence[Point]) -> Device:
    """Kinds of eager's that no call has take at least as long as they did before the fit."""
    timed = {name for works, _, _ in points for work in works for _, name in names(work)}
    longer = before.times.eager_launch.value / device.times.eager_launch.value
    for name in device.times.eager.keys() - timed:
        figure = f"eager.{name}.least"
        device = _with(device, figure, max(1.0, longer * _value(device, figure)))
    return device


def names(work: Work) -> list[tuple[str, str]]:
    who, _, kind = work.kind.partition(".")
    return [(who, kind), *([(who, work.op)] if work.op else [])]


def _fitted(device: Device, points: Sequence[Point], *, ours: bool = False) -> tuple[float, Device]:
    """All figures at once, within their bounds, by Levenberg's and Marquardt's steps: least squares
    of logarithms of time, outliers weighed down, and of the figures' distances from their kinds'
    mean. Of our kernels alone on request."""
    calls = _Calls.of(points)
    users = {
        name: places
        for name, places in _users(device, calls.works).items()
        if not ours or (name not in SHARED and not name.startswith("eager."))
    }
    pull = _pull(list(users))
    low, high = (_numbers(math.log(_bounds(device, n)[i]) for n in users) for i in (0, 1))

    def lost(candidate: Device) -> float:
        values = _logs(candidate, users)
        return calls.misfit(candidate) + float(values @ pull @ values)

    here, damping = lost(device), 1.0
    for _ in range(STEPS):
        values, before = _logs(device, users), here
        slope, curve = calls.slope(device, users)
        slope, curve = slope + pull @ values, curve + pull
        free = ((values > low) | (slope < 0)) & ((values < high) | (slope > 0))
        while here == before and damping < MOST_DAMPING:
            step = torch.zeros_like(values)
            step[free] = _step(slope[free], curve[free][:, free], damping)
            other = _at(device, users, (values + step).clamp(low, high))
            if (there := lost(other)) < here:
                device, here, damping = other, there, damping / DAMPED
            else:
                damping *= DAMPED
        if before - here < LEAST_GAIN:
            break
    return here, device


def _step(slope: Tensor, curve: Tensor, damping: float) -> Tensor:
    """From a slope down, the shorter the more it is damped."""
    damped = damping * (curve.diagonal() + LEAST_GAIN)
    return torch.linalg.solve(curve + torch.diag(damped), -slope).clamp(-MOST_STEP, MOST_STEP)


def _at(device: Device, names: Iterable[str], values: Tensor) -> Device:
    for name, value in zip(names, values.exp().tolist(), strict=True):
        device = _with(device, name, value)
    return device


@dataclass(frozen=True)
class _Calls:
    """Calls that were timed: how often each makes each of all distinct launches, a matrix; what was
    measured of them, and their weights."""

    works: Sequence[Work]
    counts: Tensor
    measured: Tensor
    weights: Tensor

    @classmethod
    def of(cls, points: Sequence[Point]) -> _Calls:
        places = {
            w: i for i, w in enumerate(dict.fromkeys(w for each, _, _ in points for w in each))
        }
        counts = torch.zeros(len(points), len(places), dtype=torch.float64)
        for row, (each, _, _) in enumerate(points):
            for work in each:
                counts[row, places[work]] += 1
        measured, weights = (_numbers(point[i] for point in points) for i in (1, 2))
        return cls(list(places), counts, measured, weights)

    def us(self, device: Device) -> Tensor:
        return device.times.call.value + self.counts @ _numbers(
            launch_us(work, device) for work in self.works
        )

    def misfit(self, device: Device) -> float:
        """Squares of logarithms; beyond an outlier's they grow linearly."""
        off = (self.us(device) / self.measured).log().abs()
        off = torch.where(off < OUTLIER, off * off, OUTLIER * (2 * off - OUTLIER))
        return float((self.weights * off).sum())

    def slope(self, device: Device, users: Mapping[str, Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Half the misfit's slope along the figures' logarithms, and its curve, nearly."""
        now = [launch_us(work, device) for work in self.works]
        us = device.times.call.value + self.counts @ _numbers(now)
        columns: list[Tensor] = []
        for name, places in users.items():
            other = _with(device, name, _value(device, name) * NEAR)
            more = _numbers(launch_us(self.works[i], other) - now[i] for i in places)
            later = other.times.call.value - device.times.call.value
            columns.append((self.counts[:, places] @ more + later) / us / math.log(NEAR))
        slopes, off = torch.stack(columns, 1), (us / self.measured).log()
        weighed = slopes.T * (self.weights * (OUTLIER / off.abs()).clamp(max=1.0))
        return weighed @ off, weighed @ slopes


def _numbers(found: Iterable[float]) -> Tensor:
    return torch.tensor(list(found), dtype=torch.float64)


def _logs(device: Device, names: Iterable[str]) -> Tensor:
    return _numbers(math.log(_value(device, name)) for name in names)


def _users(device: Device, works: Sequence[Work]) -> dict[str, list[int]]:
    """The figures, and the launches whose time hangs on each."""
    users: dict[str, list[int]] = {name: list(range(len(works))) for name in GLOBAL}
    for place, work in enumerate(works):
        who, name = work.kind.partition(".")[0], device.times.named(work.kind, work.op)
        if name == "other":
            continue  # of whatever nobody timed: a few that were would say nothing of it
        for figure in FIGURES[who]:
            if _matters(figure, work):
                users.setdefault(f"{who}.{name}.{figure}", []).append(place)
    return users


def _pull(names: Sequence[str]) -> Tensor:
    """What the figures' distances cost from the mean of the other kinds', as a quadratic form."""
    alike: dict[tuple[str, str], list[int]] = {}
    for place, name in enumerate(names):
        if name not in GLOBAL:
            who, _, figure = name.split(".")
            alike.setdefault((who, figure), []).append(place)
    pull = torch.zeros(len(names), len(names), dtype=torch.float64)
    for (who, _), places in alike.items():
        count, each = len(places), torch.tensor(places)
        pull[each[:, None], each] = PULL[who] * (torch.eye(count, dtype=torch.float64) - 1 / count)
    return pull


def _matters(figure: str, work: Work) -> bool:
    """Does the time of such work hang on that figure?"""
    eager = work.kind.startswith("eager")
    if figure == "least":  # a workspace is begun with, too
        return work.kind == "kernel.cooperative" or (eager and work.kind != "eager.stream")
    if figure == "near":
        return work.near > 0
    if figure == "step":
        return work.depth > 1 and bool(work.programs)
    if figure == "unaligned":
        return work.unaligned
    return bool(work.programs) or figure not in ("latency", "warp_bandwidth")


def _bounds(device: Device, name: str) -> tuple[float, float]:
    """No kernel beats the datasheet's bandwidth or the peaks, or is launched less than once."""
    if name.endswith("least"):
        return 1.0, MOST_LAUNCHES
    if name.endswith("overlap"):
        return 1.0, MOST_OVERLAP
    most = {
        "unaligned": 1.0,
        "found": MOST_FOUND,
        "absorbed": MOST_ABSORBED,
        "share": math.floor(1e3 * device.datasheet_bandwidth / device.bandwidth) / 1e3,
        "arithmetic": 1.0,
    }
    return LEAST, most.get(name.rpartition(".")[2], MOST)


def _with_spreads(device: Device, samples: Sequence[Sample]) -> Device:
    """What holds 95 % of the speed-ups that the fit saw, in the short kernels and in the rest: 90 %
    of those that it has not seen, which are a little further off."""
    for name, short in (("spread_short", True), ("spread_long", False)):
        off = sorted(
            abs(math.log(speedup(s, device) * s.kernel_us / s.eager_us))
            for s in samples
            if s.kernel_us and (call_us(s.fused, device) < device.times.short.value) == short
        )
        if off:
            place = min(len(off) - 1, math.ceil(0.95 * len(off)))
            device = _with(device, name, math.exp(off[place]) - 1)
    return device


def speedup(sample: Sample, device: Device) -> float:
    return call_us(sample.eager, device) / call_us(sample.fused, device)


def toml(times: Times) -> str:
    """The figures as the rules hold them."""

    def line(name: str, number: Number) -> str:
        value = f'value = {number.value:.4g}, unit = "{number.unit}"'
        return f'{name} = {{ {value}, source = "{number.source}" }}'

    lines = [
        "# How long launches take (`perfmodel`). benchmarks/predictions fit writes this file.",
        "[times]",
        f'fitted_on = "{times.fitted_on}"',
        *(line(name, getattr(times, name)) for name in (*GLOBAL, "l2_kept")),
        *(line(name, getattr(times, name)) for name in CHOSEN),
        *(line(name, getattr(times, name)) for name in ("spread_short", "spread_long")),
    ]
    for table in (
        "registers",
        "issue",
        "eager_reduction",
        "eager_pointwise",
        "eager_blocks",
        "eager_short",
        "eager_held",
        "eager_registers",
        "eager_passes",
    ):
        lines += ["", f"[times.{table}]"]
        lines += [
            line(name, number) for name, number in sorted(dict(getattr(times, table)).items())
        ]
    for who in ("eager", "kernel"):
        for name, speed in sorted(getattr(times, who).items()):
            lines += ["", f"[times.{who}.{name}]"]
            numbers = {figure: getattr(speed, figure, None) for figure in (*FIGURES[who], *COUNTED)}
            lines += [line(figure, number) for figure, number in numbers.items() if number]
    return "\n".join(lines) + "\n"
