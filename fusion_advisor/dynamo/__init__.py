"""The torch.compile backend: a graph divided between our kernels and Inductor."""
