"""Records, while a model is traced, which expression of its source makes each node.

Python's own tracing reports every call and line; the instruction of a frame has an exact position
in the source (`co_positions`), so that `silu(gate(x)) * up(x)` is four expressions and not one
line.
"""
# Frames and proxies carry Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# A module's hooks are private.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import ast
import dis
import math
import re
import sys
from collections.abc import Generator, Iterator, Sized
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from fusion_advisor.ir.frames import has_source, is_user
from fusion_advisor.ir.source_trace import (
    CHANGING,
    LENGTH,
    OPAQUE,
    SEQUENTIAL,
    UNSPELLED,
    Activation,
    Chosen,
    Evaluation,
    ModuleAttributes,
    Moment,
    Span,
    Trail,
)

_SEQUENTIAL = torch.nn.Sequential.forward.__code__
_TURN = next(
    instruction.positions.lineno
    for instruction in dis.get_instructions(_SEQUENTIAL)
    if instruction.opname.startswith("CALL") and instruction.positions
)
"""Line at which `Sequential.forward` calls its next module."""
_MARK = re.compile(r"<evaluation (\d+)>")
_PLAIN = re.compile(r"[\w.-]{1,40}")
_SHORT = 8
"""Length of tuples and lists that are recorded whole, at most."""


def mark(number: int) -> str:
    """The mark in a node's stack trace for the step that made it."""
    return f"<evaluation {number}>"


def marked(trace: str | None) -> int | None:
    """The step that a stack trace is marked with; None without a mark."""
    found = _MARK.search(trace or "")
    return int(found[1]) if found else None


class Recorder:
    """Collects a trail. `evaluated` is called as a node is made, from within the model's code."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._paths = {id(vars(child)): name for name, child in module.named_modules()}
        """By their attributes: torch's tracers put others in the place of modules, with the same
        attributes, where one is shared."""
        self._files = {type(child).__module__ for child in module.modules()}
        self._placeholders: dict[Any, int] = {}
        self._numbers: dict[int, int] = {}
        self._frames: list[FrameType] = []  # alive, so that no other frame takes their place
        self._followed: dict[CodeType, bool | str] = {}  # asked of every call that Python makes
        self._activations: list[Activation] = []
        self._steps: list[Evaluation | Chosen | Moment] = []
        self._packages: dict[str, str] = {}
        self._chosen: dict[int, frozenset[Span]] = {}
        """Branches on one line that each call is evaluating."""

    def trail(self, placeholders: tuple[str, ...]) -> Trail:
        """The trail recorded so far."""
        codes = [code for code, follows in self._followed.items() if follows]
        named = {name for code in codes for name in _names(code)} - {"training"}
        bound = {name for code in codes for name in _bound(code)}
        known = frozenset(codes)
        modules = {
            path: _held(child, named, bound, known) for path, child in self._module.named_modules()
        }
        return Trail(
            tuple(self._activations), tuple(self._steps), placeholders,
            modules=modules, tied=_tied(self._module), shared=_shared(self._module),
            packages=self._packages,
        )  # fmt: skip

    def evaluated(self, frame: FrameType | None) -> int | None:
        """The number of a new step at the innermost frame that is followed; None without one."""
        while frame is not None and id(frame) not in self._numbers:
            frame = frame.f_back
        place = position(frame) if frame is not None else None
        if frame is None or place is None:
            return None
        self._steps.append(Evaluation(self._numbers[id(frame)], place))
        return len(self._steps) - 1

    @contextmanager
    def following(self) -> Generator[None, None, None]:
        """Follow every call while the block runs."""
        before = sys.gettrace()
        # Python 3.12 reports instructions where the frame that begins the trace wants them.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        del argument
        code = frame.f_code
        follows = self._followed.get(code)
        if follows is None:
            follows = self._followed[code] = self._follows(frame)
        if event != "call" or not follows:
            return None
        caller = frame.f_back
        while caller is not None and id(caller) not in self._numbers:
            caller = caller.f_back
        if isinstance(follows, str) and (caller is None or _package(caller) != follows):
            return None
        runs_modules = code is _SEQUENTIAL
        if runs_modules and (caller is None or _has_hooks(frame.f_locals["self"])):
            return None
        self._numbers[id(frame)] = len(self._activations)
        self._frames.append(frame)
        self._activations.append(
            Activation(
                frame.f_code.co_filename,
                SEQUENTIAL if runs_modules else frame.f_code.co_qualname,
                self._numbers[id(caller)] if caller else None,
                position(caller) if caller else None,
            )
        )
        if not runs_modules:
            package = frame.f_globals.get("__package__") or ""
            self._packages[frame.f_code.co_filename] = package
        frame.f_trace_opcodes = not runs_modules and any(_branches(code))
        return self._turn if runs_modules else self._line

    def _turn(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Record the module that a `Sequential` runs next."""
        if event == "line" and frame.f_lineno == _TURN:
            words = {name: self._word(frame.f_locals[name]) for name in ("self", "module")}
            names = {name: word for name, word in words.items() if word is not None}
            self._steps.append(Moment(self._numbers[id(frame)], frame.f_lineno, names))
        return self._turn

    def _follows(self, frame: FrameType) -> bool | str:
        """Whether a frame runs the user's code, or that of a file of a package that a module is
        from; the package's name for code that such a file may call. What the user's code calls of a
        package, `einops.rearrange`, is an operation to it, as what it calls of torch is."""
        if frame.f_code is _SEQUENTIAL:
            return True
        file, own = frame.f_code.co_filename, frame.f_globals.get("__name__")
        if not has_source(file):
            return False
        package = _package(frame)
        from_there = any(_top(each) == package for each in self._files)
        return own in self._files or is_user(file) or (from_there and package)

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        number = self._numbers[id(frame)]
        if event == "opcode":
            around = _branches(frame.f_code)[frame.f_lasti // 2]
            begun = around - self._chosen.get(number, frozenset())
            self._steps += (Chosen(number, branch) for branch in sorted(begun))
            self._chosen[number] = around
        elif event == "line":
            words = {name: self._word(value) for name, value in frame.f_locals.items()}
            names = {name: word for name, word in words.items() if word is not None}
            self._steps.append(Moment(number, frame.f_lineno, names))
        elif event == "return":
            value = self._word(argument)
            self._activations[number] = replace(self._activations[number], value=value)
        return self._line

    def _word(self, value: Any) -> str | None:
        if isinstance(value, torch.nn.Module):
            path = self._paths.get(id(vars(value)))
            return None if path is None else f":{path}"
        if not isinstance(value, torch.Tensor):
            text = _spelled(value)
            return None if text is None else f"={text}"
        mode = get_proxy_mode()
        if mode is None:
            return None
        slot: Any = get_proxy_slot(value, mode.tracer, None)
        node = getattr(getattr(slot, "proxy", None), "node", None)
        if node is None:
            return None
        if node.op == "placeholder":
            if node not in self._placeholders:
                given = (n for n in node.graph.nodes if n.op == "placeholder")
                self._placeholders |= {n: number for number, n in enumerate(given)}
            return f"@{self._placeholders[node]}"
        number = marked(node.stack_trace)
        return None if number is None else f"#{number}"


def _top(name: str) -> str:
    return name.partition(".")[0]


def _package(frame: FrameType) -> str:
    """The package that a frame's code is from."""
    return _top(str(frame.f_globals.get("__name__")))


def _has_hooks(module: torch.nn.Module) -> bool:
    """Whether a call of a module runs more than its `forward`."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def position(frame: FrameType) -> Span | None:
    """The expression that a frame is evaluating."""
    return _positions(frame.f_code)[frame.f_lasti // 2]


def first_paths(module: torch.nn.Module) -> dict[str, str]:
    """The first path of each module by each of its paths, of which a shared one has several."""
    first = {id(child): path for path, child in module.named_modules()}
    every = module.named_modules(remove_duplicate=False)
    return {path: first[id(child)] for path, child in every}


def _shared(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """The other paths of each module that has several, by its first."""
    found: dict[str, list[str]] = {}
    for path, first in first_paths(module).items():
        if path != first:
            found.setdefault(first, []).append(path)
    return {first: tuple(paths) for first, paths in found.items()}


def _tied(module: torch.nn.Module) -> dict[str, tuple[str, ...]]:
    """All paths of each parameter or buffer that has several, by each of them."""
    paths: dict[int, list[str]] = {}
    for named in (module.named_parameters, module.named_buffers):
        for path, tensor in named(remove_duplicate=False):
            paths.setdefault(id(tensor), []).append(path)
    return {path: tuple(same) for same in paths.values() if len(same) > 1 for path in same}


@lru_cache(maxsize=4096)
def _positions(code: CodeType) -> tuple[Span | None, ...]:
    return tuple(_span(*place) for place in code.co_positions())


@lru_cache(maxsize=4096)
def _branches(code: CodeType) -> tuple[frozenset[Span], ...]:
    """The branches on one line around each instruction of a function."""
    places = _positions(code)
    lines = {place.line for place in places if place}
    every = [each for each in _conditional(code.co_filename) if each.line in lines]
    return tuple(
        frozenset(branch for branch in every if place and branch.holds(place)) for place in places
    )


@lru_cache(maxsize=64)
def _conditional(file: str) -> tuple[Span, ...]:
    """Both branches of each `a if b else c` of a file, what `a and b` evaluates at times, and the
    body of an `if` on one line, of which no line tells."""
    branches: list[ast.expr | ast.stmt] = []
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                branches += (body, orelse)
            case ast.BoolOp(values=[_, *rest]):
                branches += rest
            case ast.If(body=[first, *_]) if first.lineno == node.lineno:
                branches.append(first)
            case _:
                pass
    spans = (_span(n.lineno, n.end_lineno, n.col_offset, n.end_col_offset) for n in branches)
    return tuple(filter(None, spans))


def _span(line: int | None, end: int | None, column: int | None, last: int | None) -> Span | None:
    """Stretch of source between two places; None where one is not known."""
    if line is None or end is None or column is None or last is None:
        return None
    return Span(line, column, end, last)


def _names(code: CodeType) -> Iterator[str]:
    """Names of attributes and globals in a function, and in the functions within it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


def _bound(code: CodeType) -> Iterator[str]:
    """The attributes that a function sets."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield str(instruction.argval)


def _held(
    module: torch.nn.Module, named: set[str], bound: set[str], followed: frozenset[CodeType]
) -> ModuleAttributes:
    """The attributes of a module that a trail keeps: of modules of torch all, of others those that
    the code names and those that a class of torch gives them, except attributes that are `bound`
    anew as the model runs. `followed` is the code of which there are steps."""
    cls = type(module)
    plain_class = next(base for base in cls.__mro__ if _of_torch(base) or base is torch.nn.Module)
    if plain_class is not torch.nn.Module and cls.forward is plain_class.forward:
        own = vars(module).items()
        plain = {name: value for name, value in own if name[0] != "_" and name != "training"}
        plain |= dict.fromkeys(_left_out(module))
        kind = f"torch.nn.{cls.__name__}" if _of_torch(cls) else cls.__name__
        if isinstance(module, Sized):
            plain[LENGTH] = len(module)
        return ModuleAttributes(kind, "", _texts(plain), forward=_forward(module))
    classes = [vars(base) for base in reversed(cls.__mro__) if not _of_torch(base)]
    given = vars(module).keys() & {*_given(cls)}
    kept = named | given
    held = (pair for each in (*classes, vars(module)) for pair in each.items())
    values = {n: v.__func__ if isinstance(v, staticmethod) else v for n, v in held if n in kept}
    for name, value in [*values.items()]:
        if not isinstance(value, (torch.nn.Module, torch.Tensor, type)):
            within: dict[str, Any] = getattr(value, "__dict__", {})
            values |= {f"{name}.{n}": v for n, v in within.items() if n in named}
    forward = getattr(cls, "forward", None)  # of a script an instance alone has it
    code = getattr(forward, "__code__", None)
    texts = _texts(values) | {name: CHANGING for name in values if name in bound}
    others = {n: value for n, value in values.items() if n not in texts}
    texts |= dict.fromkeys((n for n, v in others.items() if not _is_known(v)), OPAQUE)
    methods = {n for base in classes for n, v in base.items() if isinstance(v, FunctionType)}
    methods -= vars(module).keys()  # those of a class are asked for with the class
    calls = (n for n, v in others.items() if n not in methods and _is_unspelled(v, followed))
    texts |= dict.fromkeys(calls, UNSPELLED)
    if plain_class is not torch.nn.Module:
        texts |= dict.fromkeys(_left_out(module), "None")
        given |= {*_left_out(module)}
    inherited = tuple(sorted(given & texts.keys()))
    file = code.co_filename if code else ""
    return ModuleAttributes(cls.__name__, file, texts, inherited, _forward(module))


def _forward(module: torch.nn.Module) -> str:
    """The file and the name of the code of a module's `forward`: `norms.py:Norm.forward`."""
    code = getattr(getattr(module, "forward", None), "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_qualname}" if code else ""


def _left_out(module: torch.nn.Module) -> list[str]:
    """The parameters and buffers that a module was built without: `bias=False`."""
    held = (module._parameters, module._buffers)
    return [name for each in held for name, tensor in each.items() if tensor is None]


def _given(cls: type) -> Iterator[str]:
    """The attributes that the classes of torch give to objects of a class which inherits them."""
    for base in cls.__mro__:
        code = getattr(vars(base).get("__init__"), "__code__", None)
        if code is not None and base.__module__.partition(".")[0] == "torch":
            yield from _bound(code)


def _of_torch(cls: type) -> bool:
    return getattr(torch.nn, cls.__name__, None) is cls


def _texts(values: dict[str, Any]) -> dict[str, str]:
    texts = {name: _spelled(value) for name, value in values.items()}
    return {name: text for name, text in texts.items() if text is not None}


def _is_unspelled(value: Any, followed: frozenset[CodeType]) -> bool:
    """Whether a value is called without a step that says so."""
    known = isinstance(value, (torch.nn.Module, torch.Tensor, type, property))
    code = getattr(value, "__code__", None)
    return callable(value) and not known and code not in followed


def _is_known(value: Any) -> bool:
    """Whether a value is followed by other means than its text, or gives no number."""
    known = (torch.nn.Module, torch.Tensor, type, str, property)
    return isinstance(value, known) or callable(value) or hasattr(value, "__func__")


def _spelled(value: Any) -> str | None:
    """A Python value as source text; None for all but numbers, short tuples and lists of numbers,
    one-word strings, dtypes and torch's functions."""
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, int | float) and type(value) is not bool:  # members of enums, too
        value = float(value) if isinstance(value, float) else int(value)
    if value is None or isinstance(value, torch.dtype) or type(value) in (bool, int):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f"float('{value}')"
    value = tuple(value) if isinstance(value, torch.Size) else value
    if type(value) in (tuple, list) and len(value) <= _SHORT:
        texts = [text for text in map(_spelled, value) if text]
        one = "," if type(value) is tuple and len(texts) == 1 else ""
        spelled = f"({', '.join(texts)}{one})" if type(value) is tuple else f"[{', '.join(texts)}]"
        return spelled if len(texts) == len(value) else None
    if type(value) is str:
        return repr(value) if _PLAIN.fullmatch(value) else None
    return _functions().get(id(value)) if callable(value) else None


@lru_cache(maxsize=1)
def _functions() -> dict[int, str]:
    """The functions of torch that a model may hold, by their identities."""
    return {
        id(value): f"{spelled}.{name}"
        for spelled, owner in (("torch", torch), ("torch.nn.functional", torch.nn.functional))
        for name, value in vars(owner).items()
        if callable(value) and not isinstance(value, type) and name[0] != "_"
    }
