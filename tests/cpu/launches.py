"""What a function's launches do, in eager and as kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_advisor.fusion.decide import Decision, fused_of
from fusion_advisor.perfmodel.model import Work
from fusion_advisor.perfmodel.workload import eager_works, fused_works
from fusion_advisor.rulebook.schema import Rulebook

from .regions import PACKED, decided, flow_of


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that has a layout and no data."""
    return torch.empty(shape, dtype=dtype, device="meta")


def of_kernels(
    function: Callable[..., object], *inputs: torch.Tensor, rules: Rulebook = PACKED
) -> tuple[Work, ...]:
    """The kernels of a function's plan."""
    subject = decided(flow_of(function, *inputs), rules).subject
    return fused_works(fused_of(subject), subject.device)


def of_eager(function: Callable[..., object], *inputs: torch.Tensor) -> Work:
    """The first of eager's launches."""
    return eager_of(decided(flow_of(function, *inputs)))[0]


def eager_of(decision: Decision) -> tuple[Work, ...]:
    """All of eager's launches in a set."""
    return eager_works(decision.subject.flow, decision.subject.launches)
