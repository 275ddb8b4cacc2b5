"""Gradients that an emitted file makes, held to float64 autograd of the model's graph, as results
are: within eager's own error."""

# torch is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch

from fusion_advisor.ir.kernel import Case, Criterion, Kernel
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.verify.launches import poisoned_outputs
from fusion_advisor.verify.references import truth
from fusion_advisor.verify.stepping import as_tuple
from fusion_advisor.verify.tolerance import Error, Tensors, compare


def check_gradients(
    kernel: Kernel,
    entry: Callable[..., Any],
    yardstick: Callable[..., Any],
    case: Case,
    drawn: Callable[[int], Tensors],
    criterion: Criterion,
) -> Error:
    """Compare the gradients of a file's function with those of its graph, for one draw of a case;
    `drawn` gives the inputs of a draw. Raises KernelFault where they differ."""
    inputs = drawn(0)
    with poisoned_outputs():
        try:
            ours = gradients_of(entry, kernel, 0)(*inputs)
        except Exception as error:
            raise KernelFault(f"its backward fails: {cause(error)}") from error
    further = (truth(gradients_of(yardstick, kernel, n), drawn(n)) for n in count(1))
    exact = truth(gradients_of(yardstick, kernel, 0), inputs)
    return compare(ours, exact, criterion, case.summed, further)


def gradients_of(call: Callable[..., Any], kernel: Kernel, seed: int) -> Callable[..., Tensors]:
    """Function that returns the gradients of a call's inputs, for gradients of its results that a
    seed draws."""

    def gradients(*tensors: torch.Tensor) -> Tensors:
        leaves = [
            tensor.detach().requires_grad_(number in kernel.gradients)
            for number, tensor in enumerate(tensors)
        ]
        with torch.enable_grad():
            results = as_tuple(call(*leaves))
            arriving = _arriving(results, kernel.outputs, seed)
            pairs = zip(results, arriving, strict=True)
            roots, incoming = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
            return torch.autograd.grad(
                roots, [leaves[number] for number in kernel.gradients], incoming
            )

    return gradients


def _arriving(results: Tensors, dtypes: Sequence[str], seed: int) -> list[torch.Tensor]:
    """Gradients of results: the same numbers for any dtype that they are computed in."""
    drawn = torch.Generator().manual_seed(seed)
    return [
        torch.randn(result.shape, generator=drawn)
        .to(getattr(torch, dtype))
        .to(result.device, result.dtype)
        for result, dtype in zip(results, dtypes, strict=True)
    ]
