"""Functions whose calls an edit takes out: what is asked for them, or why they may not go.

A kernel stands for what such a function computed as the model was captured. It computes that
wherever the same function is called, and its conditions turn out as they did; what it does beside
computing a kernel does not do.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import cast

from fusion_advisor.codegen.kernel_package import asks
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.source_trace import (
    LENGTH,
    OPAQUE,
    SEQUENTIAL,
    UNSPELLED,
    Activation,
    Span,
)
from fusion_advisor.sourcepatch.editing.outline import asked_beside_kernel
from fusion_advisor.sourcepatch.editing.rewrite import Edit, NotPlaced, otherwise
from fusion_advisor.sourcepatch.editing.sources import (
    COMPREHENDED,
    Function,
    SourceFile,
    SourcePlace,
    Sources,
    assigned,
    held_path,
    names_in,
    span_of,
)
from fusion_advisor.sourcepatch.editing.spelling import SpellingAtPlace, enclosed, is_local

_PLAIN_MARKS = ("staticmethod", "classmethod", "property")


_NAMED = ".__code__.co_qualname != "
"""Part of a condition that asks for a function by its name."""


def another_function(text: str, names: Collection[str]) -> Iterator[str]:
    """Yield the conditions that what `text` spells is none of some functions, by their files and
    qualified names: `norms.py:Norm.forward`."""
    files, _, functions = zip(*(name.rpartition(":") for name in sorted(names)), strict=True)
    text = enclosed(text)
    yield f"not hasattr({text}, '__code__')"  # a partial, or what TorchScript made
    yield none_of(f"{text}.__code__.co_qualname", map(repr, functions))
    yield none_of(f"{text}.__code__.co_filename.rpartition('/')[2]", map(repr, files))


def none_of(asked: str, literals: Iterable[str]) -> str:
    """Condition that what is asked is none of some literals."""
    found = [*dict.fromkeys(literals)]
    asked = enclosed(asked)
    return f"{asked} != {found[0]}" if len(found) == 1 else f"{asked} not in ({', '.join(found)})"


@dataclass(frozen=True)
class _Choice:
    """Condition of a function, and whether it held."""

    test: ast.expr
    held: bool


class _AskedSpelling(SpellingAtPlace):
    """Expressions that are asked beside which functions are `called`, and how each branches: what
    such a function returned is what it returns, where its code says a constant, and no None where
    that says something else."""

    def of(self, node: ast.expr, activation: int) -> ast.expr | None:
        """An expression of a call's function as the place spells it; None where it cannot."""
        found = super().of(node, activation)
        match node:
            case ast.Call() if found is None:
                calls = self.calls(node, activation)
                ends = {ast.unparse(each) if each else "" for each in map(self._returned, calls)}
                if len(ends) == 1 and "" not in ends:
                    return ast.parse(min(ends), mode="eval").body
            case ast.Compare(ast.Name() as name, [ast.Is() | ast.IsNot() as sign], [none]) if (
                found is None and getattr(none, "value", "") is None
            ):
                made = self.sources.made_by(self._word(name, activation), activation)
                if made and self._gives(made[1], activation):
                    return ast.Constant(isinstance(sign, ast.IsNot))
            case _:
                pass
        return found

    def _gives(self, node: ast.expr, activation: int) -> bool:
        """Whether an expression that gave a tensor never gives None, while the functions are called
        that were."""
        match node:
            case ast.BinOp() | ast.UnaryOp():
                return True
            case ast.Subscript(slice=index):
                return any(isinstance(each, ast.Slice) for each in ast.walk(index))
            case ast.Call() if (activation, span_of(node)) in self.sources.calls:
                calls = self.calls(node, activation)
                ends = [(call, self.sources.ended_at(call)) for call in calls]
                return bool(calls) and all(
                    isinstance(end, ast.Return) and end.value and self._gives(end.value, call)
                    for call, end in ends
                )
            case ast.Call(ast.Attribute(ast.Name(name))) if self._is_torch(name, activation):
                return True
            case ast.Call(ast.Attribute(of)):  # a tensor's method
                return self.tensor(of, activation) is not None or self._gives(of, activation)
            case _:
                return False

    def _is_torch(self, name: str, activation: int) -> bool:
        """Whether the file of a call's function imports something of torch under a name."""
        file = self.sources.file(self.sources.trail.activations[activation].file)
        return bool(re.match(r"(import|from) torch\b", file.bound.get(name, "")))

    def _returned(self, call: int) -> ast.Constant | None:
        """The constant behind the `return` that ended a call; None for anything else."""
        end = self.sources.ended_at(call)
        value = end.value or ast.Constant(None) if isinstance(end, ast.Return) else None
        return value if isinstance(value, ast.Constant) else None


class Called:
    """The functions that the code of one trail calls."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._known: dict[int, list[_Choice] | str] = {}
        self._within_calls: dict[int, set[str]] = {}

    def conditions(
        self,
        place: SourcePlace,
        edit: Edit,
        given: Callable[[Ref], str],
        exchanged: Callable[[str], Iterable[str]],
    ) -> Iterator[str]:
        """Yield the conditions under which what an edit takes out would run otherwise than it did,
        in the order in which it runs: what is asked in a function is asked behind whether that is
        called. `given` has texts of tensors that a function beside the kernels could ask,
        `exchanged` what is asked for a module by its path. NotPlaced where one cannot be asked, or
        something would not happen any more."""
        spelling = _AskedSpelling(self._sources, place, edit.lines[0], given=given)
        file, own = self._file(place.activation), place.activation
        nodes = (file.expressions.get(s) or file.statements.get(s) for s, _ in edit.replaced)
        called = self._sources.called(place, edit.takes, edit.opened)
        spelling.called = frozenset(called)
        for node in filter(None, nodes):
            choices = self._within(node, own, place, edit.keeps)
            yield from self._asked(choices, own, spelling, edit.lines[0])
        for number in called:
            call = self._sources.trail.activations[number]
            if call.function == SEQUENTIAL or call.function.endswith(COMPREHENDED):
                continue
            path = self._module(call, place)
            if path is None:
                yield from self._identity(call, spelling, edit.lines[0])
            else:
                yield from exchanged(path)
            choices = self._asked_in(number)
            if isinstance(choices, str):
                raise NotPlaced(f"line {edit.lines[0]}: {choices}")
            yield from self._asked(choices, number, spelling, edit.lines[0])

    def branches_otherwise(self, edit: Edit, place: SourcePlace) -> bool:
        """Whether a question of what an edit takes out, of its lines or of a function that they
        call, or which one they call, turned out in some run of its block as one of the edit's
        conditions asks. An edit asks each of them, so that the first that turned out otherwise
        keeps the source."""
        asked, own = {*edit.conditions}, place.activation
        spelling = _AskedSpelling(self._sources, place, edit.lines[0])
        called = self._sources.called(place, edit.takes, edit.opened)
        spelling.called = frozenset(called)
        statements = (self._file(own).statements.get(span) for span, _ in edit.replaced)
        branches = (each for s in statements if s for each in ast.walk(s))
        found = [
            (node.test, self._sources.began(node.body[0], own, place.turns))
            for node in branches
            if isinstance(node, ast.If)
        ]
        for number in called:
            if self._is_another(number, spelling, edit):
                return True
            choices = self._asked_in(number)
            for choice in () if isinstance(choices, str) else choices:
                test = spelling.of(choice.test, number)
                found += [(test, choice.held)] if test else []
        turned = ({*map(ast.unparse, otherwise(test, held=not held))} for test, held in found)
        return any(texts <= asked for texts in turned)

    def _is_another(self, number: int, spelling: SpellingAtPlace, edit: Edit) -> bool:
        """Whether a call runs another function than that which an edit asks for there."""
        call = self._sources.trail.activations[number]
        try:
            own = [*self._identity(call, spelling, edit.lines[0])]
        except NotPlaced:
            return False
        names = {text.partition(" != ")[0]: text for text in own if _NAMED in text}
        asked = [text for text in edit.conditions if text.partition(" != ")[0] in names]
        return bool(asked) and not {*asked} & {*own}

    def _asked_in(self, number: int) -> list[_Choice] | str:
        """The conditions that a call's function asked; or what it does that no kernel does."""
        if number not in self._known:
            self._known[number] = self._choices(number)
        return self._known[number]

    def _asked(
        self, choices: Iterable[_Choice], number: int, spelling: SpellingAtPlace, line: int
    ) -> Iterator[str]:
        """Yield the texts of conditions of a call."""
        for choice in choices:
            asked = spelling.of(choice.test, number)
            texts = [*map(ast.unparse, otherwise(asked, held=choice.held))] if asked else [" or "]
            if any(" or " in text for text in texts):
                where = self._where(choice.test, number)
                what = f"{where}: what it asks, `{ast.unparse(choice.test)}`"
                raise NotPlaced(f"line {line}: {what}, cannot be asked there")
            yield from (
                text for text in texts if names_in(ast.parse(text))
            )  # others stay as they are

    def modules(self, place: SourcePlace, edit: Edit) -> set[str]:
        """The modules, by their paths, whose calls an edit takes out, those that launch nothing
        included, and those that run within a `Sequential`."""
        file = self._file(place.activation)
        replaced = (file.expressions.get(s) or file.statements.get(s) for s, _ in edit.replaced)
        inside = (each for node in replaced if node for each in ast.walk(node))
        called = [n for n in inside if isinstance(n, ast.Call) and edit.takes(span_of(n))]
        found = self._held(called, place.activation, place)
        for number in self._sources.called(place, edit.takes, edit.opened):
            if number not in self._within_calls:
                path = self._module(self._sources.trail.activations[number], place)
                function = self._sources.code(number)
                nodes = (
                    [n for n in ast.walk(function) if isinstance(n, ast.Call)] if function else []
                )
                own = {path} if path is not None else set[str]()
                self._within_calls[number] = own | self._held(nodes, number)
            found |= self._within_calls[number]
        return found

    def _held(
        self, calls: Iterable[ast.Call], number: int, place: SourcePlace | None = None
    ) -> set[str]:
        """The paths of the modules that some expressions of a call's function call."""
        found, modules = set[str](), self._sources.trail.modules
        for call in calls:
            names = self._sources.at(call, number, place) or {}
            path = self._sources.held_module(call.func, names)
            todo = [] if path is None else [path]
            while todo:
                found.add(path := todo.pop())
                if LENGTH in modules[path].plain:  # no source calls what it runs
                    todo += [each for each in modules if each.rpartition(".")[0] == path]
        return found

    def _module(self, call: Activation, place: SourcePlace) -> str | None:
        """The path of the module whose `forward` a call runs, which a place's text makes, in the
        turns of its loops."""
        made, caller = self._made(call), call.caller
        names = self._sources.at(made, caller, place) if made and caller is not None else None
        func = made.func if isinstance(made, ast.Call) else None
        return self._sources.held_module(func, names) if func and names is not None else None

    def _made(self, call: Activation) -> ast.expr | None:
        """The expression that makes a call."""
        if call.caller is None or call.place is None:
            return None
        return self._file(call.caller).expressions.get(call.place)

    def _file(self, activation: int) -> SourceFile:
        return self._sources.file(self._sources.trail.activations[activation].file)

    def _where(self, node: ast.expr | ast.stmt, number: int) -> str:
        return f"{Path(self._file(number).path).name}:{node.lineno}"

    # Which function.

    def _identity(self, call: Activation, spelling: SpellingAtPlace, line: int) -> Iterator[str]:
        """Yield the condition that another function would be called: of one that the file defines
        there is none."""
        assert call.caller is not None  # it was called from a place
        caller, function = self._sources.code(call.caller), call.function
        made = self._made(call)
        if isinstance(made, ast.Attribute) and (call.value or "").startswith("="):
            return  # a property, which is asked as it is
        func = made.func if isinstance(made, ast.Call) else None
        root = func
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Call) and getattr(root.func, "id", "") == "super":
            return
        lambda_ = function.endswith("<lambda>")
        if isinstance(root, ast.Name) and caller is not None and not lambda_:
            bound = self._file(call.caller).bound
            if root.id in bound and not is_local(caller, root.id):
                return
        text = spelling.of(func, call.caller) if func else None
        several = function in self._sources.file(call.file).repeated
        partial = self._held_text(func, call.caller) == UNSPELLED
        if text is None or lambda_ or several or partial:
            raise NotPlaced(f"line {line}: whether {function}() is called cannot be asked there")
        name = f"{Path(call.file).name}:{function}"
        yield from another_function(ast.unparse(text), {name})

    def _held_text(self, node: ast.AST | None, number: int) -> str:
        """Text of what a module holds where an attribute leads, as a trail has it; empty for
        anything else."""
        if not isinstance(node, ast.Attribute):
            return ""
        path = held_path(node, self._sources.at(node, number) or {})
        held, inside = self._sources.innermost(path or "")
        return held.plain.get(".".join(inside), "") if inside else ""

    # What it does.

    def _choices(self, number: int) -> list[_Choice] | str:
        """The conditions of a call's function that were asked; or what it does that no kernel
        does."""
        call, function = self._sources.trail.activations[number], self._sources.code(number)
        if function is None:
            return f"{call.function}() computes nothing, and may do anything"
        marks = [ast.unparse(each) for each in function.decorator_list]
        if any(mark not in _PLAIN_MARKS for mark in marks):
            return f"{call.function}() is decorated: @{marks[0]}"
        found: list[_Choice] = []
        why = self._ran(function.body, number, function, found)
        return why or found

    def _ran(
        self, body: Sequence[ast.stmt], number: int, function: Function, found: list[_Choice]
    ) -> str:
        """Collect the conditions of the statements that ran; what one of them did that no kernel
        does, or an empty text."""
        for statement in body:
            match statement:
                case ast.Expr(ast.Constant()) | ast.AnnAssign(value=None):
                    continue  # no line that runs
                case ast.Global(names) | ast.Nonlocal(names):
                    return f"{self._where(statement, number)}: it sets `{names[0]}`"
                case _ if not self._sources.began(statement, number):
                    return ""
                case _:
                    pass
            where = self._where(statement, number)
            for child in ast.iter_child_nodes(statement):
                if isinstance(child, ast.expr):
                    found += self._within(child, number)
            match statement:
                case ast.If(test):
                    held = self._sources.began(statement.body[0], number)
                    ours = asks(self._file(number).path)
                    asked = asked_beside_kernel(test) if ours else test
                    found += [_Choice(asked, held)] if asked else []
                    branch = statement.body if held else statement.orelse
                    why = self._ran(branch, number, function, found)
                case ast.Assert(test):
                    found.append(_Choice(test, held=True))
                    why = ""
                case ast.Assign(targets=targets):
                    plain = all(isinstance(each, ast.Name | ast.Tuple) for each in targets)
                    why = "" if plain or self._computes(statement, number) else "it sets something"
                case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
                    plain = isinstance(target, ast.Name) or self._computes(statement, number)
                    why = "" if plain else "it sets something"
                case ast.Expr(value):
                    computes = self._computes(statement, number)
                    why = "" if computes else f"`{ast.unparse(value)}` would not be called"
                case ast.Return() | ast.Pass() | ast.FunctionDef():
                    why = ""
                case _:
                    why = f"a kernel stands for no `{type(statement).__name__.lower()}`"
            if why:
                return why if ".py:" in why else f"{where}: {why}"
        return ""

    def _within(
        self,
        node: ast.expr | ast.stmt,
        number: int,
        own: SourcePlace | None = None,
        kept: Callable[[Span], bool] = lambda span: False,
    ) -> Iterator[_Choice]:
        """Yield the conditions of `a if b else c`, of those in an `own` place as it ran once,
        without what is `kept`. NotPlaced where one turned out both ways, or where a module is taken
        by a number, or a name, that may be another one later."""
        function = self._sources.code(number)
        for each in ast.walk(node):
            match each:
                case ast.IfExp(test, body, orelse) if not kept(span_of(each)):
                    ran = [self._chosen(part, number, own) for part in (body, orelse)]
                    if all(ran):
                        asked = f"`{ast.unparse(test)}` turns out either way"
                        raise NotPlaced(f"{self._where(test, number)}: {asked}")
                    if any(ran):
                        yield _Choice(test, held=ran[0])
                case ast.BoolOp(sign, values) if not kept(span_of(each)):
                    if not self._is_test(each, number):
                        yield from self._short(sign, values, number, own)
                case ast.Subscript(value, index):
                    names = self._sources.at(each, number) or {}
                    fixed = isinstance(index, ast.Constant)
                    if not fixed and self._sources.held_module(value, names) is not None:
                        raise NotPlaced(self._unknown(each, number))
                    if _is_open(value, index, function) and not kept(span_of(each)):
                        asked = f"which part `{ast.unparse(each)}` takes may change"
                        raise NotPlaced(f"{self._where(each, number)}: {asked}")
                case ast.Call(ast.Call()) if self._computes(each, number):
                    raise NotPlaced(self._unknown(each.func, number))
                case (
                    ast.Starred(held)
                    | ast.comprehension(iter=held)
                    | ast.keyword(arg=None, value=held)
                    | ast.Call(ast.Subscript(held))
                ):
                    yield from self._contents([held], number)
                case ast.Call(ast.Name(name), given) if hasattr(builtins, name):
                    yield from self._contents(given, number)
                case _:
                    pass

    def _short(
        self, sign: ast.boolop, values: Sequence[ast.expr], number: int, own: SourcePlace | None
    ) -> Iterator[_Choice]:
        """Yield the conditions of `a and b` that were asked: each but the last that was."""
        for test, value in pairwise(values):
            on = self._chosen(value, number, own)
            yield _Choice(test, held=on == isinstance(sign, ast.And))
            if not on:
                return

    def _is_test(self, node: ast.expr, number: int) -> bool:
        """Whether an expression is all that a statement or `a if b else c` asks, or a part of
        that."""
        parents = self._file(number).parents
        while isinstance(parents[node], ast.BoolOp | ast.UnaryOp):
            node = cast("ast.expr", parents[node])
        return getattr(parents[node], "test", None) is node

    def _chosen(self, branch: ast.expr, number: int, own: SourcePlace | None) -> bool:
        """Whether a branch of a conditional expression was evaluated."""
        span, chosen = span_of(branch), self._sources.chosen
        return any(
            span in chosen.get(place, ())
            for place in ([own] if own else self._sources.within(number, span))
        )

    def _contents(self, iterated: Sequence[ast.expr], number: int) -> Iterator[_Choice]:
        """Yield the conditions that containers which a module holds have what they had, where their
        elements are computed with. NotPlaced where that has no text. Numbers alone are asked for
        where they are read."""
        for node in (each for whole in iterated for each in ast.walk(whole)):
            text = self._held_text(node, number)
            if text == OPAQUE:
                asked = f"`{ast.unparse(node)}` may hold something else"
                raise NotPlaced(f"{self._where(cast('ast.expr', node), number)}: {asked}")
            if text[:1] in ("[", "(") and not _has_numbers_alone(text):
                held = ast.parse(text, mode="eval").body
                yield _Choice(ast.Compare(cast("ast.expr", node), [ast.Eq()], [held]), held=True)

    def _unknown(self, node: ast.expr, number: int) -> str:
        return f"{self._where(node, number)}: which module `{ast.unparse(node)}` is may change"

    def _computes(self, node: ast.expr | ast.stmt, number: int) -> bool:
        """Whether a part of the graph was made there."""
        places = self._sources.within(number, span_of(node))
        evaluated = (
            self._sources.evaluated(place, span_of(node), within=True)
            for place in places
            if place in self._sources.held
        )
        return any(any(step in self._sources.made for step in steps) for steps in evaluated)


def _has_numbers_alone(text: str) -> bool:
    """Whether a container that a text spells has numbers, and nothing else."""
    try:
        held = ast.literal_eval(text)
    except ValueError:  # it has a function
        return False
    return bool(held) and all(isinstance(each, int | float) for each in held)


def _is_open(value: ast.expr, index: ast.expr, function: Function | None) -> bool:
    """Whether another element of a display may stand at an index at another call."""
    if not _is_display(value, function):
        return False
    changed = (
        isinstance(value, ast.Name)
        and function is not None
        and any(_changes(each, value.id) for each in ast.walk(function))
    )
    return changed or bool(names_in(index))


def _changes(node: ast.AST, name: str) -> bool:
    """Whether a node may change a list that has a name: by a method, or an element."""
    match node:
        case ast.Attribute(ast.Name(of)):
            return of == name
        case ast.Subscript(ast.Name(of), ctx=ast.Store() | ast.Del()):
            return of == name
        case ast.AugAssign(ast.Name(of)):
            return of == name
        case _:
            return False


def _is_display(node: ast.expr, function: Function | None) -> bool:
    """Whether an expression is a display of several values, `(a, b)`, or a name that a function
    binds to one."""
    if isinstance(node, ast.Name) and function is not None:
        return any(
            isinstance(target, ast.Name) and target.id == node.id and _is_display(value, None)
            for each in ast.walk(function)
            for target, value in assigned(each)
            if value is not None
        )
    return isinstance(node, (ast.Tuple, ast.List, ast.Dict, ast.ListComp, ast.DictComp))
