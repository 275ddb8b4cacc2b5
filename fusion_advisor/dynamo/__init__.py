"""Backend of torch.compile: a graph divided between our kernels and Inductor."""

OFFERS = ("backend", "begins", "exported", "measured", "options", "rewrites")
"""The modules that other rooms may import."""
