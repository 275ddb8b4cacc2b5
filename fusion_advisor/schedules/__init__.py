"""How a region becomes kernels: one schedule a file, tried in this order."""

from fusion_advisor.schedules import blocked, carried, flat, persistent, row, split, tiled

SCHEDULES = (tiled, flat, persistent, row, carried, split, blocked)
