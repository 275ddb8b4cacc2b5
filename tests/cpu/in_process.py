"""Captures with the trail of their nodes, one after the other in this process."""

from __future__ import annotations

import sys
from threading import Lock

from fusion_advisor.frontend.child import capture_here, relocate
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Moved, Scenario, Sizes
from fusion_advisor.support.errors import CaptureError

_ONE_AT_A_TIME = Lock()


def captured(
    model: str,
    scenario: Scenario,
    references: str | None = None,
    moved: Moved | None = None,
) -> Graph:
    """As the command does in a child; here, with nothing left of the model behind."""
    with _ONE_AT_A_TIME:
        path, modules = list(sys.path), set(sys.modules)
        try:
            if moved:
                relocate(*moved)
            return capture_here(model, scenario, trail=True, references=references)
        finally:
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.startswith(("fused_", "fusion_advisor_model_")):
                    del sys.modules[name]


def captured_as_asked(
    model: str,
    scenario: Scenario,
    references: str | None = None,
    moved: Moved | None = None,
) -> Graph:
    """The same of a model that takes no other sizes: a patch is proven at its own alone, which
    takes a third of the time."""
    if scenario.sizes != Sizes():
        raise CaptureError("it takes no other sizes")
    return captured(model, scenario, references, moved)
