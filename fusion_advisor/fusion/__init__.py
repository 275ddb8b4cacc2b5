"""Fusion: decides which launches become one kernel, by search, gates, verdict, name and route."""

OFFERS = (
    "components",
    "decide",
    "findings",
    "gates",
    "idioms",
    "library_match",
    "lower",
    "route",
    "verdict",
)
"""The modules that other rooms may import."""
