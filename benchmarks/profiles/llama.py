"""Training of the two Llama layers of `examples/llama_block.py`: token ids to the loss of telling
each token from itself."""

import sys
from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from llama_block import Model as Llama
from llama_block import get_init_inputs, get_inputs

__all__ = ["Model", "get_init_inputs", "get_inputs"]


class Model(nn.Module):
    """Token ids [B, T] to a loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.llama = Llama(layers)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.llama(tokens)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
