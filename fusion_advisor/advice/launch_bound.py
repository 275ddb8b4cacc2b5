"""Stretches in which the GPU waits for the host's launches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from fusion_advisor.advice.base import MOST_TOLD, Advice, Model, mark
from fusion_advisor.advice.host_sync import waits
from fusion_advisor.advice.launch_queue import step


def find(model: Model) -> Iterator[Advice]:
    """One for the model, where the idle time is more than the stated share of the step."""
    kind = model.rulebook.advice_kind("launch-bound")
    found = model.queue or step(model, ())
    idle = sum(found.idle_us.values())
    if not found.us or idle < kind.number("share").value * found.us:
        return
    stretches = [
        list(numbers)
        for waiting, numbers in groupby(found.idle_us, lambda i: found.idle_us[i] > 0)
        if waiting
    ]

    def idle_in(numbers: list[int]) -> float:
        return sum(found.idle_us[i] for i in numbers)

    stretches.sort(key=lambda numbers: -idle_in(numbers))
    barred = waits(model)
    evidence = [
        f"{found.us:.1f} us a step as the host launches it, {found.us - idle:.1f} us of kernels",
        *(_stretch(model, numbers, idle_in(numbers)) for numbers in stretches[:MOST_TOLD]),
    ]
    if barred:
        evidence.append(
            f"in the way of a graph: the host waits for the GPU {len(barred)} times (host-sync)"
        )
    yield Advice(
        "launch-bound",
        f"the GPU waits for launches {idle / found.us:.0%} of the step, before"
        f" {sum(map(len, stretches))} of {len(found.idle_us)} kernels: capture the model in a CUDA"
        ' graph (torch.compile(mode="reduce-overhead") or torch.cuda.graph), or raise the batch',
        idle,
        model.sources(numbers[0] for numbers in stretches[:MOST_TOLD]),
        tuple(evidence),
        mark("launch-bound"),
    )


def _stretch(model: Model, numbers: list[int], idle_us: float) -> str:
    nodes = model.flow.nodes
    every = model.rulebook.advice_kind("launch-bound").number("eager")
    how = f"the GPU idle for {idle_us:.1f} us" if model.queue else f"launched every {every}"
    return (
        f"{nodes[numbers[0]].name} to {nodes[numbers[-1]].name}: {len(numbers)} kernels of"
        f" {model.time_us(numbers):.1f} us, {how}"
    )
