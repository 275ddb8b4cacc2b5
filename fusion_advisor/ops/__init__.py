"""The registry of ops: importing this package fills it."""

from fusion_advisor.ops import creation, matmul, memory, pointwise, reductions, views
from fusion_advisor.ops.registry import REGISTRY, Call, Op, state

__all__ = [
    "REGISTRY",
    "Call",
    "Op",
    "creation",
    "matmul",
    "memory",
    "pointwise",
    "reductions",
    "state",
    "views",
]
