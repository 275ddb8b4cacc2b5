"""Expressions of functions that a place calls, in names that are bound at that place.

`cfg.cap` in a function that was given `self.cfg` is `self.cfg.cap` where the function is called.
Names are followed back through arguments and local bindings, as far as they mean the same there.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Callable, Mapping
from typing import cast

from fusion_advisor.ir.graph import Ref
from fusion_advisor.sourcepatch.editing.ranks import size
from fusion_advisor.sourcepatch.editing.sources import (
    Function,
    SourcePlace,
    Sources,
    attribute,
    held_path,
    names_in,
    span_of,
    spelled,
)

Names = Mapping[str, str]

_ASKING = {
    *("isinstance", "len", "callable", "hasattr", "getattr", "type", "int", "float", "bool"),
    *("abs", "min", "max", "dim", "size", "numel", "is_contiguous", "is_floating_point"),
    *("ndimension", "is_complex", "startswith", "endswith", "get", "is_tensor"),
    *("is_grad_enabled", "is_autocast_enabled", "is_scripting", "is_tracing", "is_compiling"),
}
"""Functions and methods that only ask: they may be called a second time."""


class SpellingAtPlace:
    """Expressions as a line of a place spells them, where `names` are bound (None: those of the
    source); `given` has texts of tensors that a function beside the kernels could ask."""

    called: frozenset[int] = frozenset()
    """Calls whose functions are asked for: what one returns stands for it, `x is not None` for
    `exists(x)`."""

    def __init__(
        self,
        sources: Sources,
        place: SourcePlace,
        line: int,
        names: Names | None = None,
        given: Callable[[Ref], str] = lambda ref: "",
    ) -> None:
        self.sources, self.place, self._line = sources, place, line
        self.names = sources.names.get(place, {}).get(line, {}) if names is None else names
        self._given = given

    def of(self, node: ast.expr, activation: int) -> ast.expr | None:
        """An expression of a call's function as the place spells it; None where it cannot."""
        match node:
            case ast.Constant():
                return node
            case ast.Name():
                return self._name(node, activation)
            case ast.Call(ast.Name(name) | ast.Attribute(attr=name)) if name not in _ASKING:
                return self._returned_by(node, activation)
            case ast.Lambda() | ast.NamedExpr() | ast.Await() | ast.Yield() | ast.YieldFrom():
                return None
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                return None
            case _:
                return self._alike(node, activation) or self._filled(node, activation)

    def calls(self, node: ast.expr, activation: int) -> list[int]:
        """The calls of an expression whose functions are asked for."""
        made = self.sources.calls.get((activation, span_of(node)), ())
        return [call for call in made if call in self.called]

    def _returned_by(self, node: ast.expr, activation: int) -> ast.expr | None:
        """Expression that the function of a call returns, where it does nothing else."""
        found = dict[str, ast.expr]()
        for call in self.calls(node, activation):
            function = self.sources.code(call)
            match function.body if function else []:
                case [ast.Return(ast.expr() as value)] | [
                    ast.Expr(ast.Constant()),
                    ast.Return(ast.expr() as value),
                ] if made := self.of(value, call):
                    found[ast.unparse(made)] = made
                case _:
                    return None
        return next(iter(found.values())) if len(found) == 1 else None

    def _filled(self, node: ast.expr, activation: int) -> ast.expr | None:
        made = copy.copy(node)
        for name, value in ast.iter_fields(node):
            parts = cast("list[object]", value) if isinstance(value, list) else [value]
            filled: list[object] = []
            for part in parts:
                if isinstance(part, ast.keyword):
                    given = self.of(part.value, activation)
                    filled.append(given and ast.keyword(part.arg, given))
                elif isinstance(part, ast.expr):
                    filled.append(self.of(part, activation))
                else:
                    filled.append(part)
                    continue
                if filled[-1] is None:
                    return None
            setattr(made, name, filled if isinstance(value, list) else filled[0])
        return made

    def _name(self, node: ast.Name, activation: int) -> ast.expr | None:
        function, word = self.sources.code(activation), self._word(node, activation)
        local = function is not None and is_local(function, node.id)
        if activation == self.place.activation:
            same = self.names.get(node.id) == word if word else not local or self._stays(node.id)
            return node if same else None
        if word and word[0] in ":#@":
            return self._held(word)
        if function is None or not local:
            return None if function is None else self._global(node, activation)
        if not _once(function, node.id):
            return None
        given, caller = self.passed(function, node.id, activation)
        if given is not None:
            return self.of(given, caller)
        for each in ast.walk(function):
            value: object = getattr(each, "value", None)
            for target in targets(each):
                dim = place_in(target, node.id)
                named = dim is not None or getattr(target, "id", "") == node.id
                if named and isinstance(value, ast.expr):
                    return self.of(_part(value, dim), activation)
        return None

    def _word(self, node: ast.Name, activation: int) -> str | None:
        return (self.words(node, activation) or {}).get(node.id)

    def _stays(self, name: str) -> bool:
        """Whether a local name of the place, which no word tells of, is bound before its line and
        never again."""
        function = self.sources.code(self.place.activation)
        assert function is not None  # it has a place
        bound = [node for node in ast.walk(function) if binds(node, name)]
        early = all(getattr(node, "lineno", self._line) < self._line for node in bound)
        return _once(function, name) and early

    def _held(self, word: str) -> ast.expr | None:
        """A module or a tensor."""
        if word.startswith(":"):
            text = spelled(self.sources.trail, word[1:], self.names)
        else:
            text = self._tensor(self.sources.value(word))
        return None if text is None else _parsed(text)

    def _tensor(self, ref: Ref | None) -> str | None:
        """Text of a tensor: a name, what a module holds, or an operand."""
        if ref is None:
            return None
        named = (name for name, word in self.names.items() if self.sources.value(word) == ref)
        word, text = self.sources.word(ref), next(named, None)
        if text is None and word.startswith("@"):
            path = self.sources.trail.placeholders[int(word[1:])]
            text = attribute(path, self.names) if "." in path else None
        return text or self._given(ref) or None

    def _global(self, node: ast.Name, activation: int) -> ast.expr | None:
        """A name of the function's file, if the place has it, too."""
        file = self.sources.file(self.sources.trail.activations[activation].file)
        here = self.sources.file(self.place.block.file)
        around = here.function(self.place.block)
        if is_local(around, node.id):
            return None
        own, there = file.bound.get(node.id), here.bound.get(node.id)
        if node.id == "torch":
            return node if file.has_torch else None
        if own is None:
            return node if hasattr(builtins, node.id) and there is None else None
        return node if file is here or (own and own == there) else None

    def _alike(self, node: ast.expr, activation: int) -> ast.expr | None:
        """`x.size(1)` or `x.dtype`, of a tensor that has a text, if x has it from that."""
        tensor, dim = size(node)
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            tensor, dim = node.value, None
        ref = self.tensor(tensor, activation) if tensor is not None else None
        text = "" if ref is None else self.dtype(ref) if dim is None else self.size(ref, dim)
        return _parsed(text) if text else None

    def size(self, ref: Ref, dim: int) -> str:
        """Text of a tensor's size; empty where none is known."""
        rank = len(self.sources.shape(ref))
        last = dim if dim < 0 else dim - rank
        like = self.sources.as_long(ref, last) if -rank <= dim < rank else ()
        texts = ((each, self._tensor(each)) for each in like)
        found = (f"{t}.size({dim if each == ref else last})" for each, t in texts if t)
        return next(found, "")

    def dtype(self, ref: Ref) -> str:
        """Text of a tensor's dtype; empty where none is known."""
        like = self.sources.as_long(ref, -1) if self.sources.shape(ref) else (ref,)
        same = (each for each in like if self.sources.dtype(each) == self.sources.dtype(ref))
        return next((f"{text}.dtype" for text in map(self._tensor, same) if text), "")

    def tensor(self, node: ast.expr, activation: int) -> Ref | None:
        """The tensor that an expression of names and attributes is."""
        names, placeholders = self.words(node, activation) or {}, self.sources.trail.placeholders
        if isinstance(node, ast.Name):
            return self.sources.value(names.get(node.id))
        path = held_path(node, names)
        return self.sources.value(f"@{placeholders.index(path)}") if path in placeholders else None

    def words(self, node: ast.AST | None, activation: int) -> Names | None:
        """The words of the names as the statement begins that an expression stands in; None for
        what stands in none that ran."""
        return self.sources.at(node, activation, self.place)

    # What a call gives.

    def passed(self, function: Function, name: str, activation: int) -> tuple[ast.expr | None, int]:
        """Find what a call passes for a parameter, and the call in whose function that is written:
        itself for a default, which reads constants of its file alone; None where nothing tells."""
        call = self.sources.trail.activations[activation]
        made = None
        if call.caller is not None and call.place is not None:
            caller = self.sources.file(self.sources.trail.activations[call.caller].file)
            made = caller.expressions.get(call.place)
        if call.caller is None or not isinstance(made, ast.Call) or not _is_plain(made):
            return None, activation
        args = function.args
        positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
        defaults = {
            **dict(zip(reversed(positional), reversed(args.defaults), strict=False)),
            **dict(zip((arg.arg for arg in args.kwonlyargs), args.kw_defaults, strict=True)),
        }
        positional = positional[self._is_bound(made, function, call.caller) :]
        given = {
            **dict(zip(positional, made.args, strict=False)),
            **{each.arg: each.value for each in made.keywords},
        }
        if name in given:
            return given[name], call.caller
        default = defaults.get(name)
        told = default is not None and names_in(default) <= self.sources.file(call.file).constants
        return (default if told else None), activation

    def _is_bound(self, call: ast.Call, function: Function, caller: int) -> bool:
        """Whether a call gives its function a first argument that it does not spell: `self`."""
        files = self.sources.files.values()
        parents = next(each.parents for each in files if function in each.parents)
        marks = [getattr(each, "id", "") for each in function.decorator_list]
        if not isinstance(parents[function], ast.ClassDef) or "staticmethod" in marks:
            return False
        func = call.func
        if not isinstance(func, ast.Attribute) or func.attr != function.name:
            return True  # a module's `forward`
        around = self.sources.code(caller)
        if "classmethod" in marks or around is None or not isinstance(func.value, ast.Name):
            return True
        return is_local(around, func.value.id)  # of an object, or of a class, which is no local


def _is_plain(call: ast.Call) -> bool:
    """Whether a call spells each of its arguments."""
    starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    return not starred and all(keyword.arg is not None for keyword in call.keywords)


def enclosed(text: str) -> str:
    """Text of an expression as it can stand within another one: in brackets but for what binds
    closest, `x`, `self.x`, `x[0]`, `f(x)`."""
    closest = ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant | ast.Tuple
    return text if isinstance(_parsed(text), closest) else f"({text})"


def is_local(function: Function, name: str) -> bool:
    """Whether a call of a function gives or binds a name."""
    return name in parameters(function) or any(binds(node, name) for node in ast.walk(function))


def _once(function: Function, name: str) -> bool:
    """Whether a name has one binding in a function, a parameter's included."""
    bound = sum(binds(node, name) for node in ast.walk(function))
    return bound + (name in parameters(function)) == 1


def parameters(function: Function) -> list[str]:
    """The names that a function has for what it is called with."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [arg.arg for arg in every if arg is not None]


def binds(node: ast.AST, name: str) -> bool:
    """Whether a node, those within it aside, binds a name."""
    return any(name in names_in(target) for target in targets(node))


def targets(node: ast.AST) -> list[ast.expr]:
    """Targets that a statement, a loop or a walrus binds."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension)):
        return [node.target]
    return [node.optional_vars] if isinstance(node, ast.withitem) and node.optional_vars else []


def place_in(target: ast.expr, name: str) -> int | None:
    """Index of a name in the target `a, b`; None where it is not there."""
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if any(isinstance(part, ast.Starred) for part in parts):
        return None
    return next((i for i, p in enumerate(parts) if isinstance(p, ast.Name) and p.id == name), None)


def _part(value: ast.expr, number: int | None) -> ast.expr:
    """The part of a value that the target `a, b` gets under a number; without one all of it."""
    if number is None:
        return value
    if isinstance(value, ast.Tuple):
        return value.elts[number]
    return ast.Subscript(value, ast.Constant(number), ast.Load())


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
