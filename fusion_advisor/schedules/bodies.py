"""Which body a kernel has, by its schedule."""

from __future__ import annotations

from fusion_advisor.schedules.chunked_body import ChunkedBody
from fusion_advisor.schedules.cooperative_body import CooperativeBody
from fusion_advisor.schedules.persistent_body import PersistentBody
from fusion_advisor.schedules.text import Body

BODIES: dict[str, type[Body]] = {
    "blocked": ChunkedBody,
    "cooperative": CooperativeBody,
    "persistent": PersistentBody,
}
"""Every other schedule has its tile at once."""
