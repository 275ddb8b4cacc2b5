"""Constants of an expression beside tensors: numbers, words, and functions of torch that Python
holds.

A kernel has them as constants. Where they come from is followed back, through names, arguments and
what functions return, to what can be asked where the kernel is called: attributes of modules, names
that are bound there, and sizes of tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fusion_advisor.codegen.eager_reference import numbers_of
from fusion_advisor.ir.source_trace import CHANGING, LENGTH, OPAQUE, UNSPELLED, Evaluation, Span
from fusion_advisor.sourcepatch.editing.ranks import shape_of, size
from fusion_advisor.sourcepatch.editing.sources import (
    Function,
    SourcePlace,
    Sources,
    held_path,
    names_in,
    path_of,
    span_of,
    spelled,
)
from fusion_advisor.sourcepatch.editing.spelling import (
    Names,
    SpellingAtPlace,
    binds,
    is_local,
    parameters,
    place_in,
    targets,
)


@dataclass(frozen=True)
class HeldNumber:
    """Number at a place of a file: `value` as source spells it, an attribute of a module, a name's
    value, or a size. `text` is an expression with that value where it was asked for; empty where
    none is known."""

    file: str
    span: Span
    of: Literal["module", "name", "size", "object"]
    value: str
    text: str


class HeldNumbers:
    """The numbers in the source of one trail."""

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self._trail = sources.trail
        self._computed: set[tuple[int, Span]] = set()
        """Places that compute a part of the graph, by activations."""
        self._returned: dict[tuple[int, Span], int] = {}
        """The calls that return a number, by who makes them and where."""
        for step in self._trail.steps:
            if isinstance(step, Evaluation):
                self._computed |= {*sources.chain(step.activation, step.place)}
        for number, call in enumerate(self._trail.activations):
            if call.caller is not None and call.place and (call.value or "").startswith("="):
                self._returned[call.caller, call.place] = number

    def read(
        self, step: int, place: SourcePlace, line: int, names: Names | None = None
    ) -> Iterator[HeldNumber]:
        """Yield the numbers in the expression that made a node, each with its text at a line of a
        place around the expression, where `names` are bound (None: those of the source)."""
        made = self._trail.steps[step]
        assert isinstance(made, Evaluation)  # it made a node
        file = self.sources.file(self._trail.activations[made.activation].file)
        node = file.expressions.get(made.place) or file.statements.get(made.place)
        launched = self.sources.made.get(step, ())
        numbered = any(
            any(n is not None for n in numbers_of(each)) or "dtype" in dict(each.kwargs)
            for each in launched
        )
        for number in _Asked(self, place, line, names).within(node, made.activation):
            if numbered or number.of != "object":
                yield number

    def idle(self, step: int) -> Literal["", "dtype", "dropout"]:
        """Work that an evaluation could do which hands on what it is given: give a dtype, or drop;
        empty for anything else."""
        made = self._trail.steps[step]
        assert isinstance(made, Evaluation)  # it stands somewhere
        file = self.sources.file(self._trail.activations[made.activation].file)
        match file.expressions.get(made.place):
            case ast.Call(ast.Attribute(attr="to" | "type" | "type_as")):
                return "dtype"
            case ast.Call(func) if "dropout" in ast.unparse(func).rpartition(".")[2]:
                return "dropout"
            case _:
                return ""

    def computed(self, activation: int, span: Span) -> bool:
        """Whether a part of the graph is computed there."""
        return (activation, span) in self._computed

    def called(self, activation: int, span: Span) -> bool:
        """Whether the model calls a function of its own there."""
        return (activation, span) in self.sources.calls

    def returning(self, activation: int, span: Span) -> int | None:
        """The call there that returns a number."""
        return self._returned.get((activation, span))


class _Asked:
    """Numbers as they are to be had at one line of a place."""

    def __init__(
        self, numbers: HeldNumbers, place: SourcePlace, line: int, names: Names | None = None
    ) -> None:
        self._numbers = numbers
        self._sources = numbers.sources
        self._trail = numbers.sources.trail
        self._place = place
        self._spelling = SpellingAtPlace(numbers.sources, place, line, names)
        self._names = self._spelling.names
        self._followed: set[tuple[int, Span]] = set()
        self._in_tensors = False
        """Whether the numbers are looked for that tensors are made of."""

    def within(self, node: ast.AST | None, activation: int) -> Iterator[HeldNumber]:
        """Yield the numbers in the parts of an expression that no other node computes."""
        names = self._spelling.words(node, activation)
        for child in ast.iter_child_nodes(node) if node is not None and names is not None else ():
            yield from self._parts(child, activation, names or {})

    def of(self, node: ast.expr, activation: int) -> Iterator[HeldNumber]:
        """Yield the numbers in an expression."""
        key = activation, span_of(node)
        names = self._spelling.words(node, activation)
        if names is None or key in self._followed:
            return
        self._followed.add(key)
        yield from self._parts(node, activation, names)

    def _parts(self, node: ast.AST, activation: int, names: Names) -> Iterator[HeldNumber]:
        if isinstance(node, ast.expr):
            taken = _taken_out(node)
            if taken and any(
                self._numbers.computed(activation, span_of(each))
                for each in ast.walk(taken)
                if isinstance(each, ast.expr)
            ):
                yield from self._taken_out(node, taken, activation, names)
                return
            if not self._in_tensors and self._numbers.computed(activation, span_of(node)):
                return
            if isinstance(node, ast.Name):
                yield from self._name(node, activation, names)
                return
            found = [*self._sized(node, activation), *self._held(node, activation, names)]
            returning = self._numbers.returning(activation, span_of(node))
            if returning is not None:
                found += self._property(node, returning, names)
                found += [] if found else self._result(node, activation, returning)
            if isinstance(node, ast.Call) and returning is None:
                found += self._computed(node, activation, names)
            if found:
                yield from found
                return
        for child in ast.iter_child_nodes(node):
            yield from self._parts(child, activation, names)

    def _taken_out(
        self, node: ast.expr, tensor: ast.expr, activation: int, names: Names
    ) -> Iterator[HeldNumber]:
        """Yield the numbers that a tensor is made of out of which an expression takes a number:
        capturing leaves no other trace of that. Of one that is made of tensors nothing tells."""
        parts = (n for n in ast.walk(tensor) if isinstance(n, ast.Name | ast.Attribute))
        if any(self._spelling.tensor(each, activation) is not None for each in parts):
            yield self._number(node, activation, "object", f"value of {ast.unparse(node)}")
        before, self._in_tensors = self._in_tensors, True
        yield from self._parts(tensor, activation, names)
        self._in_tensors = before

    def _spelled(self, node: ast.expr, activation: int) -> str | None:
        """An attribute of a module as the place spells it; None where no name leads there."""
        path = held_path(node, self._spelling.words(node, activation) or {})
        return None if path is None else spelled(self._trail, path, self._names)

    def _property(self, node: ast.expr, returning: int, names: Names) -> Iterator[HeldNumber]:
        """A property of a module, which is asked as it is."""
        call = self._trail.activations[returning]
        held = isinstance(node, ast.Attribute) and held_path(node, names) is not None
        if held and call.caller is not None:
            text = self._spelled(node, call.caller)
            yield self._number(node, call.caller, "module", (call.value or "")[1:], text)

    def _computed(self, node: ast.Call, activation: int, names: Names) -> Iterator[HeldNumber]:
        """Number that a call makes of objects: how many modules a container holds, or one that
        nothing here says."""
        func, unknown = node.func, f"value of {ast.unparse(node)}"
        if isinstance(func, ast.Name) and func.id == "len" and len(node.args) == 1:
            path = held_path(node.args[0], names)
            held = None if path is None else self._trail.modules.get(path)
            if path is not None and held and LENGTH in held.plain:
                text = spelled(self._trail, path, self._names)
                text = f"len({text})" if text else None
                yield self._number(node, activation, "module", held.plain[LENGTH], text)
                return
        if isinstance(func, ast.Name):
            locals_ = (
                each.id
                for arg in node.args
                for each in ast.walk(arg)
                if isinstance(each, ast.Name) and not names.get(each.id)
            )
            opaque = func.id in _OF_OBJECTS and any(self._is_local(n, activation) for n in locals_)
        else:
            path = held_path(func, names)
            followed = self._numbers.called(activation, span_of(node))
            opaque = path is not None and not followed and path not in self._trail.modules
        if opaque:
            yield self._number(node, activation, "object", unknown)

    def _number(
        self,
        node: ast.expr,
        activation: int,
        of: Literal["module", "name", "size", "object"],
        value: str,
        text: str | None = None,
    ) -> HeldNumber:
        file = self._trail.activations[activation].file
        return HeldNumber(file, span_of(node), of, value, text or "")

    # What has it.

    def _held(self, node: ast.expr, activation: int, names: Names) -> Iterator[HeldNumber]:
        """An attribute of a module, or of what that holds."""
        root, parts = self._followed_path(node, activation)
        word = names.get(root, "")
        unknown = self._number(node, activation, "object", f"value of {ast.unparse(node)}")
        if parts and not word and self._is_local(root, activation):
            yield unknown
        if not word.startswith(":") or not parts:
            return
        path = [part for part in word[1:].split(".") if part] + parts
        module, inside = self._sources.innermost(".".join(path))
        held = module.plain
        value = held.get(".".join(inside))
        if value not in (None, OPAQUE):
            asked = value not in (CHANGING, UNSPELLED)
            text = spelled(self._trail, ".".join(path), self._names) if asked else None
            yield self._number(node, activation, "module", value, text)
        elif len(inside) > 2 or OPAQUE in (value, held.get(".".join(inside[:-1]))):
            yield unknown  # of an object, or of one that an object holds

    def _is_local(self, name: str, activation: int) -> bool:
        """Whether a call gives or binds a name."""
        function = self._sources.code(activation)
        return function is not None and is_local(function, name)

    def _followed_path(self, node: ast.expr, activation: int) -> tuple[str, list[str]]:
        """The path of an attribute; `cfg.s` is `self.cfg.s` where `cfg = self.cfg` binds it."""
        root, parts = path_of(node)
        function = self._sources.code(activation)
        if not parts or function is None or root in parameters(function):
            return root, parts
        bound = [
            getattr(each, "value", None)
            for each in ast.walk(function)
            for target in targets(each)
            if isinstance(target, ast.Name) and target.id == root
        ]
        value = bound[0] if len(bound) == 1 else None
        if not isinstance(value, ast.Attribute):
            return root, parts
        root, around = path_of(value)
        return root, [*around, *parts]

    def _sized(self, node: ast.expr, activation: int) -> Iterator[HeldNumber]:
        """`x.shape[1]` or `x.size(1)`."""
        tensor, dim = size(node)
        if tensor is not None and dim is not None:
            yield from self._size(node, tensor, dim, activation)

    def _size(
        self, node: ast.expr, tensor: ast.expr, dim: int, activation: int
    ) -> Iterator[HeldNumber]:
        """A size of a tensor that has a name, or that a module holds."""
        ref = self._spelling.tensor(tensor, activation)
        shape = self._sources.shape(ref) if ref else ()
        if ref and -len(shape) <= dim < len(shape):
            text = self._spelling.size(ref, dim)
            yield self._number(node, activation, "size", str(shape[dim]), text)

    # Where it comes from.

    def _name(self, node: ast.Name, activation: int, names: Names) -> Iterator[HeldNumber]:
        word = names.get(node.id, "")
        if not word and self._is_unfollowed(node, activation):
            word = f"={UNSPELLED}"
        if not word.startswith("="):
            return
        if activation == self._place.activation and self._names.get(node.id) == word:
            yield self._number(node, activation, "name", word[1:], node.id)
            return
        function = self._sources.code(activation)
        unknown = self._number(node, activation, "name", word[1:])
        if function is None:
            yield unknown
            return
        given = node.id in parameters(function)
        binding = [each for each in ast.walk(function) if binds(each, node.id)]
        if given:
            yield from self._argument(function, node.id, activation, unknown)
        for each in binding:
            yield from self._bound(each, node.id, activation, unknown)
        if not given and not binding:  # closed over
            yield unknown

    def _is_unfollowed(self, node: ast.Name, activation: int) -> bool:
        """Whether a local name is called, of what no step tells."""
        file = self._sources.file(self._trail.activations[activation].file)
        match file.parents.get(node):
            case ast.Call(func) as call if func is node and self._is_local(node.id, activation):
                return not self._numbers.called(activation, span_of(call))
            case _:
                return False

    def _argument(
        self, function: Function, name: str, activation: int, unknown: HeldNumber
    ) -> Iterator[HeldNumber]:
        """Yield the numbers that a call passes for a parameter; none for its default, which the
        source says."""
        given, caller = self._spelling.passed(function, name, activation)
        if given is None:
            yield unknown
        elif caller != activation:
            yield from self.of(given, caller)

    def _bound(
        self, node: ast.AST, name: str, activation: int, unknown: HeldNumber
    ) -> Iterator[HeldNumber]:
        """Yield the numbers that a statement assigns to a local name, if it does."""
        for target in targets(node):
            if name not in names_in(target):
                continue
            value = getattr(node, "iter", None) or getattr(node, "value", None)
            plain = isinstance(target, ast.Name) or isinstance(node, (ast.For, ast.comprehension))
            if plain and isinstance(value, ast.expr):
                yield from self.of(value, activation)
                continue
            tensor = shape_of(value) if isinstance(value, ast.expr) else None
            dim = place_in(target, name)
            found: list[HeldNumber] = []
            if isinstance(value, ast.expr) and tensor and dim is not None:
                found += self._size(value, tensor, dim, activation)
            yield from found or [unknown]

    def _result(self, node: ast.expr, activation: int, returning: int) -> Iterator[HeldNumber]:
        """Yield the numbers of a call that computes nothing of the graph."""
        value = self._trail.activations[returning].value or ""
        unknown = self._number(node, activation, "name", value[1:])
        function = self._sources.code(returning)
        results = [n for n in ast.walk(function) if isinstance(n, ast.Return)] if function else []
        if not results:
            yield unknown
        asked = [result.value for result in results if result.value is not None]
        for each in asked:
            yield from self.of(each, returning)


def _taken_out(node: ast.expr) -> ast.expr | None:
    """The operand of what makes a number of a tensor: `x.item()`, `float(x)`."""
    match node:
        case ast.Call(ast.Attribute(value, "item" | "tolist")):
            return value
        case ast.Call(ast.Name("float" | "int" | "bool"), [value]):
            return value
        case _:
            return None


_OF_OBJECTS = ("len", "sum", "min", "max", "int", "float", "abs", "round", "next")
"""Functions of Python that make a number of what an object holds."""
