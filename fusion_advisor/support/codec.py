"""Frozen records as JSON and back, by the types of their fields.

A record is an object of its fields, or a list of them where its class is marked as a `row`, or its
field as one of `rows`; tuples are lists; infinities and NaN are as Python's JSON spells them. A
reader takes either form of a record, leaves out fields that it does not know and takes defaults for
those that are missing. Where one of several records may stand, an object is told by the names of
its fields, a list by its length.
"""
# What JSON holds is anything.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

_T = TypeVar("_T")
_row_kinds: set[type] = set()

_PLAIN = frozenset((str, int, float, bool, type(None)))

ROWS = {"rows": True}
"""Metadata of a field whose records are written as lists."""


def row(kind: type[_T]) -> type[_T]:
    """Mark a dataclass whose records are written as lists."""
    _row_kinds.add(kind)
    return kind


def to_data(value: Any) -> Any:
    """Encode a record, or a container of records, as JSON data."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, tuple | list):
        return [*map(to_data, value)]
    if isinstance(value, Mapping):
        return {name: to_data(each) for name, each in value.items()}
    kind = type(value)
    if not is_dataclass(kind):
        return value
    found: dict[str, Any] = {}
    for name, rows in _names(kind).items():
        held = getattr(value, name)
        found[name] = [[*to_data(each).values()] for each in held] if rows else to_data(held)
    return [*found.values()] if kind in _row_kinds else found


def to_json(record: Any) -> str:
    """Encode a record as one line of JSON."""
    return json.dumps(to_data(record))


def from_data(kind: type[_T], data: Any) -> _T:
    """Decode a record from the data of `to_data`, before or after JSON. Raises ValueError for
    anything else."""
    return _reader(kind)(data)


def from_json(kind: type[_T], line: str | bytes) -> _T:
    """Decode a record that `to_json` wrote. Raises ValueError for anything else."""
    return from_data(kind, json.loads(line))


@cache
def _names(kind: Any) -> dict[str, bool]:
    """Fields of a record, each with whether its records are written as lists."""
    return {each.name: "rows" in each.metadata for each in fields(kind)}


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    origin, of = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(kind)
    if origin in (Union, UnionType):
        return _one_of(of)
    if origin is tuple and of[1:] == (...,):
        item = _reader(of[0])
        return lambda data: tuple(map(item, _known(data, (list, tuple))))
    if origin is tuple:
        items = [*map(_reader, of)]
        return lambda data: tuple(
            read(each) for read, each in zip(items, _known(data, (list, tuple)), strict=True)
        )
    if origin in (dict, Mapping):
        value = _reader(of[1])
        return lambda data: {k: value(each) for k, each in _known(data, (Mapping,)).items()}
    if kind is Any:
        return lambda data: data
    plain = map(type, of) if origin is Literal else [float, int] if kind is float else [kind]
    return partial(_known, kinds=tuple(plain))


def _known(data: Any, kinds: tuple[Any, ...]) -> Any:
    if not isinstance(data, kinds) or (isinstance(data, bool) and bool not in kinds):
        raise ValueError(f"{data!r} is no {kinds[0].__name__}")
    return data


def _record(kind: Any) -> Callable[[Any], Any]:
    types = inspect.get_annotations(kind, eval_str=True)
    readers = {name: _reader(types[name]) for name in _names(kind)}
    optional = {
        each.name
        for each in fields(kind)
        if each.default is not MISSING or each.default_factory is not MISSING
    }

    def read(data: Any) -> Any:
        if not isinstance(data, Mapping):
            data = dict(zip(readers, _known(data, (list, tuple)), strict=False))
        found = {name: read(data[name]) for name, read in readers.items() if name in data}
        if missing := readers.keys() - found.keys() - optional:
            raise ValueError(f"{kind.__name__} without {', '.join(sorted(missing))}")
        return kind(**found)

    return read


def _one_of(kinds: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Decoder for one of several types. Where a tuple among the types refers to the union by name,
    its elements are decoded by this same decoder."""
    records = [kind for kind in kinds if is_dataclass(kind)]
    nested = [kind for kind in kinds if get_origin(kind) is tuple]
    simple = [_reader(kind) for kind in kinds if kind not in records and kind not in nested]
    plain = _PLAIN.intersection(kinds)

    def read(data: Any) -> Any:
        if type(data) in plain:
            return data
        if isinstance(data, list | tuple) and nested:
            (item, *_) = get_args(nested[0])
            if isinstance(item, str):
                return tuple(map(read, data))
            return _reader(nested[0])(data)
        if isinstance(data, list | tuple | Mapping):
            whole = isinstance(data, Mapping)
            for kind in records:
                names = _names(kind)
                matches = data.keys() <= names.keys() if whole else len(data) == len(names)
                if matches or len(records) == 1:
                    return _reader(kind)(data)
        for each in simple:
            try:
                return each(data)
            except ValueError:
                continue
        raise ValueError(f"{data!r} is none of {', '.join(map(str, kinds))}")

    return read
