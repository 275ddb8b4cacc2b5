"""Constants of an expression beside tensors: numbers, words, and functions of torch that Python
holds.

A kernel has them as constants. Where they come from is followed back, through names, arguments and
what functions return, to what can be asked where the kernel is called: attributes of modules, names
that are bound there, and sizes of tensors.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from fusion_advisor.codegen.eager_reference import numbers_of
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.source_trace import CHANGING, GIVEN, LENGTH, Evaluation, Span
from fusion_advisor.sourcepatch.editing.rewrite import spelled
from fusion_advisor.sourcepatch.editing.sources import (
    Function,
    SourcePlace,
    Sources,
    held_path,
    names_in,
    path_of,
    span_of,
)

Names = Mapping[str, str]


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
        self._called = {(call.caller, call.place) for call in self._trail.activations}
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

    def steering(self, activation: int, place: SourcePlace, line: int) -> Iterator[HeldNumber]:
        """Yield the numbers in the conditions of a call that was made from a place."""
        function, asked = self.sources.code(activation), _Asked(self, place, line)
        for condition in conditions(function) if function else ():
            yield from asked.of(condition, activation)
            for node in ast.walk(condition):
                match node:
                    case ast.Compare(ast.Name() as name, [ast.Is() | ast.IsNot()], [_]):
                        yield from asked.given(name, activation)
                    case _:
                        pass

    def computed(self, activation: int, span: Span) -> bool:
        """Whether a part of the graph is computed there."""
        return (activation, span) in self._computed

    def called(self, activation: int, span: Span) -> bool:
        """Whether the model calls a function of its own there."""
        return (activation, span) in self._called

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
        known = numbers.sources.names.get(place, {}).get(line, {})
        self._names = known if names is None else names
        self._followed: set[tuple[int, Span]] = set()

    def within(self, node: ast.AST | None, activation: int) -> Iterator[HeldNumber]:
        """Yield the numbers in the parts of an expression that no other node computes."""
        names = self._names_at(node, activation)
        for child in ast.iter_child_nodes(node) if node is not None and names is not None else ():
            yield from self._parts(child, activation, names or {})

    def of(self, node: ast.expr, activation: int) -> Iterator[HeldNumber]:
        """Yield the numbers in an expression."""
        key = activation, span_of(node)
        names = self._names_at(node, activation)
        if names is None or key in self._followed:
            return
        self._followed.add(key)
        yield from self._parts(node, activation, names)

    def _names_at(self, node: ast.AST | None, activation: int) -> Names | None:
        """The words of the names as the statement begins that an expression stands in."""
        if not isinstance(node, (ast.expr, ast.stmt)):
            return None
        around = self._sources.within(activation, span_of(node))
        own = self._place.activation, self._place.block
        for place in reversed(around):
            at = self._place if (place.activation, place.block) == own else place
            names = self._sources.names.get(at, {}).get(around[place].statement.line)
            if names is not None:
                return names
        return None

    def _parts(self, node: ast.AST, activation: int, names: Names) -> Iterator[HeldNumber]:
        if isinstance(node, ast.expr):
            if self._numbers.computed(activation, span_of(node)):
                return
            if isinstance(node, ast.Name):
                yield from self._name(node, activation, names)
                return
            found = [*self._sized(node, activation, names), *self._held(node, activation, names)]
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

    def given(self, node: ast.Name, activation: int) -> Iterator[HeldNumber]:
        """Yield that a tensor is there which a function compares with None, where it is given by a
        name or by a module: it may be left out of another call."""
        names = self._names_at(node, activation)
        if names is None or names.get(node.id, "")[:1] not in ("#", "@"):
            return
        function = self._sources.code(activation)
        if activation == self._place.activation:
            if self._names.get(node.id) == names[node.id]:
                yield self._number(node, activation, "name", GIVEN, node.id)
        elif function is not None and node.id in _parameters(function):
            for given, caller in self._passed(function, node.id, activation):
                if isinstance(given, ast.Name):
                    yield from self.given(given, caller)
                elif isinstance(given, ast.Attribute):
                    text = self._spelled(given, caller)
                    yield self._number(given, caller, "module", GIVEN, text)

    def _spelled(self, node: ast.expr, activation: int) -> str | None:
        """An attribute of a module as the place spells it; None where no name leads there."""
        path = held_path(node, self._names_at(node, activation) or {})
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
        for count in range(len(path), -1, -1):
            held = self._trail.modules.get(".".join(path[:count]))
            value = held and held.plain.get(".".join(path[count:]))
            if value:
                text = (
                    spelled(self._trail, ".".join(path), self._names) if value != CHANGING else None
                )
                yield self._number(node, activation, "module", value, text)
                return
        around = max(n for n in range(len(path) + 1) if ".".join(path[:n]) in self._trail.modules)
        if len(path) - around > 2:  # of an object that an object of the module's holds
            yield unknown

    def _is_local(self, name: str, activation: int) -> bool:
        """Whether a call gives or binds a name."""
        function = self._sources.code(activation)
        return function is not None and (
            name in _parameters(function) or any(_binds(n, name) for n in ast.walk(function))
        )

    def _followed_path(self, node: ast.expr, activation: int) -> tuple[str, list[str]]:
        """The path of an attribute; `cfg.s` is `self.cfg.s` where `cfg = self.cfg` binds it."""
        root, parts = path_of(node)
        function = self._sources.code(activation)
        if not parts or function is None or root in _parameters(function):
            return root, parts
        bound = [
            getattr(each, "value", None)
            for each in ast.walk(function)
            for target in _targets(each)
            if isinstance(target, ast.Name) and target.id == root
        ]
        value = bound[0] if len(bound) == 1 else None
        if not isinstance(value, ast.Attribute):
            return root, parts
        root, around = path_of(value)
        return root, [*around, *parts]

    def _sized(self, node: ast.expr, activation: int, names: Names) -> Iterator[HeldNumber]:
        """`x.shape[1]` or `x.size(1)`."""
        tensor, dim = _size(node)
        if tensor is not None and dim is not None:
            yield from self._size(node, tensor, dim, activation, names)

    def _size(
        self, node: ast.expr, tensor: ast.expr, dim: int, activation: int, names: Names
    ) -> Iterator[HeldNumber]:
        root, parts = path_of(tensor)
        ref = self._sources.value(names.get(root)) if not parts else None
        shape = self._sources.shape(ref) if ref else ()
        if ref and -len(shape) <= dim < len(shape):
            asked = dim if dim < 0 else dim - len(shape)
            text = next(self._as_long(ref, asked, dim), None)
            yield self._number(node, activation, "size", str(shape[dim]), text)

    def _as_long(self, ref: Ref, last: int, dim: int) -> Iterator[str]:
        """The size of a tensor, or one that it has from another, by names; `last` and `dim` are the
        same dimension."""
        for each in self._sources.as_long(ref, last):
            for name, word in self._names.items():
                if self._sources.value(word) == each:
                    yield f"{name}.size({dim if each == ref else last})"

    # Where it comes from.

    def _name(self, node: ast.Name, activation: int, names: Names) -> Iterator[HeldNumber]:
        word = names.get(node.id, "")
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
        given = node.id in _parameters(function)
        binding = [each for each in ast.walk(function) if _binds(each, node.id)]
        if given:
            yield from self._argument(function, node.id, activation, unknown)
        for each in binding:
            yield from self._bound(each, node.id, activation, unknown)
        if not given and not binding:  # closed over
            yield unknown

    def _argument(
        self, function: Function, name: str, activation: int, unknown: HeldNumber
    ) -> Iterator[HeldNumber]:
        """Yield the numbers that a call passes for a parameter; none for its default, which the
        source says."""
        for given, caller in self._passed(function, name, activation):
            if given is None:
                yield unknown
            elif isinstance(given, ast.expr):
                yield from self.of(given, caller)

    def _passed(
        self, function: Function, name: str, activation: int
    ) -> Iterator[tuple[ast.expr | bool | None, int]]:
        """Yield what a call passes for a parameter, and where the call was made: True for its
        default, None where nothing tells."""
        call = self._trail.activations[activation]
        given: ast.expr | bool | None = None
        if call.caller is not None and call.place is not None:
            file = self._sources.file(self._trail.activations[call.caller].file)
            made = file.expressions.get(call.place)
            if isinstance(made, ast.Call):
                bound = self._is_bound(made, function, call.caller)
                constants = self._sources.file(call.file).constants
                given = _given(made, function, name, constants, bound=bound)
        yield given, activation if call.caller is None else call.caller

    def _is_bound(self, call: ast.Call, function: Function, caller: int) -> bool:
        """Whether a call gives its function a first argument that it does not spell: `self`."""
        files = self._sources.files.values()
        parents = next(each.parents for each in files if function in each.parents)
        marks = [getattr(each, "id", "") for each in function.decorator_list]
        if not isinstance(parents[function], ast.ClassDef) or "staticmethod" in marks:
            return False
        func = call.func
        if not isinstance(func, ast.Attribute) or func.attr != function.name:
            return True  # a module's `forward`
        around = self._sources.code(caller)
        if "classmethod" in marks or around is None or not isinstance(func.value, ast.Name):
            return True
        name = func.value.id  # that of an object, or of a class, which is no local name
        return name in _parameters(around) or any(_binds(n, name) for n in ast.walk(around))

    def _bound(
        self, node: ast.AST, name: str, activation: int, unknown: HeldNumber
    ) -> Iterator[HeldNumber]:
        """Yield the numbers that a statement assigns to a local name, if it does."""
        for target in _targets(node):
            if name not in names_in(target):
                continue
            value = getattr(node, "iter", None) or getattr(node, "value", None)
            plain = isinstance(target, ast.Name) or isinstance(node, (ast.For, ast.comprehension))
            if plain and isinstance(value, ast.expr):
                yield from self.of(value, activation)
                continue
            tensor = _shape_of(value) if isinstance(value, ast.expr) else None
            dim, names = _place_in(target, name), self._names_at(node, activation)
            found: list[HeldNumber] = []
            if isinstance(value, ast.expr) and tensor and dim is not None and names is not None:
                found += self._size(value, tensor, dim, activation, names)
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
        for each in (*asked, *(conditions(function) if function else ())):
            yield from self.of(each, returning)


_OF_OBJECTS = ("len", "sum", "min", "max", "int", "float", "abs", "round", "next")
"""Functions of Python that make a number of what an object holds."""


def conditions(function: Function) -> Iterator[ast.expr]:
    """Yield the conditions that decide the control flow of a function."""
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield node.test


def _size(node: ast.expr) -> tuple[ast.expr | None, int | None]:
    """The tensor and the dimension of `x.shape[1]` or `x.size(1)`."""
    if isinstance(node, ast.Subscript):
        return _shape_of(node.value), _integer(node.slice)
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr == "size":
            return func.value, _integer(node.args[0])
    return None, None


def _shape_of(node: ast.expr) -> ast.expr | None:
    """The tensor of `x.shape` or `x.size()`."""
    if isinstance(node, ast.Call) and not node.args and not node.keywords:
        func = node.func
        return func.value if isinstance(func, ast.Attribute) and func.attr == "size" else None
    return node.value if isinstance(node, ast.Attribute) and node.attr == "shape" else None


def _integer(node: ast.expr) -> int | None:
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1, node.operand
    value = node.value if isinstance(node, ast.Constant) else None
    return sign * value if type(value) is int else None


def _parameters(function: Function) -> list[str]:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return [arg.arg for arg in every if arg is not None]


def _given(
    call: ast.Call, function: Function, name: str, constants: Collection[str], *, bound: bool
) -> ast.expr | bool | None:
    """Argument of a call for a parameter: an expression, True for its default, which reads no more
    than `constants` of its file, None where the call does not tell."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    if any(keyword.arg is None for keyword in call.keywords):
        return None
    given = next((k.value for k in call.keywords if k.arg == name), None)
    if given is not None:
        return given
    args = function.args
    positional = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    defaults = {
        **dict(zip(reversed(positional), reversed(args.defaults), strict=False)),
        **dict(zip((arg.arg for arg in args.kwonlyargs), args.kw_defaults, strict=True)),
    }
    positional = positional[bound:]
    if name in positional and positional.index(name) < len(call.args):
        return call.args[positional.index(name)]
    default = defaults.get(name)
    return True if default is not None and names_in(default) <= {*constants} else None


def _binds(node: ast.AST, name: str) -> bool:
    return any(name in names_in(target) for target in _targets(node))


def _targets(node: ast.AST) -> list[ast.expr]:
    """Targets that a statement, a loop or a walrus binds."""
    if isinstance(node, ast.Assign):
        return node.targets
    if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension)):
        return [node.target]
    return [node.optional_vars] if isinstance(node, ast.withitem) and node.optional_vars else []


def _place_in(target: ast.expr, name: str) -> int | None:
    """Index of a name in the target `a, b`; None where it is not there."""
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    if any(isinstance(part, ast.Starred) for part in parts):
        return None
    return next((i for i, p in enumerate(parts) if isinstance(p, ast.Name) and p.id == name), None)
