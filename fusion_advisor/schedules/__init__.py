"""How a region becomes a kernel: one schedule a file, tried in this order."""

from fusion_advisor.schedules import flat, row

SCHEDULES = (flat, row)
