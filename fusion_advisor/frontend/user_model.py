"""MODEL as the user names it, resolved to a module and its inputs. No weights, no GPU.

Everything is built under fake tensors: a 70B model takes no memory. CUDA devices in the user's code
are read as the host's, since the layouts are the same and there may be no GPU.
"""
# A model file is somebody's code: everything that comes out of it is Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._subclasses.fake_tensor import FakeTensorConverter, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fusion_advisor.ir.frames import source_of_traceback
from fusion_advisor.ir.scenario import Scenario, Sizes
from fusion_advisor.support.errors import AdvisorError, CaptureError, UsageError
from fusion_advisor.support.files import missing

aten = torch.ops.aten

_CONSTANT_ELEMENTS = 1 << 18
"""Most elements of a tensor whose values are known: so many has a mask over 512 tokens."""
_HIGHER_ORDER: Any = torch._ops.HigherOrderOperator
_FACTORIES = {
    aten.linspace.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.scalar_tensor.default,
}


@dataclass(slots=True)
class Loaded:
    """A module in its scenario's mode with the inputs of one forward pass, all fake."""

    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    fake: FakeTensorMode
    source: str
    assumed: list[str] = field(default_factory=list[str])
    program: torch.export.ExportedProgram | None = None
    breaks: bool = True
    """Whether Dynamo may be asked for graph breaks, which makes it forget what was compiled."""
    built: tuple[int, ...] = ()
    """The distinct whole numbers that the model's factory was given."""
    hint: str = ""
    """Advice where forward raises: the inputs that it takes and was not given."""
    loss: Callable[[Any], Any] | None = None
    """The loss of the model's output, where its file defines one."""
    optimizer: Callable[[Any], Any] | None = None
    """The optimizer of given parameters, where the model's file defines one."""


class _Constants(FakeTensorConverter):
    """Constants behind fake tensors. What has no storage, as a sparse tensor, shares none of
    theirs: torch's own class asks for its storage, which raises."""

    def invalidate_constant_aliases(self, tensor: torch.Tensor) -> None:
        if tensor.layout == torch.strided:
            super().invalidate_constant_aliases(tensor)


class HostFakeMode(FakeTensorMode):
    """Fake tensors that remember small constants, so that `linspace(...)[i].item()` is a number."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.fake_tensor_converter = _Constants()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, _HIGHER_ORDER) and func not in registered_hop_fake_fns:
            # torch looks for the rule of a mode by its very class
            return func.python_key_table[FakeTensorMode](self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def may_turn_const(self, t: torch.Tensor) -> bool:
        return (
            t.numel() <= _CONSTANT_ELEMENTS
            and t.layout == torch.strided
            and t.device.type == "cpu"
            and not self.is_our_fake(t)
        )

    def _cached_dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in _FACTORIES:  # modes that remember no constant share the cache
            return self._dispatch_impl(func, types, args, kwargs)
        return super()._cached_dispatch_impl(func, types, args, kwargs)

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super()._dispatch_impl(func, types, args, kwargs)
        if func in _FACTORIES and _small_constant(result, args, kwargs):
            with torch._C._DisableTorchDispatch():
                real = func(*args, **kwargs)
            return self.fake_tensor_converter.from_real_tensor(self, real, make_constant=True)
        return result


def _small_constant(result: Any, args: Any, kwargs: Any) -> bool:
    return (
        result.numel() <= _CONSTANT_ELEMENTS
        and result.device.type == "cpu"
        and all(not isinstance(x, torch.SymInt) for x in pytree.tree_leaves((args, kwargs)))
    )


class OnHost(TorchFunctionMode):
    """Reads every CUDA device in the user's code as the host."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0]
        if _names_cuda(args) or (kwargs and _names_cuda(tuple(kwargs.values()))):
            args = tuple(_host(value) for value in args)
            kwargs = {name: _host(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _names_cuda(values: Any) -> bool:
    return any(
        (isinstance(v, torch.device) and v.type == "cuda")
        or (isinstance(v, str) and v.startswith("cuda"))
        for v in values
    )


def _host(value: Any) -> Any:
    if _names_cuda((value,)):
        return torch.device("cpu")
    return value


# Files and modules.


def load_python(model: str, scenario: Scenario, fake: FakeTensorMode) -> Loaded:
    """The model that a Python file or module defines, with its inputs; CaptureError, one line."""
    with building(scenario, fake):
        module, draw, assumed, built, namespace = found_in(model, scenario.sizes)
        if scenario.cast and scenario.dtype is not None:
            module = module.to(getattr(torch, scenario.dtype))
        args, kwargs = draw()
    args, kwargs = under_scenario(module, args, kwargs, scenario, fake)
    assumed.append(f"mode={scenario.mode}")
    if scenario.dtype is None:
        assumed.append("dtype as the model has it")
    return Loaded(
        module, args, kwargs, fake, model, assumed, built=built,
        loss=_function(namespace, "loss"), optimizer=_function(namespace, "optimizer"),
    )  # fmt: skip


def _function(namespace: ModuleType, name: str) -> Callable[[Any], Any] | None:
    """A function of the model's own file; None where there is none."""
    found = getattr(namespace, name, None)
    return found if inspect.isfunction(found) else None


class NamedModel(NamedTuple):
    """Module that a Python file or module defines, the function that draws its inputs, the
    assumptions made in finding them, the whole numbers that its factory was given, and the Python
    module that it is from."""

    module: torch.nn.Module
    draw: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    assumed: list[str]
    built: tuple[int, ...]
    namespace: ModuleType


def found_in(model: str, sizes: Sizes | None = None) -> NamedModel:
    """Build what a Python file or module defines, with other numbers where `sizes` has some. Raises
    CaptureError, one line."""
    namespace, name, file = _import(model)
    module, name, assumed, built = _find(namespace, name, file, dict(sizes.built) if sizes else {})

    def draw() -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs_of(_inputs(namespace, module, name, file), file)

    return NamedModel(module, draw, assumed, built, namespace)


@contextmanager
def building(scenario: Scenario, fake: FakeTensorMode) -> Generator[None, None, None]:
    """Fake tensors, the scenario's default dtype, CUDA read as the host."""
    # torch redraws until no value is out of range, which no fake tensor can tell.
    drawn = mock.patch("torch.nn.init._no_grad_trunc_normal_", _left_as_is)
    with defaults(scenario), drawn, swappable(), fake, OnHost():
        yield


@contextmanager
def defaults(scenario: Scenario) -> Generator[None, None, None]:
    """Set the dtype that models are built in."""
    before = torch.get_default_dtype()
    if scenario.dtype is not None:
        torch.set_default_dtype(getattr(torch, scenario.dtype))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_swap = torch.utils.swap_tensors


def swappable() -> AbstractContextManager[object]:
    """Let `model.half()` and `.to(dtype)` swap the contents of fake parameters, where a model is
    built and where its forward does so. torch refuses tensors with weak references, which the fake
    mode itself holds here."""
    return mock.patch("torch.utils.swap_tensors", _swapped)


def _swapped(one: torch.Tensor, other: torch.Tensor) -> None:
    with mock.patch("weakref.getweakrefs", return_value=[]):
        _swap(one, other)


def _left_as_is(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _import(model: str) -> tuple[ModuleType, str, str]:
    """The Python module that MODEL names, the name wanted from it, and its file."""
    path, _, name = model.partition(":")
    if path.endswith(".py") or "/" in path:
        return _import_file(path), name, path
    if not name:
        raise UsageError(
            f"model {model!r}: {missing(path)}; give FILE.py, FILE.py:NAME, package.module:NAME, "
            "hf:config.json, FILE.pt2 or RECORDING.json"
        )
    sys.path.insert(0, str(Path.cwd()))
    namespace = guarded(f"importing {path}", lambda: importlib.import_module(path))
    return namespace, name, getattr(namespace, "__file__", None) or path


def _import_file(path: str) -> ModuleType:
    file = Path(path)
    if not file.is_file():
        raise CaptureError(f"{path}: {missing(path)}; give the path of a Python file with a model")
    sys.path.insert(0, str(file.resolve().parent))
    identity = "".join(c if c.isalnum() else "_" for c in file.stem)
    spec = importlib.util.spec_from_file_location(
        f"fusion_advisor_model_{identity}", file.resolve()
    )
    if spec is None or spec.loader is None:
        raise CaptureError(f"{path}: not a Python file; MODEL files end in .py or .pt2")
    namespace = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = namespace
    loader = spec.loader
    guarded(f"importing {path}", lambda: loader.exec_module(namespace))
    return namespace


def _find(
    namespace: ModuleType, name: str, file: str, built: Mapping[int, int]
) -> tuple[torch.nn.Module, str, list[str], tuple[int, ...]]:
    """The module, its name, the assumptions made in finding them, and the whole numbers that its
    factory was given; numbers in `built` are replaced."""
    assumed: list[str] = []
    numbers: tuple[int, ...] = ()
    if not name:
        name = next((n for n in ("Model", "model") if hasattr(namespace, n)), "")
        if not name:
            name = _only_module_class(namespace, file)
            assumed.append(f"model={name}")
    found: Any = namespace
    for part in name.split("."):
        if not hasattr(found, part):
            raise CaptureError(f"{file}: has no {name!r}; name a module, a class or a factory")
        found = getattr(found, part)
    module = found
    if built and isinstance(found, torch.nn.Module):
        raise CaptureError(f"{file}: {name} is there already, built of nothing")
    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise CaptureError(
                f"{file}: {name} is a {type(found).__name__}; "
                "expected a module, a class or a factory"
            )
        args, kwargs = (), {}
        if hasattr(namespace, "get_init_inputs"):
            given = guarded("get_init_inputs()", namespace.get_init_inputs)
            args, kwargs = inputs_of(given, f"{file}: get_init_inputs()")
            numbers = tuple(dict.fromkeys(filter(_is_whole, pytree.tree_leaves((args, kwargs)))))
        if not built.keys() <= {*numbers}:
            raise CaptureError(f"{file}: get_init_inputs() has no {min(built.keys() - {*numbers})}")
        if built:
            args, kwargs = pytree.tree_map_only(int, partial(_another, built), (args, kwargs))
        _check_served(found, args, kwargs, f"{file}: {name}")
        module = guarded(f"building {name}(...)", lambda: found(*args, **kwargs))
    if not isinstance(module, torch.nn.Module):
        raise CaptureError(
            f"{file}: {name} made a {type(module).__name__}, not a torch.nn.Module; "
            "name a module, a class or a factory of one"
        )
    return module, name, assumed, numbers


def _is_whole(value: Any) -> bool:
    return type(value) is int


def _another(built: Mapping[int, int], value: int) -> int:
    return built.get(value, value) if _is_whole(value) else value


def _check_served(found: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: str) -> None:
    """Raise CaptureError where a class or factory asks for arguments that are not there."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):  # written in C: the call itself tells
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        advice = "define get_init_inputs() with what it is built from"
        if not isinstance(found, type):
            advice += ", or put a function of tensors into the forward of a torch.nn.Module"
        raise CaptureError(f"{named}{signature}: {error}; {advice}") from error


def _only_module_class(namespace: ModuleType, file: str) -> str:
    classes = [
        n
        for n, value in vars(namespace).items()
        if isinstance(value, type)
        and issubclass(value, torch.nn.Module)
        and value.__module__ == namespace.__name__
    ]
    if len(classes) == 1:
        return classes[0]
    choice = f" (it has {', '.join(classes)})" if classes else ""
    raise CaptureError(
        f"{file}: no Model and no model found{choice}; define Model and get_inputs(), "
        f"or name one as {file}:NAME"
    )


def _inputs(namespace: ModuleType, module: torch.nn.Module, name: str, file: str) -> Any:
    for holder in (module, namespace):
        for attribute in ("get_inputs", "example_inputs"):
            value = getattr(holder, attribute, None)
            if value is None:
                continue
            given = guarded(f"{attribute}()", value) if callable(value) else value
            if given is None:
                raise CaptureError(
                    f"{file}: {attribute}() returned None; return a list, a dict of keywords or "
                    "(args, kwargs)"
                )
            return given
    return ()


def guarded(stage: str, action: Callable[[], Any]) -> Any:
    """Run the user's code; an exception becomes one line with its file and line."""
    try:
        return action()
    except AdvisorError:
        raise
    except ModuleNotFoundError as error:
        raise failure(stage, error, f"install {error.name} or correct the import") from error
    except SystemExit as error:
        raise failure(stage, error, "remove the call that ends the process") from error
    except Exception as error:
        raise failure(stage, error, "correct it there") from error


def failure(stage: str, error: BaseException, advice: str) -> CaptureError:
    """`file:line: stage raised Type: message; advice` for an exception in the user's code."""
    source = source_of_traceback(error)
    where = f"{source.file}:{source.line}: " if source else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = f": {lines[0][:300]}" if lines else ""
    return CaptureError(f"{where}{stage} raised {type(error).__name__}{message}; {advice}")


_KINDS_OF_INPUTS = "a list, a dict of keywords or (args, kwargs)"


def inputs_of(given: Any, file: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs that a file draws, as (args, kwargs). Raises CaptureError for another kind."""
    found = _as_call(given)
    if found is None:
        raise CaptureError(
            f"{file}: inputs are a {type(given).__name__}; return {_KINDS_OF_INPUTS}"
        )
    return found


def given_inputs(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs that a caller gives, as (args, kwargs); None is no input. Raises UsageError for
    another kind."""
    found = _as_call(() if given is None else given)
    if found is None:
        raise UsageError(f"inputs are a {type(given).__name__}; give {_KINDS_OF_INPUTS}")
    return found


def _as_call(given: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Inputs as (args, kwargs), from a list or tuple, a dict of keywords, `(args, kwargs)`, or one
    tensor; None for another kind of value."""
    if isinstance(given, dict):
        return (), {str(key): value for key, value in given.items()}
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, (list, tuple)):
        if (
            len(given) == 2
            and isinstance(given[0], (list, tuple))
            and isinstance(given[1], dict)
            and all(isinstance(key, str) for key in given[1])
        ):
            return tuple(given[0]), dict(given[1])
        return tuple(given), {}
    return None


# The scenario on inputs.


def under_scenario(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    scenario: Scenario,
    fake: FakeTensorMode,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's inputs as fake tensors, with the scenario's batch, sequence length and dtype."""
    with fake:
        args, kwargs = named_inputs(module, args, kwargs, scenario)
    sizes = leading_sizes((args, kwargs))
    wanted = {0: scenario.batch, 1: scenario.seq}

    def adjusted(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        shape = [
            wanted.get(dim) or size if size == sizes.get(dim) else size
            for dim, size in enumerate(value.shape)
        ]
        dtype = value.dtype
        if scenario.dtype is not None and dtype.is_floating_point:
            dtype = getattr(torch, scenario.dtype)
        if shape == list(value.shape) and dtype == value.dtype:
            return value if fake.is_our_fake(value) else fake.from_tensor(value)
        with fake:
            return torch.empty_permuted(shape, _memory_order(value), dtype=dtype)

    given = pytree.tree_map(adjusted, (args, kwargs))
    with fake:
        return resized(given, scenario.sizes)


def _memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions of a tensor from the largest step to the smallest; of one that is broadcast as
    they come."""
    broadcast = 0 in value.stride()
    return sorted(range(value.dim()), key=lambda dim: 0 if broadcast else -value.stride(dim))


def with_size(value: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor with another size in a dimension, that lies as it did: its own elements, repeated
    from the start where there are too few."""
    places = torch.arange(size, device=value.device) % value.shape[dim]
    shape = [size if d == dim else n for d, n in enumerate(value.shape)]
    made = torch.empty_permuted(shape, _memory_order(value), dtype=value.dtype, device=value.device)
    return made.copy_(value.index_select(dim, places))


def resized(given: Any, sizes: Sizes) -> Any:
    """Inputs at other sizes."""
    numbers = count()

    def changed(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        number = next(numbers)
        for tensor, dim, size in sizes.inputs:
            if tensor == number and value.dim() > dim and value.shape[dim] not in (0, size):
                value = with_size(value, dim, size)
        return value

    return pytree.tree_map(changed, given) if sizes.inputs else given


def leading_sizes(given: Any) -> dict[int, int | None]:
    """First and second dimension of the first tensor that has them: the batch and the
    sequence length."""
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    return {dim: next((x.shape[dim] for x in tensors if x.dim() > dim), None) for dim in (0, 1)}


def named_inputs(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], scenario: Scenario
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A model's inputs with those that `--input NAME=SHAPE:DTYPE` names, in which nothing is
    written."""
    if not scenario.inputs:
        return args, kwargs
    try:
        names = list(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        names = []
    positional = list(args)
    keywords = dict(kwargs)
    for spec in scenario.inputs:
        if names and spec.name not in names:
            raise CaptureError(
                f"--input {spec.name}: forward takes {', '.join(names)}; name one of them"
            )
        place = names.index(spec.name) if spec.name in names else len(positional)
        old = positional[place] if place < len(positional) else keywords.get(spec.name)
        dtype = getattr(torch, spec.dtype) if spec.dtype else None
        if dtype is None and isinstance(old, torch.Tensor):
            dtype = old.dtype
        if dtype is None and scenario.dtype is not None:
            dtype = getattr(torch, scenario.dtype)
        tensor = torch.empty(spec.shape, dtype=dtype)
        if place < len(positional):
            positional[place] = tensor
        else:
            keywords[spec.name] = tensor
    return tuple(positional), keywords


# Exported programs.


def load_program(path: str, fake: FakeTensorMode) -> Loaded:
    """A saved torch.export program, whose inputs are inside it; CaptureError, one line."""
    if not Path(path).is_file():
        raise CaptureError(f"{path}: no such file; give the path of a torch.export program")
    program = guarded(f"loading {path}", lambda: _exported(path))
    return Loaded(program.module(), (), {}, fake, path, ["mode and dtype as exported"], program)


_TENSORS_ALONE = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}


def _exported(path: str) -> torch.export.ExportedProgram:
    """The program in a file, of whose pickles nothing but tensors and plain containers is read:
    anything else could run code."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise UnpicklingError

    with mock.patch.dict(os.environ, _TENSORS_ALONE), mock.patch("pickle.loads", refuse):
        try:
            return torch.export.load(path)
        except UnpicklingError as error:
            raise CaptureError(
                f"{path}: holds pickled objects that are no tensors, and loading those could run "
                "code; export the model with tensors alone as inputs and constants"
            ) from error


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file; CaptureError when there is none."""
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise CaptureError(f"{path}: {error.strerror}; give the path of a config.json") from error
    except ValueError as error:
        raise CaptureError(f"{path}: not JSON ({error}); give a config.json") from error
    if not isinstance(content, dict):
        raise CaptureError(f"{path}: not a JSON object; give a config.json")
    return content
