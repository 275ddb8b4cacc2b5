"""Time model: how long launches take, with an interval. Shared knowledge, free of torch.

Every launch, eager's and ours, has one form. A launch takes what any takes at least, and the
longest of four parts, which overlap: its bytes at the copy bandwidth, by the share of it that
kernels of its kind reach; the sectors that lanes ask for one by one; the instructions that its
warps issue; and its programs, each of which waits for its loads, wave after wave. What is read
first waits for longer; what is written first stays in the L2, and what launches before left there
is read from it. Waves that begin together wait for each other. Every coefficient stands in
`rules/predict.toml` with the run that it was fitted on. No measurement of what is predicted is
looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import ceil

from fusion_advisor.rulebook.devices import SECTOR_BYTES, Device


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one launch: the figures that decide how long it takes.

    `kind` names an entry of the rules (`stream`, `kernel`). Bytes are HBM bytes, of which
    `resident` are read where the launches before left them, in the L2; `torn` are the bytes of
    sectors beside the elements that a program takes of them, and `halved` those of lines that
    programs share, times how often a line is halved among them. `scattered` counts sectors of the
    L2 that are read or written for one element each. `elements` are those that eager's lanes walk;
    `primitives` are instructions of a warp for scalar operations, `steps` for places that
    reductions combine, `requests` loads and stores of a warp. `arithmetic_us` is the time of
    products at the device's peaks. `programs` is how many blocks of `warps` warps there are, 0
    where that is not known and enough, `at_once` how many of them the device holds, and `depth`
    how often each waits for loads; `chained` are the instructions of its scans, which wait for one
    another. `launches` counts all that an operator of eager's makes, and `scratch` is the memory in
    bytes that it takes for itself while it runs.
    """

    kind: str
    bytes_read: int
    bytes_written: int
    resident: int = 0
    torn: int = 0
    halved: float = 0.0
    scattered: int = 0
    elements: int = 0
    primitives: float = 0.0
    steps: float = 0.0
    requests: float = 0.0
    arithmetic_us: float = 0.0
    programs: int = 0
    warps: int = 1
    at_once: int = 1
    depth: float = 1
    chained: float = 0.0
    launches: int = 1
    scratch: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


NOTHING = Work("other", 0, 0)
"""Work of a view: none."""


def launch_us(work: Work, device: Device) -> float:
    """Time of one launch among others, us."""
    times = device.times
    parts = (
        memory_us(work, device),
        1e6 * work.scattered / times.sectors.base,
        issued_us(work, device),
        programs_us(work, device),
    )
    power = times.overlap.value
    longest = max(parts) or 1.0  # whose power may be beyond a float
    busy = longest * sum((part / longest) ** power for part in parts) ** (1 / power)
    return times.launch.value * work.launches + busy + between_us(work, device)


def call_us(works: Iterable[Work], device: Device) -> float:
    """Time of launches one after the other, called with cold caches, us."""
    return device.times.call.value + sum(launch_us(work, device) for work in works)


def memory_us(work: Work, device: Device) -> float:
    """Time of a launch's bytes, us."""
    times = device.times
    moved = work.bytes - work.resident + work.resident / times.l2_speed.value
    moved += times.torn.value * work.torn + times.halved.value * work.halved
    moved /= times.speed(work.kind).share.value
    moved -= times.absorbed.value * min(work.bytes_written, device.memory.l2.base)
    waited = times.first.value * work.bytes_read / (work.bytes_read + times.first_bytes.base)
    return max(0.0, moved) / device.bandwidth * 1e6 + waited


def issued_us(work: Work, device: Device) -> float:
    """Time to issue the instructions of a launch's warps, and of its products, us."""
    times, speed = device.times, device.times.speed(work.kind)
    issued = speed.element.value * work.elements / device.warp_size if speed.element else 0.0
    issued += times.primitive.value * work.primitives + times.step.value * work.steps
    issued += times.request.value * work.requests
    peak = device.peak_flops("cuda", "float32") / 2  # an instruction of a lane has two FLOPs
    products_us = work.arithmetic_us / (speed.arithmetic.value if speed.arithmetic else 1.0)
    return 1e6 * issued * device.warp_size / peak + products_us


def programs_us(work: Work, device: Device) -> float:
    """The time of a launch's programs, were there memory without end, us; of enough programs, where
    nobody knows how many there are, that of one."""
    wait = device.times.speed(work.kind).wait
    further = wait.value * (work.depth - 1) if wait else 0.0
    further += device.times.chained.value * work.chained
    return (device.times.latency.value + further) * max(1.0, work.programs / work.at_once)


def between_us(work: Work, device: Device) -> float:
    """The time between waves of programs that begin and end together, us: the fewer a
    multiprocessor holds, the longer it has nothing on its way. After many waves they fall out of
    step."""
    if not work.programs:
        return 0.0
    waves = ceil(work.programs / work.at_once)
    return device.times.wave.value * (1.0 - 1.0 / waves) / max(1.0, work.at_once / device.sm_count)


def sectors_apart(elements: int, pitch: int, itemsize: int) -> int:
    """Sectors that neighbouring lanes ask for one by one, where they lie `pitch` bytes apart: none
    where their elements follow each other."""
    return 0 if pitch <= itemsize else int(elements * min(1.0, pitch / SECTOR_BYTES))


def kept(size: int, since: float, device: Device) -> int:
    """Bytes of `size` that are still in the L2 when `since` bytes, these included, have gone
    through it."""
    room = device.times.l2_kept.value * device.memory.l2.base
    return int(size * min(1.0, max(0.0, 2.0 - since / room)))


def speedup_interval(
    unfused: Collection[Work], fused_us: float, device: Device
) -> tuple[float, float]:
    """Interval that holds 90 % of measured speed-ups of a call of eager's launches; narrower where
    all of these are of kinds whose times are known best."""
    times = device.times
    known = all(work.kind in times.steady for work in unfused)
    wide = 1.0 + (times.spread if known else times.spread_other).value
    speedup = call_us(unfused, device) / fused_us
    return speedup / wide, speedup * wide
