"""fusion-advisor: which operators of a PyTorch model to fuse, with numbers and proven kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_advisor.applied import apply as apply

__all__ = ["apply"]


def __getattr__(name: str) -> Any:
    """`apply` needs torch, which the command line must not pay for."""
    if name != "apply":
        raise AttributeError(f"module 'fusion_advisor' has no attribute {name!r}")
    from importlib import import_module

    return import_module("fusion_advisor.applied").apply
