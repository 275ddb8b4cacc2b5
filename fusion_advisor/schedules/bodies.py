"""Which body a kernel has, by its schedule."""

from __future__ import annotations

from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.chunked_body import ChunkedBody
from fusion_advisor.schedules.cooperative_body import CooperativeBody
from fusion_advisor.schedules.flat_body import FlatBody
from fusion_advisor.schedules.persistent_body import PersistentBody
from fusion_advisor.schedules.pieced_body import PiecedBody
from fusion_advisor.schedules.squares import SquareBody

_BODIES: dict[str, type[Body]] = {
    "flat": FlatBody,
    "blocked": ChunkedBody,
    "cooperative": CooperativeBody,
    "persistent": PersistentBody,
    "squares": SquareBody,
}


def body_of(step: Step) -> type[Body]:
    """Every other schedule has its tile at once, but for rows in two pieces."""
    return _BODIES.get(step.schedule, PiecedBody if step.rest else Body)
