"""Numbers of a model's source as arguments of its kernels: nothing has to be asked of them.

`self.cap`, an eps, a scale: where an op hands such a number on, the kernel is given it, and its
call spells it as the source does. A number that decides anything else is a constant, which a guard
asks.
"""

from __future__ import annotations

import ast
import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard, cast

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import Arg, GivenNumber, Node, Ref
from fusion_advisor.ir.source_trace import Evaluation, ModuleAttributes, Span
from fusion_advisor.ops.given import HANDED_ON, written_out
from fusion_advisor.region.builder import NARROW_FLOATS
from fusion_advisor.sourcepatch.editing.numbers import HeldNumber, HeldNumbers
from fusion_advisor.sourcepatch.editing.rewrite import NotPlaced
from fusion_advisor.sourcepatch.editing.sources import (
    SourcePlace,
    Sources,
    names_in,
    span_of,
    spelled,
)

Argument = tuple[str, int]
"""An argument of an op: the node and the position."""


@dataclass(frozen=True)
class Held:
    """Origin of a number: an expression of the source, whose `leaves` are the numbers that
    it is made of, with their values; an attribute of a module whose code is torch's; or a dimension
    of a tensor, whose `size` torch's own code counts by."""

    step: int
    file: str = ""
    span: Span | None = None
    leaves: tuple[tuple[Span, str], ...] = ()
    module: str = ""
    attribute: str = ""
    size: tuple[Ref, int] | None = None
    literal: str = ""
    """The number as an op was given it, whole or not."""

    def has(self, file: str, span: Span) -> bool:
        """Whether a number at a place of a file is a part of it."""
        return file == self.file and any(span == leaf for leaf, _ in self.leaves)


@dataclass(frozen=True)
class GivenNumbers:
    """The numbers that kernels are given, in a model as it was captured."""

    reader: HeldNumbers
    held: Mapping[Argument, Held] = field(default_factory=dict[Argument, Held])
    numbers: Mapping[Argument, GivenNumber] = field(default_factory=dict[Argument, GivenNumber])

    def put_into(self, flow: Dataflow) -> Dataflow:
        """A graph that launches the same, with these numbers in place of its constants."""
        nodes = tuple(self._with_numbers(node) for node in flow.nodes)
        graph = replace(flow.annotated.graph, nodes=nodes)
        return replace(flow, annotated=replace(flow.annotated, graph=graph))

    def _with_numbers(self, node: Node) -> Node:
        args = [*written_out(node).args]
        for place, arg in enumerate(args):
            known, value = self.numbers.get((node.name, place)), _value(arg)
            if known is not None and value is not None:
                args[place] = GivenNumber(value, known.key, known.name)
        return replace(node, args=tuple(args))

    def of(self, nodes: Sequence[Node]) -> list[tuple[GivenNumber, Held]]:
        """The numbers that some nodes are given, each use with where it is held."""
        return [
            (arg, self.held[node.name, place])
            for node in nodes
            for place, arg in enumerate(node.args)
            if isinstance(arg, GivenNumber)
        ]

    def texts(
        self,
        numbers: Sequence[GivenNumber],
        nodes: Sequence[Node],
        place: SourcePlace,
        line: int,
        names: Mapping[str, str],
    ) -> list[str]:
        """The numbers as a line of a place spells them, where some names are bound. Raises
        NotPlaced where it cannot."""
        uses = self.of(nodes)
        origins = [next(held for n, held in uses if n.key == number.key) for number in numbers]
        pairs = zip(numbers, origins, strict=True)
        return [self._text(number, held, place, line, names) for number, held in pairs]

    def _text(
        self,
        number: GivenNumber,
        held: Held,
        place: SourcePlace,
        line: int,
        names: Mapping[str, str],
    ) -> str:
        missing = f"line {line}: no name there has {number.name}, a number of its kernel"
        if held.size is not None:
            ref, dim = held.size
            value = self.reader.sources.value
            name = next((name for name, word in names.items() if value(word) == ref), "")
            if not name:
                raise NotPlaced(missing)
            return f"{name}.size({dim})"
        if held.span is None:
            owner = spelled(self.reader.sources.trail, held.module, names)
            if not owner:
                raise NotPlaced(missing)
            return f"{owner}.{held.attribute}"
        sources = self.reader.sources
        read = self.reader.read(held.step, place, line, names)
        texts = {n.span: n.text for n in read if held.has(n.file, n.span)}
        if not all(texts.values()):
            raise NotPlaced(missing)
        if len(texts) < len(held.leaves):  # a call passes one: a guard asks what it follows from
            return held.literal
        tree = _filled(sources.file(held.file).expressions[held.span], texts)
        if _MATH in names_in(tree) and _MATH not in sources.file(place.block.file).bound:
            raise NotPlaced(f"line {line}: `{_MATH}`, which a number is made with, is not there")
        return ast.unparse(tree)


def given_numbers(
    sources: Sources, flow: Dataflow, resized: Sequence[Dataflow] = ()
) -> GivenNumbers:
    """Find the numbers of a graph that ops hand on and the source holds, or torch takes of a size;
    `resized` are the same launches at other sizes."""
    reader = HeldNumbers(sources)
    finder = _Finder(sources, reader, resized)
    held: dict[Argument, Held] = {}
    numbers: dict[Argument, GivenNumber] = {}
    for node in flow.nodes:
        for place, number, where in finder.of(node, flow):
            numbers[node.name, place] = number
            literal = repr(written_out(node).args[place])
            held[node.name, place] = replace(where, literal=literal)
    return GivenNumbers(reader, held, numbers)


@dataclass(frozen=True)
class _Finder:
    sources: Sources
    reader: HeldNumbers
    resized: Sequence[Dataflow] = ()

    def of(self, node: Node, flow: Dataflow) -> Iterator[tuple[int, GivenNumber, Held]]:
        """The numbers of a node, with their positions and where they are held."""
        places, node = HANDED_ON.get(node.op, ()), written_out(node)
        values = {p: _value(node.args[p]) for p in places if p < len(node.args)}
        more = bool(node.kwargs) or len(node.args) > max(places, default=0) + 1
        if not values or more or node.step is None or not _in_float32(node, flow):
            return
        found = {
            p: self._held(node, v) or self._of_size(node, p, v, flow)
            for p, v in values.items()
            if v is not None
        }
        known = {p: each for p, each in found.items() if each is not None}
        if not self._makes_more(node, known):
            yield from ((place, *each) for place, each in known.items())

    def _held(self, node: Node, value: float) -> tuple[GivenNumber, Held] | None:
        """Number of a node with the place where the source holds it, if it is one place alone."""
        assert node.step is not None
        standing = self.sources.standing[node.step]
        if not standing:
            return None
        place = [*standing][-1]
        line = standing[place].statement.line
        found: dict[str, tuple[GivenNumber, Held]] = {}
        file = self.sources.trail.activations[self._evaluation(node.step).activation].file
        read = self.reader.read(node.step, place, line)
        leaves = [n for n in read if n.text and n.file == file]
        if any(n.of == "name" and self._bound_again(n.text, node.step) for n in leaves):
            return None
        for expression in self._expressions(node.step, leaves):
            inside = [n for n in leaves if span_of(expression).holds(n.span)]
            told = _MATH not in names_in(expression) or _MATH in self.sources.file(file).bound
            if told and _computed(expression, {n.span: n.value for n in inside}) == value:
                tree = _filled(expression, {n.span: n.text for n in inside})
                text, held = ast.unparse(tree), Held(
                    node.step, file, span_of(expression),
                    tuple((n.span, n.value) for n in inside),
                )  # fmt: skip
                apart = span_of(expression) if self._bound_again(text, node.step) else None
                key = place.activation, text, value, apart
                found[text] = GivenNumber(value, key, _last_name(tree)), held
        found |= self._of_torch(node, value)
        return next(iter(found.values())) if len(found) == 1 else None

    def _of_size(
        self, node: Node, place: int, value: float, flow: Dataflow
    ) -> tuple[GivenNumber, Held] | None:
        """Number that torch's own code takes of a size, as `batchmean` does: what a name holds has
        that size, here and wherever the number is another."""
        assert node.step is not None
        there = [
            (each, number)
            for each in self.resized
            if (number := _value(written_out(each.nodes[each.position[node.name]]).args[place]))
        ]
        if len({value, *(number for _, number in there)}) == 1 or len(there) < len(self.resized):
            return None
        standing = self.sources.standing[node.step]
        at = [*standing][-1] if standing else None
        line = standing[at].statement.line if at else 0
        names = self.sources.names.get(at, {}).get(line, {}) if at else {}
        for ref in filter(None, map(self.sources.value, names.values())):
            for dim, size in enumerate(flow.annotated.tensors[ref].shape):
                if size == value and all(
                    each.annotated.tensors[ref].shape[dim] == number for each, number in there
                ):
                    key = (ref, dim)
                    return GivenNumber(value, key, "size"), Held(node.step, size=key)
        return None

    def _expressions(self, step: int, leaves: Sequence[HeldNumber]) -> Iterator[ast.expr]:
        """The operands of the expression that made a node that are made of numbers alone which
        Python holds."""
        made = self._expression(step)
        activation = self._evaluation(step).activation
        for node in ast.iter_child_nodes(made) if made else ():
            value = node.value if isinstance(node, ast.keyword) else node
            if not isinstance(value, ast.expr):
                continue
            inside = any(span_of(value).holds(n.span) for n in leaves)
            if inside and not self.reader.computed(activation, span_of(value)):
                yield value

    def _bound_again(self, text: str, step: int) -> bool:
        """Whether a name of a text has several bindings in its function: what the text gives may be
        another number elsewhere, of equal value or not."""
        function = self.sources.code(self._evaluation(step).activation)
        nodes = [*ast.walk(function)] if function else []
        bound = [n.arg for n in nodes if isinstance(n, ast.arg)]
        bound += [
            n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)
        ]
        return any(bound.count(name) > 1 for name in names_in(ast.parse(text)))

    def _evaluation(self, step: int) -> Evaluation:
        made = self.sources.trail.steps[step]
        assert isinstance(made, Evaluation)  # it made a node
        return made

    def _expression(self, step: int) -> ast.expr | ast.stmt | None:
        made = self._evaluation(step)
        file = self.sources.file(self.sources.trail.activations[made.activation].file)
        return file.expressions.get(made.place) or file.statements.get(made.place)

    def _of_torch(self, node: Node, value: float) -> Iterator[tuple[str, tuple[GivenNumber, Held]]]:
        """Attributes with that value of a module whose code is torch's."""
        assert node.step is not None
        owner = self.sources.trail.modules.get(node.module)
        for name in _names_of_torch(owner) if owner else ():
            if owner and _read(owner.plain[name]) == value:
                held = Held(node.step, module=node.module, attribute=name)
                key = node.module, name
                yield f"{node.module}:{name}", (GivenNumber(value, key, name), held)

    def _makes_more(self, node: Node, known: Mapping[int, object]) -> bool:
        """Whether the call that made a node made something else with numbers that it does not
        spell: they may follow from the same number."""
        assert node.step is not None
        spelled = _spelled(self._expression(node.step))
        beside = [each for each in self.sources.made[node.step] if each.name != node.name]
        numbers = [n for each in beside for n in _floats(each.args)]
        numbers += [
            n for place, arg in enumerate(node.args) if place not in known for n in _floats(arg)
        ]
        return not spelled.issuperset(numbers)


def _names_of_torch(owner: ModuleAttributes) -> Iterator[str]:
    """The attributes of a module that a class of torch gives it."""
    return (
        name for name in (owner.inherited if owner.file else owner.plain) if name.isidentifier()
    )


def asked_of_modules(sources: Sources, flow: Dataflow) -> frozenset[tuple[str, float]]:
    """Whole numbers of nodes, by name, that a module of torch holds, as `num_groups`: a guard asks
    for each (`Guards`)."""
    found = set[tuple[str, float]]()
    for node in flow.nodes:
        owner = sources.trail.modules.get(node.module)
        values = {_read(owner.plain[name]) for name in _names_of_torch(owner)} if owner else ()
        numbers = (arg for arg in node.args if type(arg) is int)
        found |= {(node.name, number) for number in numbers if number in values}
    return frozenset(found)


def _in_float32(node: Node, flow: Dataflow) -> bool:
    """Whether a node is computed in float32."""
    taken = [flow.annotated.tensors[ref].dtype for ref in node.refs()]
    return node.out.dtype in (*NARROW_FLOATS, "float32") and "float64" not in taken


def _value(arg: Arg) -> float | None:
    """A finite number among the arguments of an op; None for anything else."""
    if isinstance(arg, bool) or not isinstance(arg, int | float) or not math.isfinite(arg):
        return None
    return float(arg)


def _read(text: str) -> float | None:
    """The number that a text spells; None for anything else."""
    try:
        return _value(ast.literal_eval(text))
    except (ValueError, SyntaxError):
        return None


def _floats(arg: Arg | tuple[Arg, ...]) -> Iterator[float]:
    """The numbers with a point among arguments: others name dimensions and sizes."""
    if isinstance(arg, tuple):
        for each in arg:
            yield from _floats(each)
    elif isinstance(arg, float):
        yield arg


def _spelled(node: ast.AST | None) -> set[float]:
    """The numbers that a piece of source spells, with either sign."""
    found = ast.walk(node) if node is not None else ()
    values = {_value(n.value) for n in found if isinstance(n, ast.Constant) and _is_number(n.value)}
    return {sign * value for value in values if value is not None for sign in (1.0, -1.0)}


def _is_number(value: object) -> TypeGuard[Arg]:
    return isinstance(value, int | float)


_MATH = "math"
_SIGNS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b,
    ast.Pow: math.pow,
}


def _computed(node: ast.expr, values: Mapping[Span, str]) -> float | None:
    """The number that an expression is of values that parts of it have; None for what is made in
    other ways than by arithmetic and the functions of `math`."""
    if span_of(node) in values:
        return _read(values[span_of(node)])
    match node:
        case ast.Constant(value) if _is_number(value):
            return _value(value)
        case ast.UnaryOp(ast.USub(), of):
            found = _computed(of, values)
            return None if found is None else -found
        case ast.BinOp(left, sign, right) if type(sign) in _SIGNS:
            return _applied(_SIGNS[type(sign)], [_computed(n, values) for n in (left, right)])
        case ast.Call(ast.Attribute(ast.Name("math"), name), args, []) if hasattr(math, name):
            return _applied(getattr(math, name), [_computed(n, values) for n in args])
        case ast.Call(ast.Name("float"), [of], []):
            return _computed(of, values)
        case _:
            return None


def _applied(function: Callable[..., float], args: Sequence[float | None]) -> float | None:
    """A function of numbers; None where one is missing, or the function refuses them."""
    if any(each is None for each in args):
        return None
    try:
        return _value(function(*args))
    except (ArithmeticError, TypeError, ValueError):
        return None


def _filled(node: ast.expr, texts: Mapping[Span, str]) -> ast.expr:
    """An expression with other texts in the place of some parts."""
    if span_of(node) in texts:
        return ast.parse(texts[span_of(node)], mode="eval").body
    made = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, ast.expr):
            setattr(made, name, _filled(value, texts))
        elif isinstance(value, list):
            parts = cast("list[object]", value)
            filled = [_filled(n, texts) if isinstance(n, ast.expr) else n for n in parts]
            setattr(made, name, filled)
    return made


def _last_name(node: ast.expr) -> str:
    """The word for a number: the last name of its expression, but for functions."""
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Call(ast.Attribute(ast.Name("math")), [of, *_]) | ast.UnaryOp(operand=of):
            return _last_name(of)
        case ast.Call(func):
            return _last_name(func)
        case ast.BinOp(left, _, right):
            return _last_name(left if isinstance(right, ast.Constant) else right)
        case ast.Subscript(value):
            return _last_name(value)
        case _:
            return "number"
