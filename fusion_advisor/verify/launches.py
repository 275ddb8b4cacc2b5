"""Calls of an emitted file's launcher as a check makes them: poisoned results, inputs kept, parts
of the runtime watched or replaced."""

# Triton and torch's dispatch types are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from fusion_advisor.ir.kernel import PROGRAMS
from fusion_advisor.shipped.files import HOST
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.verify.inputs import poison
from fusion_advisor.verify.stepping import as_tuple
from fusion_advisor.verify.tolerance import Tensors

_ALLOCATORS = ("empty_strided", "empty", "empty_like")


@contextmanager
def poisoned_outputs() -> Generator[None, None, None]:
    """Poison every tensor that the launcher allocates: it starts as NaN or an odd pattern."""
    originals = {name: getattr(torch, name) for name in _ALLOCATORS}

    def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def wrapper(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            poison(tensor.as_strided((size,), (1,), 0))
            return tensor

        return wrapper

    for name, original in originals.items():
        setattr(torch, name, poisoning(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def launch(
    module: ModuleType, entry: str, inputs: Tensors, numbers: Sequence[float] = ()
) -> Tensors:
    """Results of a launcher. Raises KernelFault where it fails, or changes an input."""
    before = [tensor.untyped_storage().clone() for tensor in inputs]
    try:
        with poisoned_outputs():
            result = as_tuple(getattr(module, entry)(*inputs, *numbers))
    except Exception as error:
        raise KernelFault(cause(error)) from error
    for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
        after = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        after.set_(tensor.untyped_storage())
        kept = torch.tensor([], dtype=torch.uint8, device=tensor.device)
        kept.set_(copy)
        if not torch.equal(after, kept):
            raise KernelFault(f"input {index} was changed by the kernel")
    return result


@contextmanager
def limited(module: ModuleType, programs: int) -> Generator[None, None, None]:
    """Let no more programs walk the rows than a case says; 0: as many as the file says."""
    own = {name: most for name, most in vars(module).items() if name.startswith(PROGRAMS)}
    if programs:
        vars(module).update(dict.fromkeys(own, programs))
    yield
    vars(module).update(own)


def has_runtime(module: ModuleType) -> bool:
    """Whether a file has a launcher that is written with the runtime: not a library's op, or a
    kernel that a person wrote."""
    return hasattr(getattr(module, HOST, module), "beyond_int32")


@contextmanager
def instead(
    module: ModuleType, name: str, other: Callable[[Any], Any]
) -> Generator[None, None, None]:
    """Give a kernel's file another function of the runtime, made of its own."""
    host: Any = getattr(module, HOST, module)
    own = getattr(host, name)
    setattr(host, name, other(own))
    try:
        yield
    finally:
        setattr(host, name, own)
