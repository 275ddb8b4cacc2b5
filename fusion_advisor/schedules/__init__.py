"""How a region becomes kernels: one schedule a file, tried in this order."""

from fusion_advisor.schedules import (
    blocked,
    carried,
    cooperative,
    flat,
    persistent,
    row,
    split,
    tiled,
)

SCHEDULES = (tiled, flat, cooperative, persistent, row, carried, split, blocked)

OFFERS = (
    "base",
    "blocked",
    "bodies",
    "body",
    "cooperative_body",
    "joined",
    "layout",
    "names",
    "places",
    "reducing",
    "select",
    "vectors",
)
"""The modules that other rooms may import."""
