"""Kernels that this tool wrote, in a model that is traced: each call is one operator.

An emitted file has its launcher beside the eager reference that the launcher falls back to. While
it is traced it never launches: its guards are asked, but for the device, and where they hold the
call becomes `fusion_advisor::<name>`, which reads its inputs and writes its results as the kernel
does.
"""
# torch.library has no types for made-up schemas, emitted files none at all.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from fusion_advisor.ir.graph import OWN_OPS

NAMESPACE = OWN_OPS.removesuffix(".")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEFINED: dict[str, Any] = {}
_PARTS = ("reference", "serves", "fall_back", "fallbacks")


class _Served(Exception):
    """Raised where every guard of a launcher holds."""


class _Refused(Exception):
    """Raised where a guard of a launcher does not hold."""


@contextmanager
def own_kernels(besides: str | None = None) -> Generator[None, None, None]:
    """While active, calls of emitted kernels are operators; kernels of the package `besides` run
    their references, as all do outside."""
    with ExitStack() as stack:
        for module in [*_emitted()]:
            plain = bool(besides) and module.__name__.startswith(f"{besides}.")
            instead = _reference(module) if plain else _traced(module)
            stack.enter_context(mock.patch.object(module, "serves", _never))
            stack.enter_context(mock.patch.object(module, "fall_back", instead))
            if "plan_of" in vars(module):  # earlier versions wrote none
                stack.enter_context(mock.patch.object(module, "plan_of", _no_plan))
        yield


@contextmanager
def references() -> Generator[None, None, None]:
    """While active, emitted kernels run their references, as for tensors that they do not serve."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"FUSION_ADVISOR_STRICT": "0"}))
        for module in [*_emitted()]:
            stack.enter_context(mock.patch.object(module, "serves", _never))
            if "plan_of" in vars(module):
                stack.enter_context(mock.patch.object(module, "plan_of", _no_plan))
        yield


def _never(*_: Any) -> str:
    """Stands in for the check of a tensor: the launcher never launches while it is traced."""
    return "it is traced"


def _no_plan(*_: Any) -> tuple[None, None]:
    """Stands in for the plan cache: the launcher checks each tensor."""
    return None, None


def _reference(module: ModuleType) -> Callable[..., Any]:
    def called(problem: str, *tensors: Any) -> Any:
        del problem
        return vars(module)["reference"](*tensors)

    return called


def _emitted() -> Iterator[ModuleType]:
    """Modules of emitted files that the model imported, each named as its launcher."""
    for module in [*sys.modules.values()]:
        name = getattr(module, "__name__", "").rpartition(".")[2]
        parts = getattr(module, "__dict__", {})
        if all(part in parts for part in _PARTS) and callable(parts.get(name)):
            yield module


def _traced(module: ModuleType) -> Callable[..., Any]:
    plain: Any = vars(module)["fall_back"]
    serves: Any = vars(module)["serves"]

    def called(problem: str, *tensors: Any) -> Any:
        problem = _guarded(module, serves, tensors) or ""
        return plain(problem, *tensors) if problem else _operator(module, len(tensors))(*tensors)

    return called


def _guarded(module: ModuleType, serves: Any, tensors: tuple[Any, ...]) -> str | None:
    """The reason that a launcher does not serve some tensors, whatever their device; None where it
    serves them."""
    name = module.__name__.rpartition(".")[2]

    def refuse(problem: str, *_: Any) -> NoReturn:
        raise _Refused(problem)

    def allocate(*_: Any, **__: Any) -> NoReturn:
        raise _Served

    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}
    with (
        mock.patch.object(module, "fall_back", refuse),
        mock.patch.object(module, "serves", serves),
        mock.patch.dict(os.environ, interpreted),
        mock.patch.object(torch, "empty_strided", allocate),
    ):
        try:
            vars(module)[name](*tensors)
        except _Served:
            return None
        except _Refused as refused:
            return str(refused)
    return "it has nothing to do"


def _operator(module: ModuleType, count: int) -> Any:
    """The operator of an emitted file, with as many results as its reference."""
    name = module.__name__.replace(".", "_")
    if name not in _DEFINED:
        reference: Any = vars(module)["reference"]
        inputs = ", ".join(f"Tensor in{index}" for index in range(count))
        _LIBRARY.define(f"{name}({inputs}) -> Tensor[]")

        def results(*tensors: torch.Tensor) -> list[torch.Tensor]:
            found = reference(*tensors)
            return [*found] if isinstance(found, tuple) else [found]

        _LIBRARY.impl(name, results, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", results, lib=_LIBRARY)
        _DEFINED[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    operator = _DEFINED[name]

    def call(*tensors: torch.Tensor) -> Any:
        found = operator(*tensors)
        return found[0] if len(found) == 1 else tuple(found)

    return call
