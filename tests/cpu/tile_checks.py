"""Kernels checked by the NumPy meaning of their tile programs: the emitted launcher, inputs and
criterion are those of the checking child."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import pytest

from fusion_advisor.codegen.emit import written
from fusion_advisor.codegen.kernel_file import KernelFile
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.shipped.load import load_module, process_folder
from fusion_advisor.support.kernel_fault import KernelFault
from fusion_advisor.tile.program import TileFunction
from fusion_advisor.verify import check_child

from .checks import CRITERION
from .generated import group, kernel
from .tile_interpreter import Change, interpret


@dataclass(frozen=True)
class Programs:
    """An emitted kernel, and the tile functions that it was written from."""

    kernel: Kernel
    file: KernelFile

    @property
    def exchanges(self) -> bool:
        """Do programs share a row?"""
        return any(kernel.step.phases for kernel in self.file.kernels)


@cache
def programs(name: str) -> Programs:
    """One of the generated kernels."""
    return Programs(kernel(name), written(*group(name)))


def fault(
    made: Programs,
    functions: Iterable[TileFunction] | None = None,
    *,
    seeds: int = 2,
    together: bool = False,
    change: Change | None = None,
    elements: int = CRITERION.eager_elements,
) -> str:
    """What the check finds wrong; "" where nothing is. Other `functions` are checked in the place
    of the kernel's own, `change` makes another launch of each, and eager's error is taken over so
    many `elements`."""
    criterion = replace(CRITERION, eager_elements=elements)
    functions = made.file.functions if functions is None else tuple(functions)
    module = _module(made.kernel.text)
    with _interpreted():
        yardstick = check_child.yardstick_of(made.kernel, module)
        for case in made.kernel.cases:
            for seed in range(seeds):
                traffic = interpret(module, functions, seed, together=together, change=change)
                counted = None if together else traffic  # words travel otherwise than by the plan
                run = check_child.Run(seed, "cpu", criterion, lambda c=counted: nullcontext(c))
                try:
                    check_child.check_once(made.kernel, module, yardstick, case, run)
                except KernelFault as found:
                    return str(found)
    return ""


@cache
def _module(text: str) -> ModuleType:
    """An emitted file; its jit functions are to be replaced."""
    return load_module(text, process_folder())


@contextmanager
def _interpreted() -> Iterator[None]:
    """Launchers take tensors of the CPU, and raise instead of falling back."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("FUSION_ADVISOR_STRICT", "1")
        yield
