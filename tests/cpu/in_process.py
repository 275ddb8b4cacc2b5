"""Captures with the trail of their nodes, one after the other in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from threading import Lock

from fusion_advisor.frontend.child import capture_here, relocate
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Moved, Scenario
from fusion_advisor.support.errors import CaptureError

Captured = Callable[..., Graph]
"""Takes what `captured` takes."""
EVERY_WAY = "every way"
WAYS = ContextVar("WAYS", default=EVERY_WAY)
"""In which models are patched beside what was asked for: the fixture `ways` sets it."""
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
    asked: Scenario, *, resized: bool = False, everywhere: bool = False
) -> Captured:
    """The same of a model that takes no other sizes unless `resized`, and that runs in no other way
    unless `everywhere` or where the test's `WAYS` say so: a patch is proven by what is left, which
    takes a fraction of the time."""
    every = everywhere or WAYS.get() == EVERY_WAY

    def capturing(
        model: str,
        scenario: Scenario,
        references: str | None = None,
        moved: Moved | None = None,
    ) -> Graph:
        if not resized and scenario.sizes != asked.sizes:
            raise CaptureError("it takes no other sizes")
        if not every and replace(scenario, sizes=asked.sizes) != asked:
            raise CaptureError("it runs in no other way")
        return captured(model, scenario, references, moved)

    return capturing
