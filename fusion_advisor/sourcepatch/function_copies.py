"""The functions that a model's classes run, and copies of them with other code.

A method may be wrapped by decorators, which close over it; a function of a module is named by those
that call it, or found by them in a table or in the class of an object that they call. A copy of any
leaves the original as it is: wrappers are copied around it, callers are given another name for it,
and in place of an object one that has its state and hands out or runs the copy. Free of torch.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import CellType, CodeType, FunctionType
from typing import Any

from fusion_advisor.ir.frames import has_source
from fusion_advisor.ir.source_trace import Trail
from fusion_advisor.support.errors import UsageError

Key = tuple[str, str]
"""A function by its file, links followed, and its qualified name."""


_METHODS: tuple[Any, ...] = (staticmethod, classmethod)


def key_of(code: CodeType) -> Key:
    """Key of the function that a code object belongs to."""
    return key(code.co_filename, code.co_qualname)


def key(file: str, qualname: str) -> Key:
    """Key of a function in a file."""
    return _resolved(file), qualname


@lru_cache(maxsize=4096)
def _resolved(file: str) -> str:
    return str(Path(file).resolve())


@dataclass
class Functions:
    """The functions with a source that attributes of classes lead to: through decorators, through
    the global names that they use, and through the tables and callable objects under either."""

    attributes: dict[tuple[type, str], Any] = field(default_factory=dict[tuple[type, str], Any])
    """Attributes of the classes that lead to functions."""
    found: dict[Key, FunctionType] = field(default_factory=dict[Key, FunctionType])
    """One function for each code object that ran."""
    names: dict[Key, dict[str, Any]] = field(default_factory=dict[Key, dict[str, Any]])
    """Global names in each function that lead to other functions."""
    _accepted: Callable[[FunctionType], bool] = lambda function: True
    _objects: bool = True

    @classmethod
    def of(
        cls,
        classes: Iterable[type],
        ran: Container[Key],
        accepted: Callable[[FunctionType], bool] = lambda function: True,
        *,
        objects: bool = True,
    ) -> Functions:
        """Collect the functions that ran, and are accepted; without `objects` none that are only
        found in a table or by a call of an object."""
        found = cls(_accepted=accepted, _objects=objects)
        for owner in classes:
            for name, value in vars(owner).items():
                if found._follow(value, ran):
                    found.attributes[owner, name] = value
        return found

    def _follow(self, value: Any, ran: Container[Key]) -> bool:
        """Whether a value leads to functions that ran, which are noted."""
        leads = False
        for function in self.layers(value):
            this = key_of(function.__code__)
            if this not in ran or not has_source(function.__code__.co_filename):
                continue
            if not self._accepted(function):
                continue
            leads = True
            if this in self.found:
                continue
            self.found[this] = function
            self.names[this] = {}
            for name in _global_names(function.__code__):
                named = function.__globals__.get(name)
                if self._follow(named, ran):
                    self.names[this][name] = named
        return leads

    def holding(self, file: str, line: int) -> Key | None:
        """The innermost function that a line of a file is in."""
        around = [
            (function.__code__.co_firstlineno, this)
            for this, function in self.found.items()
            if this[0] == _resolved(file)
            and function.__code__.co_firstlineno <= line <= _last_line(function.__code__)
        ]
        return max(around)[1] if around else None

    def naming(self, changed: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """The functions that lead to changed ones through global names, those that lead to them in
        turn included, with these names and what they stand for."""
        found: dict[Key, dict[str, Any]] = {}
        every = set(changed)
        while True:
            for this, names in self.names.items():
                stale = {n: v for n, v in names.items() if self.leads_to(v, every)}
                if stale:
                    found[this] = stale
            if found.keys() <= every:
                return found
            every |= found.keys()

    def texts(self) -> dict[str, str]:
        """The texts of the functions' files. Raises UsageError where a file is not what was
        imported."""
        texts: dict[str, str] = {}
        for file in dict.fromkeys(file for file, _ in self.found):
            try:
                texts[file] = Path(file).read_text(encoding="utf-8")
                written = [*compiled(texts[file], file)]
            except (OSError, ValueError, SyntaxError) as error:
                raise UsageError(f"{file}: cannot be read again ({error}); start again") from error
            for this in [this for this in self.found if this[0] == file]:
                code = self.found[this].__code__
                alike = [each for each in written if each.co_qualname == code.co_qualname]
                if code not in alike:
                    raise UsageError(
                        f"{file}:{code.co_firstlineno}: {code.co_qualname}() is not what was "
                        "imported, for the file has changed since; start again"
                    )
                if len(alike) > 1:  # which of them an edit is of is not to be told
                    del self.found[this], self.names[this]
        return texts

    def reached(self, trail: Trail) -> set[Key]:
        """Functions that ran from classes' attributes alone, or from functions that name them."""
        own = {key_of(f.__code__) for value in self.attributes.values() for f in self.layers(value)}
        named = {
            this: {key_of(f.__code__) for value in names.values() for f in self.layers(value)}
            for this, names in self.names.items()
        }
        calls = trail.activations
        keys = [key(call.file, call.function) for call in calls]
        fine: list[bool] = []
        for call, this in zip(calls, keys, strict=True):
            at, held = call.caller, this in own
            while at is not None and not held:
                held = fine[at] and this in named.get(keys[at], ())
                at = calls[at].caller
            fine.append(held)
        strayed = {this for this, held in zip(keys, fine, strict=True) if not held}
        return self.found.keys() - strayed

    def layers(self, value: Any) -> Iterator[FunctionType]:
        """The functions that a value consists of."""
        return _layers(value, objects=self._objects)

    def leads_to(self, value: Any, changed: Container[Key]) -> bool:
        """Whether one of the functions that a value consists of is among the changed."""
        return any(key_of(function.__code__) in changed for function in self.layers(value))


def _layers(value: Any, *, objects: bool = True) -> Iterator[FunctionType]:
    """The functions that a value consists of: itself, what it closes over, and of an object
    what it holds and what a call of it runs."""
    todo, seen = [value], dict[int, Any]()
    while todo:
        at = todo.pop()
        if id(at) in seen:
            continue
        seen[id(at)] = at  # alive, so that nothing else takes its number
        if isinstance(at, _METHODS):
            todo.append(at.__func__)
        elif isinstance(at, FunctionType):
            yield at
            todo += [content for cell in at.__closure__ or () for content in _contents(cell)]
        elif objects:
            todo += [*_called(at), *_held(at)]


def compiled(text: str, name: str) -> Iterator[CodeType]:
    """Every function of a file's text."""
    todo = [compile(text, name, "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        yield code
        todo += [const for const in code.co_consts if isinstance(const, CodeType)]


def _last_line(code: CodeType) -> int:
    inner = (_last_line(const) for const in code.co_consts if isinstance(const, CodeType))
    return max([line or 0 for _, _, line in code.co_lines()] + [*inner])


class Copies:
    """Functions with other code, and copies of what closes over them, holds them in a table or runs
    them when it is called; each is made once."""

    def __init__(self, codes: Mapping[Key, CodeType]) -> None:
        self._codes = codes
        self._made: dict[int, Any] = {}

    def of(self, value: Any) -> Any:
        """A copy that leads to the functions with other code; a value that leads to none of them is
        given back as it is."""
        for kind in _METHODS:
            if isinstance(value, kind):
                made = self.of(value.__func__)
                return value if made is value.__func__ else kind(made)
        if not self._stale(value):
            return value
        if id(value) not in self._made:
            if isinstance(value, FunctionType):
                self._copy(value)
            else:
                self._stand_in(value)
        return self._made[id(value)]

    def _copy(self, function: FunctionType) -> None:
        code = self._codes.get(key_of(function.__code__), function.__code__)
        before = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells = {
            name: CellType() if any(map(self._stale, _contents(cell))) else cell
            for name, cell in before.items()
        }
        closure = tuple(cells[name] for name in code.co_freevars)
        made = FunctionType(
            code, function.__globals__, function.__name__, function.__defaults__, closure
        )
        self._made[id(function)] = made  # it may close over itself
        for name, cell in before.items():
            if cells[name] is not cell:
                cells[name].cell_contents = self.of(cell.cell_contents)
        made.__kwdefaults__ = function.__kwdefaults__
        made.__dict__.update({name: self.of(value) for name, value in vars(function).items()})
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        made.__doc__, made.__annotations__ = function.__doc__, function.__annotations__

    def _stand_in(self, value: Any) -> None:
        """An object that has its state in common with another, whatever becomes of it, and hands
        out and runs copies."""
        base: Any = UserDict if _class_of(value) is dict else _class_of(value)
        pairs: list[tuple[Any, Any]] = []

        def __getitem__(self: Any, key: Any) -> Any:
            found = base.__getitem__(self, key)
            for before, after in pairs:
                if found is before:
                    return after
            return found

        looked_up = {"__getitem__": __getitem__} if hasattr(base, "__getitem__") else {}
        cls: Any = derived(base, looked_up)
        made = self._made[id(value)] = object.__new__(cls)  # what it holds may lead to it
        made.__dict__ = {"data": value} if base is UserDict else vars(value)
        pairs += [(each, self.of(each)) for each in _held(value) if self._stale(each)]
        for called in _called(value):
            cls.__call__ = self.of(called)

    def _stale(self, value: Any) -> bool:
        return any(key_of(function.__code__) in self._codes for function in _layers(value))


def derived(cls: type, attributes: Mapping[str, Any]) -> type:
    """A class with other attributes that looks as the one it is derived from."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (Unannounced, cls), {**names, **attributes})


class Unannounced:
    """Base class that keeps the class beside it from acting on a new subclass (register it, wrap
    its methods): it has done that already."""

    def __init_subclass__(cls, **_: Any) -> None:
        pass


def _called(value: Any) -> list[FunctionType]:
    """Functions that a call of an object runs, if its class says so."""
    said = (vars(base).get("__call__") for base in _class_of(value).__mro__)
    called = next((each for each in said if each is not None), None)
    return [called] if isinstance(called, FunctionType) and _is_open(value) else []


def _held(value: Any) -> list[Any]:
    """Values of a table; empty where not all of them can be listed. Only plain dicts count: a dict
    of another class may make its values as they are read."""
    cls = _class_of(value)
    if cls is dict or (issubclass(cls, Mapping) and _is_open(value)):
        with suppress(Exception):  # the class may be anybody's
            return [*value.values()]
    return []


def _is_open(value: Any) -> bool:
    """Whether all of an object's state is in its `__dict__`."""
    cls = _class_of(value)
    slots = any(vars(base).get("__slots__") for base in cls.__mro__)
    return cls.__new__ is object.__new__ and hasattr(value, "__dict__") and not slots


def _class_of(value: object) -> type:
    return type(value)


def _contents(cell: CellType) -> tuple[Any, ...]:
    """The content of a cell, if it has any yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _global_names(code: CodeType) -> set[str]:
    """The names that a function and those within it may look up outside of functions, and never
    bind."""
    names, bound, todo = set[str](), set[str](), [code]
    while todo:
        at = todo.pop()
        names |= {*at.co_names}
        bound |= {*at.co_varnames, *at.co_cellvars, *at.co_freevars}
        todo += [const for const in at.co_consts if isinstance(const, CodeType)]
    return names - bound
