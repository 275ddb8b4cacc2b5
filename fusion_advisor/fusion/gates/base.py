"""Input and output of a gate. A gate measures; `decide` alone compares."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_advisor.cost.annotate import Cost
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.lower import Boundary, Expressed
from fusion_advisor.region.axes import NotExpressible
from fusion_advisor.rulebook.devices import Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules.base import Plan
from fusion_advisor.schedules.select import Planned

PRODUCTS = ("matmul", "attention", "convolution")
"""Patterns of launches that wait for the tensor cores where they are large."""


@dataclass(frozen=True)
class Subject:
    """Set of launches that might become one kernel, with everything known of it. `expressed` and
    `planned` are None where the region form cannot express the set; `problem` says why."""

    flow: Dataflow
    launches: tuple[int, ...]
    border: Boundary
    expressed: Expressed | None
    planned: Planned | None
    problem: NotExpressible | None
    rulebook: Rulebook

    @property
    def device(self) -> Device:
        return self.flow.annotated.device

    @property
    def plan(self) -> Plan | None:
        """Plan that would be emitted; None where there is none."""
        return self.planned.plans[0] if self.planned and self.planned.plans else None

    @property
    def hopeless(self) -> bool:
        """Whether no larger set can have a plan either."""
        if self.problem is not None:
            return self.problem.final
        return self.planned is not None and any(r.final for r in self.planned.refusals)

    @property
    def apart(self) -> bool:
        """Whether its results may have kernels of their own."""
        return self.launches in self.flow.called_together

    def cost(self, launch: int) -> Cost:
        return self.flow.annotated.costs[self.flow.nodes[launch].name]

    @property
    def unfused_bytes(self) -> int:
        return sum(self.cost(i).bytes for i in self.launches)


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurement against a limit, both in `unit`. `measured` is None when it cannot be known."""

    measured: float | None
    limit: float
    why: str
