"""A patched model as one file: the kernels in it, and its class called `ModelNew`.

Two emitted files, or one and the model's own file, may give one name to different things. What a
launcher needs of its file and of the runtime beside it is taken under names that mean nothing else;
what several files share word for word stands once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from itertools import chain, count

import libcst as cst
from libcst.metadata import Assignment, MetadataWrapper, ScopeProvider

from fusion_advisor.ir.kernel import LICENSE
from fusion_advisor.shipped.files import DEVICE, HOST, RUNTIME, texts
from fusion_advisor.support.errors import UsageError

_GIVEN, _MADE = "Model", "ModelNew"
_INPUTS = ("get_inputs", "get_init_inputs")
_BEGIN, _END = ("# SPDX-SnippetBegin", LICENSE), "# SPDX-SnippetEnd"
"""Around the kernels: the rest of the file is of whatever licence the model is."""
_OF_A_FILE = re.compile(
    r"\s+or (\((?:[^()]|\([^()]*\))*\)|[^\s,]+)\.__code__\.co_filename\.rpartition\('/'\)\[2\] "
    r"(!= '[^']*'|not in \([^)]*\))"
)
"""Conditions that a function is of a file of some name, which stand behind others."""


def inline(text: str, package: str, kernels: Mapping[str, str], asking: str = "") -> str:
    """The text of a model's file that imports `package` and calls `package.NAME(...)`, as one file:
    the kernels of NAME (the texts of their emitted files) in place of the import, behind them the
    functions that ask before they launch one, `ModelNew` for its class `Model`, and without the
    functions that make a problem's inputs.

    UsageError as `require_model` raises it.
    """
    require_model(text)
    model = _File(text)
    library = _Library(model, package)
    launchers = {name: library.add(name, source) for name, source in kernels.items()}
    functions = library.asking(asking, launchers)
    renaming = _Renaming(dict.fromkeys(model.spelled(_GIVEN), _MADE), {}, package, launchers)
    gone = {name for name in _INPUTS if len(model.using(name)) == 1}
    body: list[cst.BaseStatement] = []
    inlined = -1
    for before in model.module.body:
        after = before.visit(renaming)
        if _imports(before, package):
            body += _begun(library.statements())
            inlined = len(body)
            body += (_below(_apart(f), *[_END][n:]) for n, f in enumerate(functions))
        elif not (isinstance(before, cst.FunctionDef) and before.name.value in gone):
            assert isinstance(after, cst.BaseStatement)
            ends = len(body) == inlined and kernels
            body.append(_below(_apart(after), _END) if ends else after)
    code = model.module.with_changes(body=body).code
    code = _OF_A_FILE.sub("", code)  # all is in one, whose name is the user's
    return code.replace(f"co_qualname != '{_GIVEN}.", f"co_qualname != '{_MADE}.")


def require_model(text: str) -> None:
    """UsageError unless a file defines one class `Model`, and nothing called `ModelNew`."""
    model = _File(text)
    bound = model.bound(_GIVEN)
    if len(bound) != 1 or not isinstance(bound[0], cst.ClassDef):
        raise UsageError(f"{_MADE} is made of a class {_GIVEN}, which the file has to define once")
    if _MADE in model.identifiers:
        raise UsageError(f"{_MADE} cannot be made: the file uses that name already")


def in_one(text: str) -> str:
    """The text of an emitted file with what it imports of the files beside it in its place: the
    definitions of all of them, which give no name to two things."""
    module = cst.parse_module(text)
    own = [s for s in module.body if not _of_the_package(s)]
    if len(own) == len(module.body):
        return text  # of an earlier version, which stood alone
    named = {s.name.value for s in own if isinstance(s, cst.FunctionDef)}
    shared = [
        s for s in _shipped() if not (isinstance(s, cst.FunctionDef) and s.name.value in named)
    ]
    said, rest = own[:1], own[1:]
    return module.with_changes(body=[*said, *shared, *map(_unhosted, rest)]).code


@cache
def _shipped() -> tuple[cst.BaseStatement, ...]:
    """The statements of the files that stand beside every emitted one."""
    modules = (cst.parse_module(texts()[f"{name}.py"]) for name in (RUNTIME, DEVICE))
    return tuple(
        _unhosted(statement)
        for module in modules
        for statement in module.body
        if not _of_the_package(statement)
    )


def _unhosted(statement: cst.BaseStatement) -> cst.BaseStatement:
    """A statement with `host.NAME` spelled as NAME."""
    changed = statement.visit(_Unhosted())
    assert isinstance(changed, cst.BaseStatement)
    return changed


def _of_the_package(statement: cst.CSTNode) -> bool:
    """Whether a statement is what a file does as one of a package: its relative imports, `if`, and
    what it requires of the runtime."""
    if isinstance(statement, cst.If):
        return True
    small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    match small:
        case [cst.ImportFrom(relative=[_, *_])]:
            return True
        case [cst.Expr(value=cst.Call(func=cst.Attribute(value=cst.Name(value=name))))]:
            return name == HOST
        case _:
            return False


class _Unhosted(cst.CSTTransformer):
    """Spells `host.NAME` as NAME."""

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        value = updated_node.value
        return (
            updated_node.attr
            if isinstance(value, cst.Name) and value.value == HOST
            else updated_node
        )


class _File:
    """A file's tree: what its top-level names are bound to, and where they are used."""

    def __init__(self, text: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)  # no node twice
        self.module = wrapper.module
        scope = wrapper.resolve(ScopeProvider)[self.module]
        assert scope is not None  # a module has one
        self._assignments = [a for a in scope.assignments if isinstance(a, Assignment)]

    @property
    def names(self) -> list[str]:
        """The top-level names, in the order in which they are bound."""
        return [*dict.fromkeys(a.name for a in self._assignments)]

    def bound(self, name: str) -> list[cst.CSTNode]:
        """Nodes that bind a top-level name: definitions, imports, names that are assigned to."""
        return [a.node for a in self._assignments if a.name == name]

    def spelled(self, name: str) -> Iterator[cst.CSTNode]:
        """Every node of the tree that spells a top-level name, but for imports."""
        for assignment in self._assignments:
            if assignment.name == name:
                node = assignment.node
                yield node.name if isinstance(node, (cst.FunctionDef, cst.ClassDef)) else node
                yield from (access.node for access in assignment.references)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        """Every name in the file, whatever it means, but for attributes."""
        nodes = [*_within(self.module)]
        attributes = {node.attr for node in nodes if isinstance(node, cst.Attribute)}
        names = (n for n in nodes if isinstance(n, cst.Name) and n not in attributes)
        return frozenset(node.value for node in names)

    @cached_property
    def _owners(self) -> dict[cst.CSTNode, int]:
        """The number of the top-level statement that a node is in."""
        return {
            node: number
            for number, statement in enumerate(self.module.body)
            for node in (statement, *_within(statement))
        }

    def using(self, name: str) -> set[int]:
        """The top-level statements that bind a top-level name or use it."""
        return {self._owners[node] for node in self.spelled(name)}

    def binding(self, name: str) -> list[int]:
        """The top-level statements that bind a top-level name, not those of functions that do."""
        found = {self._owners[node]: node for node in self.bound(name)}
        return [
            number
            for number, node in sorted(found.items())
            if self.module.body[number] is node
            or not isinstance(self.module.body[number], (cst.FunctionDef, cst.ClassDef))
        ]

    def imports(self, name: str) -> set[str]:
        """The imports that bind a top-level name, each as it would stand alone; an empty text for
        whatever else binds it."""
        return {_import_of(node, name) for node in self.bound(name)}


@lru_cache(maxsize=64)
def _emitted(text: str) -> _File:
    """An emitted file with what it needs of those beside it, read once for every edit that is
    tried."""
    return _File(in_one(text))


class _Library:
    """Definitions that launchers need from their files, under names that are unused in the
    model's file."""

    def __init__(self, model: _File, package: str) -> None:
        self._model = model
        self._taken = set(model.identifiers) | {_MADE}
        self._used = set(model.names) | {_MADE}
        """Taken names that mean something at the top of the file."""
        self._had: set[str] = set()
        for statement in model.module.body:
            if _imports(statement, package):
                break
            self._had |= {text for name in model.names for text in _bindings(statement, name)}
        self._imports: dict[str, str] = {}
        """The names that imports are had under, by the imports."""
        self._shared: dict[object, str] = {}
        """The names of definitions by their texts and by what the names in them mean."""
        self._body: list[cst.BaseStatement] = []

    def statements(self) -> Iterator[cst.BaseStatement]:
        """The imports that the model's file does not begin with, and the definitions."""
        for text, name in sorted(self._imports.items()):
            if text not in self._had or name != _local(text):
                yield cst.parse_statement(_import_as(text, name))
        yield from self._body

    def add(self, launcher: str, text: str) -> str:
        """Takes in a launcher with what it needs of its file; its name here."""
        file = _emitted(text)
        self._taken |= file.identifiers - set(file.names)
        start = len(self._body)
        name = self._definition(file, launcher, launcher, {})
        said = file.module.get_docstring()
        if said and len(self._body) > start:
            self._body[start] = _headed(self._body[start], said)
        return name

    def asking(self, text: str, launchers: dict[str, str]) -> list[cst.BaseStatement]:
        """Takes the functions that ask before they launch a kernel, behind all that is there, and
        adds their names here to the launchers'."""
        file, start = _File(text), len(self._body)
        self._taken |= file.identifiers - set(file.names)
        known = dict(launchers)
        for statement in file.module.body:
            if isinstance(statement, cst.FunctionDef):
                name = statement.name.value
                launchers[name] = self._definition(file, name, name, known)
        functions = self._body[start:]
        del self._body[start:]
        return functions

    def _definition(self, file: _File, name: str, launcher: str, known: dict[str, str]) -> str:
        """The name here of a top-level name of a file, with all that it needs before it: the
        definitions of an emitted file do not need each other in circles."""
        if name in known:
            return known[name]
        if all(file.imports(name)):
            (text,) = file.imports(name)
            known[name] = self._import(text, name)
            return known[name]
        numbers = file.binding(name)
        needed = [n for n in file.names if n != name and file.using(n) & set(numbers)]
        means = {n: self._definition(file, n, launcher, known) for n in needed}
        texts = tuple(file.module.code_for_node(file.module.body[n]).strip() for n in numbers)
        same = (texts, *means.items())
        alone = len(file.bound(name)) > 1  # it counts: files do not share it
        if not alone and same in self._shared:
            known[name] = self._shared[same]
            return known[name]
        choices = [f"fused_{name}"] if name == launcher else [name, f"{launcher}_{name}"]
        known[name] = self._shared[same] = self._free(choices)
        self._body += (
            self._renamed(file, number, {**means, name: known[name]}) for number in numbers
        )
        return known[name]

    def _import(self, text: str, name: str) -> str:
        """The name here of what a file imports: its own, unless that means something else.
        Of a tile's constants Triton's interpreter, not its compiler, knows `tl.constexpr` alone."""
        if text not in self._imports:
            own = name not in self._used or self._model.imports(name) == {text}
            self._imports[text] = name if own else self._free([f"fused_{name}"])
            self._taken.add(self._imports[text])
            self._used.add(self._imports[text])
        return self._imports[text]

    def _free(self, choices: Sequence[str]) -> str:
        numbered = (f"{choices[-1]}_{number}" for number in count(2))
        name = next(n for n in chain(choices, numbered) if n not in self._taken | self._used)
        self._taken.add(name)
        self._used.add(name)
        return name

    def _renamed(self, file: _File, number: int, names: Mapping[str, str]) -> cst.BaseStatement:
        nodes = {node: new for old, new in names.items() for node in file.spelled(old)}
        changed = file.module.body[number].visit(_Renaming(nodes, names))
        assert isinstance(changed, cst.BaseStatement)
        return changed


class _Renaming(cst.CSTTransformer):
    """Spells names otherwise: those at `nodes`, those that a `global` statement names, and
    `package.NAME` for the kernels."""

    def __init__(
        self,
        nodes: Mapping[cst.CSTNode, str],
        overwritten: Mapping[str, str],
        package: str = "",
        launchers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._nodes = nodes
        self._overwritten = overwritten
        self._package = package
        self._launchers = launchers or {}

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        new = self._nodes.get(original_node)
        return updated_node.with_changes(value=new) if new else updated_node

    def leave_NameItem(
        self, original_node: cst.NameItem, updated_node: cst.NameItem
    ) -> cst.NameItem:
        new = self._overwritten.get(original_node.name.value)
        return updated_node.with_changes(name=cst.Name(new)) if new else updated_node

    def leave_Attribute(
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        value, name = original_node.value, original_node.attr.value
        if isinstance(value, cst.Name) and value.value == self._package and name in self._launchers:
            return cst.Name(self._launchers[name])
        return updated_node


def _within(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    for child in node.children:
        yield child
        yield from _within(child)


def _imports(statement: cst.CSTNode, package: str) -> bool:
    """Whether a statement does nothing but import the package of kernels."""
    return f"import {package}" in _bindings(statement, package) or (
        f"from . import {package}" in _bindings(statement, package)
    )


def _bindings(statement: cst.CSTNode, name: str) -> set[str]:
    """The imports of a top-level statement that bind a name."""
    small = statement.body if isinstance(statement, cst.SimpleStatementLine) else ()
    return {text for node in small if (text := _import_of(node, name))}


def _import_of(node: cst.CSTNode, name: str) -> str:
    """The import of one name as a statement of its own; empty where a node is none of it."""
    if not isinstance(node, (cst.Import, cst.ImportFrom)) or isinstance(node.names, cst.ImportStar):
        return ""
    for alias in node.names:
        local = alias.evaluated_alias or alias.evaluated_name.partition(".")[0]
        if local == name:
            one = node.with_changes(names=[alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)])
            if isinstance(one, cst.ImportFrom):
                one = one.with_changes(lpar=None, rpar=None)
            return cst.Module([]).code_for_node(one).strip()
    return ""


def _local(text: str) -> str:
    """The name that an import binds."""
    return text.rpartition(" ")[2].partition(".")[0]


def _import_as(text: str, name: str) -> str:
    return text if name == _local(text) else f"{text.partition(' as ')[0]} as {name}"


def _headed(statement: cst.BaseStatement, said: str) -> cst.BaseStatement:
    """With what an emitted file says of itself above its first definition."""
    notes = [cst.Comment(f"# {line}".rstrip()) for line in said.strip().splitlines()]
    lines = [cst.EmptyLine(comment=note) for note in notes]
    return _apart(statement.with_changes(leading_lines=lines))


def _begun(statements: Iterable[cst.BaseStatement]) -> Iterator[cst.BaseStatement]:
    """With what stands above the kernels above the first of them."""
    for number, statement in enumerate(statements):
        yield statement if number else _below(statement, *_BEGIN)


def _below(statement: cst.BaseStatement, *comments: str) -> cst.BaseStatement:
    """With comments above all that is above it."""
    lines = [cst.EmptyLine(indent=False, comment=cst.Comment(text)) for text in comments]
    above: list[cst.EmptyLine] = [*getattr(statement, "leading_lines", ())]
    return statement.with_changes(leading_lines=[*lines, *above])


def _apart(statement: cst.BaseStatement) -> cst.BaseStatement:
    """With two empty lines above."""
    lines: list[cst.EmptyLine] = [*getattr(statement, "leading_lines", ())]
    while lines and lines[0].comment is None:
        del lines[0]
    empty = [cst.EmptyLine(indent=False), cst.EmptyLine(indent=False)]
    return statement.with_changes(leading_lines=[*empty, *lines])
