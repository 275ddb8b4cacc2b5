"""The captured launch graph, and records of kernels, scenarios and recordings; no torch."""

OFFERS = (
    "addressed",
    "faults",
    "frames",
    "graph",
    "graph_json",
    "kernel",
    "recording_file",
    "scenario",
    "source_trace",
)
"""The modules that other rooms may import."""
