"""Modules of a model by the calls that make them, as far as its classes spell these.

`self.norm = nn.GroupNorm(8, c)` in a class says of which class `norm` is, and
`self.block = nn.Sequential(a, b)` how many modules a `Sequential` runs, whatever the model is built
with.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from fusion_advisor.ir.source_trace import ModuleAttributes, Trail
from fusion_advisor.sourcepatch.editing.sources import SourceFile, assigned

_CHANGING = {"append", "extend", "insert", "pop", "add_module", "register_module", "update"}
"""Methods that change which modules a container holds."""

_EMPTY = tuple(
    f"{made}({given})" if made else "[]"
    for made in ("", "nn.ModuleList", "torch.nn.ModuleList", "ModuleList")
    for given in ("", "[]")
)
"""Lists without elements, as source spells them."""

PARAMETERS = ("weight", "bias")
"""Parameters that torch's modules may be built without."""

_FLAGS = ("bias", "affine", "elementwise_affine")
"""Arguments that decide which parameters a module of torch has."""

Parts = dict[str, ast.expr]
"""Arguments that a call puts into a container, by their names there."""
_Made = tuple[SourceFile, ast.Call]


class Constructors:
    """Calls that make the modules of a model; `read` gives a file by its path."""

    def __init__(self, trail: Trail, read: Callable[[str], SourceFile]) -> None:
        self._trail = trail
        self._read = read
        self._known: dict[str, _Made | None] = {}

    def of(self, path: str) -> _Made | None:
        """The call that makes the module at a path, and its file, as `_found` says; each is asked
        for in every set that a search judges."""
        if path not in self._known:
            self._known[path] = self._found(path)
        return self._known[path]

    def _found(self, path: str) -> _Made | None:
        """The call that makes the module at a path, and its file; None where the classes make it at
        several places, or out of sight."""
        held, parts = self._trail.modules, path.split(".")
        depths = (n for n in range(len(parts) - 1, -1, -1) if held[".".join(parts[:n])].file)
        around = next(depths, None)
        if around is None:  # a class of torch's is the model
            return None
        owner = held[".".join(parts[:around])]
        name, *within = parts[around:]
        found = self._given(self._read(owner.file), owner.kind, name)
        if found is None and within:
            found, within = self._appended_to(self._read(owner.file), owner.kind, name), within[1:]
        for part in within:
            value = self._part(*found, part) if found else None
            found = self._returned(found[0], value) if found and value else None
        return found

    def says_parameters(self, path: str) -> bool:
        """Whether the class of a module, or the call that makes it, spells which parameters it
        has."""
        held = self._trail.modules[path]
        if held.file and self._always_holds(held):
            return True
        found = self.of(path)
        return found is not None and all(
            keyword.arg is not None
            and (keyword.arg not in _FLAGS or isinstance(keyword.value, ast.Constant))
            for keyword in found[1].keywords
        )

    def _always_holds(self, held: ModuleAttributes) -> bool:
        """Whether a class of the user's gives its objects parameters under the names that torch's
        modules may be built without, and never anything else."""
        given = dict[str, list[bool]]()
        for _, owner in self._family(self._read(held.file), held.kind):
            for node in ast.walk(owner):
                if isinstance(node, ast.Call) and _called(node) == "register_parameter":
                    return False
                for target, value in assigned(node):
                    if isinstance(target, ast.Attribute) and target.attr in PARAMETERS:
                        made = isinstance(value, ast.Call) and _called(value) == "Parameter"
                        given.setdefault(target.attr, []).append(made)
        return bool(given) and all(made for each in given.values() for made in each)

    def length(self, path: str) -> int | None:
        """How many modules a container holds; None where the source does not spell that."""
        found = self.of(path)
        inside = self._parts(*found) if found else None
        return None if inside is None else len(inside)

    @cached_property
    def _files(self) -> list[SourceFile]:
        """The files that the model's code is in."""
        files = {call.file for call in self._trail.activations}
        files |= {held.file for held in self._trail.modules.values() if held.file}
        return [*map(self._read, sorted(files))]

    @cached_property
    def _classes(self) -> dict[str, list[tuple[SourceFile, ast.ClassDef]]]:
        """The classes of these files, by their names."""
        found = dict[str, list[tuple[SourceFile, ast.ClassDef]]]()
        for file in self._files:
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append((file, node))
        return found

    def _family(
        self, file: SourceFile, kind: str, known: tuple[ast.ClassDef, ...] = ()
    ) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
        """Yield a class of a file with those that it inherits from, torch's and those that are
        `known` aside: `class LayerNorm(nn.LayerNorm)`."""
        every = [pair for pair in self._classes.get(kind, []) if pair[1] not in known]
        own = [pair for pair in every if pair[0] is file] or every
        if len(own) == 1:
            yield own[0]
            of, owner = own[0]
            for base in owner.bases:
                names = (n.id for n in ast.walk(base) if isinstance(n, ast.Name))
                if not of.bound.get(next(names, "")):  # an import of torch has a text there
                    yield from self._family(of, _word(base), (*known, owner))

    def _given(self, file: SourceFile, kind: str, name: str) -> _Made | None:
        """The call whose result a class gives to an attribute of its objects; None where it gives
        it anything else, too, or changes what that holds."""
        found = list[_Made]()
        for own, owner in self._family(file, kind):
            for node in ast.walk(owner):
                if _changes(own, node, name):
                    return None
                for target, value in assigned(node):
                    if isinstance(target, ast.Attribute) and target.attr == name:
                        made = value and self._returned(own, value)
                        if made is None:
                            return None
                        found.append(made)
        return found[0] if len(found) == 1 else None

    def _appended_to(self, file: SourceFile, kind: str, name: str) -> _Made | None:
        """The call whose results a class appends to a list of modules; None where it changes that
        in any other way."""
        family = [*self._family(file, kind)]
        found = [(own, _appended(own, owner, f"self.{name}")) for own, owner in family]
        made = [(own, value) for own, value in found if value]
        changed = sum(_changes(own, n, name) for own, owner in family for n in ast.walk(owner))
        return self._returned(*made[0]) if len(made) == changed == 1 else None

    def _returned(self, file: SourceFile, value: ast.expr) -> _Made | None:
        """A call, or the one that a function of these files returns where that is called."""
        if not isinstance(value, ast.Call):
            return None
        called = value.func.id if isinstance(value.func, ast.Name) else ""
        theirs = file.bound.get(called)  # what is imported of torch is no function of these files
        files = [file] if called in file.functions else [] if theirs else self._files
        named = [(each, each.functions[called]) for each in files if called in each.functions]
        for own, function in named if len(named) == 1 else ():
            returns = [node for node in ast.walk(function) if isinstance(node, ast.Return)]
            if len(returns) == 1 and isinstance(returns[0].value, ast.Call):
                return own, returns[0].value
        return file, value

    def _part(self, file: SourceFile, call: ast.Call, name: str) -> ast.expr | None:
        """Expression that a container has under a name; one for all of a list that is
        comprehended, or that one expression is appended to."""
        match call.args:
            case [ast.ListComp(elt) | ast.GeneratorExp(elt)] if _called(call) == "ModuleList":
                return elt
            case [ast.Name(listed)] if _called(call) == "ModuleList":
                within = file.enclosing(call)
                scope = file.parents[within[0]] if within else file.tree
                return _appended(file, scope, listed)
            case _:
                return (self._parts(file, call) or {}).get(name)

    def _parts(self, file: SourceFile, call: ast.Call) -> Parts | None:
        """Arguments that a call puts into a container, by their names there; None where it does
        not spell how many they are."""
        if _called(call) in ("Sequential", "ModuleList"):
            return _listed(call.args)
        for _, owner in self._family(file, _called(call)):
            initial = [n for n in ast.walk(owner) if isinstance(n, ast.Call) and _is_initial(n)]
            if initial:
                return _listed(initial[0].args) if len(initial) == 1 else None
        return None


def _appended(file: SourceFile, scope: ast.AST, text: str) -> ast.expr | None:
    """Expression that is appended to a list, which is made empty in a piece of source, in one place
    of it; None where that does anything else to it."""
    made, found = list[ast.expr | None](), list[ast.expr]()
    for node in ast.walk(scope):
        made += [value for target, value in assigned(node) if ast.unparse(target) == text]
        if not isinstance(node, ast.Attribute | ast.Subscript) or ast.unparse(node.value) != text:
            continue
        match node, file.parents[node]:
            case ast.Attribute(attr="append"), ast.Call(args=[value]):
                found.append(value)
            case ast.Attribute(attr=method), _ if method in _CHANGING:
                return None
            case ast.Subscript(ctx=context), _ if not isinstance(context, ast.Load):
                return None
            case _:
                pass
    empty = [value is not None and ast.unparse(value) in _EMPTY for value in made]
    return found[0] if empty == [True] and len(found) == 1 else None


def _listed(args: Sequence[ast.expr]) -> Parts | None:
    """The arguments of a container's constructor: modules, a list of them, or pairs in order."""
    match args:
        case [ast.List(elts) | ast.Tuple(elts)]:
            return _listed(elts)
        case [ast.Call(args=[ast.List(elts)]) as call] if _called(call) == "OrderedDict":
            pairs = [each.elts for each in elts if isinstance(each, ast.Tuple)]
            named = {_word(key): value for key, value in pairs}
            return named if len(named) == len(elts) and "" not in named else None
        case [ast.Dict(keys, values)]:
            named = {_word(key): value for key, value in zip(keys, values, strict=True)}
            return named if len(named) == len(values) and "" not in named else None
        case _:
            starred = any(isinstance(each, ast.Starred) for each in args)
            return None if starred else {str(n): each for n, each in enumerate(args)}


def _called(call: ast.Call) -> str:
    return _word(call.func)


def _word(node: ast.expr | None) -> str:
    """The last name of a path of names, or a plain text; empty for all else."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name) | ast.Constant(str(name)):
            return name
        case _:
            return ""


def _is_initial(call: ast.Call) -> bool:
    """Whether a call is `super().__init__(...)`."""
    match call.func:
        case ast.Attribute(ast.Call(ast.Name("super")), "__init__"):
            return True
        case _:
            return False


def _changes(file: SourceFile, node: ast.AST, name: str) -> bool:
    """Whether a node is an attribute of this name whose elements are added, replaced or removed."""
    if not isinstance(node, ast.Attribute) or node.attr != name:
        return False
    match file.parents.get(node):
        case ast.Attribute(attr=method):
            return method in _CHANGING
        case ast.Subscript(ctx=context):
            return not isinstance(context, ast.Load)
        case _:
            return False
