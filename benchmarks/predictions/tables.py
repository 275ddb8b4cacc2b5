"""Predicted against measured, as tables."""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence

from fusion_advisor.fusion.decide import fused_of
from fusion_advisor.perfmodel.model import (
    Work,
    call_us,
    issued_us,
    launch_us,
    memory_us,
    speedup_interval,
)
from fusion_advisor.perfmodel.workload import eager_works, fused_works
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Rulebook

from .cases import DEVICE, decided, read
from .counts import counted
from .fitting import Sample, samples, speedup
from .regret import TimedDecision, verdicts

SLOWER = 1.02
"""Than torch.compile by more than measurements differ."""
GAIN = 1.0
"""Faster than eager by any amount is a gain."""


def run(arguments: argparse.Namespace) -> int:
    """Errors over the half of the goal set that the fit has not seen, verdicts over all of it."""
    rules = load_rulebook()
    device = rules.device(DEVICE)
    goal = [s for s in samples(arguments, device, rules) if s.case.goal]
    every = [s for s in goal if s.kernel_us]
    timed = [s for s in every if s.case.reported]
    alone = [s for s in goal if s.case.launches == 1 and s.case.reported]
    accepted = [s for s in timed if s.case.accepted]
    lines = [
        "# Predicted against measured",
        "",
        f"On an {device.title}, torch 2.11, Triton 3.6, cold L2, medians; the half of the goal set"
        " of which the fit has seen nothing:",
        f"{len(timed)} kernels ({len(accepted)} of accepted groups) and {len(alone)} launches of"
        f" eager alone, from {len({s.case.problem for s in goal if s.case.reported})} problems."
        " Errors are of the larger over the smaller, less one.",
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
    lines += _decisions(every, device)
    lines += _losses(every, device)
    lines += _against_compile([s for s in every if s.case.accepted])
    if arguments.counts:
        lines += _traffic(arguments, device, rules)
    text = "\n".join(lines) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    print(text)
    return 0


def _traffic(arguments: argparse.Namespace, device: Device, rules: Rulebook) -> list[str]:
    """Predicted against counted HBM bytes. What is written last may still lie in the L2 when a
    kernel ends, so that counts are short by up to its size: an error is what that leaves open."""
    ways = [f"dram__bytes_{way}.sum" for way in ("read", "write")]
    counts = counted(arguments.counts, ways)
    rows: list[tuple[str, float, float, str]] = []
    for case in read(arguments.cases):
        if case.name not in counts:
            continue
        subject = decided(case, device, rules).subject
        works = (
            fused_works(fused_of(subject), device)
            if case.text
            else eager_works(subject.flow, subject.launches)
        )
        reads, writes = sum(w.bytes_read for w in works), sum(w.bytes_written for w in works)
        hbm_read, hbm_written = counts[case.name]
        most = hbm_read + hbm_written + min(device.memory.l2.base, writes)
        total = reads + writes
        off = max(0.0, hbm_read + hbm_written - total, total - most) / total
        what = case.schedule or subject.flow.nodes[subject.launches[0]].op
        rows.append((case.name, abs(hbm_read - reads) / total, off, what))
    if not rows:
        return []
    return [
        "",
        "## HBM bytes, counted by ncu at 8 times the L2 and more",
        "",
        "Every op class alone and emitted kernels; errors are shares of the predicted bytes.",
        "",
        "| figure | cases | median | 90th | 95th percentile |",
        "|---|---|---|---|---|",
        _errors("bytes read", [read for _, read, _, _ in rows]),
        _errors("bytes read and written", [total for _, _, total, _ in rows]),
        "",
        *(
            f"- {name} ({what}): off by {100 * total:.1f} %"
            for name, _, total, what in rows
            if total > FAR_BYTES
        ),
    ]


FAR_BYTES = 0.05
"""Of the predicted bytes: listed by name."""


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
    inside = 0
    for sample in samples:
        unfused, fused = call_us(sample.eager, device), call_us(sample.fused, device)
        low, high = speedup_interval(unfused, fused, device)
        inside += low <= sample.eager_us / sample.kernel_us <= high
    share = 100 * inside / max(len(samples), 1)
    return f"Inside their interval: {inside} of {len(samples)} speed-ups ({share:.0f} %)."


def _decisions(samples: Sequence[Sample], device: Device) -> list[str]:
    """Verdicts against what was gained, weighted by how often each kernel is there."""
    rows: list[str] = []
    deciders: tuple[tuple[str, Callable[[Sample], bool]], ...] = (
        ("chapter", lambda s: s.case.accepted),
        ("time model", lambda s: speedup(s, device) > GAIN),
    )
    for who, fuse in deciders:
        found = verdicts(
            TimedDecision(fuse(s), s.eager_us, s.kernel_us, s.case.weight) for s in samples
        )
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


def _against_compile(accepted: Sequence[Sample]) -> list[str]:
    """The emitted kernels beside what torch.compile makes of the same launches."""
    both = [s for s in accepted if s.compiled_us and s.beside_us]
    if not both:
        return []
    ratios = sorted(((s.compiled_us / s.beside_us, s) for s in both), key=lambda pair: pair[0])
    mean = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
    return [
        "",
        "## Beside torch.compile (default mode, static sizes), accepted groups",
        "",
        f"{len(both)} groups: the emitted kernels take 1/{mean:.2f} of its time in the geometric"
        f" mean; slower by more than {100 * (SLOWER - 1):.0f} %:",
        "",
        "| case | schedule | kernel µs | torch.compile µs |",
        "|---|---|---|---|",
        *(
            f"| {s.case.name} | {s.case.schedule} | {s.beside_us:.1f} | {s.compiled_us:.1f} |"
            for ratio, s in ratios
            if ratio < 1 / SLOWER
        ),
    ]


def _reason(sample: Sample, device: Device) -> str:
    """The largest part of the kernel's predicted time, and what would be without the others."""
    work = max(sample.fused, key=lambda work: launch_us(work, device))
    times = device.times
    parts = {
        f"{work.bytes / 1e6:.1f} MB from {work.programs} programs": memory_us(work, device),
        f"{work.programs} programs begun": 1e6 * work.programs / times.blocks.base,
        f"{work.scattered:.3g} sectors of the L2": 1e6 * work.scattered / times.sectors.base,
        f"{work.wavefronts:.3g} wavefronts of the L1": 1e6
        * work.wavefronts
        / times.wavefronts.base,
        f"{work.instructions:.3g} instructions": issued_us(work, device),
    }
    why, us = max(parts.items(), key=lambda item: item[1])
    return f"{why}: {us:.1f} µs"
