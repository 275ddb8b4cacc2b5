"""Mutants of tile programs and of launches: one node of a program, or one argument, is another.

`mutants` gives all of a function, `launch_mutants` all of its launches, each with its kind and with
what stands there instead. A check has to find every one that differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from fusion_advisor.tile import program as ir
from fusion_advisor.tile.text import Text, shown

from .tile_interpreter import Change, Launched


@dataclass(frozen=True)
class Mutant:
    """A function with one node changed."""

    kind: str
    told: str
    function: ir.TileFunction
    unfilled: ir.TileFunction | None = None
    """Of another filling: the function that fills nothing there."""


@dataclass(frozen=True)
class LaunchMutant:
    """A launch of a function with one argument changed."""

    kind: str
    told: str
    change: Change


def mutants(function: ir.TileFunction) -> Iterator[Mutant]:
    """Every mutant of a function."""
    made: list[Mutant] = []
    for kind, told, body in _of_block(function.body):
        changed = replace(function, body=body)
        if kind == "filling lost":  # follows another filling of the same load
            made[-1] = replace(made[-1], unfilled=changed)
        else:
            made.append(Mutant(kind, told, changed))
    yield from made


_Found = Iterator[tuple[str, str, ir.Node]]


def _of_block(block: ir.Block) -> Iterator[tuple[str, str, ir.Block]]:
    for at, statement in enumerate(block):
        before, behind = block[:at], block[at + 1 :]
        if isinstance(statement, (ir.Store, ir.Do)):
            told = " ".join(Text().lines(statement))
            yield "missing statement", told, (*before, *behind)
        for kind, told, other in _of_node(statement):
            assert isinstance(other, ir.Statement)
            yield kind, told, (*before, other, *behind)


def _of_node(node: ir.Node) -> _Found:
    """Each mutant of a node and of what it is made of."""
    if isinstance(node, ir.DeviceCall) and node.function.startswith("widened_"):
        node = ir.DeviceCall(node.function, node.args[:1])  # the other says how it is compiled
    for kind, other in _changed(node):
        yield kind, f"{_text(node)} -> {_text(other)}", other
    for field in fields(node):  # pyright: ignore[reportArgumentType]
        value = getattr(node, field.name)
        if isinstance(value, ir.Node):
            for kind, told, other in _of_node(value):
                yield kind, told, replace(node, **{field.name: other})
        elif isinstance(value, tuple) and value and isinstance(value[0], ir.Statement):
            for kind, told, block in _of_block(value):
                yield kind, told, replace(node, **{field.name: block})
        elif isinstance(value, tuple):
            for at, each in enumerate(value):
                for kind, told, other in _of_node(each) if isinstance(each, ir.Node) else ():
                    changed = (*value[:at], other, *value[at + 1 :])
                    yield kind, told, replace(node, **{field.name: changed})


def _text(node: ir.Node) -> str:
    return shown(node) if isinstance(node, ir.Tile) else Text().lines(node)[0]


_OTHERS = {
    "add": "sub", "sub": "add", "mul": "add", "div": "mul", "maximum": "minimum", "abs": "neg",
    "minimum": "maximum", "exp": "exp2", "log": "log2", "sqrt": "abs", "rsqrt": "sqrt",
    "sigmoid": "tanh", "tanh": "sigmoid", "erf": "tanh", "floor": "ceil", "rint": "floor",
    "eq": "ne", "ne": "eq", "lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "and": "or",
    "or": "and",
}  # fmt: skip
_MONOIDS = {
    "sum": "max",
    "max": "sum",
    "min": "max",
    "prod": "sum",
    "logsum": "max",
    "argmax": "argmin",
}
_FILLS = {"0": "1", "0.0": "1.0", "-inf": "0.0", "inf": "0.0", "False": "True"}


def _changed(node: ir.Node) -> Iterator[tuple[str, ir.Node]]:
    """Other nodes in the place of one, by the kind of the mistake."""
    match node:
        case ir.Load(_, mask, other):
            if mask is not None:
                yield "mask dropped", replace(node, mask=None, other=None)
            if isinstance(other, ir.Literal) and other.text in _FILLS:
                yield "other filling", replace(node, other=ir.Literal(_FILLS[other.text]))
                yield "filling lost", replace(node, other=None)
        case ir.Store(_, _, mask) if mask is not None:
            yield "mask dropped", replace(node, mask=None)
        case ir.Binary("&", left, right):
            yield "mask widened", left
            yield "mask widened", right
        case ir.Binary("<", left, right):
            yield "tail lost", left < right - 1
            yield "one too many", left <= right
        case ir.Binary("<=" | "==" | "!=" as sign, left, right):
            yield (
                "other comparison",
                ir.Binary({"<=": "<", "==": "!="}.get(sign, "=="), left, right),
            )
        case ir.Binary("+", left, right):
            yield "term lost", left
            yield "term lost", right
            yield "sign changed", left - right
        case ir.Binary("-" | "/", left, right):
            yield "operands swapped", ir.Binary(node.sign, right, left)
        case ir.Binary("*" | "//" | "%" as sign, left, right):
            if right != ir.Literal("1.0"):
                yield "factor lost", left
            yield "factor changed", ir.Binary(sign, left, right + 1)
        case ir.Address(_, terms):
            yield "wrong offset", replace(node, terms=(*terms, ir.Literal("1")))
            for at in range(len(terms)):
                yield "term lost", replace(node, terms=(*terms[:at], *terms[at + 1 :]))
        case ir.Name(name) if "stride" in name:
            yield "stride changed", node * 2
        case ir.ProgramId(axis):
            yield "wrong program", ir.Literal("0")
            yield "wrong program", ir.ProgramId((axis + 1) % 3)
        case ir.Cast(value, dtype):
            if dtype not in ("float32", "float64", "int64"):  # wide enough for what they are given
                yield "cast dropped", value
            if dtype.startswith(("float", "bfloat")):
                yield "cast narrowed", replace(node, value=ir.Cast(value, "float8_e5m2"))
        case ir.Elementwise("where", (condition, this, other)):
            yield "choice lost", this
            yield "choice lost", other
            yield "choice turned", ir.where(condition, other, this)
        case ir.Elementwise(op, args) if op in _OTHERS:
            yield "other function", replace(node, op=_OTHERS[op])
            if op in ("sub", "div", "pow", "atan2"):
                yield "operands swapped", replace(node, args=args[::-1])
        case ir.Reduce(monoid, value, axis):
            if monoid in _MONOIDS and node.place is None:
                yield "other reduction", replace(node, monoid=_MONOIDS[monoid])
            if axis == 1:
                yield "wrong axis", replace(node, axis=0)
            if monoid == "sum":
                narrow = ir.Cast(value, "float8_e5m2")
                yield "terms narrowed", replace(node, value=ir.Cast(narrow, "float32"))
        case ir.Scan(monoid):
            yield "other reduction", replace(node, monoid=_MONOIDS[monoid])
            yield "scan turned", replace(node, reverse=not node.reverse)
        case ir.Combine(monoid, left, right):
            yield "other reduction", replace(node, monoid=_MONOIDS[monoid])
            yield "part lost", left
            yield "part lost", right
        case ir.Begin(_, ir.Full(_, ir.Literal(text))) if text in _FILLS:
            full = replace(node.value, value=ir.Literal(_FILLS[text]))
            yield "other filling", replace(node, value=full)
        case ir.For(_, _, stop):
            yield "tail lost", replace(node, stop=stop - 1)
        case ir.If(_, body, otherwise):
            yield "branch turned", replace(node, body=otherwise, otherwise=body)
        case ir.Literal(text) if "." in text and float(text) not in (0.0, 1.0):
            yield "constant changed", ir.Literal(repr(float(text) * 1.05))
        case _:
            pass


def launch_mutants(function: ir.TileFunction) -> Iterator[LaunchMutant]:
    """Every mutant of a function's launches. `WHOLE` and `NEAR` only ever allow less where they are
    false, `FAR` where it is true, and lanes beyond the last are masked, so the other way round a
    launch is as good."""
    name = function.name
    for axis in range(3):
        yield LaunchMutant("grid short", f"{name}: dimension {axis}", _on(name, _short, axis))
    numbers = [n for n in function.arguments if not n.endswith("_ptr")]
    for one in numbers:
        yield LaunchMutant("number off by one", f"{name}: {one}", _on(name, _more, one))
    strides = [n for n in numbers if "stride" in n]
    for one, other in pairwise(strides):
        told = f"{name}: {one}, {other}"
        yield LaunchMutant("numbers exchanged", told, _on(name, _exchanged, (one, other)))
    pointers = [n for n in function.arguments if n.endswith("_ptr")]
    for one, other in pairwise(pointers):
        told = f"{name}: {one}, {other}"
        yield LaunchMutant("tensors exchanged", told, _on(name, _exchanged, (one, other)))
    for one in function.constants:
        if one in ("WHOLE", "NEAR"):
            yield LaunchMutant("flag set", f"{name}: {one}", _on(name, _set, one))
        elif one in ("DIVISOR", "ROWS_DIVISOR"):
            yield LaunchMutant("divisor doubled", f"{name}: {one}", _on(name, _doubled, one))
        elif one in ("COLS", "REST", "ENDS", "PEERS", "ROWS", "BLOCK"):
            yield LaunchMutant("tile halved", f"{name}: {one}", _on(name, _halved, one))


def _on(name: str, change: Callable[[Launched, Any], Launched], what: Any) -> Change:
    return lambda launched, given: change(given, what) if launched == name else given


def _short(given: Launched, axis: int) -> Launched:
    grid = [*given.grid]
    grid[axis] -= grid[axis] > 1
    return replace(given, grid=tuple(grid))


def _with(given: Launched, **changed: Any) -> Launched:
    return replace(given, named={**given.named, **changed})


def _more(given: Launched, name: str) -> Launched:
    return _with(given, **{name: given.named[name] + 1})


def _exchanged(given: Launched, names: tuple[str, str]) -> Launched:
    one, other = names
    return _with(given, **{one: given.named[other], other: given.named[one]})


def _set(given: Launched, name: str) -> Launched:
    return _with(given, **{name: True})


def _doubled(given: Launched, name: str) -> Launched:
    return _with(given, **{name: given.named[name] * 2})


def _halved(given: Launched, name: str) -> Launched:
    return _with(given, **{name: max(given.named[name] // 2, 1)})
