"""Raw Triton launches inside a model, as one opaque operator that tracing can carry.

`kernel[grid](...)` asks for a CUDA driver. While a model is traced, each launch becomes a call of
a custom operator `triton::<kernel>` instead: its tensors are recorded, and counted as written.

An `autograd.Function` is no such operator: its forward is traced through. Eager launches the
kernels inside it one by one, so they are what there is to count and to fuse; one node would hide a
matmul's FLOPs, charge a forward that only returns a view (a reversed gradient) for a kernel that
nobody launches, and need an operator without a schema, since what a forward writes in place shows
only when it runs. A Triton launch inside one is an operator here like any other.
"""
# Triton has no types for its launchers, torch.library none for made-up schemas.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

_LIBRARY = torch.library.Library("triton", "FRAGMENT")
_DEFINED: dict[tuple[str, int], Any] = {}


@contextmanager
def opaque_triton() -> Generator[None, None, None]:
    """While active, a launch of a Triton kernel runs no kernel and leaves one operator."""
    jit = sys.modules.get("triton.runtime.jit")
    if jit is None:
        yield
        return
    with ExitStack() as stack:
        classes: list[Any] = [jit.JITFunction]
        for module, name in (
            ("triton.runtime.autotuner", "Autotuner"),
            ("triton.runtime.autotuner", "Heuristics"),
            ("triton.runtime.interpreter", "InterpretedFunction"),
        ):
            if module in sys.modules:
                classes.append(getattr(sys.modules[module], name))
        for cls in classes:
            stack.enter_context(mock.patch.object(cls, "run", _run))
            if "__getitem__" in vars(cls):
                stack.enter_context(mock.patch.object(cls, "__getitem__", _getitem))
        yield


def _getitem(kernel: Any, grid: Any) -> Any:
    return functools.partial(_run, kernel, grid=grid)


def _run(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    _operator(_kernel_name(kernel), len(tensors))(*tensors)


def _nothing(*_: Any) -> None:
    """Stands for the computation of a launch under tracing."""


def _kernel_name(kernel: Any) -> str:
    while not hasattr(kernel, "__name__") and hasattr(kernel, "fn"):
        kernel = kernel.fn
    return re.sub(r"\W", "_", getattr(kernel, "__name__", "kernel"))


def _operator(name: str, count: int) -> Any:
    """The operator of a kernel by its name and number of tensors, all of them written."""
    key = (name, count)
    if key not in _DEFINED:
        unique = name if all(known != name for known, _ in _DEFINED) else f"{name}_{count}"
        letters = [f"Tensor(a{index}!) t{index}" for index in range(count)]
        _LIBRARY.define(f"{unique}({', '.join(letters)}) -> ()")
        _LIBRARY.impl(unique, _nothing, "CompositeExplicitAutograd")
        torch.library.register_fake(f"triton::{unique}", _nothing, lib=_LIBRARY)
        _DEFINED[key] = getattr(torch.ops.triton, unique).default
    return _DEFINED[key]
