"""One occurrence of a group as an edit of the source that made it, or the reason why there is none.

All nodes of the group have to be made in one place (`sources.SourcePlace`). Every expression there
that belongs to the group is taken out; a part of it that does not belong to the group becomes an
operand of the kernel's call, which stands where the first result was made.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeGuard

from fusion_advisor.codegen.kernel_package import asks
from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.ir.graph import Ref
from fusion_advisor.ir.source_trace import Evaluation, Span
from fusion_advisor.sourcepatch.editing.opened import (
    OpenedOperand,
    alters,
    launches_nothing,
    opened_operand,
)
from fusion_advisor.sourcepatch.editing.ranks import rank_first
from fusion_advisor.sourcepatch.editing.sources import (
    LOOPS,
    Block,
    Function,
    OpenedExpression,
    SourceFile,
    SourcePlace,
    Sources,
    displayed,
    names_in,
    span_of,
    spelled,
    stored_in,
)
from fusion_advisor.sourcepatch.editing.spelling import SpellingAtPlace
from fusion_advisor.support.errors import AdvisorError


class NotPlaced(AdvisorError):
    """Raised for a group that the source cannot express; the message is the reason."""

    def within(self, file: str) -> NotPlaced:
        """The same with its lines as those of a file."""
        return NotPlaced(re.sub(r"\bline (?=\d)", f"{file}:", str(self)))


def _no_numbers(place: SourcePlace, line: int, names: Mapping[str, str]) -> Sequence[str]:
    del place, line, names
    return ()


@dataclass(frozen=True)
class KernelCall:
    """A kernel as the source calls it: its name, and the tensors that it takes and gives. With a
    `line` the source says that instead: an expression in which `names` stand for inputs, by their
    numbers. With `only_dtype` it may stand for the statements in the captured dtypes alone."""

    name: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    line: str = ""
    names: tuple[tuple[str, int], ...] = ()
    only_dtype: bool = False
    viewed: str = ""
    """Text behind the call of a kernel with one result, which is a view of that."""
    numbers: Callable[[SourcePlace, int, Mapping[str, str]], Sequence[str]] = _no_numbers
    """The texts of the numbers that it takes behind its tensors, at a line of a place where some
    names are bound."""

    def written(self, texts: Sequence[str]) -> str:
        """Its text; `texts` are those of the inputs. NotPlaced where one would be computed more
        than once."""
        if not self.line:
            return f"{self.name}({', '.join(texts)}){self.viewed}"
        given = {name: texts[number] for name, number in self.names}
        tree = ast.parse(self.line, mode="eval").body
        read = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
        for name, text in given.items():
            if read.count(name) > 1 and not _is_path(ast.parse(text, mode="eval").body):
                raise NotPlaced(f"`{text}` would be computed more than once")
        return ast.unparse(_Filling(given).visit(tree))


class _Filling(ast.NodeTransformer):
    """Puts expressions in place of names."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        text = self._given.get(node.id)
        return ast.parse(text, mode="eval").body if text else node


def _is_path(node: ast.expr) -> bool:
    """Whether an expression is a name or an attribute of one."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


@dataclass(frozen=True)
class Part:
    """Statement that an edit takes out, or an expression of one. `leaves` are the parts of it that
    the call is given, with the texts that it is given them as; `result` is the number of the
    kernel's result that it is, if it is one."""

    statement: Span
    node: Span
    leaves: tuple[tuple[Span, str], ...] = ()
    result: int | None = None
    viewed: bool = False
    """Whether it is a result of which its statement stores a view."""


@dataclass(frozen=True)
class TakenOut:
    """Parts that an edit takes out of the source, and the call that stands for them: its text, with
    those of its operands. `modules` are names that hold modules there, `views` operands for which
    nothing is launched; what is put there is what the call gives, `viewed` so."""

    kernel: str
    call: str
    operands: tuple[str, ...]
    parts: tuple[Part, ...]
    modules: frozenset[str]
    views: frozenset[str] = frozenset()
    viewed: str = ""


@dataclass(frozen=True)
class Edit:
    """Edit of one block of a file: expressions and statements replaced by text, statements removed
    (an empty text), and text inserted before a statement."""

    block: Block
    function: str
    qualname: str
    replaced: tuple[tuple[Span, str], ...]
    inserted: tuple[tuple[Span, str], ...]
    called: Span
    """The statement in which, or before which, the kernel is called."""
    lines: tuple[int, int]
    """First and last line of the statements that change."""
    taken: TakenOut = field(compare=False)
    kept: tuple[Span, ...] = ()
    """Parts of replaced expressions that become operands."""
    guard: str = ""
    """Condition under which the source stays as it was: it computes something else then."""
    steering: tuple[str, ...] = ()
    """Conditions under which another branch would run of an `if` that is taken out."""
    with_statements: bool = False
    """Whether the kernel's reference may be no substitute for the statements at another call: where
    one function of torch launches several ops, which may be others there, where a number is given,
    which may be a tensor there, and where an operator of Python's raises other errors."""
    wholes: tuple[tuple[Span, tuple[str, ...]], ...] = ()
    """Calls of a `Sequential` that are spelled out and taken out in part, each with the conditions
    that it may run otherwise."""
    asked_too: frozenset[str] = frozenset()
    """Conditions of the guard that the kernel's launcher asks, too."""
    opened: tuple[OpenedExpression, ...] = ()
    """Operands that a function beside the kernels computes, of calls that are taken out in part."""

    @property
    def file(self) -> str:
        """Path of the file."""
        return self.block.file

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions of the guard, any of which keeps the source; () without a guard."""
        return tuple(filter(None, self.guard.split(" or ")))

    def asked(self, *, launched: bool = False) -> tuple[str, ...]:
        """The conditions in an order in which none raises; with `launched` without those that the
        launcher asks, too."""
        left = self.asked_too if launched else ()
        return (*rank_first(each for each in self.conditions if each not in left),)

    @property
    def needs_function(self) -> bool:
        """Whether a function has to ask, or to hold the statements."""
        return bool(self.guard or self.opened) or self.with_statements

    def guarded(self, condition: str) -> Edit:
        """The edit with one more condition, or several, under which the source stays."""
        conditions = dict.fromkeys(filter(None, (*self.conditions, *condition.split(" or "))))
        return replace(self, guard=" or ".join(conditions))

    @property
    def touched(self) -> tuple[Span, ...]:
        return tuple(span for span, _ in (*self.replaced, *self.inserted))

    def takes(self, span: Span) -> bool:
        """Whether an edit removes the text at a span: replaced, and not kept as an operand."""
        replaced = any(each.holds(span) for each, _ in self.replaced)
        return replaced and not self.keeps(span)

    def keeps(self, span: Span) -> bool:
        """Whether the text at a span lies in an operand."""
        return any(each.holds(span) for each in self.kept)

    def as_called(self) -> tuple[object, ...]:
        """Changes that an edit makes to the source, whichever kernel it calls: equal for edits of
        which one call may stand for both."""
        own = self.taken.call
        kept = [pair for pair in (*self.replaced, *self.inserted) if pair[1]]
        gone = [s for s in self.touched if not any(o != s and o.holds(s) for o in self.touched)]
        texts = [(span, text.replace(own, "()")) for span, text in kept]
        removed = [span for span, text in self.replaced if not text]
        given = [leaf for leaf in self.kept if not any(span.holds(leaf) for span in removed)]
        return self.block, self.called, tuple(given), tuple(texts), tuple(gone)

    def takes_as_operand(self, other: Edit) -> bool:
        """Whether what another edit touches of the same text lies in operands of this one."""
        shared = [(a, b) for a in self.touched for b in other.touched if a.holds(b) or b.holds(a)]
        return all(any(a.holds(leaf) and leaf.holds(b) for leaf in self.kept) for a, b in shared)


@dataclass
class _Top:
    """An expression that belongs to the group, in a statement that it stands in; `leaves` are the
    expressions inside it that something else computes."""

    statement: ast.stmt
    node: ast.expr | ast.AugAssign
    value: Ref | None
    leaves: list[ast.expr] = field(default_factory=list[ast.expr])
    kept: tuple[str, ...] = ()
    """Names that those of these have which its statement computes, once the rest is taken out."""

    @property
    def whole(self) -> bool:
        """Whether the statement does nothing but compute it and store or return it."""
        return self.node is self.statement or getattr(self.statement, "value", None) is self.node


def rewrite(
    sources: Sources, flow: Dataflow, members: Sequence[int], call: KernelCall
) -> tuple[SourcePlace, Edit]:
    """Find the place where one occurrence of a group is made, and the edit there. Raises NotPlaced
    with the reason."""
    rewriter = _Rewriter(sources, flow, members, call)
    try:
        return rewriter.edit()
    except NotPlaced as reason:
        raise reason.within(rewriter.path) from reason


class _Rewriter:
    def __init__(
        self, sources: Sources, flow: Dataflow, members: Sequence[int], call: KernelCall
    ) -> None:
        self._sources = sources
        self._flow = flow
        self._call = call
        self._inside = set(members)
        steps = {flow.nodes[number].step for number in members}
        if None in steps:
            raise NotPlaced("a part of it was made by no expression of the source")
        self._steps = {step for step in steps if step is not None}
        self._gone = self._steps | self._idle() | self._passed_on()
        self._place = self._common()
        activation = sources.trail.activations[self._place.activation]
        self.path = activation.file
        self._file: SourceFile = sources.file(activation.file)
        self._function = self._file.function(self._place.block)
        self._at = sources.held[self._place]
        self._block = self._file.body(self._place.block)
        self._branches: list[ast.If] = []
        self._left: dict[Span, dict[str, str | None]] = {}
        """The words of the names that statements bind, by what is left of them; None for a name
        that keeps what it held."""
        self._body: list[ast.stmt] = []
        self._dropped: list[ast.If] = []
        self._partial: dict[Span, frozenset[int]] = {}
        """Calls of which the group has a part, with what else they evaluate."""
        self._opened: list[OpenedOperand] = []

    # Where.

    def _idle(self) -> set[int]:
        """Evaluations whose results only the kernel needs; what nobody needed before stays, a view
        of what the group makes aside."""
        flow, needed = self._flow, set[int]()
        todo = [flow.position[ref.node] for ref in (*flow.returned, *self._call.inputs)]
        todo += [i for i, node in enumerate(flow.nodes) if node.mutates]
        todo += [i for i, made in flow.ends if made not in self._inside]
        while todo:
            number = todo.pop()
            if number not in needed and number not in self._inside:
                needed.add(number)
                todo += flow.before[number]
        idle: set[int] = set()
        for step, nodes in self._sources.made.items():
            numbers = {flow.position[node.name] for node in nodes}
            spared = numbers - self._inside
            if step in self._steps and spared & needed:
                made = self._sources.described(flow.nodes[min(spared & needed)].name)
                raise NotPlaced(f"only a part of what {made} computes is fused")
            if step not in self._steps and not numbers & needed:
                idle.add(step)
        return idle

    def _passed_on(self) -> set[int]:
        """Evaluations that launch nothing and hand on what only the kernel needs: a dropout in
        eval."""
        return {
            step
            for ref, steps in self._sources.handed_on.items()
            if ref not in self._call.outputs and self._flow.position[ref.node] in self._inside
            for step in steps
        }

    def _common(self) -> SourcePlace:
        """The innermost place that all of the group is in; not in a function that asks before it
        launches a kernel, but where that is called."""
        every = [self._sources.standing[step] for step in self._steps]
        shared = [place for place in every[0] if all(place in places for places in every)]
        shared = [place for place in shared if not asks(place.block.file)] or shared
        if not shared:
            raise NotPlaced(
                "its parts are made in different calls, or in different turns of a loop"
            )
        return shared[-1]

    def _require_own_writes(self) -> None:
        """NotPlaced where a part of it writes in place into a tensor that its function was given,
        of which whoever gave it may hold another name."""
        flow, calls = self._flow, self._sources
        for number in sorted(self._inside):
            node = flow.nodes[number]
            for other in flow.nodes[:number] if node.mutates and not flow.is_view(number) else ():
                if not any(t and t.storage in node.mutates for t in other.outputs):
                    continue
                made = None if other.step is None else calls.trail.steps[other.step]
                own = isinstance(made, Evaluation)
                around = calls.chain(made.activation, made.place) if own else ()
                if all(at != self._place.activation for at, _ in around):
                    raise NotPlaced(
                        f"it writes into a tensor that {self._function.name}() is given"
                    )

    # What.

    def edit(self) -> tuple[SourcePlace, Edit]:
        self._body += self._as_it_ran(self._block)
        self._require_own_writes()
        tops = [top for statement in self._statements() for top in self._tops(statement)]
        tops += self._made_in_branches(tops)
        tops, together = self._together(tops)
        results = [top for top in tops if top.value in self._call.outputs or top is together]
        missing = set(self._call.outputs) - {top.value for top in results}
        if missing and not together:
            where = f"{self._function.name}()"
            made = ", ".join(sorted(self._sources.described(ref.node) for ref in missing))
            raise NotPlaced(f"no expression in {where} has the value of {made}")
        first = results[0]
        replaced: dict[Span, str] = {}
        rebound: list[tuple[str, ast.stmt]] = []
        for top in tops:
            if top not in results:
                self._take_out(top, tops, replaced, rebound)
        gone = {name for name, _ in rebound}
        for top in results:
            top.node = self._handed_on(top, gone)
        single = len(self._call.outputs) == 1 or together is not None
        texts = self._arguments(first, tops, replaced, single=single)
        for top, node in self._handing(tops, texts):
            top.leaves.append(node)
        before, after = self._names(first.statement), self._bindings(first.statement, replaced)
        names = {name: word for name, word in after.items() if before.get(name) == word}
        texts += self._call.numbers(self._place, first.statement.lineno, names)
        text = self._call.written(texts)
        inserted: dict[Span, str] = {}
        if single:
            replaced[span_of(first.node)] = self._assigned(first, text)
        else:
            self._several(results, text, replaced, inserted)
        self._idle_names(replaced)
        self._idle_casts(replaced)
        self._hoist(tops, replaced, inserted)
        self._unread(rebound, replaced)
        body = [*map(span_of, self._block)]
        held = [s for s in body if any(s.holds(span) for span in (*replaced, *inserted))]
        called = next(s for s in body if s.holds(span_of(first.statement)))
        for span in held:
            if not self._file.alone(span):
                raise NotPlaced(f"line {span.line}: its statements share a line")
        self._require_no_jump(held, called, replaced)
        return self._place, Edit(
            block=self._place.block,
            function=self._function.name,
            qualname=self._file.qualname(self._function),
            replaced=tuple(sorted(replaced.items())),
            inserted=tuple(sorted(inserted.items())),
            called=called,
            steering=tuple(self._steering(body.index(held[0]), called, replaced)),
            kept=tuple(sorted(span_of(leaf) for top in tops for leaf in top.leaves)),
            opened=tuple(sorted((each.at for each in self._opened), key=lambda each: each.text)),
            lines=(held[0].line, held[-1].end_line),
            taken=TakenOut(
                self._call.name.rpartition(".")[2],
                text,
                tuple(texts),
                tuple(self._parts(tops, together, texts, replaced)),
                frozenset(n for n, w in self._names(first.statement).items() if w[:1] == ":"),
                frozenset(self._text(o) for t in tops for o in t.leaves if self._only_views(o)),
                self._call.viewed,
            ),
        )

    def _together(self, tops: list[_Top]) -> tuple[list[_Top], _Top | None]:
        """Tops, with the one that gives all results in their order, if one does: a call of what
        returns them, or `a, b` in place of its elements."""
        outputs = self._call.outputs
        if len(outputs) == 1:
            return tops, None
        for top in tops:
            if isinstance(top.node, ast.Call) and self._returned(top.node) == outputs:
                return tops, top
        own = [top for ref in outputs for top in tops if top.value == ref]
        value = getattr(own[0].statement, "value", None) if own else None
        if not isinstance(value, ast.Tuple) or [top.node for top in own] != value.elts:
            return tops, None
        whole = _Top(own[0].statement, value, None, [leaf for top in own for leaf in top.leaves])
        return [whole if top is own[0] else top for top in tops if top not in own[1:]], whole

    def _returned(self, node: ast.Call) -> tuple[Ref | None, ...]:
        """The tensors that a call returns as a tuple; () of other calls."""
        calls = self._sources.calls_at(self._place, span_of(node))
        return self._sources.returned(max(calls)) if calls else ()

    def _require_no_jump(
        self, held: Sequence[Span], called: Span, replaced: Mapping[Span, str]
    ) -> None:
        """NotPlaced where what stays between the parts may leave the block: what stood behind that
        would run before it, or what stood before it would not run. Where it returns, nobody reads
        what the parts before it made."""
        for statement in self._block:
            span = span_of(statement)
            between = held[0].line < span.line < held[-1].line and replaced.get(span) != ""
            jumps = {*_jumps(statement)} if between else set[type[ast.stmt]]()
            if (called.line < span.line and jumps) or jumps & {ast.Continue, ast.Break}:
                raise NotPlaced(f"line {span.line} between its parts may leave the block")

    def _parts(
        self,
        tops: list[_Top],
        together: _Top | None,
        texts: Sequence[str],
        replaced: dict[Span, str],
    ) -> Iterator[Part]:
        """Yield the parts that the call stands for, statements that only they read included."""
        numbers: dict[Ref | None, int] = {ref: n for n, ref in enumerate(self._call.outputs)}
        for top in tops:
            number = 0 if top is together else numbers.pop(top.value, None)
            kept, stayed = top.kept if number is None else (), 0
            leaves: list[tuple[Span, str]] = []
            for leaf in top.leaves:
                stays = bool(kept) and not self._only_views(leaf)
                text = kept[stayed] if stays else self._text(leaf)
                stayed += stays
                if stays or text in texts:
                    leaves.append((span_of(leaf), text))
            value = getattr(top.statement, "value", None)
            viewed = number is not None and bool(value) and self._is_view_of(value, top.value)
            at = span_of(top.statement), span_of(top.node)
            yield Part(*at, tuple(leaves), number, viewed and bool(_targets(top.statement)))
        known = {span_of(top.statement) for top in tops}
        yield from (Part(s, s) for s, text in replaced.items() if not text and s not in known)

    def _statements(self) -> list[ast.stmt]:
        """The statements of the place that the group is made in, in their order."""
        touched = [self._at[step].span for step in self._gone if step in self._at]
        return [s for s in self._body if any(span_of(s).holds(span) for span in touched)]

    def _as_it_ran(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        """Yield the statements of a block, with those of the branch that ran in place of an `if`
        that has a part of the group, where nothing is computed for what it asks."""
        for statement in body:
            branch = self._branch(statement)
            if isinstance(statement, ast.If) and branch:
                self._branches.append(statement)
                yield from self._as_it_ran(branch)
            else:
                yield statement

    def _branch(self, statement: ast.stmt) -> list[ast.stmt]:
        """The branch of an `if` that has a part of the group; none where its question computes."""
        if not isinstance(statement, ast.If) or self._evaluated(statement.test):
            return []
        steps = [self._at[step].span for step in self._gone if step in self._at]
        for branch in (statement.body, statement.orelse):
            if any(span_of(each).holds(span) for each in branch for span in steps):
                return branch
        return []

    def _hoist(
        self, tops: Sequence[_Top], replaced: dict[Span, str], inserted: Mapping[Span, str]
    ) -> None:
        """Put what is left of each branch in place of its `if`: the call, which the function beside
        the kernels makes where it would run, or an operand, which is computed there alone."""
        spared = set[str]()
        for statement in self._branches[::-1]:
            branch = self._branch(statement)
            left = [*filter(None, (_left(each, replaced) for each in branch))]
            if len(left) > 1 or any(span_of(each) in inserted for each in branch):
                raise NotPlaced(f"line {statement.lineno}: a part of it is in a block of its own")
            own = any(top.kept and top.statement in branch for top in tops)
            if left and (own or left[0] in spared):
                left[0] = _only_if(statement.test, left[0], held=branch is statement.body)
                spared.add(left[0])
            replaced[span_of(statement)] = left[0] if left else ""

    def _steering(self, start: int, called: Span, replaced: Mapping[Span, str]) -> Iterator[str]:
        """Yield the conditions, at a statement of the block, under which another branch runs of
        what is taken out, in their order: one may be asked only where those before let it."""
        first = self._names(self._block[start])
        for statement in sorted((*self._branches, *self._dropped), key=lambda each: each.lineno):
            test = self._asked(statement)
            names, read = self._names(statement), names_in(test)
            before = [s for s in self._block[start:] if s.lineno < statement.lineno]
            bound = {n for s in before for n in stored_in(s)}
            same = all(first.get(name) == names.get(name) for name in read)
            told = same and not any(name in bound for name in read - first.keys())
            ran = statement in self._branches and self._branch(statement) is statement.body
            texts = [*map(ast.unparse, otherwise(test, held=ran))]
            plain = told and _is_plain(test)
            if not plain or any(" or " in text for text in texts):
                raise NotPlaced(f"line {statement.lineno}: what it asks cannot be asked before")
            stays = (s for s in self._block if replaced.get(span_of(s)) != "")
            between = (s for s in stays if statement.lineno < s.lineno <= called.line)
            if _objects(statement.test) & {name for s in between for name in _altered(s)}:
                raise NotPlaced(f"line {statement.lineno}: what it asks changes before the call")
            yield from texts

    def _asked(self, statement: ast.If) -> ast.expr:
        """Condition of an `if`, with what functions return that do nothing else in place of their
        calls."""
        spelling = SpellingAtPlace(self._sources, self._place, statement.lineno)
        own = self._place.activation
        spelling.called = frozenset(
            number
            for each in ast.walk(statement.test)
            if isinstance(each, ast.Call)
            for number in self._sources.calls.get((own, span_of(each)), ())
        )
        return (spelling.of(statement.test, own) if spelling.called else None) or statement.test

    def _made_in_branches(self, tops: Sequence[_Top]) -> Iterator[_Top]:
        """Yield the statements of branches that store views which operands are, and nothing else:
        the operand is made where the kernel is called."""
        known = [top.statement for top in tops]
        for each in (each for branched in self._branches for each in self._branch(branched)):
            value = getattr(each, "value", None)
            targets = _targets(each) if isinstance(each, ast.Assign) else None
            if each in known or value is None or not targets or not self._only_views(value):
                continue
            if (made := self._value(value)) in self._call.inputs and made not in self._call.outputs:
                yield _Top(each, value, made, [value])

    def _tops(self, statement: ast.stmt) -> list[_Top]:
        """The outermost expressions of a statement that belong to the group."""
        if not isinstance(statement, _SIMPLE):
            if self._evaluated(statement) & self._steps:
                raise NotPlaced(f"line {statement.lineno}: a part of it is in a block of its own")
            return []
        found: list[_Top] = []
        if isinstance(statement, ast.AugAssign) and self._gone & self._exactly(span_of(statement)):
            value = self._value(statement)
            top = _Top(statement, statement, value)
            if self._evaluated(statement.value):
                top.leaves += self._leaves(statement.value)
            return [top]
        for child in ast.iter_child_nodes(statement):
            if isinstance(child, ast.expr):
                found += self._search(statement, child)
        return found

    def _search(self, statement: ast.stmt, node: ast.expr) -> Iterator[_Top]:
        inside = self._evaluated(node)
        if not inside & self._gone:
            return
        if self._belongs(node) and not self._looks_at_result(node):
            top = _Top(statement, node, self._value(node))
            for child in _parts(node):
                top.leaves += self._leaves(child)
            yield top
            return
        for child in _parts(node):
            yield from self._search(statement, child)

    def _looks_at_result(self, node: ast.expr) -> bool:
        """Whether an expression is a view of a result that a part of it makes: what is seen of it
        stays in the source."""
        inner = (each for child in _parts(node) for each in ast.walk(child))
        made = (self._value(each) for each in inner if isinstance(each, ast.expr))
        return any(ref in self._call.outputs and self._is_view_of(node, ref) for ref in made if ref)

    def _is_view_of(self, node: ast.expr, ref: Ref | None) -> bool:
        """Whether the value of an expression is a view of a tensor."""
        value = self._value(node)
        return value is not None and value != ref and self._flow.base(value) == ref

    def _leaves(self, node: ast.expr) -> list[ast.expr]:
        """The outermost expressions that something beside the group computes."""
        inside = self._evaluated(node)
        if not inside:
            return []
        if not inside & self._gone:
            return [node] if any(self._sources.made.get(step) for step in inside) else []
        if not self._belongs(node) and self._exactly(span_of(node)):
            raise NotPlaced(
                f"line {node.lineno}: `{self._text(node)}` is computed between its parts"
            )
        return [leaf for child in _parts(node) for leaf in self._leaves(child)]

    def _evaluated(self, node: ast.expr | ast.stmt) -> frozenset[int]:
        """The evaluations within an expression, those of the calls that it makes included."""
        return self._sources.evaluated(self._place, span_of(node), within=True)

    def _exactly(self, span: Span) -> frozenset[int]:
        return self._sources.evaluated(self._place, span, within=False)

    def _belongs(self, node: ast.expr) -> bool:
        """Whether the value of an expression is made by the group, and all that makes it is."""
        node = self._picked(node) or node
        made = self._sources.made.keys() | self._gone
        own = {step for step in self._exactly(span_of(node)) if step in made}
        if own and own & self._gone and not own <= self._gone:
            if self._call.line or not self._sources.calls_at(self._place, span_of(node)):
                raise self._in_part(node)
            self._partial[span_of(node)] = frozenset(own - self._gone)
            return True
        if not own and (whole := self._unchanged(node)):
            return self._belongs(whole)
        return bool(own) and own <= self._gone

    def _in_part(self, node: ast.expr) -> NotPlaced:
        text = self._text(node)
        return NotPlaced(f"line {node.lineno}: only a part of what `{text}` computes is fused")

    def _open(self, ref: Ref, line: int, names: Mapping[str, str]) -> str | None:
        """The text of an operand that a call makes of which the group has a part."""
        if not self._partial:
            return None
        flow, gone = self._flow, self._gone
        found = opened_operand(self._sources, flow, self._place, line, names, ref, gone)
        if found is None:
            return None
        self._opened.append(found)
        return found.at.text

    def _require_all_of_calls(self) -> None:
        """NotPlaced where a call of which the group has a part launches something else that is no
        operand, or that two operands are made of, or may not be made later."""
        sources, made = self._sources, [step for each in self._opened for step in each.steps]
        written = self._written_between(made)
        for span, beside in self._partial.items():
            other = [step for step in beside if made.count(step) != 1]
            once = launches_nothing(sources, self._flow, other)
            if not once or written or alters(sources, self._exactly(span)):
                raise self._in_part(self._file.expressions[span])

    def _written_between(self, steps: Collection[int]) -> bool:
        """Whether something writes into what some evaluations read, before the group is done."""
        flow = self._flow
        nodes = [node for step in steps for node in self._sources.made.get(step, ())]
        tensors = (flow.annotated.tensors[ref] for node in nodes for ref in node.refs())
        read = {tensor.storage for tensor in tensors}
        first = min((flow.position[node.name] for node in nodes), default=0)
        return any(
            read.intersection(node.mutates) for node in flow.nodes[first : max(self._inside)]
        )

    def _value(self, node: ast.expr | ast.stmt) -> Ref | None:
        """Value of an expression: the last that it evaluates itself, or the result of its call."""
        span = span_of(node)
        if isinstance(node, ast.expr) and (whole := self._picked(node)):
            return self._several_of(whole).get(_index(node))
        steps = sorted(self._exactly(span))
        if not steps and (whole := self._unchanged(node)):
            return self._value(whole)
        if not steps or len(self._several_of(node)) > 1:
            return None
        return self._sources.value_at(self._place, span)

    def _unchanged(self, node: ast.expr | ast.stmt) -> ast.expr | None:
        """The argument of a call that gives it back and makes nothing: of an `nn.Identity`, or of a
        function whose branches are not taken."""
        if isinstance(node, ast.Call):
            calls = self._sources.calls.get((self._place.activation, span_of(node)), ())
            given = {self._sources.value(self._sources.trail.activations[n].value) for n in calls}
            for whole in (*node.args, *(each.value for each in node.keywords)):
                if given == {self._value(whole)} != {None}:
                    return whole
        match node:
            case ast.Call(func=module, args=[whole], keywords=[]):
                names = self._sources.at(node, self._place.activation, self._place) or {}
                held = self._sources.trail.modules.get(
                    self._sources.held_module(module, names) or ""
                )
                return whole if held and held.kind == "torch.nn.Identity" else None
            case _:
                return None

    def _picked(self, node: ast.expr) -> ast.expr | None:
        """The call in `call(...)[0]`, and in `call(...).values` of an op with several results."""
        whole = node.value if isinstance(node, ast.Subscript | ast.Attribute) else None
        if not isinstance(whole, ast.Call) or _index(node) is None:
            return None
        made = {ref.node for ref in self._several_of(whole).values()}
        several = all(len(self._flow.nodes[self._flow.position[name]].outputs) > 1 for name in made)
        return whole if isinstance(node, ast.Subscript) or (made and several) else None

    def _several_of(self, node: ast.expr | ast.stmt) -> dict[int | None, Ref]:
        """The tensors that an expression gives as a tuple, as `max` does along a dimension."""
        given = (self._sources.value(f"#{step}") for step in self._exactly(span_of(node)))
        refs = {ref for ref in given if ref is not None}
        return {ref.output: ref for ref in refs} if len({ref.node for ref in refs}) == 1 else {}

    # Taking out.

    def _take_out(
        self,
        top: _Top,
        tops: Sequence[_Top],
        replaced: dict[Span, str],
        rebound: list[tuple[str, ast.stmt]],
    ) -> None:
        """A value that only the kernel needs: its statement goes, or keeps its operands."""
        statement = top.statement
        if self._all_unpacked(statement, tops):
            rebound += ((target, statement) for target in _unpacked(statement))
            replaced[span_of(statement)] = ""
            return
        targets, place = _targets(statement), span_of(statement)
        element = displayed(statement).get(span_of(top.node))
        if element:
            targets, place = [element.id], span_of(top.node)
        elif targets is None or not top.whole:
            raise NotPlaced(
                f"line {statement.lineno}: `{self._text(top.node)}` is used there and not stored"
            )
        computed = [leaf for leaf in top.leaves if not self._only_views(leaf)]
        several = len(computed) > 1
        if several and (element or statement not in self._block):
            raise NotPlaced(
                f"line {statement.lineno}: more than one of its operands is computed there"
            )
        rebound += ((target, statement) for target in targets)
        names, left = self._names(statement), self._left.setdefault(span_of(statement), {})
        stays = element and element.id in names
        replaced[place] = "" if not element else element.id if stays else "None"
        left |= dict.fromkeys(targets, "" if replaced[place] == "None" else None)
        kept = {name for each in tops for name in each.kept}
        for leaf in computed:
            value, before = self._value(leaf), {self._sources.value(names.get(t)) for t in targets}
            needed = before & {*self._call.inputs} - {value} or kept & {*targets}
            if element and needed:
                raise NotPlaced(f"line {statement.lineno}: `{targets[0]}` holds an operand")
            apart = several or needed or not (element or statement in self._block)
            own = (self._fresh(leaf, kept.union(top.kept)),) if apart else tuple(targets)
            top.kept += own
            left |= dict.fromkeys(own, "" if value is None else self._sources.word(value))
        if computed:
            texts = ", ".join(map(self._text, computed))
            stored = (", " if several else " = ").join(top.kept)
            replaced[place] = texts if element else f"{stored} = {texts}"

    def _fresh(self, node: ast.expr, kept: Collection[str]) -> str:
        """A name that the function does not have, after the last one of an expression; none of
        those that are `kept`."""
        names = names_in(self._function).union(kept) | {
            a.arg for a in ast.walk(self._function.args) if isinstance(a, ast.arg)
        }
        words = [n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)]
        word = next((w for w in reversed(words) if not w.startswith("_")), "operand")
        return next(w for w in (f"{word}{'_' * more}" for more in count()) if w not in names)

    def _all_unpacked(self, statement: ast.stmt, tops: Sequence[_Top]) -> bool:
        """Whether a statement, `a, b = ...`, names several values that only the kernel needs, and
        computes nothing else."""
        if _targets(statement) is not None or not _unpacked(statement):
            return False
        value = getattr(statement, "value", None)
        own = [t for t in tops if t.statement is statement and t.value not in self._call.outputs]
        if any(not self._only_views(leaf) for top in own for leaf in top.leaves):
            return False
        known = [top.node for top in own]
        whole = value.elts if isinstance(value, ast.Tuple) else [value]
        return all(any(each is node for node in known) for each in whole)

    def _handed_on(self, top: _Top, gone: Collection[str]) -> ast.expr | ast.AugAssign:
        """A result, with the calls on it that launch nothing and hand it on, as far as they ask
        names that are `gone`: `.to(x.dtype)`, where only the kernel has x."""
        for node in ast.walk(top.statement):
            match node:
                case ast.Call(func=ast.Attribute(value=whole)) if whole is top.node:
                    asked = {n for part in [*_parts(node)][1:] for n in names_in(part)}
                    more = self._evaluated(node) - self._evaluated(whole)
                    made = any(self._sources.made.get(step) for step in more)
                    idle = not made and self._value(node) == top.value
                    if asked & {*gone} and idle:
                        return self._handed_on(replace(top, node=node), gone)
                case _:
                    pass
        return top.node

    def _only_views(self, node: ast.expr) -> bool:
        """Whether nothing is launched for an expression, so that it can stand anywhere."""
        return launches_nothing(self._sources, self._flow, self._evaluated(node))

    def _assigned(self, top: _Top, text: str) -> str:
        """The call in place of an expression, or of `x += y`."""
        if isinstance(top.node, ast.AugAssign):
            return f"{self._text(top.node.target)} = {text}"
        return text

    def _several(
        self, results: list[_Top], text: str, replaced: dict[Span, str], inserted: dict[Span, str]
    ) -> None:
        """One call that gives several results, before the statement that made the first. A result
        that is stored as soon as it is made gets its name at once."""
        first = results[0]
        taken = names_in(self._function)
        made: dict[Ref, str] = {}
        for ref in self._call.outputs:
            top = next(top for top in results if top.value == ref)
            name = _stored(top)
            if name and (top is first or self._untouched(name, first.statement, top.statement)):
                made[ref] = name
                replaced[span_of(top.statement)] = ""
                continue
            made[ref] = result_name(top.node, self._function, taken)
            replaced[span_of(top.node)] = self._assigned(top, made[ref])
        line = f"{', '.join(made[ref] for ref in self._call.outputs)} = {text}"
        if replaced.get(span_of(first.statement)) == "":
            replaced[span_of(first.statement)] = line
        else:
            inserted[span_of(first.statement)] = line

    def _untouched(self, name: str, start: ast.stmt, end: ast.stmt) -> bool:
        """Whether nothing between two statements, the later included, reads or binds a name."""
        between = self._body[self._body.index(start) : self._body.index(end)]
        loads = {n for s in between for n in names_in(s)}
        return name not in loads and name not in names_in(getattr(end, "value", end))

    # Arguments.

    def _arguments(
        self, first: _Top, tops: list[_Top], replaced: dict[Span, str], *, single: bool
    ) -> list[str]:
        """The text of each input where the call stands, at the first result, or the only one."""
        names = self._bindings(first.statement, replaced)
        original = self._names(first.statement)
        leaves: dict[Ref, str] = {}
        for leaf in first.leaves:
            value = self._value(leaf)
            if value is None or value not in self._call.inputs or value in leaves:
                raise NotPlaced(
                    f"line {leaf.lineno}: `{self._text(leaf)}` is computed there and is no input"
                )
            if not _same(leaf, names, original):
                raise NotPlaced(
                    f"line {leaf.lineno}: a name in `{self._text(leaf)}` has another value by then"
                )
            leaves[value] = self._text(leaf)
        for top in tops:
            launched = [leaf for leaf in top.leaves if not self._only_views(leaf)]
            if top.value in self._call.outputs and top is not first and launched:
                raise NotPlaced(
                    f"line {top.statement.lineno}: an operand of a later result is computed there"
                )
            unchanged = self._names(top.statement)
            for leaf in top.leaves if top is not first else ():
                value = self._value(leaf)
                if leaf in launched or value is None:
                    continue
                if _same(leaf, names, unchanged):
                    leaves.setdefault(value, self._text(leaf))
        beside = getattr(first.statement, "value", None) is not first.node
        if not (single or all(map(self._only_views, first.leaves))) and beside:
            raise NotPlaced(
                f"line {first.statement.lineno}: an operand is computed beside the first result"
            )
        known = {
            **{self._sources.value(word): name for name, word in reversed(names.items())},
            **self._mentioned(tops, names),
        }
        known.pop(None, None)
        texts: list[str] = []
        for ref in self._call.inputs:
            text = leaves.get(ref) or known.get(ref) or self._path(ref, names)
            text = text or self._open(ref, first.statement.lineno, names)
            if text is None:
                made = self._sources.described(ref.node)
                raise NotPlaced(
                    f"line {first.statement.lineno}: its operand {made} has no name there"
                )
            texts.append(text)
        self._require_all_of_calls()
        return texts

    def _mentioned(self, tops: list[_Top], names: dict[str, str]) -> dict[Ref | None, str]:
        """Names, and calls that change nothing (a dropout in eval), that the group's own source
        spells: what was written is kept."""
        found: dict[Ref | None, str] = {}
        for top in tops:
            unchanged = self._names(top.statement)
            for node in ast.walk(top.node):
                if isinstance(node, ast.Name) and node.id in names:
                    found.setdefault(self._sources.value(names[node.id]), node.id)
                if self._hands_on(node) and _same(node, names, unchanged):
                    found.setdefault(self._value(node), self._text(node))
        return found

    def _hands_on(self, node: ast.AST) -> TypeGuard[ast.Call]:
        """Whether an expression is a call that launches nothing and gives a tensor."""
        inside = self._evaluated(node) if isinstance(node, ast.Call) else ()
        return bool(inside) and not any(self._sources.made.get(step) for step in inside)

    def _handing(
        self, tops: Sequence[_Top], texts: Sequence[str]
    ) -> Iterator[tuple[_Top, ast.expr]]:
        """Yield the calls of modules and functions that change nothing which operands are, each
        where it stands first: they are made before the kernel's, and never again. A tensor's own
        (`x.float()`) may be."""
        left = {*texts}
        for top in tops:
            names = self._names(top.statement)
            known = [inner for leaf in top.leaves for inner in ast.walk(leaf)]
            for node in ast.walk(top.node):
                if not self._hands_on(node) or node in known or self._text(node) not in left:
                    continue
                of = node.func.value if isinstance(node.func, ast.Attribute) else None
                named = isinstance(of, ast.Name) and self._sources.value(names.get(of.id))
                if of is None or not (named or self._evaluated(of)):
                    left.remove(self._text(node))
                    yield top, node

    def _path(self, ref: Ref, names: dict[str, str]) -> str | None:
        """A parameter or buffer as an attribute of a module that a name holds; a tied one as the
        module that reads it calls it, since the model may be untied."""
        trail, word = self._sources.trail, self._sources.word(ref)
        kind = self._flow.nodes[self._flow.position[ref.node]].kind
        if not word.startswith("@") or kind not in ("parameter", "buffer"):
            return None
        path = trail.placeholders[int(word[1:])]
        reading = {
            self._flow.nodes[i].module for i in self._inside if ref in self._flow.operands[i]
        }
        same = trail.tied.get(path, ())
        own = (each for each in same if each.rpartition(".")[0] in reading)
        return spelled(trail, next(own, path), names)

    def _names(self, statement: ast.stmt) -> dict[str, str]:
        """The words of the names as a statement begins, in the source as it is."""
        place = replace(self._place, block=self._file.block_of(statement))
        return self._sources.names.get(place, {}).get(statement.lineno, {})

    def _bindings(self, until: ast.stmt, replaced: dict[Span, str]) -> dict[str, str]:
        """The same once the source is edited."""
        body = self._body
        edited = (s is until or any(span_of(s).holds(span) for span in replaced) for s in body)
        start = next(i for i, is_edited in enumerate(edited) if is_edited)
        names = dict(self._names(body[start]))
        for statement, following in zip(body[start:], body[start + 1 :], strict=False):
            if statement is until:
                break
            before, after = self._names(statement), self._names(following)
            if replaced.get(span_of(statement)) == "":
                continue
            changed = {n: w for n, w in after.items() if before.get(n) != w}
            for name, word in self._left.get(span_of(statement), {}).items():
                changed[name] = names.get(name, "") if word is None else word
            names |= changed
        return names

    # What stays.

    def _unread(self, rebound: Sequence[tuple[str, ast.stmt]], replaced: dict[Span, str]) -> None:
        """NotPlaced where a name that is bound no longer, or otherwise, is read afterwards."""
        for name, statement in rebound:
            reader = self._read_after(name, statement, replaced)
            if reader is not None:
                raise NotPlaced(f"line {reader}: `{name}` is read, which only the kernel has now")

    def _read_after(self, name: str, statement: ast.stmt, replaced: dict[Span, str]) -> int | None:
        """The line of the first read of a name behind a statement that stays in the source."""
        index = next(i for i, s in enumerate(self._body) if s is statement)
        for later in self._body[index + 1 :]:
            for node in self._surviving(later, replaced):
                if node.id == name and isinstance(node.ctx, ast.Load):
                    if self._never(later, node) and self._ends_behind(later, replaced):
                        self._dropped.append(later)
                        replaced[span_of(later)] = ""
                        break
                    return node.lineno
            if isinstance(later, ast.Return):
                return None
            if name in _unpacked(later) and replaced.get(span_of(later), "=") != "":
                return None
        end = span_of(self._block[-1])
        for node in self._surviving(self._function, replaced):
            outside = (node.lineno, node.col_offset) > (end.end_line, end.end_column)
            looped = bool(self._place.turns) and node.lineno < statement.lineno
            if node.id == name and isinstance(node.ctx, ast.Load) and (outside or looped):
                return node.lineno
        return None

    def _never(self, statement: ast.stmt, node: ast.AST) -> TypeGuard[ast.If]:
        """Whether a statement is an `if` without another branch that did not run."""
        if not isinstance(statement, ast.If) or statement.orelse:
            return False
        asked = any(each is node for each in ast.walk(statement.test))
        place = replace(self._place, block=self._file.block_of(statement.body[0]))
        ran = statement.body[0].lineno in self._sources.names.get(place, {})
        return not (asked or ran or self._evaluated(statement.test))

    def _ends_behind(self, statement: ast.stmt, replaced: Collection[Span]) -> bool:
        """Whether an edit changes something behind a statement."""
        return any(span.line > statement.lineno for span in replaced)

    def _surviving(self, root: ast.AST, replaced: dict[Span, str]) -> Iterator[ast.Name]:
        """The names in what an edit leaves as it is."""
        if isinstance(root, (ast.expr, ast.stmt)) and span_of(root) in replaced:
            return
        if isinstance(root, ast.Name):
            yield root
        for child in ast.iter_child_nodes(root):
            yield from self._surviving(child, replaced)

    def _idle_names(self, replaced: dict[Span, str]) -> None:
        """Take out `dtype = x.dtype` and its like, which were there for what is gone."""
        used = {
            n.id for n in self._surviving(self._function, replaced) if isinstance(n.ctx, ast.Load)
        }
        kept = set(re.findall(r"\w+", " ".join(replaced.values())))
        for statement in self._body:
            targets = _unpacked(statement)
            if not targets or span_of(statement) in replaced or self._evaluated(statement):
                continue
            value = getattr(statement, "value", None)
            plain = value is not None and all(
                isinstance(n, (ast.Name, ast.Attribute, ast.Constant, ast.expr_context))
                for n in ast.walk(value)
            )
            was_read = any(
                isinstance(n, ast.Name) and n.id in targets and isinstance(n.ctx, ast.Load)
                for n in ast.walk(self._function)
            )
            if plain and was_read and not any(t in used or t in kept for t in targets):
                replaced[span_of(statement)] = ""

    def _idle_casts(self, replaced: dict[Span, str]) -> None:
        """Take out `h = x.float()` and its like between the parts of the group, where it is what x
        is and only what is gone reads it."""
        body = self._body
        touched = [n for n, s in enumerate(body) if any(span_of(s).holds(r) for r in replaced)]
        kept = set(re.findall(r"\w+", " ".join(replaced.values())))
        for statement in body[touched[0] : touched[-1]]:
            match statement:
                case ast.Assign(
                    targets=[ast.Name(id=name)],
                    value=ast.Call(func=ast.Attribute(value=ast.Name(id=root))) as value,
                ) if span_of(statement) not in replaced and (name == root or name not in kept):
                    steps = self._evaluated(statement)
                    made = any(self._sources.made.get(step) for step in steps)
                    given = self._sources.value(self._names(statement).get(root))
                    same = given is not None and given == self._value(value)
                    if same and not made and not self._read_after(name, statement, replaced):
                        replaced[span_of(statement)] = ""
                case _:
                    pass

    def _text(self, node: ast.expr | ast.stmt) -> str:
        """In one line: as it is written, if that is one."""
        text = self._file.source(node)
        return ast.unparse(node) if "\n" in text else text


def _left(statement: ast.stmt, replaced: Mapping[Span, str]) -> str:
    """Text that an edit leaves of a statement."""
    value = getattr(statement, "value", None)
    text = replaced.get(span_of(statement))
    if text is not None or isinstance(statement, ast.Pass):
        return text or ""
    given = replaced.get(span_of(value)) if isinstance(value, ast.expr) else None
    if given is None or not isinstance(statement, (ast.Assign, ast.Return)):
        raise NotPlaced(f"line {statement.lineno}: it stays in a branch beside parts of it")
    targets = [ast.unparse(each) for each in getattr(statement, "targets", ())]
    return " = ".join([*targets, given]) if targets else f"return {given}"


def _only_if(test: ast.expr, text: str, *, held: bool) -> str:
    """An assignment whose value is computed only where a test turns out as it did; else None."""
    (made,) = ast.parse(text).body
    assert isinstance(made, ast.Assign)  # of an operand to a name
    nothing = ast.Constant(None)
    made.value = ast.IfExp(test, *((made.value, nothing) if held else (nothing, made.value)))
    return ast.unparse(made)


_OTHERWISE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    one: other
    for pair in (
        (ast.Is, ast.IsNot), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn),
    )
    for one, other in (pair, pair[::-1])
}  # fmt: skip
"""Comparisons of which one holds where the other does not; of an order and a NaN neither does."""


def _negated(test: ast.expr) -> ast.expr:
    """The condition that holds where another does not."""
    match test:
        case ast.Compare(left, [sign], right) if type(sign) in _OTHERWISE:
            return ast.Compare(left, [_OTHERWISE[type(sign)]()], right)
        case ast.UnaryOp(ast.Not(), of):
            return of
        case _:
            return ast.UnaryOp(ast.Not(), test)


def otherwise(test: ast.expr, *, held: bool) -> list[ast.expr]:
    """Conditions of which one is true where a test turns out otherwise than it did."""
    match test:
        case ast.UnaryOp(ast.Not(), of):
            return otherwise(of, held=not held)
        case ast.BoolOp(sign, values) if isinstance(sign, ast.And) == held:
            return [each for value in values for each in otherwise(value, held=held)]
        case ast.BoolOp(ast.Or(), values):
            parts = [otherwise(value, held=True) for value in values]
            if all(len(part) == 1 for part in parts):
                return [ast.BoolOp(ast.And(), [part[0] for part in parts])]
            return [_negated(test)]
        case ast.IfExp() if not held:  # among other conditions it would take them for its own
            return [ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test))]
        case _:
            return [_negated(test) if held else test]


def _is_plain(test: ast.expr) -> bool:
    """Whether a condition may be asked earlier: it reads names, attributes and sizes."""
    for node in ast.walk(test):
        match node:
            case ast.Call(ast.Name("isinstance" | "len" | "callable" | "hasattr")):
                pass
            case ast.Call(ast.Attribute(attr="dim" | "size" | "numel" | "is_floating_point")):
                pass
            case ast.Call() | ast.NamedExpr() | ast.Lambda() | ast.Await():
                return False
            case _:
                pass
    return True


_LEAVING = (ast.Continue, ast.Break)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)


def _jumps(statement: ast.AST, looping: bool = False) -> Iterator[type[ast.stmt]]:
    """Yield the kinds of statements in a statement that leave it: not those that leave a loop or a
    function in it alone."""
    if isinstance(statement, (*_LEAVING, ast.Return, ast.Raise)):
        if not (looping and isinstance(statement, _LEAVING)):
            yield type(statement)
    elif not isinstance(statement, Function | ast.Lambda):
        looping = looping or isinstance(statement, LOOPS)
        for child in ast.iter_child_nodes(statement):
            yield from _jumps(child, looping)


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions that an expression is made of; of a method's call what the method is of."""
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Call) and child is node.func and isinstance(child, ast.Attribute):
            yield child.value
        elif isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword):
            yield child.value


def _stored(top: _Top) -> str | None:
    """The one name that a statement stores a value of the group under, and does nothing else."""
    targets = _targets(top.statement)
    return targets[0] if targets and len(targets) == 1 and top.whole else None


_OPERATION: dict[type[ast.operator], str] = {
    ast.Add: "total",
    ast.Sub: "difference",
    ast.Mult: "product",
    ast.Div: "quotient",
}


def result_name(node: ast.AST, function: ast.AST, taken: Collection[str]) -> str:
    """Name for what an expression gives, by what it calls, with its number among those of that word
    in its function: no other expression has it."""

    def word(of: ast.AST) -> str:
        match of:
            case ast.Call(ast.Name(called) | ast.Attribute(attr=called)):
                return f"{called.strip('_')}_out"
            case ast.Call(ast.Subscript(held)):
                return word(ast.Call(held, [], []))
            case ast.Attribute(ast.Call(), named):
                return f"{named}_out"
            case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATION:
                return _OPERATION[type(op)]
            case ast.Name() | ast.Constant() | ast.Attribute():
                return ""
            case _:
                return "result" if isinstance(of, ast.expr | ast.AugAssign) else ""

    own = word(node)
    number = [each for each in ast.walk(function) if word(each) == own].index(node) + 1
    name = own if number == 1 else f"{own}_{number}"
    return next(n for n in (f"{name}{'_' * more}" for more in count()) if n not in taken)


def _index(node: ast.expr) -> int | None:
    """Place among several results of the one that is taken, by its number or torch's name."""
    match node:
        case ast.Subscript(slice=ast.Constant(int(number))):
            return number
        case ast.Attribute(attr="values" | "indices" as name):
            return ("values", "indices").index(name)
        case _:
            return None


def _targets(statement: ast.stmt) -> list[str] | None:
    """The names that a statement binds; None where it does anything else."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    elif isinstance(statement, ast.Expr):
        return []
    else:
        return None
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return names if len(names) == len(targets) else None


def _altered(statement: ast.stmt) -> set[str]:
    """The words of what a statement stores into, or calls for what it does: `self.seen.append(1)`,
    `counts["i"] += 1`."""
    whole = [
        node
        for node in ast.walk(statement)
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
    ]
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(value=owner))):
            return _objects(owner).union(*map(_objects, whole))
        case _:
            return set[str]().union(*map(_objects, whole))


def _objects(node: ast.AST) -> set[str]:
    """The attributes in an expression, and its names without them."""
    found = {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
    return found or names_in(node)


def _unpacked(statement: ast.stmt) -> list[str]:
    """The names that an assignment binds, `a, b = x.shape` included; none where it does more."""
    if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
        parts = statement.targets[0].elts if len(statement.targets) == 1 else []
        names = [part.id for part in parts if isinstance(part, ast.Name)]
        return names if len(names) == len(parts) else []
    return _targets(statement) or []


def _same(node: ast.expr, names: Mapping[str, str], others: Mapping[str, str]) -> bool:
    """Whether every name in an expression has one value in both."""
    return all(names.get(name) == others.get(name) for name in names_in(node))
