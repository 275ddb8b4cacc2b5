"""Steps of a model, timed: the wall time of steps that follow each other, in batches, and what the
GPU works of it."""
# torch is partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

KINDS = (
    ("attention", ("flash", "fmha", "attention", "sdpa")),
    (
        "products",
        ("gemm", "nvjet", "cutlass", "cublas", "gemv", "xmma", "splitk", "triton_tem", "conv"),
    ),
)
"""Kinds of kernels, by what their names hold; convolutions count as products."""


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


def on_gpu(step: Callable[[], Any]) -> tuple[dict[str, float], int]:
    """The GPU's milliseconds in one step by the kind of kernel, and how many it launched."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        _wait("cuda")
    spent: dict[str, float] = defaultdict(float)
    launches = 0
    for event in seen.events():
        if event.device_type.name == "CUDA":
            launches += 1
            spent[_kind(event.name)] += event.device_time / 1e3
    return dict(spent), launches


def _kind(name: str) -> str:
    """Kind of a kernel. Inductor names one that it fused after the operators beside it, too, of
    which it does nothing itself; its templates are products and attention."""
    lower = name.lower()
    if lower.startswith("triton_") and not lower.startswith("triton_tem"):
        return "Inductor"
    if lower.endswith("_kernel") and "::" not in lower:
        return "ours"
    return next((kind for kind, signs in KINDS if any(sign in lower for sign in signs)), "eager")


def _wait(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
