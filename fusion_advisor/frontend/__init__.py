"""From a model to its launch graph; the last room that sees FX."""

OFFERS = (
    "aot",
    "child",
    "decompositions",
    "emitted_calls",
    "expansions",
    "export",
    "joint",
    "loading",
    "pairs",
    "replay",
    "session",
    "signature",
    "user_model",
)
"""The modules that other rooms may import."""
