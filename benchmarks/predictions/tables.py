"""Predicted against measured, as tables."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from statistics import median

from fusion_advisor.perfmodel.model import (
    Work,
    call_us,
    issued_us,
    launch_us,
    memory_us,
    programs_us,
    speedup_interval,
)
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.load import load_rulebook

from ..gpu import heading
from .fitting import Sample, samples, speedup
from .regret import TimedDecision, verdicts

GAIN = 1.0
"""Faster than eager by any amount is a gain."""


def run(arguments: argparse.Namespace) -> int:
    """Errors, verdicts and what was decided wrong, over cases that no fit has seen."""
    rules = load_rulebook()
    device = rules.device(arguments.device)
    every = samples(arguments.cases, arguments.times, device, rules)
    timed = [s for s in every if s.kernel_us]
    alone = [s for s in every if len(s.eager) == 1]
    accepted = [s for s in timed if s.case.accepted]
    lines = [
        *heading("Predicted against measured"),
        f"{len(timed)} kernels ({len(accepted)} of accepted groups) and {len(alone)} launches of"
        f" eager alone, from {len({s.module for s in every})} modules, on an {device.title}, cold"
        " L2, medians. Errors are of the larger over the smaller, less one.",
        "",
        "| figure | cases | median | 90th | 95th percentile |",
        "|---|---|---|---|---|",
        _errors(
            "time of a launch of eager alone", [_off(s.eager, s.eager_us, device) for s in alone]
        ),
        _errors("time of a group in eager", [_off(s.eager, s.eager_us, device) for s in timed]),
        _errors("time of an emitted kernel", [_off(s.fused, s.kernel_us, device) for s in timed]),
        _errors("speed-up, accepted groups", [_off_speedup(s, device) for s in accepted]),
        _errors("speed-up, all that have a plan", [_off_speedup(s, device) for s in timed]),
        "",
        _coverage(timed, device),
        "",
    ]
    lines += _decisions(timed, device)
    lines += _losses(timed, device)
    text = "\n".join(lines) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    print(text)
    return 0


def _off(works: tuple[Work, ...], us: float, device: Device) -> float:
    return math.exp(abs(math.log(call_us(works, device) / us))) - 1


def _off_speedup(sample: Sample, device: Device) -> float:
    measured = sample.eager_us / sample.kernel_us
    return math.exp(abs(math.log(speedup(sample, device) / measured))) - 1


def _errors(title: str, off: Sequence[float]) -> str:
    ranked = sorted(off)

    def at(share: float) -> str:
        return f"{100 * ranked[min(len(ranked) - 1, int(share * len(ranked)))]:.1f} %"

    figures = (at(0.5), at(0.9), at(0.95)) if ranked else ("", "", "")
    return f"| {title} | {len(ranked)} | {' | '.join(figures)} |"


def _coverage(samples: Sequence[Sample], device: Device) -> str:
    inside, widths = 0, list[float]()
    for sample in samples:
        low, high = speedup_interval(sample.eager, call_us(sample.fused, device), device)
        inside += low <= sample.eager_us / sample.kernel_us <= high
        widths.append(high / low)
    share = 100 * inside / max(len(samples), 1)
    width = f"whose ends are a factor of {median(widths):.2f} apart in the median"
    return f"Inside their interval, {width}: {inside} of {len(samples)} speed-ups ({share:.0f} %)."


def _decisions(samples: Sequence[Sample], device: Device) -> list[str]:
    """Verdicts against what was gained."""
    rows: list[str] = []
    deciders: tuple[tuple[str, Callable[[Sample], bool]], ...] = (
        ("chapter", lambda s: s.case.accepted),
        ("time model", lambda s: speedup(s, device) > GAIN),
    )
    for who, fuse in deciders:
        found = verdicts(TimedDecision(fuse(s), s.eager_us, s.kernel_us) for s in samples)
        rows.append(
            f"| {who} | {found.fused_faster} | {found.fused_slower} | {found.rejected_faster}"
            f" | {found.rejected_slower} | {100 * found.lost:.2f} % |"
        )
    return [
        "## Verdicts",
        "",
        "| verdict | fuse, faster | fuse, not faster | reject, faster | reject, not faster |"
        " time lost against hindsight |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]


def _losses(samples: Sequence[Sample], device: Device) -> list[str]:
    """Every kernel that is slower than eager although a verdict wants it, or left out although it
    is faster, with what decides its predicted time."""
    found: list[str] = []
    for s in samples:
        fuse, gain = s.case.accepted, s.kernel_us < s.eager_us
        model = speedup(s, device) > GAIN
        if fuse != gain or model != gain:
            eager, fused = call_us(s.eager, device), call_us(s.fused, device)
            found.append(
                f"| {s.case.name} | {s.case.schedule} | {'fuse' if fuse else s.case.gate}"
                f" | {'fuse' if model else 'leave'} | {s.eager_us:.1f} ({eager:.1f})"
                f" | {s.kernel_us:.1f} ({fused:.1f}) | {_reason(s, device)} |"
            )
    head = [
        "## Verdicts that are wrong",
        "",
        "| case | schedule | chapter | time model | eager µs (predicted) | kernel µs (predicted) |"
        " what its time hangs on |",
        "|---|---|---|---|---|---|---|",
    ]
    failures = [f"- {s.case.name}: {s.failure}" for s in samples if s.failure]
    return [*head, *found, *(["", *failures] if failures else [])]


def _reason(sample: Sample, device: Device) -> str:
    """The largest part of the kernel's predicted time, and what would be without the others."""
    work = max(sample.fused, key=lambda work: launch_us(work, device))
    parts = {
        f"{work.bytes / 1e6:.1f} MB": memory_us(work, device),
        f"{work.scattered:.3g} sectors": 1e6 * work.scattered / device.times.sectors.base,
        f"{work.primitives:.3g} instructions of operations": issued_us(work, device),
        f"{work.programs} programs": programs_us(work, device),
    }
    why, us = max(parts.items(), key=lambda item: item[1])
    return f"{why}: {us:.1f} µs"
