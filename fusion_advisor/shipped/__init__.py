"""Runtime that stands beside emitted kernels: modules that users get word for word."""

OFFERS = ("files", "fused_interpreter", "load")
"""The modules that other rooms may import."""
