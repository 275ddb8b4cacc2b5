"""How a region becomes kernels: one schedule a file, tried in this order."""

from fusion_advisor.schedules import (
    blocked,
    carried,
    cooperative,
    flat,
    row,
    split,
    tiled,
)

SCHEDULES = (tiled, flat, cooperative, row, carried, split, blocked)

OFFERS = (
    "base",
    "blocked",
    "bodies",
    "body",
    "cooperative_body",
    "launch",
    "layout",
    "names",
    "reducing",
    "select",
)
"""The modules that other rooms may import."""
