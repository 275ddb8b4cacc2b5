"""Launchers are checked like kernels: what they refuse, and how wide they let offsets be."""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

from fusion_advisor.ir.kernel import Case, Criterion, Kernel
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.verify.launches import instead, launch, limited
from fusion_advisor.verify.references import truth, with_numbers
from fusion_advisor.verify.stepping import as_tuple
from fusion_advisor.verify.tolerance import Tensors, compare


@dataclass(frozen=True)
class Launcher:
    """Launcher of an emitted file, a case's inputs, and the model's graph, which it has to agree
    with."""

    module: ModuleType
    kernel: Kernel
    yardstick: Callable[..., Any]
    case: Case
    inputs: Tensors
    criterion: Criterion

    @property
    def numbers(self) -> tuple[float, ...]:
        """Numbers behind the inputs."""
        return self.case.numbers

    def check_refusals(self) -> None:
        """Hand it inputs that it was not made for, one changed at a time: it refuses them, or gives
        what the model's graph does. Raises KernelFault where it does neither."""
        for place, name in enumerate(self.kernel.inputs[: len(self.inputs)]):
            for what, changed in _others(self.inputs[place]):
                given = (*self.inputs[:place], changed, *self.inputs[place + 1 :])
                try:
                    if (ours := self._taken(given)) is not None:
                        self._check_agreement(given, ours)
                except KernelFault as fault:
                    raise KernelFault(f"{name} {what}: {fault}") from fault

    def check_width(self) -> None:
        """Launch as if some offset were beyond 32 bits: the launcher asks it of every result, and
        its kernels give the same. Raises KernelFault."""
        asked = set[int]()

        def beyond(tensors: Sequence[torch.Tensor], *counted: int, behind: int = 0) -> bool:
            del counted, behind
            asked.update(tensor.data_ptr() for tensor in tensors)
            return True

        with self._limited(), instead(self.module, "beyond_int32", lambda _: beyond):
            ours = launch(self.module, self.kernel.entry, self.inputs, self.numbers)
        if not asked.issuperset(tensor.data_ptr() for tensor in ours if tensor.numel()):
            raise KernelFault("no launch asks whether offsets in a result are beyond 32 bits")
        self._check_agreement(self.inputs, ours)

    def _limited(self) -> AbstractContextManager[None]:
        return limited(self.module, self.case.programs)

    def _taken(self, inputs: Tensors) -> Tensors | None:
        """Results for inputs that the launcher may refuse; None where it does, however it says so.
        Raises KernelFault where it launches something that fails."""
        launches: list[Any] = []

        def noted(launch: Callable[..., Any]) -> Callable[..., Any]:
            def call(*given: Any, **more: Any) -> Any:
                launches.append(given)
                return launch(*given, **more)

            return call

        with self._limited(), instead(self.module, "launch", noted):
            try:
                return as_tuple(getattr(self.module, self.kernel.entry)(*inputs, *self.numbers))
            except Exception as error:
                if not launches:  # no result, so none that is wrong
                    return None
                raise KernelFault(f"taken, and its kernel fails: {cause(error)}") from error

    def _check_agreement(self, inputs: Tensors, ours: Tensors) -> None:
        """Raise KernelFault where results of inputs that the launcher took are not the graph's;
        they may lie in memory as those of the captured layout do (docs/limits.md)."""
        try:
            found = truth(with_numbers(self.yardstick, self.numbers), inputs)
        except Exception as error:
            raise KernelFault(f"taken, and eager refuses it: {cause(error)}") from error
        graded = any(tensor.requires_grad for tensor in found.eager)
        if graded and not any(tensor.requires_grad for tensor in ours):
            raise KernelFault("taken, and the results have no gradient")
        grossly = replace(self.criterion, factor=_GROSS, ulps=_GROSS, eager_elements=1)
        compare(tuple(tensor.detach() for tensor in ours), found, grossly)


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
