"""Scenarios of a program that tests start: each in turn, with what it saw, as JSON."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

Facts = dict[str, Any]


def report(scenarios: Sequence[Callable[[], Facts]], wanted: Collection[str] = ()) -> None:
    """Print the facts of each scenario by its name, of the `wanted` ones if any are named. One that
    raises has its traceback as `raised`."""
    found: dict[str, Facts] = {}
    for scenario in scenarios:
        if wanted and scenario.__name__ not in wanted:
            continue
        torch.manual_seed(0)
        try:
            found[scenario.__name__] = scenario()
        except Exception:  # noqa: BLE001 the test that asks for it fails with it
            found[scenario.__name__] = {"raised": traceback.format_exc()}
    print(json.dumps(found))
