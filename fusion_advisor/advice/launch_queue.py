"""The host's launches and the GPU's kernels as a queue, in one of many equal steps."""

from __future__ import annotations

from collections.abc import Collection

from fusion_advisor.advice.base import Model, QueueStep


def step(model: Model, waits: Collection[int]) -> QueueStep:
    """A step in which the host waits for the GPU after each of `waits`.

    The host launches every `eager` microseconds, the GPU runs a launch when the one before has
    ended. Steps follow each other without a wait of their own, so the first one is not counted.
    """
    every_us = model.rulebook.advice_kind("launch-bound").number("eager").value
    wait_us = model.rulebook.advice_kind("host-sync").number("wait").value
    launches = list(model.launches)
    host = gpu = began = 0.0
    idle: dict[int, float] = {}
    for _ in range(2):
        began, idle = gpu, {}
        for number in launches:
            host += every_us
            idle[number] = max(host - gpu, 0.0)
            gpu = max(host, gpu) + model.cost(number).time_us
            if number in waits:
                host = max(host, gpu) + wait_us
    return QueueStep(idle, gpu - began)
