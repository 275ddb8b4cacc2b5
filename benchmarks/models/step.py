"""Steps of a model, timed: the wall time of steps that follow each other, in batches."""
# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def leading(result: Any) -> Any:
    """First tensor of what a model returns."""
    return result if hasattr(result, "shape") else result[0]


def warmed(step: Callable[[], Any], device: str = "cuda") -> None:
    """Run a step as often as a CUDA graph needs to be recorded, once where there is no GPU."""
    for _ in range(3 if device == "cuda" else 1):
        step()
    _wait(device)


def batches(step: Callable[[], Any], device: str = "cuda", rounds: int = 7) -> list[float]:
    """Milliseconds of a step in each of some batches of about 80 ms; of two of one step where
    there is no GPU."""
    began = time.perf_counter()
    step()
    _wait(device)
    once = time.perf_counter() - began
    count = max(3, min(50, int(0.08 / once))) if device == "cuda" else 1
    spent: list[float] = []
    for _ in range(rounds if device == "cuda" else 2):
        began = time.perf_counter()
        for _ in range(count):
            step()
        _wait(device)
        spent.append((time.perf_counter() - began) / count * 1e3)
    return spent


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
