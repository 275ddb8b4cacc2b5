"""Launchers are checked like kernels: what they refuse, and how wide they let offsets be."""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from fusion_advisor.ir.kernel import Case, Criterion, Kernel
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.verify.launches import instead, launch, limited
from fusion_advisor.verify.references import eagerly, truth
from fusion_advisor.verify.stepping import as_tuple
from fusion_advisor.verify.tolerance import Tensors, compare


def check_refusals(
    kernel: Kernel,
    module: ModuleType,
    yardstick: Callable[..., Any],
    case: Case,
    inputs: Tensors,
    criterion: Criterion,
) -> None:
    """Hand the launcher inputs that it was not made for, one changed at a time: it refuses them, or
    gives what the model's graph does. Raises KernelFault where it does neither."""
    for place, name in enumerate(kernel.inputs[: len(inputs)]):
        for what, changed in _others(inputs[place]):
            given = (*inputs[:place], changed, *inputs[place + 1 :])
            try:
                with limited(module, case.programs):
                    ours = _taken(module, kernel.entry, given)
                if ours is not None:
                    _check_agreement(yardstick, given, ours, criterion)
            except KernelFault as fault:
                raise KernelFault(f"{name} {what}: {fault}") from fault


def _taken(module: ModuleType, entry: str, inputs: Tensors) -> Tensors | None:
    """Results of a launcher for inputs that it may refuse; None where it does, however it says so.
    Raises KernelFault where it launches something that fails."""
    launches: list[Any] = []

    def noted(launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            launches.append(given)
            return launch(*given, **more)

        return call

    with instead(module, "launch", noted):
        try:
            return as_tuple(getattr(module, entry)(*inputs))
        except Exception as error:
            if not launches:  # no result, so none that is wrong
                return None
            raise KernelFault(f"taken, and its kernel fails: {cause(error)}") from error


def check_width(
    kernel: Kernel,
    module: ModuleType,
    yardstick: Callable[..., Any],
    case: Case,
    inputs: Tensors,
    criterion: Criterion,
) -> None:
    """Launch as if some offset were beyond 32 bits: the launcher asks it of every result, and its
    kernels give the same. Raises KernelFault."""
    asked = list[torch.Tensor]()

    def beyond(tensors: Sequence[torch.Tensor], *counted: int, behind: int = 0) -> bool:
        del counted, behind
        asked.extend(tensors)
        return True

    with limited(module, case.programs), instead(module, "beyond_int32", lambda _: beyond):
        ours = launch(module, kernel.entry, inputs)
    if not {tensor.data_ptr() for tensor in ours if tensor.numel()} <= {
        x.data_ptr() for x in asked
    }:
        raise KernelFault("no launch asks whether offsets in a result are beyond 32 bits")
    _check_agreement(yardstick, inputs, ours, criterion)


def _others(tensor: torch.Tensor) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Tensors of the same numbers that a launcher may take for another: of a dtype, a layout, a
    place in memory, a rank or a size of its own, or one that requires a gradient."""
    for dtype in _OTHER_DTYPES.get(tensor.dtype, ()):
        yield f"in {str(dtype).removeprefix('torch.')}", tensor.to(dtype)
    if tensor.dim() and tensor.shape[-1] > 1:
        spread = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2]
        yield "with gaps between its elements", spread.copy_(tensor)
    if tensor.dim() > 1 and min(tensor.shape[-2:]) > 1:
        turned = torch.empty_like(tensor.transpose(-1, -2), memory_format=torch.contiguous_format)
        yield "with columns in rows' place", turned.transpose(-1, -2).copy_(tensor)
        yield "with another row", torch.cat((tensor, tensor[..., :1, :]), -2)
    apart = tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape)
    yield "one element further in memory", apart.copy_(tensor)
    yield "with a dimension more", tensor[None]
    if tensor.is_floating_point():
        yield "that requires a gradient", tensor.detach().clone().requires_grad_()


_GROSS = 16
"""Times eager's error, and ulps, beyond which a result of one small draw is another one."""
_OTHER_DTYPES = {
    torch.float64: (torch.float32,),
    torch.float32: (torch.float16, torch.float64),
    torch.bfloat16: (torch.float16, torch.float32),
    torch.float16: (torch.bfloat16, torch.float32),
    torch.int64: (torch.int32,),
    torch.int32: (torch.int64,),
}


def _check_agreement(
    yardstick: Callable[..., Any], inputs: Tensors, ours: Tensors, criterion: Criterion
) -> None:
    """Raise KernelFault where results of inputs that a launcher took are not the graph's; they may
    lie in memory as those of the captured layout do (docs/limits.md)."""
    try:
        eager = truth(yardstick, inputs)
    except Exception as error:
        raise KernelFault(f"taken, and eager refuses it: {cause(error)}") from error
    graded = any(tensor.requires_grad for tensor in eagerly(yardstick, inputs))
    if graded and not any(tensor.requires_grad for tensor in ours):
        raise KernelFault("taken, and the results have no gradient")
    grossly = replace(criterion, factor=_GROSS, ulps=_GROSS, eager_elements=1)
    compare(tuple(tensor.detach() for tensor in ours), eager, grossly)
