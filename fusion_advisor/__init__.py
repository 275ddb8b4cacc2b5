"""fusion-advisor: which operators of a PyTorch model to fuse, with numbers and proven kernels."""
