"""The loop-level IR of a fused region: typed scalar expressions over named axes."""

OFFERS = (
    "axes",
    "builder",
    "exprs",
    "index_range",
    "instruction_mix",
    "normal_form",
    "peephole",
    "primitives",
    "random",
    "region",
)
"""The modules that other rooms may import."""
