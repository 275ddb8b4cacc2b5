"""Measurements on a GPU of eager, kernels and torch.compile; the search for configurations."""

OFFERS = (
    "calibrate",
    "clocks",
    "config_space",
    "driver",
    "protocol",
    "regret",
    "search",
)
"""The modules that other rooms may import."""
