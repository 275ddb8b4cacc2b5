"""Kernels that this tool wrote, in a model that is traced: each call is one operator.

An emitted file has its launcher beside the eager reference that the launcher falls back to. While
it is traced it never launches: its guards are asked, but for the device, and where they hold the
call becomes `fusion_advisor::<name>`, which reads its inputs and writes its results as the kernel
does. The guards and the fallback are those of the runtime beside the file; files of earlier
versions stand alone, and have their own.
"""
# torch.library has no types for made-up schemas, emitted files none at all.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from fusion_advisor.ir.graph import OWN_OPS
from fusion_advisor.shipped.files import RUNTIME

NAMESPACE = OWN_OPS.removesuffix(".")
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_DEFINED: dict[str, Any] = {}
Call = Callable[..., Any]
_PARTS = {"serves", "fall_back", "fallbacks"}


class _Served(Exception):
    """Raised where every guard of a launcher holds."""


class _Refused(Exception):
    """Raised where a guard of a launcher does not hold."""


@contextmanager
def own_kernels(model: torch.nn.Module, besides: str | None = None) -> Generator[None, None, None]:
    """While active, calls of emitted kernels are operators; kernels of the package `besides` and
    those in the model's own file run their references."""
    with ExitStack() as stack:
        for module in [*_hosts()]:
            plain = bool(besides) and besides in module.__name__.split(".")[:-1]
            instead = _traced(module, operators=not plain)
            patch = mock.patch.object(module, "fall_back", _called_as_it_is_by(module, instead))
            stack.enter_context(patch)
            _asked_always(module, stack)
        for launcher in _beside(model):
            # one that trains is made of two functions: that behind its operator is the eager one
            eager = inspect.getclosurevars(launcher).nonlocals.get("call")
            stack.enter_context(mock.patch.object(launcher, "operator", eager))
        yield


@contextmanager
def references() -> Generator[None, None, None]:
    """While active, emitted kernels run their references, as for tensors that they do not serve."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"FUSION_ADVISOR_STRICT": "0"}))
        for module in [*_hosts()]:
            _asked_always(module, stack)
            if _launcher(module) is None:
                instead = _run_reference(vars(module)["fall_back"])
                stack.enter_context(mock.patch.object(module, "fall_back", instead))
        yield


def _asked_always(module: ModuleType, stack: ExitStack) -> None:
    """Let launchers of a host serve nothing, look nothing up, and be no operators."""
    stack.enter_context(mock.patch.object(module, "serves", _never))
    if "plan_of" in vars(module):  # earlier versions wrote none
        stack.enter_context(mock.patch.object(module, "plan_of", _no_plan))
        stack.enter_context(mock.patch.object(module, "TRACED", ()))


def _never(*_: Any) -> str:
    """Stands in for the check of a tensor: the launcher never launches while it is traced."""
    return "it is traced"


def _no_plan(*_: Any, **__: Any) -> tuple[None, None]:
    """Stands in for the plan cache: the launcher checks each tensor."""
    return None, None


def _run_reference(plain: Any) -> Call:
    """Fallback that runs the reference, also where the caller has statements of its own."""

    def called(problem: str, launcher: Any, reference: Call | None, *given: Any) -> Any:
        return plain(problem, launcher, reference or launcher.reference, *given)

    return called


def _called_as_it_is_by(module: ModuleType, instead: Call) -> Call:
    """Fallback as the launchers of a host call it: files that stand alone have one launcher, and do
    not name it."""
    own = _launcher(module)
    if own is None:
        return instead

    def called(problem: str, *tensors: Any) -> Any:
        return instead(problem, own, vars(module)["reference"], *tensors)

    return called


def _launcher(module: ModuleType) -> Call | None:
    """Launcher of a file that stands alone, named as its module; None for the runtime of many."""
    name = module.__name__.rpartition(".")[2]
    return vars(module)[name] if name != RUNTIME else None


def _hosts() -> Iterator[ModuleType]:
    """Modules with the guards of kernels that the model imported: runtimes, and files of earlier
    versions, each named as its launcher."""
    for module in [*sys.modules.values()]:
        parts = getattr(module, "__dict__", {})
        if "fall_back" not in parts or not parts.keys() >= _PARTS:  # of thousands of modules
            continue
        name = module.__name__.rpartition(".")[2]
        if name == RUNTIME or ("reference" in parts and callable(parts.get(name))):
            yield module


def _beside(model: torch.nn.Module) -> list[Call]:
    """Launchers in the file of a model (`ModelNew`), which has the guards under any names: without
    an operator, one that is traced runs its reference."""
    classes = {type(each) for each in model.modules()}
    forwards = [inspect.unwrap(each.forward) for each in classes if hasattr(each, "forward")]
    files = [forward.__globals__ for forward in forwards if inspect.isfunction(forward)]
    functions = {value for file in files for value in file.values() if inspect.isfunction(value)}
    return [f for f in functions if getattr(vars(f).get("operator"), "namespace", "") == NAMESPACE]


def _traced(module: ModuleType, *, operators: bool) -> Call:
    """Fallback that asks what a launcher asks, and runs an operator, or the reference, where that
    holds; where it does not, what the launcher falls back to: the caller's statements, if it has
    some, else the reference."""
    plain: Any = vars(module)["fall_back"]
    serves: Any = vars(module)["serves"]

    def called(problem: str, launcher: Any, reference: Call | None, *given: Any) -> Any:
        runs = reference or launcher.reference
        if reference and not operators:
            return reference(*given)
        asked = launcher if reference else launcher.or_none
        problem = _guarded(module, serves, asked, given) or ""
        if not problem:
            return (_operator(launcher, runs, given) if operators else runs)(*given)
        named = () if _launcher(module) else (launcher, reference)
        return plain(problem, *named, *given)

    return called


def _guarded(module: ModuleType, serves: Any, launcher: Call, given: tuple[Any, ...]) -> str | None:
    """Reason why a launcher does not serve what it is given, whatever their device; None where it
    serves them."""

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
            launcher(*given)
        except _Served:
            return None
        except _Refused as refused:
            return str(refused)
    return "it has nothing to do"


def _operator(launcher: Call, reference: Call, given: tuple[Any, ...]) -> Any:
    """The operator of an emitted file, with as many results as its reference."""
    name = launcher.__module__.replace(".", "_")
    if name not in _DEFINED:
        kinds = ["Tensor" if isinstance(each, torch.Tensor) else "float" for each in given]
        inputs = ", ".join(f"{kind} in{index}" for index, kind in enumerate(kinds))
        _LIBRARY.define(f"{name}({inputs}) -> Tensor[]")

        def results(*given: Any) -> list[torch.Tensor]:
            found = reference(*given)
            return [*found] if isinstance(found, tuple) else [found]

        _LIBRARY.impl(name, results, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", results, lib=_LIBRARY)
        _DEFINED[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    operator = _DEFINED[name]

    def call(*given: Any) -> Any:
        found = operator(*given)
        return found[0] if len(found) == 1 else tuple(found)

    return call
