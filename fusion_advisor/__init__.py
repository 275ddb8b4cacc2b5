"""fusion-advisor: which operators of a PyTorch model to fuse, with numbers and proven kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_advisor.frontend.session import record as record
    from fusion_advisor.workflows.apply import apply as apply
    from fusion_advisor.workflows.live import Report as Report
    from fusion_advisor.workflows.live import analyze as analyze

__all__ = ["Report", "analyze", "apply", "record"]

_OFFERED = {
    "Report": "workflows.live",
    "analyze": "workflows.live",
    "apply": "workflows.apply",
    "record": "frontend.session",
}
"""What is offered, and the module that it is in."""


def __getattr__(name: str) -> Any:
    """What is offered needs torch, which the command line must not pay for."""
    if name == "backend":  # `fusion_advisor.backend.last()`
        return import_module("fusion_advisor.dynamo.backend")
    if name not in _OFFERED:
        raise AttributeError(f"module 'fusion_advisor' has no attribute {name!r}")
    import_module("fusion_advisor.rulebook.local_gpu").require_torch()
    return getattr(import_module(f"fusion_advisor.{_OFFERED[name]}"), name)
