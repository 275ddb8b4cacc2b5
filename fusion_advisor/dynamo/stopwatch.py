"""Stopwatch for kernels that the backend has chosen: each is run once on the GPU before it is put
into a graph, and left where it takes longer than it was chosen for."""
# torch.fx and torch.library carry Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fusion_advisor.dynamo.partition import Occurrence
from fusion_advisor.frontend.expansions import hint
from fusion_advisor.rulebook.schema import InductorRules

_RUNS = 5
_AHEAD = 1_000_000
"""Cycles that the GPU sleeps for before a run: by then the host's part of a call is over."""
_MEMORY = 0.1
"""Share of the free memory that operands may take."""

Clock = Callable[[Any, Sequence[torch.Tensor]], float | None]
"""Microseconds of an operator with tensors like the given ones; None where it is not timed."""


@dataclass
class Stopwatch:
    """Times of operators in one graph, each taken once for the same operands."""

    rules: InductorRules
    clock: Clock
    known: dict[object, float | None] = field(default_factory=dict[object, float | None])

    def objects(self, place: Occurrence, called: Any, given: Sequence[torch.Tensor]) -> str:
        """Reason against a place's kernel: by the clock it takes longer than it may, by more than
        is tolerated; "" where there is none, and where so little time cannot be told."""
        if not self.rules.timed.value <= place.worth_us < inf:
            return ""
        key = called, tuple((tuple(map(hint, t.shape)), t.dtype) for t in given)
        if key not in self.known:
            self.known[key] = self.clock(called, given)
        us = self.known[key]
        if us is None or us <= self.rules.tolerated.value * place.worth_us:
            return ""
        return f"takes {us:.0f} us on this GPU, where it was worth {place.worth_us:.0f} us"


def alone() -> bool:
    """Whether this process decides for itself: of several, each would decide otherwise."""
    return not (torch.distributed.is_available() and torch.distributed.is_initialized())


def cold_us(called: Any, given: Sequence[torch.Tensor]) -> float | None:
    """Median time of an operator on the GPU with a cold L2, us, with operands of its own: like the
    given fake ones at the sizes of this call, floats 0.5 and integers zero, which index anything.
    None where they would take more memory than may be."""
    device = given[0].device
    with unset_fake_temporarily(), torch.no_grad(), torch.cuda.device(device):
        sizes = [(tuple(map(hint, t.shape)), tuple(map(hint, t.stride()))) for t in given]
        spans = [1 + sum((n - 1) * s for n, s in zip(*each, strict=True)) for each in sizes]
        free, _ = torch.cuda.mem_get_info(device)
        if sum(n * t.element_size() for n, t in zip(spans, given, strict=True)) > _MEMORY * free:
            return None
        operands = [
            torch.full((span,), 0.5 if t.is_floating_point() else 0, dtype=t.dtype, device=device)
            .as_strided(*size)
            for span, size, t in zip(spans, sizes, given, strict=True)
        ]  # fmt: skip
        flush = torch.empty(2 * torch.cuda.get_device_properties(device).L2_cache_size,
                            dtype=torch.int8, device=device)  # fmt: skip
        times: list[float] = []
        for _ in range(1 + _RUNS):
            flush.zero_()
            torch.cuda._sleep(_AHEAD)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            called(*operands)
            end.record()
            torch.cuda.synchronize(device)
            times.append(begin.elapsed_time(end) * 1e3)
        return median(times[1:])
