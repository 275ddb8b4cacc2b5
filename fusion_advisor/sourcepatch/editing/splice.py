"""Edits applied to the text of a file; all other text stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from itertools import groupby

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from fusion_advisor.ir.source_trace import Span
from fusion_advisor.sourcepatch.editing.rewrite import Edit
from fusion_advisor.sourcepatch.editing.sources import SourceFile, span_of


def splice(text: str, edits: Iterable[tuple[Edit, str]], imports: Iterable[str]) -> str:
    """The text after the edits, each with the comment that stands above its call, and with the
    statements that import what they name."""
    wrapper = MetadataWrapper(cst.parse_module(text))
    positions = wrapper.resolve(PositionProvider)
    spans = _Spans(text)
    replaced: dict[Span, str] = {}
    inserted: dict[Span, str] = {}
    comments: dict[Span, list[str]] = {}
    edits = [*edits]
    guards = [*_guards(edits)]
    for edit, comment in edits:
        replaced |= dict(edit.replaced)
        inserted |= dict(edit.inserted)
        comments.setdefault(edit.called, []).append(comment)
    branches = {
        (each.lineno, each.col_offset): span_of(each)
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.If)
    }
    places = {node: spans.of(place) for node, place in positions.items()}
    for node, place in places.items():
        if isinstance(node, cst.If):  # libcst ends it elsewhere
            places[node] = branches[place.line, place.column]
    edited = wrapper.module.visit(_Editor(places, replaced, inserted, comments, guards))
    for statement in imports:
        edited = _importing(edited, statement)
    return edited.code


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
            yield _Guard(edit.guard, edit.called, *edit.lines)


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
        comments: dict[Span, list[str]],
        guards: Sequence[_Guard],
    ) -> None:
        super().__init__()
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
        if _says_nothing(after) and not after.deep_equals(before):
            return []
        made: list[cst.BaseStatement] = [after]
        if text is not None:
            changed = cst.parse_statement(text)
            assert isinstance(changed, cst.SimpleStatementLine)
            made = [changed.with_changes(leading_lines=_leading(after))]
        if span in self._inserted:
            call = cst.parse_statement(self._inserted[span])
            made = [_with_lines(call, _leading(after)), _with_lines(made[0], [])]
        called = [s for s in self._comments if span.holds(s)]
        if called and isinstance(made[0], cst.SimpleStatementLine):
            notes = [
                cst.EmptyLine(comment=cst.Comment(f"# {line}"))
                for s in sorted(called)
                for line in self._comments[s]
            ]
            made[0] = _with_lines(made[0], [*_leading(made[0]), *notes])
        return made


def _says_nothing(statement: cst.BaseStatement) -> bool:
    """Whether a statement binds names to what they hold, `a, b = a, b`."""
    match statement:
        case cst.SimpleStatementLine([cst.Assign([cst.AssignTarget(target)], value)]):
            return target.deep_equals(value)
        case _:
            return False


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
