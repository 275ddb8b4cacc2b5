"""MODEL by its form: a Python file or module, a transformers configuration, an exported program."""

from __future__ import annotations

from fusion_advisor.frontend.user_model import HostFakeMode, Loaded, load_program, load_python
from fusion_advisor.ir.scenario import Scenario


def load(model: str, scenario: Scenario) -> Loaded:
    """Resolve MODEL and build it under `scenario`; CaptureError names what failed and where."""
    fake = HostFakeMode()
    if model.startswith("hf:"):
        from fusion_advisor.frontend.hf import load_config  # transformers is an extra

        loaded = load_config(model.removeprefix("hf:"), scenario, fake)
    elif model.endswith(".pt2"):
        loaded = load_program(model, fake)
    else:
        loaded = load_python(model, scenario, fake)
    if loaded.program is None:
        loaded.module.train(scenario.mode == "train")
    return loaded
