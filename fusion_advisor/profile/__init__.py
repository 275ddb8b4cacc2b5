"""Profiles: a profiler's trace of the model, its kernels linked to the graph's launches."""

OFFERS = ("profile",)
"""The modules that other rooms may import."""
