"""`fusion_advisor.apply(model, example_inputs)`: a model's groups run as kernels, in memory.

What `patch` would write is compiled instead: a module whose forward changes gets a class of its
own, derived from the one that it has, with that method edited. Parameters, buffers, hooks and the
rest of the model stay as they are, and so does the source file. A pickled model is the model as it
was; a deep copy keeps its kernels.

Where a tensor has another dtype, under autocast, in the other mode, with gradients, or with hooks
on a module whose call became part of a kernel, the original statements run.
"""
# Frames, code objects and the model are whatever the user has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import copy
import linecache
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch

from fusion_advisor.annotate import annotate
from fusion_advisor.capture import capture_module
from fusion_advisor.dataflow import dataflow
from fusion_advisor.emitted import lasting_folder, load_module
from fusion_advisor.errors import CaptureError
from fusion_advisor.kernels import Kernel
from fusion_advisor.machine import choose_device, gpu_names
from fusion_advisor.pipeline import put
from fusion_advisor.rulefiles import load_rulebook
from fusion_advisor.scenario import Scenario

_numbers = count(1)


@dataclass(frozen=True)
class Applied:
    """What became of the groups: the names of those that run as kernels, with how often they occur;
    why others do not, by their ids; and of larger ones, by their nodes, why the source cannot
    express them."""

    kernels: Mapping[str, int]
    refused: Mapping[str, str]
    unplaced: Mapping[str, str]


def apply(
    model: torch.nn.Module,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    device: str | None = None,
    rules: tuple[Path, ...] = (),
    verify: bool = True,
) -> Applied:
    """Let kernels run a model's groups, in place, for the mode that the model is in.

    The inputs are for one forward pass; the kernels serve other sizes, too. `device` and `rules`
    are as on the command line; with `verify` every kernel is checked against float64 first, on the
    GPU or through Triton's interpreter. Raises CaptureError and UsageError as `analyze` does.
    """
    rulebook = load_rulebook(rules)
    part, _ = choose_device(device, rulebook, gpu_names())
    asked = Scenario(mode="train" if model.training else "eval")
    others = [replace(asked, mode="eval" if model.training else "train")]
    others.append(replace(asked, autocast="bfloat16"))
    given = example_inputs, example_kwargs

    def flow(scenario: Scenario) -> Any:
        return dataflow(annotate(capture_module(model, *given, scenario, trail=True), part))

    originals = [("as asked", asked, flow(asked))]
    for scenario in others:
        with suppress(CaptureError):  # the model does not run so: there is nothing to keep
            originals.append(("otherwise", scenario, flow(scenario)))
    lines = {
        (f.__code__.co_filename, line)
        for _, f in _methods(model)
        for line in range(f.__code__.co_firstlineno, _last_line(f.__code__) + 1)
    }
    name = f"kernels_{next(_numbers)}"
    made, kernels, unplaced = put(
        originals, rulebook, lambda file, line: (file, line) in lines, name, verify_kernels=verify
    )
    codes = {
        (str(path), code.co_qualname): code
        for path, text in made.after.items()
        if path in made.before
        for code in _compiled(path, text)
    }
    changed = {_key(e.file, e.qualname) for each in made.puts for e in each.edits}
    _put_in(model, {key: codes[key] for key in changed}, f"fused_{name}", kernels)
    counted = {each.finding.name: each.occurrences for each in made.puts}
    return Applied(counted, made.refused, unplaced)


def _key(file: str, qualname: str) -> tuple[str, str]:
    """A function by its file, links followed, and its name."""
    return str(Path(file).resolve()), qualname


def _methods(model: torch.nn.Module) -> Iterator[tuple[type, FunctionType]]:
    """The plain methods of the model's classes, each with the class that has it."""
    for cls in dict.fromkeys(c for m in model.modules() for c in type(m).__mro__):
        if not cls.__module__.startswith("torch."):
            for method in vars(cls).values():
                if isinstance(method, FunctionType):
                    yield cls, method


def _last_line(code: CodeType) -> int:
    return max(line or 0 for _, _, line in code.co_lines())


def _compiled(path: Path, text: str) -> Iterator[CodeType]:
    """Every function of an edited text; tracebacks show the text."""
    name = f"<{path} with kernels>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    todo = [compile(text, name, "exec")]
    while todo:
        code = todo.pop()
        yield code
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]


def _put_in(
    model: torch.nn.Module,
    codes: Mapping[tuple[str, str], CodeType],
    package: str,
    kernels: tuple[Kernel, ...],
) -> None:
    """Give every module whose class has an edited method a class with it."""
    if not codes:
        return
    loaded = {k.entry: vars(load_module(k.text, lasting_folder()))[k.entry] for k in kernels}
    entries = SimpleNamespace(**loaded)
    edited: dict[type, dict[str, FunctionType]] = {}
    for cls, method in _methods(model):
        key = _key(method.__code__.co_filename, method.__code__.co_qualname)
        if key in codes:
            method.__globals__[package] = entries
            edited.setdefault(cls, {})[method.__name__] = _with_code(method, codes[key])
    derived: dict[type, type] = {}
    for module in model.modules():
        cls = type(module)
        if cls not in derived:
            methods: dict[str, Any] = {}
            for base in reversed(cls.__mro__):
                methods |= edited.get(base, {})
                own = {name for name in methods if name in vars(base) and base not in edited}
                methods = {name: f for name, f in methods.items() if name not in own}
            derived[cls] = _derived(cls, methods) if methods else cls
        module.__class__ = derived[cls]


def _with_code(method: FunctionType, code: CodeType) -> FunctionType:
    """The method with another code, and all else that it has."""
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = FunctionType(code, method.__globals__, method.__name__, method.__defaults__, closure)
    made.__kwdefaults__ = method.__kwdefaults__
    made.__dict__.update(method.__dict__)
    made.__doc__, made.__annotations__ = method.__doc__, method.__annotations__
    return made


def _derived(cls: type, methods: Mapping[str, FunctionType]) -> type:
    """A class that runs edited methods, and looks and pickles as the one it is derived from."""
    plain: Any = cls

    def reduce(self: Any, protocol: Any) -> Any:
        """As an instance of the class that can be imported."""
        _, _, *state = plain.__reduce_ex__(self, max(protocol, 2))
        return (object.__new__, (plain,), *state)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        made = plain.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))
        return made

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own: dict[str, Any] = {**names, "__reduce_ex__": reduce}
    if not hasattr(cls, "__deepcopy__"):
        own["__deepcopy__"] = deepcopy
    return type(cls.__name__, (cls,), {**own, **methods})
