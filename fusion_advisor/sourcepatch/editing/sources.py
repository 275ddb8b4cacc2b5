"""The model's source as trees, and where in them every node of the graph was made.

One run of a list of statements (the body of a function, or of a loop in one of its turns) is a
`SourcePlace`: within one, statements follow each other, so that what they compute can be moved
between them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from fusion_advisor.ir.graph import Graph, Node, Ref
from fusion_advisor.ir.source_trace import Chosen, Evaluation, ModuleAttributes, Moment, Span, Trail
from fusion_advisor.ops import REGISTRY
from fusion_advisor.support.errors import UsageError

Function = ast.FunctionDef | ast.AsyncFunctionDef

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
COMPREHENDED = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""Ends of the names of comprehensions that run as functions of their own."""
LOOPS = (ast.For, ast.AsyncFor, ast.While)
_KEEPING = ("pointwise", "reduction", "scan", "random")


def span_of(node: ast.expr | ast.stmt) -> Span:
    """The span of a node in its file."""
    end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
    return Span(node.lineno, node.col_offset, end_line, end_column)


def names_in(node: ast.AST) -> set[str]:
    """The names in a piece of source, but for attributes."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def stored_in(node: ast.AST) -> set[str]:
    """The names that a piece of source binds or deletes, but for attributes."""
    names = (each for each in ast.walk(node) if isinstance(each, ast.Name))
    return {each.id for each in names if not isinstance(each.ctx, ast.Load)}


def path_of(node: ast.expr) -> tuple[str, list[str]]:
    """`self.layers[0].eps` as its first name and what follows; no name for anything else."""
    parts: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            parts.append(node.attr)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            parts.append(str(node.slice.value))
        else:
            return "", []
        node = node.value
    return node.id, parts[::-1]


def held_path(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """The path of a module, or of what it holds, where `names` has the words of the local names;
    None for what begins with no module."""
    root, parts = path_of(node)
    word = names.get(root, "")
    inside = [*filter(None, word[1:].split(".")), *parts]
    return ".".join(inside) if word.startswith(":") else None


def attribute(path: str, names: Mapping[str, str]) -> str | None:
    """`layers.0.weight` as `self.layers[0].weight`, where a name holds a module around it; None
    where none does. `names` gives the words of the local names."""
    best: tuple[int, str] | None = None
    for name, word in names.items():
        owner = word.removeprefix(":")
        within = not owner or path == owner or path.startswith(f"{owner}.")
        if not word.startswith(":") or not within:
            continue
        parts = path[len(owner) :].lstrip(".").split(".")
        text = name + "".join(f"[{p}]" if p.isdigit() else f".{p}" for p in parts if p)
        if best is None or len(parts) < best[0]:
            best = len(parts), text
    return best[1] if best else None


def spelled(trail: Trail, path: str, names: Mapping[str, str]) -> str | None:
    """The attribute of a path, or of another path of the same module, where a name holds a module
    around it; None where none does."""
    text = attribute(path, names)
    for first, others in trail.shared.items() if text is None else ():
        within = path == first or path.startswith(f"{first}.")
        for other in others if within and text is None else ():
            text = attribute(other + path[len(first) :], names)
    return text


@dataclass(frozen=True)
class Block:
    """A list of statements in a file: the field of a function or of a compound statement."""

    file: str
    owner: Span
    field: str


@dataclass(frozen=True)
class SourcePlace:
    """One run of a block: in which call, and in which turns of the loops around it."""

    activation: int
    block: Block
    turns: tuple[int, ...]


@dataclass(frozen=True)
class OpenedExpression:
    """Expression of a function whose call an edit takes out in part: what it computes stays, in
    the words of the caller."""

    text: str
    file: str
    span: Span


@dataclass(frozen=True)
class ExpressionPosition:
    """Position of an evaluation within a place: the statement, and the expression that is the
    evaluation or the call that led to it."""

    statement: Span
    span: Span


@dataclass(frozen=True)
class SpelledCall:
    """Call of an `nn.Sequential` that is spelled out: the calls of its modules, and the texts of
    the `Sequential`s that it goes through, each with those of what it runs, the inner ones
    first."""

    links: tuple[Span, ...]
    containers: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass
class SourceFile:
    """A file of the model: its text and its tree."""

    path: str
    text: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict[ast.AST, ast.AST])
    before: str = ""
    """The text as it lies on the disk, where `text` has calls spelled out (`sequential`)."""
    spelled: dict[Span, SpelledCall] = field(default_factory=dict[Span, SpelledCall])
    """Calls that are spelled out, by their places."""

    @classmethod
    def read(cls, path: str) -> SourceFile:
        """A file from its path. Raises OSError and SyntaxError as Python does; UsageError for text
        that is not UTF-8."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            where = f"{path}: byte {error.start}"
            raise UsageError(f"{where} is not UTF-8: save the file as UTF-8") from error
        return cls.of(path, text)

    @classmethod
    def of(cls, path: str, text: str) -> SourceFile:
        """A file from its text. Raises SyntaxError as Python does."""
        found = cls(path, text, ast.parse(text), before=text)
        _mangle(found.tree)
        for parent in ast.walk(found.tree):
            for child in ast.iter_child_nodes(parent):
                found.parents[child] = parent
        return found

    @cached_property
    def expressions(self) -> dict[Span, ast.expr]:
        """Every expression by its span; the outermost of those that share one."""
        found: dict[Span, ast.expr] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr):
                found.setdefault(span_of(node), node)
        return found

    @cached_property
    def statements(self) -> dict[Span, ast.stmt]:
        """Every statement by its span; the outermost of those that share one."""
        found: dict[Span, ast.stmt] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.stmt):
                found.setdefault(span_of(node), node)
        return found

    @cached_property
    def repeated(self) -> frozenset[str]:
        """Qualified names that several functions of the file have, in branches of another one. Of
        those at the top of a file, or of a class, the last one is left."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, Function))
        found = Counter(map(self.qualname, functions))
        return frozenset(n for n, count in found.items() if count > 1 and "<locals>" in n)

    @cached_property
    def begun(self) -> dict[int, ast.stmt]:
        """The innermost statement that begins on a line."""
        found: dict[int, ast.stmt] = {}
        for statement in self.statements.values():
            found[statement.lineno] = statement
        return found

    def alone(self, span: Span) -> bool:
        """Whether a statement has its lines to itself, but for a comment."""
        before = self._lines[span.line - 1][: span.column]
        behind = self._lines[span.end_line - 1][span.end_column :].strip()
        return not before.strip() and behind[:1] in (b"", b"#")

    def source(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        span = span_of(node)
        first, *more = self._lines[span.line - 1 : span.end_line]
        if not more:
            return first[span.column : span.end_column].decode()
        *middle, last = more
        return b"".join([first[span.column :], *middle, last[: span.end_column]]).decode()

    @cached_property
    def _lines(self) -> list[bytes]:
        """As Python's parser counts them: a form feed ends none."""
        return self.text.encode().splitlines(keepends=True)

    @cached_property
    def has_torch(self) -> bool:
        """Whether the file imports torch under that name, outside of functions and classes."""
        todo: list[ast.AST] = [self.tree]
        while todo:
            node = todo.pop()
            if isinstance(node, ast.Import):
                bound = (alias.asname or alias.name.partition(".")[0] for alias in node.names)
                if "torch" in bound:
                    return True
            if not isinstance(node, (Function, ast.ClassDef)):
                todo += ast.iter_child_nodes(node)
        return False

    @cached_property
    def bound(self) -> dict[str, str]:
        """The names that the file binds outside of functions and classes. Each has the import that
        alone binds it, where that is of torch or of the standard library; else an empty text."""
        found: dict[str, str] = {}
        for statement in self.tree.body:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found[statement.name] = ""
                continue
            found |= dict.fromkeys(stored_in(statement), "")
            for node in ast.walk(statement):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    for name, text in map(partial(_imported, node), node.names):
                        alone = node is statement and found.get(name, text) == text
                        found[name] = text if alone else ""
        return found

    @cached_property
    def constants(self) -> set[str]:
        """Names that the file binds once, outside of functions and classes, to what it spells."""
        nodes = [*ast.walk(self.tree)]
        anew = {name for each in nodes if isinstance(each, ast.Global) for name in each.names}
        stored = [name for each in self.tree.body for name in stored_in(each)]
        return {
            target.id
            for each in self.tree.body
            for target, value in assigned(each)
            if isinstance(target, ast.Name) and value is not None and not names_in(value)
            if stored.count(target.id) == 1 and target.id not in anew
        }

    @cached_property
    def may_import_torch(self) -> bool:
        """Whether nothing in the file is called torch, so that an import may be."""
        for node in ast.walk(self.tree):
            called = [getattr(node, each, "") for each in ("id", "arg", "name", "asname")]
            if "torch" in called:
                return False
        return True

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """Functions that the file defines outside of functions and classes."""
        return {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}

    def replaced(self, node: ast.expr, text: str) -> str:
        """The file's text with another one in place of an expression."""
        span, lines = span_of(node), [*self._lines]
        end = lines[span.end_line - 1][span.end_column :]
        start = lines[span.line - 1][: span.column]
        lines[span.line - 1 : span.end_line] = [start + text.encode() + end]
        return b"".join(lines).decode()

    def qualname(self, function: Function) -> str:
        """A function's name as Python qualifies it: `Model.forward`, `make.<locals>.forward`."""
        name, at = function.name, self.parents.get(function)
        while at is not None:
            if isinstance(at, ast.ClassDef):
                name = f"{at.name}.{name}"
            elif isinstance(at, Function):
                name = f"{at.name}.<locals>.{name}"
            at = self.parents.get(at)
        return name

    def outside_comprehensions(self, node: ast.expr | ast.stmt) -> ast.expr | ast.stmt:
        """The outermost comprehension around a node within its statement, which runs its parts many
        times; the node itself where there is none."""
        at: ast.AST | None = node
        while isinstance(at, (ast.expr, ast.comprehension, ast.keyword)):
            if isinstance(at, _COMPREHENSIONS):
                node = at
            at = self.parents.get(at)
        return node

    def enclosing(self, node: ast.AST) -> list[ast.stmt]:
        """The statements of a function around a node, outermost first; none for what is in no
        function, or in a function or comprehension within its statement."""
        found: list[ast.stmt] = []
        at: ast.AST | None = node
        while at is not None and not isinstance(at, Function):
            if isinstance(at, ast.stmt):
                found.append(at)
            if isinstance(at, (ast.Lambda, ast.ClassDef, ast.Module)):
                return []
            at = self.parents.get(at)
        return found[::-1] if at is not None else []

    def block_of(self, statement: ast.stmt) -> Block:
        """The list that a statement is in."""
        parent = self.parents[statement]
        fields: list[tuple[str, object]] = list(ast.iter_fields(parent))
        name = next(n for n, value in fields if isinstance(value, list) and statement in value)
        if isinstance(parent, ast.match_case | ast.ExceptHandler):  # no statement has its lines
            whole: Any = self.parents[parent]
            part = "cases" if isinstance(parent, ast.match_case) else "handlers"
            name = f"{part}.{getattr(whole, part).index(parent)}.{name}"
            parent = whole
        owner = span_of(parent) if isinstance(parent, ast.stmt) else Span(0, 0, 0, 0)
        return Block(self.path, owner, name)

    def body(self, block: Block) -> list[ast.stmt]:
        """The statements of a block."""
        found: Any = self.statements[block.owner]
        for part in block.field.split("."):  # `body`, or `cases.0.body`
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found

    def function(self, block: Block) -> Function:
        """The function that a block is in."""
        at: ast.AST = self.statements[block.owner]
        while not isinstance(at, Function):
            at = self.parents[at]
        return at


def _mangle(node: ast.AST, owner: str = "") -> None:
    """Give private attributes the names that they have in Python: `self.__eps` in a class `Norm` is
    `_Norm__eps`, wherever that stands."""
    owner = node.name.lstrip("_") if isinstance(node, ast.ClassDef) else owner
    for child in ast.iter_child_nodes(node):
        _mangle(child, owner)
    if isinstance(node, ast.Attribute) and owner and node.attr.startswith("__"):
        node.attr = node.attr if node.attr.endswith("__") else f"_{owner}{node.attr}"


def _imported(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> tuple[str, str]:
    """The name that an import binds, and the import as a statement of its own, where it is of
    torch or of the standard library; else an empty text."""
    top = alias.name.partition(".")[0]
    name, text = alias.asname or top, f"import {alias.name if alias.asname else top}"
    if isinstance(node, ast.ImportFrom):
        top = "" if node.level else (node.module or "").partition(".")[0]
        text = f"from {node.module} import {alias.name}"
    text += f" as {alias.asname}" if alias.asname else ""
    return name, text if top == "torch" or top in sys.stdlib_module_names else ""


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the pairs of target and value that a statement assigns, `a, b = c, d` one by one."""
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        yield node.target, node.value
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
        for number, part in enumerate(parts):
            yield part, values[number] if len(values) == len(parts) else None


def displayed(node: ast.AST) -> dict[Span, ast.Name]:
    """The names that `a, b = c, d` binds, by the spans of what is stored under them; none for
    another statement."""
    match node:
        case ast.Assign(targets=[ast.Tuple(names)], value=ast.Tuple(values)) if len(names) == len(
            values
        ):
            named = [name for name in names if isinstance(name, ast.Name)]
            distinct = len({name.id for name in named}) == len(values)
            plain = distinct and not any(isinstance(value, ast.Starred) for value in values)
            return dict(zip(map(span_of, values), named, strict=True)) if plain else {}
        case _:
            return {}


class Sources:
    """A captured graph's trail, laid over the source that it ran."""

    def __init__(self, graph: Graph, trail: Trail, files: dict[str, SourceFile]) -> None:
        self.trail = trail
        self.files = files
        """Source files read so far; several trails of one model share them."""
        self.standing: list[dict[SourcePlace, ExpressionPosition]] = []
        """Positions of each step, in the outermost place first."""
        self.held: dict[SourcePlace, dict[int, ExpressionPosition]] = {}
        """The same by places: of the steps in each, in their order."""
        self.names: dict[SourcePlace, dict[int, dict[str, str]]] = {}
        """In a place, the words of the local names as the statement on a line begins."""
        self.chosen: dict[SourcePlace, set[Span]] = {}
        """In a place, the branches of conditional expressions that were evaluated."""
        self.made: dict[int, list[Node]] = {}
        """Nodes that each evaluation launched."""
        for node in graph.nodes:
            if node.step is not None:
                self.made.setdefault(node.step, []).append(node)
        self._nodes = {node.name: node for node in graph.nodes}
        self.handed_on: dict[Ref, list[int]] = {}
        """The evaluations that launch nothing, by the tensor that they hand on."""
        self._words: dict[Ref, str] = {}
        for word in trail.values:
            ref = Ref(*trail.values[word])
            self._words.setdefault(ref, word)
            if word.startswith("#") and int(word[1:]) not in self.made:
                self.handed_on.setdefault(ref, []).append(int(word[1:]))
        self._modules: dict[int, str] = {}
        self._begun: dict[int, Block] = {}
        self._turns: dict[tuple[int, Span], int] = {}
        self._called_in: dict[int, frozenset[SourcePlace]] = {}
        """The places of its caller that each call stands in, in the turns of their loops."""
        self._known: dict[tuple[SourcePlace, Span, bool], frozenset[int]] = {}
        self._described: dict[str, str] = {}
        self._walk()

    def file(self, path: str) -> SourceFile:
        """A file of the model, read once."""
        if path not in self.files:
            self.files[path] = SourceFile.read(path)
        return self.files[path]

    def narrows(self, node: Node) -> bool:
        """Whether a write in place may round what its operands give: they have several dtypes."""
        made = [self._nodes[ref.node].outputs[ref.output] for ref in node.refs()]
        floats = {each.dtype for each in made if each and each.shape and "float" in each.dtype}
        return bool(node.mutates) and len(floats) > 1

    def value(self, word: str | None) -> Ref | None:
        """The tensor that a word stands for."""
        found = self.trail.values.get(word or "")
        return Ref(*found) if found else None

    def word(self, ref: Ref) -> str:
        """A word for a tensor; empty where there is none."""
        return self._words.get(ref, "")

    def module(self, activation: int) -> str:
        """The path of the module whose method a call is of, or was made by; the model's is ""."""
        at: int | None = activation
        while at is not None and at not in self._modules:
            at = self.trail.activations[at].caller
        return self._modules[at] if at is not None else ""

    def innermost(self, path: str) -> tuple[ModuleAttributes, list[str]]:
        """The innermost module on a path, and the names of what it holds from there."""
        modules, parts = self.trail.modules, path.split(".") if path else []
        around = max(n for n in range(len(parts) + 1) if ".".join(parts[:n]) in modules)
        return modules[".".join(parts[:around])], parts[around:]

    def held_module(self, node: ast.expr, names: Mapping[str, str]) -> str | None:
        """The first path of the module that an expression is; None for anything else."""
        path = held_path(node, names)
        shared = (first for first, others in self.trail.shared.items() if path in others)
        return path if path in self.trail.modules else next(shared, None)

    def spans(self, nodes: Iterable[Node]) -> list[dict[SourcePlace, Span]]:
        """The expressions that nodes are made in, by the places that these stand in, the outermost
        first."""
        return [
            {place: at.span for place, at in self.standing[node.step].items()}
            if node.step is not None
            else {}
            for node in nodes
        ]

    def shape(self, ref: Ref) -> tuple[int, ...]:
        """A tensor's sizes; none where nothing is there."""
        outputs = self._nodes[ref.node].outputs
        tensor = outputs[ref.output] if ref.output < len(outputs) else None
        return tensor.shape if tensor else ()

    def dtype(self, ref: Ref) -> str:
        """A tensor's dtype; empty where nothing is there."""
        outputs = self._nodes[ref.node].outputs
        tensor = outputs[ref.output] if ref.output < len(outputs) else None
        return tensor.dtype if tensor else ""

    def as_long(self, ref: Ref, dim: int) -> Iterator[Ref]:
        """A tensor, and those that it has the length of a dimension from, which counts from the
        end: operands of ops that keep it."""
        todo, size = [ref], self.shape(ref)[dim]
        while todo:
            at = todo.pop(0)
            yield at
            node = self._nodes[at.node]
            op = REGISTRY.get(node.op)
            if op is not None and op.pattern in _KEEPING and size != 1:
                shapes = {each: self.shape(each) for each in node.refs()}
                todo += (each for each, s in shapes.items() if len(s) >= -dim and s[dim] == size)

    def described(self, name: str) -> str:
        """A node as the user's own source has it: the expression that made it, with file and line;
        without one by its name."""
        if name not in self._described:
            self._described[name] = self._as_it_is_written(name)
        return self._described[name]

    def _as_it_is_written(self, name: str) -> str:
        step = self._nodes[name].step
        made = None if step is None else self.trail.steps[step]
        around = self.chain(made.activation, made.place) if isinstance(made, Evaluation) else ()
        for activation, span in around:
            file = self.trail.activations[activation].file
            node = None if "site-packages" in file else self.file(file).expressions.get(span)
            if node is not None:
                return f"`{ast.unparse(node)}` ({file}:{span.line})"
        return name

    def code(self, activation: int) -> Function | None:
        """The function that a call runs; None for a lambda or a comprehension."""
        block = self._begun.get(activation)
        return self.file(block.file).function(block) if block else None

    def at(
        self, node: ast.AST | None, activation: int, own: SourcePlace | None = None
    ) -> Mapping[str, str] | None:
        """The words of the names as the statement of a call begins that an expression stands in, in
        the turns of an `own` place where it is in that; None for what stands in none that ran."""
        if not isinstance(node, (ast.expr, ast.stmt)):
            return None
        around = self.within(activation, span_of(node))
        for place in reversed(around):
            here = own and (place.activation, place.block) == (own.activation, own.block)
            names = self.names.get(own if own and here else place, {})
            if around[place].statement.line in names:
                return names[around[place].statement.line]
        return None

    def evaluated(self, place: SourcePlace, span: Span, *, within: bool) -> frozenset[int]:
        """The evaluations that stand at a span of a place, or anywhere within it."""
        key = place, span, within
        if key not in self._known:
            held = self.held[place].items()
            self._known[key] = frozenset(
                step for step, at in held if at.span == span or (within and span.holds(at.span))
            )
        return self._known[key]

    def made_by(self, word: str | None, activation: int) -> tuple[SourcePlace, ast.expr] | None:
        """The expression of a call's function that made what a word stands for, and the place; None
        where no statement stores just that, or in a loop."""
        step = int(word[1:]) if word and word[0] == "#" else None
        for at, standing in reversed(self.standing[step].items()) if step is not None else ():
            if at.activation == activation:
                file = self.file(at.block.file)
                node = file.expressions.get(standing.span)
                same = self.value_at(at, standing.span) == self.value(word)
                stored = node and isinstance(file.parents[node], ast.Assign | ast.Tuple)
                return (at, node) if node and stored and same and not at.turns else None
        return None

    def ended_at(self, activation: int) -> ast.stmt | None:
        """The statement that a call ran last; None for a lambda or a comprehension."""
        line = self._last.get(activation)
        file = self.trail.activations[activation].file
        return self.file(file).begun.get(line) if line is not None else None

    def returned(self, call: int) -> tuple[Ref | None, ...]:
        """The tensors that a call returns as a tuple, None for what is no tensor of the graph; ()
        where it returns something else."""
        ended = self.ended_at(call)
        if not isinstance(ended, ast.Return) or not isinstance(ended.value, ast.Tuple):
            return ()
        file = self.file(self.trail.activations[call].file)
        place = SourcePlace(call, file.block_of(ended), ())
        names = self.names.get(place, {}).get(ended.lineno, {})
        return tuple(
            self.value(names.get(each.id))
            if isinstance(each, ast.Name)
            else self.value_at(place, span_of(each))
            for each in ended.value.elts
        )

    @cached_property
    def _last(self) -> dict[int, int]:
        moments = (step for step in self.trail.steps if isinstance(step, Moment))
        return {step.activation: step.line for step in moments}

    def chain(self, activation: int, span: Span) -> Iterator[tuple[int, Span]]:
        """The calls that led to a place in a call, itself first, each with where it was."""
        at: int | None = activation
        here: Span | None = span
        while at is not None and here is not None:
            yield at, here
            at, here = self.trail.activations[at].caller, self.trail.activations[at].place

    def called(
        self,
        place: SourcePlace,
        taken: Callable[[Span], bool],
        opened: Sequence[OpenedExpression] = (),
    ) -> list[int]:
        """The calls that a place's text makes where a predicate holds, with those that they make,
        whether they launch anything or hand on what they are given; not those that stay, in an
        expression that is `opened`."""
        calls, found = self.trail.activations, set[int]()
        for number, call in enumerate(calls):  # a caller comes before what it calls
            if call.caller is None or call.place is None:
                continue
            here = call.caller == place.activation and taken(call.place)
            here = here and (not place.turns or place in self._called_in.get(number, (place,)))
            inner = call.caller in found and not self.opens(opened, call.caller, call.place)
            if here or inner:
                found.add(number)
        return sorted(found)

    def taken(
        self,
        place: SourcePlace,
        taken: Callable[[Span], bool],
        opened: Sequence[OpenedExpression] = (),
    ) -> Iterator[tuple[int, Span]]:
        """Yield the evaluations, with where they stand, that a place's text makes where a predicate
        holds; not those that stay, in an expression that is `opened`."""
        for step, at in self.held.get(place, {}).items():
            if taken(at.span) and not (opened and self.stays(step, opened)):
                yield step, at.span

    def began(self, statement: ast.stmt, number: int, turns: tuple[int, ...] = ()) -> bool:
        """Whether a statement of a call's function ran, in some turns of the loops around it."""
        file = self.file(self.trail.activations[number].file)
        place = SourcePlace(number, file.block_of(statement), turns)
        around = file.parents[statement]
        if isinstance(around, ast.If) and around.lineno == statement.lineno:
            return span_of(around.body[0]) in self.chosen.get(place, ())
        return statement.lineno in self.names.get(place, {})

    def passed_by(self, place: SourcePlace, span: Span) -> bool:
        """Whether a run of a block did not come to the text at a span: to none of the statements
        around it, or to the other branch of an `a if c else b`. False where a loop is between."""
        file = self.file(place.block.file)
        node = file.expressions.get(span) or file.statements.get(span)
        around = file.enclosing(node) if node else []
        within = [file.block_of(each) for each in around]
        inner = around[within.index(place.block) :] if place.block in within else []
        if node is None or not inner or any(isinstance(each, LOOPS) for each in inner[:-1]):
            return False
        if not all(self.began(each, place.activation, place.turns) for each in inner):
            return True
        chosen = self.chosen.get(place, ())
        at: ast.AST | None = node
        while at is not None and at is not inner[-1]:
            above = file.parents.get(at)
            if isinstance(above, ast.IfExp) and at is not above.test:
                own, other = (above.body, above.orelse)[:: 1 if at is above.body else -1]
                if span_of(other) in chosen and span_of(own) not in chosen:
                    return True
            at = above
        return False

    def stays(self, step: int, opened: Sequence[OpenedExpression]) -> bool:
        """Whether an evaluation is made in one of some expressions of functions."""
        made = self.trail.steps[step]
        around = self.chain(made.activation, made.place) if isinstance(made, Evaluation) else ()
        return any(self.opens(opened, *at) for at in around)

    def opens(self, opened: Iterable[OpenedExpression], activation: int, span: Span) -> bool:
        """Whether a place in a call lies in one of some expressions of functions."""
        file = self.trail.activations[activation].file
        return any(each.file == file and each.span.holds(span) for each in opened)

    def value_at(self, place: SourcePlace, span: Span) -> Ref | None:
        """Value of an expression of a place: the last that it evaluates itself, or the result of
        its call; None where it makes none."""
        steps = sorted(self.evaluated(place, span, within=False))
        if not steps:
            return None
        calls = self.calls_at(place, span)
        return self.value(self.trail.activations[max(calls)].value if calls else f"#{steps[-1]}")

    @cached_property
    def calls(self) -> Mapping[tuple[int, Span], list[int]]:
        """Calls by where they are made: the caller, and the expression there."""
        found = dict[tuple[int, Span], list[int]]()
        for number, call in enumerate(self.trail.activations):
            if call.caller is not None and call.place is not None:
                found.setdefault((call.caller, call.place), []).append(number)
        return found

    def calls_at(self, place: SourcePlace, span: Span) -> set[int]:
        """The calls that an expression of a place makes itself, of those that evaluate."""
        calls = self.trail.activations
        return {
            activation
            for step in self.evaluated(place, span, within=False)
            for activation, _ in self.chain(self.trail.steps[step].activation, span)
            if calls[activation].caller == place.activation and calls[activation].place == span
        }

    def _walk(self) -> None:
        evaluating = self._evaluating()
        for number, step in enumerate(self.trail.steps):
            call = self.trail.activations[step.activation]
            if step.activation not in self._called_in and call.caller is not None and call.place:
                stands = self.within(call.caller, call.place)
                self._called_in[step.activation] = frozenset(stands)
            if isinstance(step, Moment):
                self.standing.append({})
                if (call.file, call.function) in evaluating:
                    self._moment(step)
                continue
            if isinstance(step, Chosen):
                self.standing.append({})
                self._choice(step)
                continue
            found: dict[SourcePlace, ExpressionPosition] = {}
            for activation, span in reversed([*self.chain(step.activation, step.place)]):
                found |= self.within(activation, span)
            self.standing.append(found)
            for place, standing in found.items():
                self.held.setdefault(place, {})[number] = standing

    def _evaluating(self) -> set[tuple[str, str]]:
        """The functions, by file and name, in which a node of the graph was ever made, or that
        return what Python holds, or a tensor."""
        calls = self.trail.activations
        seen: set[int] = set()
        for step in self.trail.steps:
            at = step.activation if isinstance(step, Evaluation) else None
            while at is not None and at not in seen:
                seen.add(at)
                at = calls[at].caller
        seen |= {n for n, call in enumerate(calls) if (call.value or "")[:1] in ("=", "#", "@")}
        return {(calls[number].file, calls[number].function) for number in seen}

    def _moment(self, step: Moment) -> None:
        own = step.names.get("self", "")
        if own.startswith(":"):
            self._modules[step.activation] = own.removeprefix(":")
        call = self.trail.activations[step.activation]
        if call.function.endswith(">"):  # a lambda or a comprehension runs no block
            return
        file = self.file(call.file)
        statement = file.begun.get(step.line)
        if statement is None:
            return
        around = file.enclosing(statement)
        for outer, inner in pairwise(around):
            begins = inner.lineno == step.line  # `if a: break` begins two on one line
            if isinstance(outer, LOOPS) and outer.body[0] is inner and begins:
                key = step.activation, span_of(outer)
                self._turns[key] = self._turns.get(key, 0) + 1
        for depth, outer in enumerate(around):
            if outer.lineno == step.line:
                place = self._place(step.activation, file, around[: depth + 1])
                self._begun.setdefault(step.activation, place.block)
                self.names.setdefault(place, {}).setdefault(step.line, step.names)

    def _choice(self, step: Chosen) -> None:
        """Note a branch where it stands, in a comprehension in what holds that."""
        calls, at = self.trail.activations, step.activation
        while calls[at].function.endswith(COMPREHENDED) and calls[at].caller is not None:
            at = cast("int", calls[at].caller)
        for place in self.within(at, step.branch):
            self.chosen.setdefault(place, set()).add(step.branch)

    def within(self, activation: int, span: Span) -> dict[SourcePlace, ExpressionPosition]:
        """The places of one call that hold a stretch of its function."""
        call = self.trail.activations[activation]
        if call.function.endswith(">"):  # a lambda or a comprehension
            return {}
        file = self.file(call.file)
        node = file.expressions.get(span) or file.statements.get(span)
        if node is None:
            return {}
        node = file.outside_comprehensions(node)
        around = file.enclosing(node)
        return {
            self._place(activation, file, around[: depth + 1]): ExpressionPosition(
                span_of(statement), span_of(node)
            )
            for depth, statement in enumerate(around)
        }

    def _place(self, activation: int, file: SourceFile, around: Sequence[ast.stmt]) -> SourcePlace:
        turns = tuple(
            self._turns.get((activation, span_of(outer)), 0)
            for outer in around[:-1]
            if isinstance(outer, LOOPS)
        )
        return SourcePlace(activation, file.block_of(around[-1]), turns)
