"""Time model: how long launches take, with an interval. Shared knowledge, free of torch.

A call is what it waits for at first, and its launches one after the other. A launch takes what any
takes at least, and the times of its parts, which overlap: nearly the longest alone counts. Bytes
move at the device's copy bandwidth, by the share of it that this kind of kernel reaches; what is
read first waits for longer, and is slower until the L2 is full of it, faster where the launches
before left it there; what is written first stays there. What lanes ask for one by one takes a
sector of the L2 each. Programs begin one after the other, however little each does. They run as
many at once as their registers and warps let, wave after wave, and each takes its own latency and
the time of its bytes at what its warps can keep on their way; those of eager's kernels, that of
each wait for loads. So few programs, or few at once, are slower than the memory. What warps issue
is one part, of eager's kernels by what was counted of each kind, and what their L1 serves, line by
line and bank by bank, another. On top come reductions that a program makes one after the other,
what waves wait for each other, and an emitted kernel's instructions, once. Every coefficient stands
in `rules/predict.toml` with the run that it was fitted on. No measurement of what is predicted is
ever looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fusion_advisor.ir.graph import Tensor
from fusion_advisor.rulebook.devices import Device, EagerSpeed


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one launch: the figures that decide how long it takes.

    `kind` names an entry of the rules (`eager.stream`, `kernel.row`), and `op` one that goes before
    it: a kernel of its own, or one of narrow elements. Bytes are HBM bytes, of which `resident` are
    read where the launches before left them, in the L2. `elements` are those that eager's threads
    walk; `arithmetic_us` is the arithmetic's time at the device's peaks, of kernels whose
    instructions nobody counted; `programs` is how many blocks of `warps` warps there are, 0 where
    that is not known and enough, `at_once` how many of them the device holds, and `depth` how many
    places each walks one after the other: of eager's kernels, how often it waits for loads, beside
    `near` loads from the L1. `last` are the rounds of the program that puts others' results
    together, `launches` all that an operator of eager's makes. `unaligned`: rows do not begin at 16
    bytes. `instructions` are those of warps, of eager's kernels those of its primitives beside what
    its kind issues, and `wavefronts` those of the L1 (`instruction_count`). `scattered` sectors of
    the L2 are written or read for one element each, `torn` are the bytes of sectors beside the
    elements that a program takes of them. `chained` counts the reductions that a program makes one
    after the other.
    """

    kind: str
    bytes_read: int
    bytes_written: int
    elements: int = 0
    arithmetic_us: float = 0.0
    op: str = ""
    resident: int = 0
    programs: int = 0
    warps: int = 1
    at_once: int = 1
    depth: int = 1
    near: int = 0
    last: int = 0
    launches: int = 1
    unaligned: bool = False
    instructions: int = 0
    wavefronts: int = 0
    scattered: int = 0
    chained: int = 0
    torn: int = 0

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


NOTHING = Work("eager.other", 0, 0)
"""Work of a view: none."""


def launch_us(work: Work, device: Device) -> float:
    """Time of one launch among others, us."""
    times = device.times
    speed = times.speed(work.kind, work.op)
    least = times.eager_launch if isinstance(speed, EagerSpeed) else times.kernel_launch
    parts = (
        memory_us(work, device),
        1e6 * work.scattered / times.sectors.base,
        programs_us(work, device),
        1e6 * work.programs / times.blocks.base,
        issued_us(work, device),
        1e6 * work.wavefronts / times.wavefronts.base * _idle(work, device),
    )
    power = _overlap(work, device)
    longest = max(parts) or 1.0  # whose power may be beyond a float
    busy = longest * sum((part / longest) ** power for part in parts) ** (1 / power)
    waited = times.last.value * work.last + times.chained.value * work.chained
    waited += between_us(work, device) + fetched_us(work, device)
    return speed.least.value * least.value * work.launches + busy + waited


def _overlap(work: Work, device: Device) -> float:
    """The power in which the parts add up. What one warp waits for another's work hides: where few
    of those that a multiprocessor holds are resident, loads, arithmetic and stores follow each
    other."""
    most = device.times.speed(work.kind, work.op).overlap.value
    if not work.programs:
        return most
    resident = min(work.programs, work.at_once) / device.sm_count * work.warps
    return 1.0 + (most - 1.0) * min(1.0, resident / device.multiprocessor.warps.count)


def call_us(works: Iterable[Work], device: Device) -> float:
    """Time of launches one after the other, called with cold caches, us."""
    return device.times.call.value + sum(launch_us(work, device) for work in works)


def memory_us(work: Work, device: Device) -> float:
    """Time of a launch's bytes, us. Reads wait until the L2 makes room, and are slower until the L2
    is full of them; writes stay in the L2 at first."""
    times = device.times
    speed = times.speed(work.kind, work.op)
    share = speed.share.value
    if isinstance(speed, EagerSpeed) and work.unaligned:
        share *= speed.unaligned.value
    read, holds = work.bytes_read - work.resident, device.memory.l2.base
    from_l2 = work.resident / times.l2_speed.value
    moved = (read + work.bytes_written + from_l2 + times.torn.value * work.torn) / share
    moved += speed.ramp.value * min(read, holds)
    moved -= times.absorbed.value * min(work.bytes_written, holds)
    waited = times.first.value * work.bytes_read / (work.bytes_read + times.first_bytes.base)
    return moved / device.bandwidth * 1e6 + waited


def issued_us(work: Work, device: Device) -> float:
    """Time to issue the instructions of a launch's warps, us, with the time of multiprocessors that
    have none."""
    peak = device.peak_flops("cuda", "float32") / 2  # an instruction of a lane has two FLOPs
    issued = work.arithmetic_us + 1e6 * instructions(work, device) * device.warp_size / peak
    reached = device.times.speed(work.kind, work.op).arithmetic.value
    return issued / reached * _idle(work, device)


def instructions(work: Work, device: Device) -> float:
    """Instructions that the warps of a launch issue."""
    speed = device.times.speed(work.kind, work.op)
    if not isinstance(speed, EagerSpeed):
        return work.instructions
    counted = ((getattr(speed, name), count) for name, count in walked(work, device).items())
    return work.instructions + sum(each.value * count for each, count in counted if each)


def walked(work: Work, device: Device) -> dict[str, float]:
    """Actions of the warps of one eager launch, by the figure of `EagerSpeed` that gives their
    cost. A warp that has no window of its own ends."""
    warps, full = work.programs * work.warps, work.elements / device.warp_size
    walking = full if work.kind == "eager.window" else warps
    return {
        "warp": warps,
        "round": walking * work.depth,
        "tap": walking * work.near,
        "element": full,
    }


def _idle(work: Work, device: Device) -> float:
    """Factor on the time where there are fewer programs than multiprocessors."""
    return device.sm_count / min(work.programs or device.sm_count, device.sm_count)


def programs_us(work: Work, device: Device) -> float:
    """The time of a launch's programs, were there memory without end."""
    if not work.programs:
        return 0.0
    return _program_us(work, device) * max(1.0, work.programs / work.at_once)


def _program_us(work: Work, device: Device) -> float:
    """The time of one program, were there memory without end."""
    speed = device.times.speed(work.kind, work.op)
    if isinstance(speed, EagerSpeed):  # whose rounds are known, and what each asks for
        found = min(1.0, work.resident / max(work.bytes_read, 1))
        rounds = work.depth * (1.0 - device.times.found.value * found)
        return speed.latency.value + speed.step.value * rounds + speed.near.value * work.near
    own = work.bytes / work.programs / (work.warps * speed.warp_bandwidth.base) * 1e6
    return speed.latency.value + speed.step.value * (work.depth - 1) + own


def between_us(work: Work, device: Device) -> float:
    """The time between waves of programs that begin and end together: the fewer a multiprocessor
    holds, the longer it has nothing on its way. After many waves they fall out of step."""
    if not work.programs:
        return 0.0
    waves = -(-work.programs // work.at_once)
    return device.times.wave.value * (1.0 - 1.0 / waves) / max(1.0, work.at_once / device.sm_count)


def fetched_us(work: Work, device: Device) -> float:
    """The time in which the instructions of an emitted kernel's warp follow each other, each of
    them once."""
    if work.kind.startswith("eager") or not work.programs:
        return 0.0
    each = work.instructions / (work.programs * work.warps * work.depth)
    return device.times.fetched.value * each / 1e3


def narrow(tensors: Iterable[Tensor]) -> bool:
    """Whether most of the bytes read are of elements narrower than four bytes."""
    sizes = [(tensor.bytes, tensor.itemsize < 4) for tensor in tensors]
    return 2 * sum(size for size, short in sizes if short) > sum(size for size, _ in sizes)


def kept(size: int, since: float, device: Device) -> int:
    """Bytes of `size` that are still in the L2 when `since` bytes, these included, have
    gone through it."""
    room = device.times.l2_kept.value * device.memory.l2.base
    return int(size * min(1.0, max(0.0, 2.0 - since / room)))


def speedup_interval(unfused_us: float, fused_us: float, device: Device) -> tuple[float, float]:
    """Interval that holds 90 % of measured speed-ups."""
    times = device.times
    spread = times.spread_short if fused_us < times.short.value else times.spread_long
    wide = 1.0 + spread.value
    return unfused_us / fused_us / wide, unfused_us / fused_us * wide
