"""Softmax as one first writes it: five kernels where one would do."""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Numerically stable softmax over the columns of x [M, N]."""

    def forward(self, x: Tensor) -> Tensor:
        largest = x.max(dim=1)[0]
        shifted = x - largest[:, None]
        exponent = torch.exp(shifted)
        return exponent / exponent.sum(dim=1)[:, None]


def get_init_inputs() -> list[int]:
    return []


def get_inputs() -> list[Tensor]:
    return [torch.randn(1024, 4096)]
