"""The registry of ops: importing this package fills it."""

from fusion_advisor.ops import (
    backward,
    copies,
    creation,
    foreach,
    gathers,
    losses,
    matmul,
    memory,
    pointwise,
    randomness,
    reductions,
    views,
    windows,
)
from fusion_advisor.ops.registry import REGISTRY, Call, Op, state

__all__ = [
    "REGISTRY",
    "Call",
    "Op",
    "backward",
    "copies",
    "creation",
    "foreach",
    "gathers",
    "losses",
    "matmul",
    "memory",
    "pointwise",
    "randomness",
    "reductions",
    "state",
    "views",
    "windows",
]

OFFERS = (
    "attention",
    "given",
    "registry",
)
"""The modules that other rooms may import."""
