"""Edits of the model's source that call the kernels, with guards, tried before they are written."""

OFFERS = (
    "editing",
    "equivalence",
    "given",
    "guards",
    "library_call",
    "other_sizes",
    "placement",
    "trial",
)
"""The modules that other rooms may import."""
