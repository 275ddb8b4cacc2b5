"""How a region becomes kernels: one schedule a file, tried in this order."""

from fusion_advisor.schedules import (
    blocked,
    carried,
    cooperative,
    flat,
    row,
    split,
    squares,
    tiled,
)

SCHEDULES = (tiled, flat, row, cooperative, carried, squares, split, blocked)

OFFERS = (
    "base",
    "bodies",
    "body",
    "cooperative_body",
    "launch",
    "layout",
    "names",
    "reducing",
    "row_walks",
    "select",
)
"""The modules that other rooms may import."""
