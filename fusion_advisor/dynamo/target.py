"""GPU that a graph is compiled for, and whether kernels are timed on it."""
# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fusion_advisor.dynamo.measured import are_kept, may_measure
from fusion_advisor.dynamo.options import BackendOptions, Inner, alone
from fusion_advisor.dynamo.processes import Ranks, ranks
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device
from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class Target:
    """GPU of a graph: its `name`, empty where there is none, its rules, and how these were
    `chosen`. `gpu`: where kernels are timed; None where they may not be. `compiler`: Inductor,
    where it is timed beside them, and `beside` the digest of its settings. `group`: processes that
    choose alike."""

    rulebook: Rulebook
    device: Device
    chosen: str
    name: str
    gpu: torch.device | None
    compiler: Inner | None
    beside: str
    group: Ranks | None


def target_of(inputs: Sequence[Any], options: BackendOptions, *, anywhere: bool) -> Target:
    """GPU of a graph's inputs. `anywhere`: they may be on another device, and nothing is timed."""
    rulebook = load_rulebook(options.rules)
    gpu = next((v.device for v in inputs if isinstance(v, torch.Tensor) and v.is_cuda), None)
    name = torch.cuda.get_device_name(gpu) if gpu is not None else ""
    device, chosen = choose_device(options.device, rulebook, (name,) if name else ())
    measured = None if anywhere or not may_measure(options.tune) else gpu
    asked = options.tune == "now" or (options.tune == "cached" and are_kept())
    patches = options.patches if measured is not None and asked else None
    compiler, beside = (None, "") if patches is None else alone(patches)
    group = ranks(rulebook.tuning.waited.base)
    return Target(rulebook, device, chosen, name, measured, compiler, beside, group)
