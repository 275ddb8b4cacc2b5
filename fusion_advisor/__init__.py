"""fusion-advisor: which operators of a PyTorch model to fuse, with numbers and proven kernels."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_advisor.frontend.session import record as record
    from fusion_advisor.ir.graph import Graph as Graph
    from fusion_advisor.workflows.apply import Applied as Applied
    from fusion_advisor.workflows.apply import apply as apply
    from fusion_advisor.workflows.apply import unapply as unapply
    from fusion_advisor.workflows.export import Exported as Exported
    from fusion_advisor.workflows.export import export as export
    from fusion_advisor.workflows.live import Fusion as Fusion
    from fusion_advisor.workflows.live import Report as Report
    from fusion_advisor.workflows.live import analyze as analyze
    from fusion_advisor.workflows.live import bench as bench
    from fusion_advisor.workflows.live import capture as capture
    from fusion_advisor.workflows.live import fuse as fuse
    from fusion_advisor.workflows.live import patch as patch

_OFFERED = {
    "Applied": "workflows.apply",
    "Exported": "workflows.export",
    "Fusion": "workflows.live",
    "Graph": "ir.graph",
    "Report": "workflows.live",
    "analyze": "workflows.live",
    "apply": "workflows.apply",
    "bench": "workflows.live",
    "capture": "workflows.live",
    "export": "workflows.export",
    "fuse": "workflows.live",
    "patch": "workflows.live",
    "record": "frontend.session",
    "unapply": "workflows.apply",
}
"""Public names, each with the module that defines it."""

__all__ = [
    "Applied",
    "Exported",
    "Fusion",
    "Graph",
    "Report",
    "analyze",
    "apply",
    "bench",
    "capture",
    "export",
    "fuse",
    "patch",
    "record",
    "unapply",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: it needs torch, which the command line must not
    pay for."""
    if name == "backend":  # `fusion_advisor.backend.last()`
        return import_module("fusion_advisor.dynamo.backend")
    if name not in _OFFERED:
        raise AttributeError(f"module 'fusion_advisor' has no attribute {name!r}")
    import_module("fusion_advisor.rulebook.local_gpu").require_torch()
    return getattr(import_module(f"fusion_advisor.{_OFFERED[name]}"), name)
