"""Launches of an optimizer's step, recorded as those of the model are.

An optimizer of torch is built over fake CUDA parameters and runs its own `step()`: once before, in
which it makes its state, and once for the record. What it computes on the host, its count of steps,
launches nothing.
"""
# torch.optim carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from fusion_advisor.frontend.eager_trace import EagerTrace
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.scenario import Optimizer
from fusion_advisor.support.errors import UsageError

_BUILT_IN: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True),
}


def update(
    launcher: EagerTrace,
    gradients: Mapping[str, Ref],
    asked: Optimizer,
    own: Callable[[Any], Any] | None,
) -> str:
    """Record the optimizer's step for parameters with their gradients; what was assumed of it, in
    words. Raises UsageError where the model's file has no optimizer and is asked for one."""
    if asked == "none":
        return "optimizer=none"
    build = _BUILT_IN.get(asked, own)
    if build is None:
        raise UsageError(
            "--optimizer module: the model's file has no function optimizer(parameters); define "
            "it, or choose adamw, sgd or none"
        )
    values = launcher.values_of([*map(Ref, gradients), *gradients.values()])
    with launcher.faking() as fake, _on_the_host():
        fakes = {ref: fake(value) for ref, value in values.items()}
        parameters = {name: fakes[Ref(name)].requires_grad_() for name in gradients}
        for name, parameter in parameters.items():
            parameter.grad = fakes[gradients[name]]
        stepping = build(list(parameters.values()))
        for group in stepping.param_groups:
            # Torch's defaults on CUDA, which fakes are not taken for.
            by_tensor = isinstance(group.get("lr"), torch.Tensor) and not group.get("capturable")
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = not by_tensor
        stepping.step()
        operands = [(values[ref], tensor) for ref, tensor in fakes.items()]
        for name, parameter in parameters.items():
            for key, tensor in stepping.state[parameter].items():
                if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                    made = launcher.tensor(f"{key}_{name}", "buffer", tensor, phase="optimizer")
                    operands.append((made, tensor))
        launcher.follow(stepping.step, operands, type(stepping).__name__.lower(), "optimizer")
    first = stepping.param_groups[0]
    ways = [way for way in ("foreach", "fused") if first.get(way)] or ["a parameter at a time"]
    return f"optimizer={type(stepping).__name__} ({ways[0]}, in a later step than the first)"


@contextmanager
def _on_the_host() -> Generator[None, None, None]:
    """Let the count of steps, a tensor on the host, be a number."""
    with ExitStack() as stack:
        for name in ("adam", "adamax", "nadam", "radam", "adagrad", "rmsprop", "adadelta", "asgd"):
            module = f"torch.optim.{name}"
            stack.enter_context(mock.patch(f"{module}._get_value", _number, create=True))
        yield


def _number(value: Any) -> Any:
    return 2.0 if isinstance(value, torch.Tensor) else value
