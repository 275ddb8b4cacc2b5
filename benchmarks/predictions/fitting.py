"""What was timed beside what is predicted, and the fit of `rules/predict.toml`."""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from fusion_advisor.fusion.decide import Decision, fused_of
from fusion_advisor.perfmodel.model import Work, call_us, launch_us
from fusion_advisor.perfmodel.workload import eager_works, fused_works
from fusion_advisor.rulebook.devices import Device, Times
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.quantities import Number
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import from_json

from .cases import DEVICE, Case, decided, read
from .gpu import Timed


@dataclass(frozen=True)
class Sample:
    """What was measured of a case, and what it is predicted from: `fused` is empty and its time 0
    for a case without a kernel."""

    case: Case
    decision: Decision
    eager: tuple[Work, ...]
    fused: tuple[Work, ...]
    eager_us: float
    kernel_us: float
    failure: str

    @property
    def module(self) -> str:
        return self.case.name.partition("/")[0]


def samples(cases: Path, times: Iterable[Path], device: Device, rules: Rulebook) -> list[Sample]:
    """Every case that was timed, predicted as the rules are now; a case whose plan is of another
    schedule than the kernel that was timed is left out."""
    known = timed(times)
    found: list[Sample] = []
    for case in read(cases):
        eager, kernel = known.get((case.name, "eager")), known.get((case.name, "kernel"))
        if eager is None or not eager.us:
            continue
        registers = tuple(each[0] for each in kernel.compiled) if kernel else ()
        decision = replace(decided(case, device, rules), registers=registers)
        subject, plan = decision.subject, decision.subject.plan
        if case.text and (plan is None or plan.schedule != case.schedule):
            continue
        fused = fused_works(fused_of(subject, registers), device) if case.text else ()
        eager_of = eager_works(subject.flow, subject.launches)
        us, failure = (kernel.us, kernel.failure) if kernel else (0.0, "")
        found.append(Sample(case, decision, eager_of, fused, eager.us, us, failure))
    return found


def timed(files: Iterable[Path]) -> dict[tuple[str, str], Timed]:
    """What was measured last, by case and way."""
    every = (from_json(Timed, line) for file in files for line in file.read_text().splitlines())
    return {(one.name, one.way): one for one in every}


FITTED = f"fitted: benchmarks/predictions, {date.today()}, on an H200"
TERMS = {
    "call": 0.0, "latency": 0.0, "first": 0.0, "absorbed": 0.0, "l2_speed": 1.0, "torn": 0.0,
    "halved": 0.0, "sectors": 1e6, "wave": 0.0, "overlap": 30.0, "primitive": 0.0, "step": 0.0,
    "request": 0.0, "element": 0.0, "wait": 0.0,
}  # fmt: skip
"""Terms of the model, each with the value at which it says nothing; `launch` and the share of the
bandwidth are what a time is made of at least."""
BOUNDS = {"overlap": (1.0, 12.0), "absorbed": (1e-4, 0.8), "l2_speed": (1.0, 50.0)}
"""Figures that a fit may not drive further: powers beyond which the longest part alone counts, what
an L2 may take in at once, and how much faster than the memory it may be."""
LEAST, MOST = 1e-4, 1e4
"""Of a figure that has no bounds."""
STEPS = 40
LEAST_GAIN = 1e-3
"""Of a step, in squared logarithms of one sample."""
MOST_STEP, MOST_DAMPING, DAMPED = 0.7, 1e6, 4.0
"""Of a logarithm at once; and how much more a step is damped behind one that was not good."""
NEAR = 1.001
"""How many times as large a figure is where the slope is taken."""
OUTLIER = 0.15
"""Of a logarithm: beyond it a residual counts linearly."""
PULL = 0.02
"""What a figure's distance costs from where it began, in squared logarithms of one sample: a kind
that is timed twice stays near what it was."""
KERNEL_WEIGHT = 4.0
"""How many times as much a case counts that has a kernel: those are what a plan is judged by."""

Point = tuple[tuple[Work, ...], float, float]
"""Launches of a call, the microseconds that it took, and its weight."""


def run(arguments: argparse.Namespace) -> int:
    """Fit to all cases, and write the rules."""
    torch.set_default_dtype(torch.float64)
    rules = load_rulebook()
    begun = rules.device(arguments.device)
    seen = samples(arguments.cases, arguments.times, begun, rules)
    device = fitted(with_registers(begun, seen), points(seen))
    print(f"{sum(1 for _ in figures(device.times))} figures, {len(seen)} cases")
    text = toml(with_spread(device, seen).times)
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text)
    return 0


def points(seen: Sequence[Sample]) -> list[Point]:
    """The calls that were timed, in eager and as kernels."""
    weights = [KERNEL_WEIGHT if s.kernel_us else 1.0 for s in seen]
    found = [(s.eager, s.eager_us, weight) for s, weight in zip(seen, weights, strict=True)]
    return found + [(s.fused, s.kernel_us, KERNEL_WEIGHT) for s in seen if s.kernel_us]


def figures(times: Times) -> Iterable[str]:
    """The figures that are fitted: `launch`, `kinds.row.share`."""
    yield from ("launch", *(term for term in TERMS if hasattr(times, term)))
    for kind, speed in times.kinds.items():
        for figure in ("share", "element", "wait"):
            if getattr(speed, figure) is not None:
                yield f"kinds.{kind}.{figure}"


def value(device: Device, name: str) -> float:
    """A figure, as `figures` names it."""
    if "." not in name:
        return getattr(device.times, name).value
    _, kind, figure = name.split(".")
    return getattr(device.times.kinds[kind], figure).value


def changed(device: Device, name: str, to: float) -> Device:
    """The device with another figure."""
    times = device.times

    def number(of: object, figure: str) -> Number:
        return getattr(of, figure).model_copy(update={"value": to, "source": FITTED})

    if "." not in name:
        update = {name: number(times, name)}
    else:
        _, kind, figure = name.split(".")
        speed = times.kinds[kind]
        speed = speed.model_copy(update={figure: number(speed, figure)})
        update = {"kinds": {**times.kinds, kind: speed}}
    return device.model_copy(update={"times": times.model_copy(update=update)})


def fitted(device: Device, seen: Sequence[Point], fixed: Sequence[str] = ()) -> Device:
    """All figures at once but the `fixed`, within their bounds, by Levenberg's and Marquardt's
    steps: least squares of logarithms of time, outliers weighed down."""
    calls = Calls.of(seen)
    users = {name: calls.users(name) for name in figures(device.times) if name not in fixed}
    users = {name: places for name, places in users.items() if places}
    fastest = math.floor(1e3 * device.datasheet_bandwidth / device.bandwidth) / 1e3

    def bounds(name: str) -> tuple[float, float]:
        return (LEAST, fastest) if name.endswith("share") else BOUNDS.get(name, (LEAST, MOST))

    low, high = (torch.tensor([math.log(bounds(name)[i]) for name in users]) for i in (0, 1))
    begun = torch.tensor([math.log(value(device, name)) for name in users])

    def at(values: Tensor) -> Device:
        found = device
        for name, each in zip(users, values.exp().tolist(), strict=True):
            found = changed(found, name, each)
        return found

    def lost(values: Tensor) -> float:
        return calls.misfit(at(values)) + PULL * float(((values - begun) ** 2).sum())

    values, damping = begun.clone(), 1.0
    here = lost(values)
    for _ in range(STEPS):
        slope, curve = calls.slope(at(values), users)
        slope, curve = slope + PULL * (values - begun), curve + PULL * torch.eye(len(users))
        free = ((values > low) | (slope < 0)) & ((values < high) | (slope > 0))
        before = here
        while here == before and damping < MOST_DAMPING:
            step = torch.zeros_like(values)
            step[free] = _step(slope[free], curve[free][:, free], damping)
            other = torch.minimum(torch.maximum(values + step, low), high)
            if (there := lost(other)) < here:
                values, here, damping = other, there, damping / DAMPED
            else:
                damping *= DAMPED
        if before - here < LEAST_GAIN:
            break
    return at(values)


def _step(slope: Tensor, curve: Tensor, damping: float) -> Tensor:
    """From a slope down, the shorter the more it is damped."""
    damped = damping * (curve.diagonal() + LEAST_GAIN)
    return torch.linalg.solve(curve + torch.diag(damped), -slope).clamp(-MOST_STEP, MOST_STEP)


@dataclass(frozen=True)
class Calls:
    """Calls that were timed: how often each makes each of all distinct launches, a matrix; what was
    measured of them, and their weights."""

    works: Sequence[Work]
    counts: Tensor
    measured: Tensor
    weights: Tensor

    @classmethod
    def of(cls, seen: Sequence[Point]) -> Calls:
        places = {w: i for i, w in enumerate(dict.fromkeys(w for each, *_ in seen for w in each))}
        counts = torch.zeros(len(seen), len(places))
        for row, (each, *_) in enumerate(seen):
            for work in each:
                counts[row, places[work]] += 1
        measured, weights = (torch.tensor([point[i] for point in seen]) for i in (1, 2))
        return cls(list(places), counts, measured, weights)

    def users(self, name: str) -> list[int]:
        """The launches whose time hangs on a figure."""
        kind = name.split(".")[1] if "." in name else ""
        return [i for i, work in enumerate(self.works) if not kind or work.kind == kind]

    def us(self, device: Device) -> Tensor:
        each = torch.tensor([launch_us(work, device) for work in self.works])
        return device.times.call.value + self.counts @ each

    def misfit(self, device: Device) -> float:
        """Squares of logarithms; beyond an outlier's they grow linearly."""
        off = (self.us(device) / self.measured).log().abs()
        off = torch.where(off < OUTLIER, off * off, OUTLIER * (2 * off - OUTLIER))
        return float((self.weights * off).sum())

    def slope(self, device: Device, users: Mapping[str, Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Half the misfit's slope along the figures' logarithms, and its curve, nearly."""
        now = [launch_us(work, device) for work in self.works]
        us = device.times.call.value + self.counts @ torch.tensor(now)
        columns: list[Tensor] = []
        for name, places in users.items():
            other = changed(device, name, value(device, name) * NEAR)
            more = torch.tensor([launch_us(self.works[i], other) - now[i] for i in places])
            later = other.times.call.value - device.times.call.value
            columns.append((self.counts[:, places] @ more + later) / us / math.log(NEAR))
        slopes, off = torch.stack(columns, 1), (us / self.measured).log()
        weighed = slopes.T * (self.weights * (OUTLIER / off.abs()).clamp(max=1.0))
        return weighed @ off, weighed @ slopes


def speedup(sample: Sample, device: Device) -> float:
    """Predicted speed-up of a case that has a kernel."""
    return call_us(sample.eager, device) / call_us(sample.fused, device)


def with_registers(device: Device, seen: Sequence[Sample]) -> Device:
    """The device with the estimate of registers that is nearest to those of compiled kernels, by
    least squares of relative errors."""
    pairs = [
        (step.registers, compiled)
        for s in seen
        if (plan := s.decision.subject.plan) and len(plan.steps) == len(s.decision.registers)
        for step, compiled in zip(plan.steps, s.decision.registers, strict=True)
    ]
    rows = torch.tensor([[1 / compiled, estimate / compiled] for estimate, compiled in pairs])
    least, alive = torch.linalg.lstsq(rows, torch.ones(len(pairs), 1)).solution[:, 0].tolist()
    by = device.times.registers
    update = {
        name: getattr(by, name).model_copy(update={"value": each, "source": FITTED})
        for name, each in (("least", round(least)), ("alive", alive))
    }
    times = device.times.model_copy(update={"registers": by.model_copy(update=update)})
    return device.model_copy(update={"times": times})


def with_spread(device: Device, seen: Sequence[Sample]) -> Device:
    """The device with what holds 90 % of the speed-ups of these cases."""
    for name, known in (("spread", True), ("spread_other", False)):
        off = sorted(
            abs(math.log(speedup(s, device) * s.kernel_us / s.eager_us))
            for s in seen
            if s.kernel_us and known == all(w.kind in device.times.steady for w in s.eager)
        )
        device = changed(device, name, math.exp(off[int(0.9 * len(off))]) - 1)
    return device


def ablate(arguments: argparse.Namespace) -> int:
    """Fit without one term at a time, and say what that costs on other cases."""
    torch.set_default_dtype(torch.float64)
    rules = load_rulebook()
    device = rules.device(DEVICE)
    seen, others = (
        samples(cases, [times], device, rules)
        for cases, times in (arguments.files[:2], arguments.files[2:])
    )
    calls = points(seen)
    for term in (None, *TERMS):
        start = device
        fixed = [name for name in figures(device.times) if name.rpartition(".")[2] == term]
        for name in fixed:
            start = changed(start, name, TERMS[name.rpartition(".")[2]])
        found = fitted(start, calls, fixed)
        kernels = [(s.fused, s.kernel_us) for s in others if s.kernel_us]
        groups = [(s.eager, s.eager_us) for s in others if s.kernel_us]
        alone = [(s.eager, s.eager_us) for s in others if len(s.eager) == 1]
        shown = [f"{name} {_off(some, found)}" for name, some in
                 (("kernels", kernels), ("eager", groups), ("launches", alone))]  # fmt: skip
        print(f"{f'without {term}' if term else 'whole':20} {'; '.join(shown)}", flush=True)
    return 0


def _off(some: Sequence[tuple[tuple[Work, ...], float]], device: Device) -> str:
    """Errors in the median and at the 90th percentile."""
    off = sorted(abs(math.log(call_us(works, device) / us)) for works, us in some)
    ranks = (off[int(share * len(off))] for share in (0.5, 0.9))
    return " and ".join(f"{100 * (math.exp(each) - 1):.1f} %" for each in ranks)


def toml(times: Times) -> str:
    """The figures as the rules hold them."""

    def line(name: str, number: Number) -> str:
        given = f'value = {number.value:.4g}, unit = "{number.unit}"'
        return f'{name} = {{ {given}, source = "{number.source}" }}'

    lines = [
        "# How long launches take (`perfmodel`). benchmarks/predictions fit writes this file.",
        "[times]",
        f'fitted_on = "{times.fitted_on}"',
        f"steady = {list(times.steady)}".replace("'", '"'),
    ]
    tables: dict[str, Iterable[tuple[str, object]]] = {"": times}
    tables |= {name: getattr(times, name) for name in ("registers", "eager_reduction")}
    tables |= {f"kinds.{name}": speed for name, speed in times.kinds.items()}
    for table, of in tables.items():
        lines += ["", f"[times.{table}]"] if table else []
        lines += [line(name, each) for name, each in of if isinstance(each, Number)]
    return "\n".join(lines) + "\n"
