"""Backend of torch.compile: a graph divided between our kernels and Inductor."""

OFFERS = ("backend",)
"""The modules that other rooms may import."""
