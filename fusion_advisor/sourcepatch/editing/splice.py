"""Edits applied to the text of a file; all other text stays as it is."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from itertools import groupby

import libcst as cst
import libcst.matchers as matchers
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from fusion_advisor.fusion.findings import claimed
from fusion_advisor.ir.source_trace import Span
from fusion_advisor.sourcepatch.editing.rewrite import Edit
from fusion_advisor.sourcepatch.editing.sources import SourceFile, span_of

WIDTH = 100
"""Columns beyond which a call is written over several lines."""


def splice(
    text: str, edits: Iterable[tuple[Edit, str]], imports: Iterable[str], package: str = ""
) -> str:
    """The text after the edits, each with the comment that stands above its call, and with the
    statements that import what they name; `package` is that of the kernels."""
    wrapper = MetadataWrapper(cst.parse_module(text))
    positions = wrapper.resolve(PositionProvider)
    spans = _Spans(text)
    replaced: dict[Span, str] = {}
    inserted: dict[Span, str] = {}
    comments: dict[Span, list[tuple[str, str]]] = {}
    edits = [*edits]
    calls = KernelCalls(package, {*re.findall(r"\w+", text)})
    guards = [*_guards(edits)]
    for edit, comment in edits:
        replaced |= dict(edit.replaced)
        inserted |= dict(edit.inserted)
        name = calls.name_in(each for _, each in (*edit.replaced, *edit.inserted))
        comments.setdefault(edit.called, []).append((name, comment))
    branches = {
        (each.lineno, each.col_offset): span_of(each)
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.If)
    }
    places = {node: spans.of(place) for node, place in positions.items()}
    for node, place in places.items():
        if isinstance(node, cst.If):  # libcst ends it elsewhere
            places[node] = branches[place.line, place.column]
    edited = wrapper.module.visit(_Editor(places, replaced, inserted, comments, guards, calls))
    for statement in imports:
        edited = _importing(edited, statement)
    return edited.code


def narrowed(text: str, before: str, package: str) -> str:
    """The text with calls of a package over several lines where one is too wide, but for lines that
    were there `before`."""
    module = cst.parse_module(text)
    return module.visit(_Narrowing(package, before, module.default_indent)).code


@dataclass(frozen=True)
class _Guard:
    """A condition under which some lines of the block that a statement is in stay as they were."""

    condition: str
    within: Span
    first: int
    last: int


def nested(file: SourceFile, edits: Iterable[tuple[Edit, str]]) -> Iterator[tuple[Edit, str]]:
    """Yield the edits of a file with their comments, the inner ones first: the operands of an edit
    as others leave them."""
    pairs, texts = [*edits], dict[Span, str]()
    inner = [
        {(m, s) for m, (other, _) in enumerate(pairs) for s, _ in other.replaced if edit.keeps(s)}
        for edit, _ in pairs
    ]
    order = TopologicalSorter({n: {m for m, _ in spans} for n, spans in enumerate(inner)})
    for number in order.static_order():
        edit, comment = pairs[number]
        spelled = {ast.dump(file.expressions[span]): texts[span] for _, span in inner[number]}
        if spelled:
            edit = replace(
                edit,
                replaced=tuple((span, _placed(text, spelled)) for span, text in edit.replaced),
                inserted=tuple((span, _placed(text, spelled)) for span, text in edit.inserted),
            )
        texts |= dict(edit.replaced)
        yield edit, comment


def _placed(text: str, spelled: Mapping[str, str]) -> str:
    """A text with other texts in place of expressions."""
    return ast.unparse(_Placing(spelled).visit(ast.parse(text))) if text else ""


class _Placing(ast.NodeTransformer):
    """Puts texts in place of expressions."""

    def __init__(self, spelled: Mapping[str, str]) -> None:
        self._spelled = spelled

    def visit(self, node: ast.AST) -> ast.AST:
        text = self._spelled.get(ast.dump(node)) if isinstance(node, ast.expr) else None
        return ast.parse(text, mode="eval").body if text else self.generic_visit(node)


def _guards(edits: Iterable[tuple[Edit, str]]) -> Iterator[_Guard]:
    for edit, _ in edits:
        if edit.guard:
            yield _Guard(" or ".join(edit.asked()), edit.called, *edit.lines)


class _Spans:
    """Converts spans: Python counts bytes of UTF-8, libcst characters."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)

    def of(self, place: CodeRange) -> Span:
        start, end = place.start, place.end
        return Span(
            start.line, self._bytes(start.line, start.column),
            end.line, self._bytes(end.line, end.column),
        )  # fmt: skip

    def _bytes(self, line: int, column: int) -> int:
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return len(text[:column].encode())


class _Editor(cst.CSTTransformer):
    def __init__(
        self,
        places: dict[cst.CSTNode, Span],
        replaced: dict[Span, str],
        inserted: dict[Span, str],
        comments: dict[Span, list[tuple[str, str]]],
        guards: Sequence[_Guard],
        calls: KernelCalls,
    ) -> None:
        super().__init__()
        self._calls = calls
        self._guards = guards
        self._places = places
        self._replaced = replaced
        self._inserted = inserted
        self._comments = comments

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> object:  # pyright: ignore[reportIncompatibleMethodOverride]
        updated = super().on_leave(original_node, updated_node)
        if isinstance(original_node, cst.BaseExpression):
            text = self._replaced.get(self._places[original_node])
            if text:
                return cst.parse_expression(text)
        return updated

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body: list[cst.BaseStatement] = []
        pairs = [*zip(original_node.body, updated_node.body, strict=True)]
        spans = {self._places[before] for before in original_node.body}
        guards = [guard for guard in self._guards if guard.within in spans]

        def guarding(pair: tuple[cst.BaseStatement, cst.BaseStatement]) -> _Guard | None:
            return next((guard for guard in guards if self._within(pair[0], guard)), None)

        for guard, some in groupby(pairs, guarding):
            edited = [*some]
            after = self._edited(edited)
            if guard is None:
                body += after
                continue
            plain = cst.IndentedBlock([before.deep_clone() for before, _ in edited])
            test, fused = cst.parse_expression(guard.condition), cst.IndentedBlock(after)
            body.append(cst.If(test=test, body=plain, orelse=cst.Else(body=fused)))
        return updated_node.with_changes(body=body)

    def _within(self, statement: cst.BaseStatement, guard: _Guard) -> bool:
        span = self._places[statement]
        return guard.first <= span.line and span.end_line <= guard.last

    def _edited(
        self, pairs: Sequence[tuple[cst.BaseStatement, cst.BaseStatement]]
    ) -> list[cst.BaseStatement]:
        """Statements in a row; what stood above one that is taken out stands above the next."""
        body: list[cst.BaseStatement] = []
        above: list[cst.EmptyLine] = []
        for before, after in pairs:
            made = self._statement(before, after)
            if not made:
                above += [line for line in _leading(after) if line.comment]
            elif above:
                made[0] = _with_lines(made[0], [*above, *_leading(made[0])])
                above = []
            body += made
        return body

    def _statement(
        self, before: cst.BaseStatement, after: cst.BaseStatement
    ) -> list[cst.BaseStatement]:
        """Statements in place of a statement; none where it is removed."""
        span = self._places[before]
        simple = isinstance(before, (cst.SimpleStatementLine, cst.If))
        text = self._replaced.get(span) if simple else None
        if text == "":
            return []
        if isinstance(after, cst.SimpleStatementLine) and not after.deep_equals(before):
            if (left := _telling(after)) is None:
                return []
            after = left
        made: list[cst.BaseStatement] = [after]
        if text is not None:
            changed = cst.parse_statement(text)
            assert isinstance(changed, cst.SimpleStatementLine)
            made = [changed.with_changes(leading_lines=_leading(after))]
        if span in self._inserted:
            call = cst.parse_statement(self._inserted[span])
            made = [_with_lines(call, _leading(after)), _with_lines(made[0], [])]
        called = sorted(s for s in self._comments if span.holds(s))
        if called and isinstance(made[0], cst.SimpleStatementLine):
            notes = [note for s in called for note in self._comments[s]]
            made = [*self._written(made[0], notes), *made[1:]]
        return made

    def _written(
        self, statement: cst.SimpleStatementLine, notes: Iterable[tuple[str, str]]
    ) -> list[cst.BaseStatement]:
        """A statement with kernels' calls: those that others take in lines of their own, and each
        comment, by the name that is called, above its call."""
        lines = self._calls.apart(statement)
        above = [[*_leading(statement)], *([] for _ in lines[1:])]
        for name, note in dict.fromkeys(notes):
            holding = (n for n, each in enumerate(lines) if self._calls.calls(each, name))
            above[next(holding, -1)].append(cst.EmptyLine(comment=cst.Comment(f"# {note}")))
        return [_with_lines(*pair) for pair in zip(lines, above, strict=True)]


_PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Slice, ast.Tuple, ast.keyword,
    ast.UnaryOp, ast.BinOp, ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
"""Nodes of expressions that may as well be evaluated behind a call."""
_ITS_OWN = (
    ast.IfExp, ast.BoolOp, ast.Compare, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp,
    ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Dict, ast.JoinedStr,
)  # fmt: skip
"""Expressions whose parts may not be evaluated, or in another order."""


@dataclass
class KernelCalls:
    """Calls of kernels of a package in statements; `taken` are the names of their file."""

    package: str
    taken: set[str] = field(default_factory=set[str])

    def name_in(self, texts: Iterable[str]) -> str:
        """The first name of the package that one of some texts calls; empty without one."""
        called = rf"\b{self.package}\.(\w+)\("
        found = (re.search(called, text) for text in texts if self.package)
        return next((each[1] for each in found if each), "")

    def calls(self, statement: cst.SimpleStatementLine, name: str) -> bool:
        """Whether a statement calls a name of the package."""
        return bool(name) and f"{self.package}.{name}(" in _code(statement)

    def apart(self, statement: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
        """A statement as several: a call that another one takes is given a name before, where that
        keeps the order of what else is evaluated."""
        lines, code = list[str](), _code(statement)
        while self.package and (inner := self._inner(code)):
            text = ast.get_source_segment(code, inner) or ""
            own = re.sub(r"(_by_size)?(_or_eager)?(_\d+)?$", "", self.name_in([text]))
            name = claimed(own, self.taken)
            lines.append(f"{name} = {text}")
            first = _offset(code, inner.lineno, inner.col_offset)
            code = f"{code[:first]}{name}{code[first + len(text) :]}"
        if not lines:
            return [statement]
        made = [cst.parse_statement(text) for text in (*lines, code)]
        return [each for each in made if isinstance(each, cst.SimpleStatementLine)]

    def _inner(self, code: str) -> ast.Call | None:
        """The first call in a statement that another one takes, and that may be made before all
        else."""
        (statement,) = ast.parse(code).body
        value = getattr(statement, "value", None)
        if not isinstance(statement, (ast.Assign, ast.Return, ast.Expr)) or value is None:
            return None
        order = [*_in_order(value)]
        ours = [n for n in order if isinstance(n, ast.Call) and self._is_ours(n)]
        taken = (n for n in ours if any(n in ast.walk(other) for other in ours if other is not n))
        for each in taken:
            if is_first(each, value):
                return each
        return None

    def _is_ours(self, call: ast.Call) -> bool:
        match call.func:
            case ast.Attribute(ast.Name(name)):
                return name == self.package
            case _:
                return False


class _Narrowing(cst.CSTTransformer):
    """Writes the first call of a package in a statement over several lines where it is too wide
    for one: its operands in a line of their own, or each. Lines that were there `before` stay."""

    def __init__(self, package: str, before: str, indent: str) -> None:
        super().__init__()
        self._package, self._before, self._indent = package, {*before.splitlines()}, indent
        self._column = 0

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> None:
        self._column += len(self._indent if node.indent is None else node.indent)

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        own = original_node.indent
        self._column -= len(self._indent if own is None else own)
        return updated_node

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine:
        code = _code(original_node)
        first = " " * self._column + code.partition("\n")[0]
        if f"{self._package}." not in code or first in self._before or self._fits(original_node):
            return updated_node
        for changed in self._over_lines(original_node):
            updated_node = changed
            if self._fits(changed):
                break
        return updated_node

    def _over_lines(self, statement: cst.SimpleStatementLine) -> Iterator[cst.SimpleStatementLine]:
        """Yield ways to write a statement, the widest first."""
        calls = [*filter(self._is_ours, matchers.findall(statement, matchers.Call()))]
        bare = [
            each
            for each in matchers.findall(statement, matchers.Tuple(lpar=[]))
            if len([of for of in cst.ensure_type(each, cst.Tuple).elements if of.value in calls])
            > 1
        ]
        ways = [(each, _in_parentheses) for each in bare]
        ways += [(each, way) for each in calls[:1] for way in (_together, _each)]
        for node, way in ways:
            made = statement.deep_replace(node, way(node))
            assert isinstance(made, cst.SimpleStatementLine)
            yield made

    def _fits(self, statement: cst.SimpleStatementLine) -> bool:
        return max(map(len, _code(statement).splitlines())) + self._column <= WIDTH

    def _is_ours(self, call: cst.CSTNode) -> bool:
        match call:
            case cst.Call(func=cst.Attribute(value=cst.Name(value=name)), args=[_, *_]):
                return name == self._package
            case _:
                return False


def _in_parentheses(node: cst.CSTNode) -> cst.CSTNode:
    """A tuple with each of its parts in a line of its own."""
    inside, behind = _new_line("    "), _new_line("")
    *others, last = cst.ensure_type(node, cst.Tuple).elements
    others = [part.with_changes(comma=cst.Comma(whitespace_after=inside)) for part in others]
    last = last.with_changes(comma=cst.Comma(whitespace_after=behind))
    return node.with_changes(
        elements=[*others, last],
        lpar=[cst.LeftParen(whitespace_after=inside)],
        rpar=[cst.RightParen()],
    )


def _together(node: cst.CSTNode) -> cst.CSTNode:
    """A call with its operands in a line of their own."""
    call = cst.ensure_type(node, cst.Call)
    *others, last = call.args
    last = last.with_changes(whitespace_after_arg=_new_line(""))
    return call.with_changes(args=[*others, last], whitespace_before_args=_new_line("    "))


def _each(node: cst.CSTNode) -> cst.CSTNode:
    """A call with each of its operands in a line of its own."""
    call = cst.ensure_type(node, cst.Call)
    *others, last = call.args
    others = [a.with_changes(comma=cst.Comma(whitespace_after=_new_line("    "))) for a in others]
    last = last.with_changes(comma=cst.Comma(whitespace_after=_new_line("")))
    return call.with_changes(args=[*others, last], whitespace_before_args=_new_line("    "))


def _new_line(indented: str) -> cst.ParenthesizedWhitespace:
    return cst.ParenthesizedWhitespace(indent=True, last_line=cst.SimpleWhitespace(indented))


def is_first(node: ast.AST, whole: ast.AST) -> bool:
    """Whether a part of an expression may as well be evaluated before all else of it."""
    order, own = [*_in_order(whole)], {*ast.walk(node)}
    if node not in order:
        return False
    return all(isinstance(n, _PLAIN) for n in order[: order.index(node)] if n not in own)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of an expression as they are evaluated."""
    for child in () if isinstance(node, _ITS_OWN) else ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _offset(text: str, line: int, column: int) -> int:
    """Place in a text of a line and a column in bytes."""
    lines = text.splitlines(keepends=True)
    return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())


def _code(statement: cst.SimpleStatementLine) -> str:
    """Text of a statement without what stands above it."""
    return cst.Module([statement.with_changes(leading_lines=[])]).code


def _telling(statement: cst.SimpleStatementLine) -> cst.SimpleStatementLine | None:
    """Statement `a, b = a, f(b)` without the names that it binds to what they hold; None where
    nothing is left of it."""
    match statement:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(target)], value)]):
            if target.deep_equals(value):
                return None
        case _:
            return statement
    match target, value:
        case cst.Tuple(names), cst.Tuple(values) if len(names) == len(values):
            pairs = [(n.value, v.value) for n, v in zip(names, values, strict=True)]
            left = [(name, value) for name, value in pairs if not name.deep_equals(value)]
            words = {name.value for name, _ in pairs if isinstance(name, cst.Name)}
            if len(left) > 1 or len(words) < len(pairs):
                return statement
            (name, held), *_ = left
            text = cst.Module([]).code_for_node
            made = cst.parse_statement(f"{text(name)} = {text(held)}")
            assert isinstance(made, cst.SimpleStatementLine)
            return statement.with_changes(body=made.body)
        case _:
            return statement


def _leading(statement: cst.BaseStatement) -> Sequence[cst.EmptyLine]:
    return getattr(statement, "leading_lines", ())


def _with_lines(statement: cst.BaseStatement, lines: Sequence[cst.EmptyLine]) -> cst.BaseStatement:
    return statement.with_changes(leading_lines=lines)


def _bare(
    body: Iterable[cst.SimpleStatementLine | cst.BaseCompoundStatement],
) -> Iterator[cst.BaseStatement]:
    """Statements without what stands above and behind them."""
    for statement in body:
        if isinstance(statement, cst.SimpleStatementLine):
            yield statement.with_changes(
                leading_lines=[], trailing_whitespace=cst.TrailingWhitespace()
            )


def _importing(module: cst.Module, imported: str) -> cst.Module:
    """With an import behind the last one at the top of the file, unless it is there already."""
    added = cst.parse_statement(imported)
    body = list(module.body)
    at = 0
    for number, statement in enumerate(body):
        if not isinstance(statement, cst.SimpleStatementLine):
            break
        first = statement.body[0]
        if isinstance(first, (cst.Import, cst.ImportFrom)):
            at = number + 1
        elif not (number == 0 and isinstance(first, cst.Expr)):
            break
    if not any(statement.deep_equals(added) for statement in _bare(body[:at])):
        body.insert(at, added)
    return module.with_changes(body=body)
