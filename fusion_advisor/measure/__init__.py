"""Measurements on a GPU of eager, kernels and torch.compile; the search for configurations."""

OFFERS = (
    "calibrate",
    "clocks",
    "config_space",
    "driver",
    "protocol",
    "search",
)
"""The modules that other rooms may import."""
