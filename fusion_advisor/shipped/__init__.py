"""Runtime of emitted kernels, of which a folder gets the parts that its kernels call.

The repairs of Triton's interpreter are no part of it: it imports them where they are installed.
"""

OFFERS = ("files", "fused_interpreter", "load")
"""The modules that other rooms may import."""
