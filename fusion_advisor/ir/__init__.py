"""The captured launch graph, and records of kernels, scenarios and recordings; no torch."""

OFFERS = (
    "addressed",
    "faults",
    "frames",
    "graph",
    "kernel",
    "recording_file",
    "scenario",
    "source_names",
    "source_trace",
    "steps",
)
"""The modules that other rooms may import."""
