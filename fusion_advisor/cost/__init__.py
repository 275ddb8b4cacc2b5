"""FLOPs, HBM bytes and roofline bound of each launch, and the data flow between them."""

OFFERS = (
    "annotate",
    "dataflow",
    "leaner",
    "lifetimes",
    "recomputed",
    "times",
    "totals",
)
"""The modules that other rooms may import."""
