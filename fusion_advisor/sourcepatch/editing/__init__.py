"""Kernels put into the model's own source: where its nodes were made, what to replace, and how."""
