"""Workflows, where stages meet: analyze, bench, patch, apply."""

OFFERS = (
    "analyze",
    "apply_named",
    "bench",
    "patch",
    "rewrites",
    "update",
)
"""The modules that other rooms may import."""
