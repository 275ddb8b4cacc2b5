"""Proof of a file's kernels: against float64 as they run, and compiled offline."""

OFFERS = (
    "check_child",
    "inputs",
    "launches",
    "references",
    "driver",
    "interpreter",
    "launch_counter",
    "proofs",
    "sequence",
    "stepping",
    "tolerance",
)
"""The modules that other rooms may import."""
