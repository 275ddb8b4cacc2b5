"""Guarded edits as one call each: a function beside the kernels asks the guard, and where it holds,
or the kernel cannot take what it is given, runs the statements that were there.

The function is given the kernel's operands, and what else the guard and the statements read: local
names, attributes of modules, and what the model's file defines. What that file imports of torch or
of the standard library the function's file imports, too.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, groupby
from pathlib import Path
from textwrap import fill, indent

from fusion_advisor.codegen.kernel_package import ASKING
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.source_trace import Span
from fusion_advisor.sourcepatch.editing.ranks import with_ranks
from fusion_advisor.sourcepatch.editing.rewrite import (
    Edit,
    NotPlaced,
    Part,
    TakenOut,
    result_name,
)
from fusion_advisor.sourcepatch.editing.sequential import folded_call
from fusion_advisor.sourcepatch.editing.sources import (
    LOOPS,
    SourceFile,
    displayed,
    names_in,
    span_of,
    stored_in,
)
from fusion_advisor.sourcepatch.editing.splice import is_first, nested
from fusion_advisor.support.errors import UsageError

_SAYS = '''"""Calls of kernels. Where one would compute something else, or cannot take what it is
given, the model's own statements run, which it replaced. Written by fusion-advisor."""'''
_WIDTH = 100
_OR_EAGER, _OR_NONE = "_or_eager", "or_none"
BY_SIZE = "_by_size"
"""End of the names of functions that choose a kernel."""
_OWN = (
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp,
    ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom,
)  # fmt: skip
"""Expressions that bind names of their own, or that only their function can hold."""
_BRANCHING = (
    ast.If, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.Pass, ast.Raise, ast.Assert
)  # fmt: skip
"""Statements of a branch that goes into a function whole."""
_HELD = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Slice, ast.Constant, ast.Tuple, ast.UnaryOp,
    ast.expr_context, ast.unaryop,
)  # fmt: skip
"""Expressions that compute nothing, however often they are evaluated, numbers aside."""
_RENAMING = ast.Module, ast.Assign, ast.Pass, ast.Name, ast.Constant, ast.Tuple, ast.expr_context
"""Statements that do nothing but bind names, and can fail in no way."""


@dataclass(frozen=True)
class KernelRun:
    """Run of lines that a kernel serves: the text of its reference, and what it is given."""

    kernel: str
    reference: str
    tensors: Sequence[Tensor]


@dataclass(frozen=True)
class Choice:
    """Function that calls one of several kernels of the same computation. `cases` are conditions,
    in which `{n}` stands for the operand of that number, each with its kernel; the last is the
    kernel of whatever else comes."""

    name: str
    cases: tuple[tuple[str, str], ...]

    @property
    def kernels(self) -> list[str]:
        return [*dict.fromkeys(kernel for _, kernel in self.cases)]


@dataclass(frozen=True)
class Beside:
    """Function beside the kernels: its name, and its arguments as the source spells them."""

    name: str
    given: tuple[str, ...]

    @property
    def called(self) -> str:
        """Its call in the source."""
        return f"{self.name}({', '.join(self.given)})"


def choice(name: str, runs: Sequence[KernelRun]) -> Choice:
    """Choice of the kernel for each of some runs by the fewest questions that tell: what lies out
    of order is copied first by references that differ in that alone, and the order of dimensions,
    else sizes, else strides tell the kernels of one reference apart. The first run's kernel serves
    whatever else comes. NotPlaced where nothing tells."""
    ranks = [[len(tensor.shape) for tensor in run.tensors] for run in runs]
    sized = all(each == ranks[0] for each in ranks)

    def told(run: KernelRun) -> list[str]:
        return [*(_sizes(run.tensors) if sized else _ranks(run.tensors))]

    def ordered(run: KernelRun) -> list[str]:
        return [*_layouts(run.tensors), *_orders(run.tensors)] if sized else []

    def laid(run: KernelRun) -> list[str]:
        return [*told(run), *(_strides(run.tensors) if sized else ())]

    def telling(its: Sequence[KernelRun], apart: Sequence[KernelRun]) -> str:
        for facts in (ordered, told, laid):
            for some in ([its], [[one] for one in its]):
                try:
                    return " or ".join(dict.fromkeys(_telling(each, apart, facts) for each in some))
                except NotPlaced:
                    continue
        raise NotPlaced("no question tells which kernel its calls take")

    cases: list[tuple[str, str]] = []
    forms = [*dict.fromkeys(run.reference for run in runs)]
    for form in reversed(forms):
        own = [run for run in runs if run.reference == form]
        others = [run for run in runs if run.reference != form]
        lying = [_telling(own, others, lambda run: [*_layouts(run.tensors)])] if others else []
        for kernel in dict.fromkeys(run.kernel for run in own if run.kernel != own[0].kernel):
            its = [run for run in own if run.kernel == kernel]
            apart = [run for run in own if run.kernel != kernel]
            size = telling(its, apart)
            if " or " in size and lying and form != forms[0]:
                size = f"({size})"
            asked = [*lying, size] if form != forms[0] else [size]
            cases.append((" and ".join(asked), kernel))
        cases.append((" and ".join(lying) if form != forms[0] else "", own[0].kernel))
    return Choice(name, tuple(cases))


def _telling(
    some: Sequence[KernelRun], others: Sequence[KernelRun], told: Callable[[KernelRun], list[str]]
) -> str:
    """The fewest conditions that are true in some runs, and not all in one of the others."""
    first, *more = map(told, some)
    shared = [fact for fact in first if all(fact in facts for facts in more)]
    for several in chain.from_iterable(combinations(shared, n) for n in (1, 2, 3)):
        if not any({*several} <= {*told(run)} for run in others):
            return " and ".join(several)
    raise NotPlaced("no question tells which kernel its calls take")


def _ranks(tensors: Sequence[Tensor]) -> Iterator[str]:
    for number, tensor in enumerate(tensors):
        yield f"{{{number}}}.dim() == {len(tensor.shape)}"


def _sizes(tensors: Sequence[Tensor]) -> Iterator[str]:
    for number, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape):
            yield f"{{{number}}}.size({dim}) == {size}"


def _strides(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Strides, the innermost first: where a slice is read, its sizes do not tell."""
    for number, tensor in enumerate(tensors):
        for dim, (size, stride) in [*enumerate(zip(tensor.shape, tensor.stride, strict=True))][
            ::-1
        ]:
            if size > 1:
                yield f"{{{number}}}.stride({dim}) == {stride}"


def _orders(tensors: Sequence[Tensor]) -> Iterator[str]:
    """Order of two dimensions in memory, whatever their sizes are."""
    for number, tensor in enumerate(tensors):
        dims = [dim for dim, size in enumerate(tensor.shape) if size > 1]
        for a, b in combinations(dims, 2):
            sign = "<" if tensor.stride[a] < tensor.stride[b] else ">="
            yield f"{{{number}}}.stride({a}) {sign} {{{number}}}.stride({b})"


def _layouts(tensors: Sequence[Tensor]) -> Iterator[str]:
    for number, tensor in enumerate(tensors):
        yield f"{'' if tensor.contiguous else 'not '}{{{number}}}.is_contiguous()"


class Outlines:
    """The functions of one file beside the kernels, those that stand in it already included. Those
    of the kernels that are `trained` ask all that a guard asks: what compiles them sees an operator
    that asks nothing. Raises UsageError for a text that is not Python."""

    def __init__(
        self, standing: str, kernels: Collection[str], trained: Collection[str] = ()
    ) -> None:
        try:
            tree = ast.parse(standing)
        except SyntaxError as error:
            raise UsageError(f"{ASKING}:{error.lineno}: {error.msg}; correct the file") from error
        self._standing, self._kernels, self._trained = standing, kernels, trained
        self._imports = {
            alias.asname or alias.name: ast.unparse(each)
            for each in tree.body
            if isinstance(each, (ast.Import, ast.ImportFrom))
            for alias in each.names
        }
        self.functions = {
            each.name: ast.get_source_segment(standing, each) or ""
            for each in tree.body
            if isinstance(each, ast.FunctionDef)
        }
        """Their texts, by their names."""
        self._stood = dict(self.functions)
        self._choices: set[str] = set()

    @property
    def text(self) -> str:
        """The text of the file; empty without a function."""
        if self.functions == self._stood:
            return self._standing
        head = [_SAYS]
        for _, lines in groupby(
            sorted({*self._imports.values()}, key=_order), lambda i: _order(i)[0]
        ):
            head += ["", *lines]
        return "\n\n\n".join(["\n".join(head), *self.functions.values()]) + "\n"

    def choose(self, one: Choice, given: Sequence[str]) -> None:
        """Add the function of a choice; `given` are the names of its operands."""
        self._choices.add(one.name)
        self._imports |= {kernel: f"from .{kernel} import {kernel}" for kernel in one.kernels}
        call = f"({', '.join(given)})"
        lines = [f"def {one.name}{call}:", '    """The same computation, by sizes and strides."""']
        for case, kernel in one.cases[:-1]:
            asked = with_ranks(case.format(*given))
            lines += [f"    if {asked}:", f"        return {kernel}.{_OR_NONE}{call}"]
        last = one.cases[-1][1]
        self.functions[one.name] = "\n".join([*lines, f"    return {last}.{_OR_NONE}{call}"])

    def outlined(
        self, file: SourceFile, edits: Iterable[tuple[Edit, str]]
    ) -> Iterator[tuple[Edit, str]]:
        """Yield the edits of a file with their comments, those that ask or need their statements as
        calls of functions that do. Where one call stands for several edits, each of which asks for
        runs of its own, the function of one calls the next one's in place of statements.
        UsageError where the file that stands has a name of theirs."""
        pairs = sorted(edits, key=lambda p: (p[0].block.owner, p[0].lines))
        together: dict[object, list[int]] = {}
        for number, (edit, _) in enumerate(pairs):
            if edit.taken.kernel in self._choices or edit.needs_function:
                together.setdefault(edit.as_called(), []).append(number)
        called = dict[int, Edit]()
        try:
            for numbers in together.values():
                behind = None
                for number in numbers[::-1]:
                    edit = pairs[number][0]
                    function = self.function(file, edit, behind)
                    behind = self._added(f"{edit.taken.kernel}{_OR_EAGER}", function)
                assert behind is not None  # there is one number at the least
                called |= {n: _calling(pairs[n][0], behind) for n in numbers}
        except NotPlaced as reason:
            raise UsageError(
                f"{ASKING}: {reason}; remove the file, to have it written anew"
            ) from reason
        yield from ((called.get(n, edit), comment) for n, (edit, comment) in enumerate(pairs))

    def function(self, file: SourceFile, edit: Edit, behind: Beside | None = None) -> _Function:
        """The function of an edit, which runs its statements or calls the one `behind` it.
        NotPlaced where there can be none."""
        kernel = edit.taken.kernel
        every = kernel in self._trained
        way = "" if kernel in self._choices else f".{_OR_NONE}"
        made = _Function(
            file, edit, self._imports, self._kernels, self.functions, f"{kernel}{way}", behind,
            every=every,
        )  # fmt: skip
        made.imports["torch"] = "import torch"
        if kernel not in self.functions:
            made.imports[kernel] = f"from .{kernel} import {kernel}"
        if any(self._imports.get(name, line) != line for name, line in made.imports.items()):
            raise NotPlaced(f"{kernel} is something else beside the kernels")
        return made

    def _added(self, wanted: str, function: _Function) -> Beside:
        """Add a function under a name that is free."""
        name, number = wanted, 1
        while not _same(self.functions.setdefault(name, text := function.text(name)), text):
            number += 1
            name = f"{wanted}_{number}"
        self._imports |= function.imports
        return Beside(name, tuple(function.given))

    def whole(
        self, file: SourceFile, edits: Iterable[tuple[Edit, str]]
    ) -> Iterator[tuple[Edit, str]]:
        """Yield the edits of a file with their comments, those that take out a part of a call of a
        `Sequential` as one that calls a function, which asks first whether that still runs what it
        ran. NotPlaced where the part lies in no one expression, and is no beginning of one behind
        other statements of its edit."""
        pairs = [*edits]
        asked = dict[Span, dict[str, None]]()
        for edit, _ in pairs:
            for call, conditions in edit.wholes:
                around = next((s for s, _ in edit.replaced if s.holds(call)), call)
                asked.setdefault(around, {}).update(dict.fromkeys(conditions))
        for region in asked:
            if any(other != region and other.holds(region) for other in asked):
                continue
            own = {n for n, (e, _) in enumerate(pairs) if any(map(region.holds, e.touched))}
            inner = [pairs[number] for number in sorted(own)]
            ahead = [e for e, _ in inner if not all(map(region.holds, e.touched))]
            if len(ahead) > 1 or region not in file.expressions:
                raise NotPlaced(f"line {region.line}: more than a call of a Sequential is edited")
            conditions = [c for held, each in asked.items() if region.holds(held) for c in each]
            texts = {s: t for edit, _ in nested(file, inner) for s, t in edit.replaced}
            first = next(n for n in sorted(own) if not ahead or pairs[n][0] is ahead[0])
            together = self._ahead if ahead else self._alone
            made = together(file, pairs[first][0], region, conditions, texts)
            for number in own:
                left = replace(pairs[number][0], replaced=(), inserted=(), kept=())
                pairs[number] = (made if number == first else left), pairs[number][1]
        yield from pairs

    def _alone(
        self,
        file: SourceFile,
        edit: Edit,
        region: Span,
        conditions: Sequence[str],
        texts: Mapping[Span, str],
    ) -> Edit:
        """An edit of a call of a `Sequential` alone, as one that calls a function of all of it."""
        node = file.expressions[region]
        called = next(span_of(s) for s in file.body(edit.block) if span_of(s).holds(region))
        part = Part(span_of(file.enclosing(node)[-1]), region, result=0)
        package = edit.taken.call.partition(".")[0]
        whole = replace(
            edit, called=called, replaced=((region, ""),), inserted=(), kept=(), guard="",
            taken=TakenOut("", f"{package}.", (), (part,), edit.taken.modules),
        )  # fmt: skip
        function = self._in_parts(file, whole, conditions)
        function.gives(_Placing(texts).visit(copy.deepcopy(node)))
        call = f"{package}.{self._added(function.wanted, function).called}"
        return replace(edit, replaced=((region, call),), inserted=(), kept=())

    def _ahead(
        self,
        file: SourceFile,
        edit: Edit,
        region: Span,
        conditions: Sequence[str],
        texts: Mapping[Span, str],
    ) -> Edit:
        """An edit of statements and of the beginning of a call behind them, as one that calls a
        function of both: a residual, and the norm that a `Sequential` begins with. NotPlaced where
        the call may not be made as early."""
        body, node = file.body(edit.block), file.expressions[region]
        own = [(s, t) for s, t in (*edit.replaced, *edit.inserted) if not region.holds(s)]
        begun = [t for s, t in edit.replaced if region.holds(s)]
        package = edit.taken.call.partition(".")[0]
        calls = [(s, each) for s, t in own if (each := _unpacking(t, begun))]
        if len(calls) != 1 or len(begun) != 1:
            raise NotPlaced(f"line {region.line}: more than the beginning of a call is edited")
        (at, (targets, kernel)), name = calls[0], begun[0]
        numbers = [next(n for n, s in enumerate(body) if span_of(s).holds(p)) for p in (at, region)]
        gone = {span for span, text in own if not text}
        between = [s for s in body[numbers[0] + 1 : numbers[1]] if span_of(s) not in gone]
        value = getattr(body[numbers[1]], "value", None)
        if between or value is None or not is_first(node, value):
            raise NotPlaced(f"line {region.line}: a call that is edited in part may not be earlier")
        function_of = file.function(edit.block)
        out = result_name(node, function_of, names_in(function_of))
        parts = [p for p in edit.taken.parts if not region.holds(p.node)]
        result = next(p.result for p in edit.taken.parts if region.holds(p.node))
        parts.append(Part(span_of(body[numbers[1]]), region, result=result))
        whole = replace(
            edit, replaced=(*own, (region, out)), inserted=(), guard="", opened=(),
            taken=replace(edit.taken, kernel="", parts=tuple(parts)),
        )  # fmt: skip
        function = self._in_parts(file, whole, conditions)
        function.gives_behind(targets, kernel, name, _Placing(texts).visit(copy.deepcopy(node)))
        call = f"{package}.{self._added(function.wanted, function).called}"
        text = f"{', '.join(out if each == name else each for each in targets)} = {call}"
        left = [(span, text if span == at else each) for span, each in edit.replaced]
        return replace(
            edit,
            replaced=(*((s, t) for s, t in left if not region.holds(s)), (region, out)),
            inserted=tuple((s, text if s == at else t) for s, t in edit.inserted),
            kept=tuple(span for span in edit.kept if not region.holds(span)),
        )

    def _in_parts(self, file: SourceFile, edit: Edit, conditions: Sequence[str]) -> _Whole:
        """The function of an edit of a call that goes through a `Sequential`."""
        function = _Whole(file, edit, self._imports, self._kernels, self.functions, "", every=True)
        function.ask(conditions)
        function.imports["torch"] = "import torch"
        return function


def _calling(edit: Edit, function: Beside) -> Edit:
    """An edit with the call of a function, which asks its guard, in place of its own."""
    package = edit.taken.call.partition(f".{edit.taken.kernel}(")[0]
    call = f"{package}.{function.called}"

    def instead(texts: Sequence[tuple[Span, str]]) -> tuple[tuple[Span, str], ...]:
        return tuple((span, text.replace(edit.taken.call, call)) for span, text in texts)

    replaced, inserted = instead(edit.replaced), instead(edit.inserted)
    return replace(edit, replaced=replaced, inserted=inserted, guard="")


def require_function(file: SourceFile, edit: Edit) -> None:
    """NotPlaced where no function beside the kernels can hold what an edit asks and its
    statements, whatever others ask."""
    try:
        outlines = Outlines("", {edit.taken.kernel})
        if edit.needs_function:
            outlines.function(file, edit)
        for _ in outlines.whole(file, [(edit, "")]):
            pass
    except NotPlaced as reason:
        raise NotPlaced(
            f"line {edit.lines[0]}: no function can hold its lines: {reason}"
        ) from reason


class _Placing(ast.NodeTransformer):
    """Puts texts in place of expressions, by their spans."""

    def __init__(self, texts: Mapping[Span, str]) -> None:
        self._texts = texts

    def visit(self, node: ast.AST) -> ast.AST:
        text = self._texts.get(span_of(node)) if isinstance(node, ast.expr) else None
        return _expression(text) if text else self.generic_visit(node)


class _Naming(ast.NodeTransformer):
    """Puts names in place of expressions, by their texts."""

    def __init__(self, name_of: Callable[[str], str]) -> None:
        self._name_of = name_of

    def visit(self, node: ast.AST) -> ast.AST:
        name = self._name_of(ast.unparse(node)) if isinstance(node, ast.expr) else ""
        return ast.Name(name, ast.Load()) if name else self.generic_visit(node)


def _same(one: str, other: str) -> bool:
    """Whether two functions are the same but for their names and those of their parameters."""

    def plain(text: str) -> str:
        (function,) = ast.parse(text).body
        assert isinstance(function, ast.FunctionDef)
        function.name, given = "", [arg.arg for arg in function.args.args]
        for node in ast.walk(function):
            if isinstance(node, ast.arg):
                node.arg = str(given.index(node.arg))
            elif isinstance(node, ast.Name) and node.id in given:
                node.id = str(given.index(node.id))
        return ast.dump(function)

    return one == other or plain(one) == plain(other)


def asked_beside_kernel(test: ast.expr) -> ast.expr | None:
    """Condition without its question whether a kernel serves: kernel and statements compute the
    same. None where that is all of it."""
    match test:
        case ast.Compare(ast.NamedExpr(value=ast.Call(func))) if ast.unparse(func).endswith(
            (f".{_OR_NONE}", BY_SIZE)
        ):
            return None
        case ast.BoolOp(ast.Or() as joined, values):
            asked = [each for each in map(asked_beside_kernel, values) if each]
            return ast.BoolOp(joined, asked) if len(asked) > 1 else next(iter(asked), None)
        case _:
            return test


def always_eager(text: str) -> str:
    """The text of the file with functions that run the model's statements whatever they ask."""
    tree = ast.parse(text)
    for function in tree.body:
        asks = isinstance(function, ast.FunctionDef) and _OR_EAGER in function.name
        for statement in ast.iter_child_nodes(function) if asks else ():
            if isinstance(statement, ast.If):
                statement.test = ast.copy_location(ast.Constant(True), statement.test)
    return ast.unparse(tree) + "\n"


def _order(line: str) -> tuple[int, bool, str]:
    """Order of imports: the standard library's first, then torch's, then the package's."""
    top = line.split()[1].partition(".")[0]
    return 2 if not top else top == "torch", line.startswith("from"), line


class _Function(ast.NodeTransformer):
    """An edit as a function. Raises NotPlaced where its statements cannot be a function's."""

    def __init__(
        self,
        file: SourceFile,
        edit: Edit,
        imported: Mapping[str, str],
        kernels: Collection[str],
        functions: Collection[str],
        launcher: str,
        behind: Beside | None = None,
        *,
        every: bool,
    ) -> None:
        self._file, self._edit, self._taken = file, edit, edit.taken
        self._imported, self._functions = imported, functions
        self._reserved = {*kernels, "torch"}
        self.imports: dict[str, str] = {}
        self.given: dict[str, str] = {}
        """Arguments as the source spells them, with the names of their parameters."""
        self._renames: dict[str, str] = {}
        own = span_of(file.function(edit.block))
        around = [each for span, each in file.statements.items() if span.holds(own)]
        scopes = [n for n in around if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
        parameters = {n.arg for f in scopes for n in ast.walk(f.args) if isinstance(n, ast.arg)}
        self._locals = parameters.union(*map(stored_in, scopes))
        self._known = self._locals.union(self._reserved, *map(names_in, scopes))
        self._body = file.body(edit.block)
        self._call = self._number(edit.called)
        self._parts = sorted(self._taken.parts, key=lambda part: (part.statement, part.node))
        self._whole = {
            number: statement
            for number in sorted({self._number(part.statement) for part in self._parts})
            if isinstance(statement := self._body[number], ast.If)
        }
        """The `if`s, by number, that go into the function with all of their branches."""
        function = file.function(edit.block)
        self._bound = parameters | _bound_before(function.body, self._body[self._call])
        self._own: set[str] = set()
        """Names that an `if` binds before it reads them."""
        self._kept: set[str] = set()
        """Names that nothing but what stays of the statements binds: a condition that reads one
        asks of the kernel's operand."""
        self._in_expressions = [*self._left_out_of_expressions()]
        self._sometimes = [*self._in_expressions, *self._left_out()]
        """Pieces of the parts that may not be evaluated. Where there are some, attributes of
        modules are read in the function, for what it is given is evaluated whether it is read or
        not."""
        leaves = {span: text for part in self._parts for span, text in part.leaves}
        texts = dict(edit.replaced)
        lines = (texts.get(span_of(each)) for each in self._whole.values())
        self._spared = set[str]().union(*(stored_in(ast.parse(line)) for line in lines if line))
        """Names that hold what a branch computed, or None, where that is no part of the kernel."""
        kept = self._spared.intersection(leaves.values())
        self._leaves = {s: t for s, t in leaves.items() if t in kept or not self._is_left_out(s)}
        self._at: int | None = None
        """The statement whose names are read; None at the call."""
        self._named: dict[str, str] = {}
        """Names for operands that the function computes, where a condition asks for them."""
        self._unbound: dict[str, str] = {}
        """Names that no condition has bound yet, with what they are bound to."""
        self._exchanged = _asked_for(edit.conditions, edit.qualname)
        """Names of modules that may be of another class, which may lack what is asked behind
        that."""
        self._opened = {each.text: self._written_there(each.text) for each in edit.opened}
        """Operands that the function computes, in its own names."""
        operands = [self._operand(text) for text in self._taken.operands]
        self._at = min(map(self._number, (part.statement for part in self._parts)))
        asked = edit.asked(launched=not every)
        self._kept = {text for text in self._leaves.values() if text.isidentifier()}
        self._kept -= parameters | self._stored_before(function)
        self._asks = [self._asked(_expression(each)) for each in asked]
        self._kept = set[str]()
        if self._opened and not every:  # the kernel is refused then, and all would be made twice
            self._asks.insert(0, "torch.is_grad_enabled()")
        named = {self._opened[text]: name for text, name in self._named.items()}
        given = ", ".join(named.get(operand, operand) for operand in operands)
        if behind:
            self._lines = [f"return {behind.name}({', '.join(map(self._passed, behind.given))})"]
        else:
            self._lines = [self._folded(line) for line in self._statements()]
        fused = self._free("fused")
        call = f"({fused} := {launcher}({given})) is None"
        if len(call) + 11 > _WIDTH:  # behind `or`, twice indented
            lines = fill(given, _WIDTH - 12, break_long_words=False, break_on_hyphens=False)
            call = f"({fused} := {launcher}(\n{indent(lines, ' ' * 8)}\n    )) is None"
        self._asks.append(call)
        self._ends = f"return {fused}{self._taken.viewed}"

    def text(self, name: str) -> str:
        """The function, under a name."""
        where = f"{self._edit.qualname}(), {Path(self._edit.file).name}"
        body = [
            f'"""In place of statements of {where}."""',
            _over_lines("if ", " or ", self._asks, ":"),
            *(indent(line, "    ") for line in self._lines),
            self._ends,
        ]
        head = _over_lines(f"def {name}", ", ", [*self.given.values()], ":", around=True)
        return "\n".join([head, *(indent(line, "    ") for line in body)])

    # What it runs.

    def _folded(self, text: str) -> str:
        """A statement with calls of a `Sequential` as they were written where all of one is in the
        function."""
        for call in self._file.spelled.values():
            for callee, links in call.containers if all(map(self._edit.takes, call.links)) else ():
                own, *inner = (self._written(_expression(each)) for each in (callee, *links))
                text = folded_call(text, own, inner)
        return text

    def _statements(self) -> Iterator[str]:
        """The statements that the call replaces, and what they give."""
        results: dict[int, str] = {}
        several = sum(part.result is not None for part in self._parts) > 1
        for part in self._distinct():
            number = self._at = self._number(part.statement)
            statement, stored = self._body[number], sorted(self._inside(number))
            if {self._renamed(name) for name in stored} & {*results.values()}:
                raise NotPlaced(f"`{stored[0]}` is bound again")
            elements = self._elements(statement)
            if part.node in elements:
                if part.node == next(iter(elements)):
                    yield self._written(_storing(statement, elements))
                continue
            branched = self._whole.get(number)
            named = len(stored) == 1 and (several or isinstance(statement, ast.AugAssign))
            named = named and not (part.viewed or displayed(statement))
            if part.result is None or named or branched:
                yield self._branches(branched) if branched else self._written(statement)
                if part.result is not None:
                    name = self._result(branched) if branched else stored[0]
                    results[part.result] = self._renamed(name)
                continue
            node = self._file.expressions[part.node]
            if names_in(node).intersection(stored if elements else ()):
                raise NotPlaced(f"`{stored[0]}` is bound beside what reads it")
            value = self._written(node)
            if not several:
                yield f"return {value}"
                continue
            name = results[part.result] = self._free("result")
            yield f"{name} = {value}"
            if part.viewed:
                yield self._written(statement).replace(value, name, 1)
        if results:
            yield f"return {', '.join(results[number] for number in sorted(results))}"

    def _elements(self, statement: ast.stmt) -> dict[Span, tuple[ast.Name, ast.expr]]:
        """The parts that are elements of `a, b = c, d` and no results, each with the name that it
        is stored under."""
        names, expressions = displayed(statement), self._file.expressions
        own = [part.node for part in self._inner(statement) if part.result is None]
        return {node: (names[node], expressions[node]) for node in own if node in names}

    def _distinct(self) -> Iterator[Part]:
        """The parts; those of a statement that goes whole, `a, b = ...` or an `if`, as one."""
        gone = {span for span, text in self._edit.replaced if not text}
        for number, parts in groupby(self._parts, lambda part: self._number(part.statement)):
            parts = [*parts]
            if number in self._whole:
                made = [part for part in parts if part.result is not None]
                if len(made) > 1:
                    raise NotPlaced("a branch makes several of its results")
                yield (made or parts)[0]
                continue
            for before, part in zip((None, *parts), parts, strict=False):
                again = before is not None and before.statement == part.statement
                if not (again and part.result is None and part.statement in gone):
                    yield part

    # Branches.

    def _left_out_of_expressions(self) -> Iterator[Span]:
        """Yield pieces of the parts that `and`, `or` or `a if b else c` may not evaluate."""
        for part in self._parts:
            piece = self._file.expressions.get(part.node) or self._file.statements[part.statement]
            for node in ast.walk(piece):
                if isinstance(node, ast.IfExp):
                    yield from map(span_of, (node.body, node.orelse))
                elif isinstance(node, ast.BoolOp):
                    yield from map(span_of, node.values[1:])

    def _left_out(self) -> Iterator[Span]:
        """Yield pieces of the parts that are evaluated only where an `if` lets them."""
        for number, statement in self._whole.items():
            yield from map(span_of, (*statement.body, *statement.orelse))
            if _may_leave(statement):
                yield from (p.node for p in self._parts if self._number(p.statement) > number)

    def _is_left_out(self, span: Span) -> bool:
        return any(piece.holds(span) for piece in self._sometimes)

    def _branches(self, statement: ast.If) -> str:
        """An `if` with all of its branches. NotPlaced where they do what a function cannot do for
        its caller, or where a part of one stays in the source."""
        made = any(part.result is not None for part in self._inner(statement))
        stays = ast.parse(dict(self._edit.replaced).get(span_of(statement), ast.unparse(statement)))
        if not (made or stored_in(stays) <= {*self._leaves.values()}):
            raise NotPlaced("a part of a branch stays")
        allowed = (*_BRANCHING, ast.Return) if self._returned() else _BRANCHING
        for node in ast.walk(statement):
            if isinstance(node, ast.stmt) and not isinstance(node, allowed):
                raise NotPlaced(f"line {node.lineno} leaves a branch, or has a block of its own")
        if _may_leave(statement):
            self._require_nothing_behind(statement)
        texts = (text for _, text in (*self._edit.replaced, *self._edit.inserted))
        given = set[str]().union(*(stored_in(ast.parse(text)) for text in texts))
        for part in self._parts:
            if part.result is not None and self._number(part.statement) not in self._whole:
                given |= stored_in(self._file.statements[part.statement])
        function, looped = self._file.function(self._edit.block), _in_a_loop(self._file, statement)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                behind = looped or node.lineno > statement.lineno
                behind = behind and not span_of(statement).holds(span_of(node))
                stays = behind and not self._edit.takes(span_of(node))
                if stays and node.id in stored_in(statement) - given:
                    raise NotPlaced(f"`{node.id}` is bound in a branch, and read behind it")
        self._own = stored_in(statement) - _read_first([statement])
        written = self._written(statement)
        self._own = set()
        return written

    def _require_nothing_behind(self, statement: ast.If) -> None:
        """NotPlaced where a statement stays in the source that is not reached where a branch
        returns or raises: it would come before the branch."""
        texts, number = dict(self._edit.replaced), self._number(span_of(statement))
        for each in self._body[number + 1 : self._call]:
            left = texts.get(span_of(each), ast.unparse(each))
            if not all(isinstance(node, _RENAMING) for node in ast.walk(ast.parse(left))):
                raise NotPlaced(f"line {each.lineno} is not reached where a branch leaves")

    def _returned(self) -> bool:
        """Whether the source returns what the call gives: then so it does where a branch
        returns."""
        called = self._body[self._call]
        if not isinstance(called, ast.Return) or called.value is None:
            return False
        return dict(self._edit.replaced).get(span_of(called.value)) == self._taken.call

    def _inner(self, statement: ast.stmt) -> list[Part]:
        return [part for part in self._parts if span_of(statement).holds(part.statement)]

    def _result(self, statement: ast.If) -> str:
        """The name that holds the result which a branch makes."""
        match ast.parse(dict(self._edit.replaced)[span_of(statement)]).body:
            case [ast.Assign([ast.Name(name)], value)]:
                if ast.unparse(value) == ast.unparse(_expression(self._taken.call)):
                    surely = _surely_stored([statement]) or ()
                    if name not in surely and not self._is_made(name):
                        self._give(name)
                    return name
            case _:
                pass
        raise NotPlaced("a branch makes more of its result")

    def _written(self, node: ast.AST) -> str:
        """A piece of the source, in names of the function."""
        made = self.visit(copy.deepcopy(node))
        return ast.unparse(ast.fix_missing_locations(made))

    def _operand(self, text: str) -> str:
        """An operand of the kernel: what its call was given, or an expression of what has names."""
        node = _expression(text)
        if text in self._opened:
            return self._opened[text]
        if text in self._leaves.values() and not text.isidentifier():
            return self._parameter(text, _word(node, self._taken.modules))
        held = all(isinstance(each, _HELD) or _is_number(each) for each in ast.walk(node))
        if self._sometimes and not (held or self._is_asked_for(text)):
            raise NotPlaced(f"`{text}` may not be computed")
        return self._written(node)

    def _is_asked_for(self, text: str) -> bool:
        """Whether an operand is a view that is made in an `if` alone: the kernel is called behind
        what that asks, so that it may be made there."""
        spans = [span for part in self._parts for span, leaf in part.leaves if leaf == text]
        pieces = self._in_expressions
        alone = spans and not any(piece.holds(span) for piece in pieces for span in spans)
        return bool(alone) and text in self._taken.views

    def _name_of(self, text: str) -> str:
        """The name of an operand that the function computes, which a condition asks for; empty for
        another expression."""
        if text in self._opened and text not in self._named:
            name = self._free(_word(_expression(text), self._taken.modules))
            self._named[text], self._unbound[name] = name, self._opened[text]
        return self._named.get(text, "")

    def _written_there(self, text: str) -> str:
        """An operand that the function computes, which reads attributes of modules itself: another
        module may lack them."""
        sometimes, self._sometimes = self._sometimes, [Span(0, 0, 0, 0)]
        written = self._written(_expression(text))
        self._sometimes = sometimes
        return written

    def _asked(self, condition: ast.expr) -> str:
        """A condition: of an operand of the kernel as of that, else in the function's
        names."""
        if self._opened:
            condition = _expression(ast.unparse(_Naming(self._name_of).visit(condition)))
            for each in ast.walk(condition):
                partly = isinstance(each, ast.BoolOp | ast.IfExp)
                partly |= isinstance(each, ast.Compare) and len(each.ops) > 1
                if partly and names_in(each) & self._unbound.keys():
                    raise NotPlaced("a part of what they ask may not be computed")
        texts = [text for text in self._leaves.values() if not text.isidentifier()]
        given = {ast.unparse(_expression(text)): text for text in texts}
        for node in ast.walk(condition):
            if isinstance(node, ast.Attribute) and (text := given.get(ast.unparse(node.value))):
                word = _word(node.value, self._taken.modules)
                node.value = ast.Name(self._parameter(text, word), ast.Load())
                return ast.unparse(condition)
        return self._written(condition)

    # Names.

    def visit(self, node: ast.AST) -> ast.AST:
        """Puts the function's names in place of the source's."""
        if isinstance(node, ast.expr) and span_of(node) in self._leaves:
            return self._leaf(node, self._leaves[span_of(node)])
        if isinstance(node, _OWN):
            raise NotPlaced("one of them has names of its own")
        return super().visit(node)

    def _leaf(self, node: ast.expr, text: str) -> ast.AST:
        if text.isidentifier():  # bound by what stays of the statement
            self._require_unbound(text, (self._at or 0) + 1, self._call)
            self.given.setdefault(text, self._renamed(text))
            return _named(self._renamed(text), node)
        if any(self._is_made(name) for name in names_in(node) & self._locals):
            raise NotPlaced(f"`{text}` is made of what they make")
        return _named(self._parameter(text, _word(node, self._taken.modules)), node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """A local name, or a global one."""
        name, read = node.id, isinstance(node.ctx, ast.Load)
        if name in self._unbound:  # the first condition that asks for it
            made = _expression(self._unbound.pop(name))
            return ast.NamedExpr(ast.Name(name, ast.Store()), made)
        if name in self._named.values():
            return node
        if name in self._kept:
            self.given.setdefault(name, self._renamed(name))
            return _named(self._renamed(name), node)
        if name in self._locals:
            if read:
                self._read(name)
            return _named(self._renamed(name), node)
        line = self._file.bound.get(name)
        if name == "torch" and line in (None, "import torch"):
            return node  # a guard names it, whatever the file imports
        if line is None and hasattr(builtins, name):
            return node
        if line and self._imported.get(name, line) == line and name not in self._reserved:
            self.imports[name] = line
            return node
        self.given.setdefault(name, self._renamed(name))
        return _named(self._renamed(name), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call; `super()`, which belongs to the class, is given."""
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            return ast.copy_location(_expression(self._parameter(ast.unparse(node), "above")), node)
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """An attribute: of a module it is given, of the package of kernels it is at hand."""
        root = node.value
        if isinstance(root, ast.Name) and self._taken.call.startswith(f"{root.id}."):
            if node.attr in self._functions:
                return _named(node.attr, node)
            if node.attr in self._reserved:
                self.imports[node.attr] = f"from .{node.attr} import {node.attr}"
                return _named(node.attr, node)
        if isinstance(root, ast.Name) and root.id in self._taken.modules:
            if self._is_made(root.id):
                raise NotPlaced(f"`{root.id}` is bound between them")
            if self._sometimes or root.id in self._exchanged:
                return self.generic_visit(node)
            return _named(self._parameter(f"{root.id}.{node.attr}", node.attr), node)
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """`x += y`, which reads x."""
        if isinstance(node.target, ast.Name):
            self._read(node.target.id)
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """An assignment without its annotation, which may name anything."""
        assert node.value is not None  # nothing is computed without
        return self.visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def _stored_before(self, function: ast.AST) -> set[str]:
        """The names that the function binds before the statements, an earlier turn of a loop
        included."""
        first = self._body[self._at or 0]
        bound = [each for each in ast.walk(function) if isinstance(each, ast.Name)]
        return {
            each.id
            for each in bound
            if not isinstance(each.ctx, ast.Load)
            and (each.lineno < first.lineno or _in_a_loop(self._file, first))
        }

    def _read(self, name: str) -> None:
        """Give the function what a local name holds that it reads, unless it makes that itself."""
        if name not in self._own and not self._is_made(name):
            self._give(name)

    def _give(self, name: str) -> None:
        """Give the function what a local name holds. NotPlaced where it may hold nothing yet."""
        if self._sometimes and name not in self._bound:
            raise NotPlaced(f"`{name}` may not be bound before them")
        self.given.setdefault(name, self._renamed(name))

    def _parameter(self, text: str, wanted: str) -> str:
        """The parameter that an expression of the source is given as."""
        if text not in self.given:
            self.given[text] = self._free(wanted)
        return self.given[text]

    def _passed(self, text: str) -> str:
        """Argument for another function, which is given an expression of the source."""
        if text.isidentifier():
            return self.given.setdefault(text, self._renamed(text))
        return self._parameter(text, _word(_expression(text), self._taken.modules))

    def _free(self, wanted: str) -> str:
        """A name that nothing else has."""
        name = wanted.lstrip("_") or "given"
        while name in self._known:
            name += "_"
        self._known.add(name)
        return name

    def _renamed(self, name: str) -> str:
        """A name of the source: another one where that is a kernel's."""
        if name in self._reserved and name not in self._renames:
            self._renames[name] = self._free(name)
        return self._renames.get(name, name)

    # Where names are bound.

    def _is_made(self, name: str) -> bool:
        """Whether the function makes what a name has where a statement reads it; else it is given
        that, for the name has it at the call, too. NotPlaced where neither is so."""
        if self._at is None:
            return False
        makes = [number for number in range(self._at) if name in self._inside(number)]
        if makes:
            self._require_unbound(name, makes[-1] + 1, self._at)
            if not any(name in self._surely(number) for number in makes):
                self._require_unbound(name, *sorted((min(makes), self._call)))
                self._give(name)
            return True
        self._require_unbound(name, *sorted((self._at, self._call)))
        return False

    def _inside(self, number: int) -> set[str]:
        """The names that a statement binds in the function."""
        statement = self._body[number]
        if number in self._whole:
            return stored_in(statement)
        if elements := self._elements(statement):
            return {name.id for name, _ in elements.values()}
        value = getattr(statement, "value", None) or statement
        several = isinstance(value, ast.Tuple) and len(stored_in(statement)) > 1
        each = value.elts if isinstance(value, ast.Tuple) and several else ()
        nodes = {span_of(node) for node in (statement, value, *each)}
        parts = [p for p in self._parts if p.statement == span_of(statement)]
        own = [p for p in parts if p.node in nodes or p.viewed]
        names = stored_in(statement) if own else set[str]()
        return names if len(names) == 1 or all(part.result is None for part in own) else set()

    def _surely(self, number: int) -> set[str]:
        """The names that a statement binds in the function, whatever its branches ask."""
        branched = self._whole.get(number)
        return _surely_stored([branched]) or set() if branched else self._inside(number)

    def _number(self, span: Span) -> int:
        """Number of the statement of the block that a statement is, or is in."""
        return next(n for n, each in enumerate(self._body) if span_of(each).holds(span))

    def _require_unbound(self, name: str, start: int, end: int) -> None:
        """NotPlaced where one of some statements, if it stays in the source, binds a name."""
        texts = dict(self._edit.replaced)
        for statement in self._body[start:end]:
            text = texts.get(span_of(statement))
            stays = stored_in(statement if text is None else ast.parse(text))
            same = (
                each.id for at, each in displayed(statement).items() if texts.get(at) == each.id
            )
            if name in stays.difference(same):
                raise NotPlaced(f"`{name}` is bound between them")


class _Whole(_Function):
    """An expression as a function: as it was written, where calls of a `Sequential` in it may run
    otherwise than they did, else as edits leave it."""

    @property
    def wanted(self) -> str:
        """A name for it."""
        calls = (c for s, c in self._file.spelled.items() if self._edit.takes(s))
        callee, _ = next(calls).containers[-1]
        return f"{_word(_expression(callee), self._taken.modules).lstrip('_')}_in_parts"

    def ask(self, conditions: Iterable[str]) -> None:
        """Give it the conditions."""
        self._asks = [self._asked(_expression(each)) for each in conditions]

    def gives(self, left: ast.AST) -> None:
        """Give it what is left of the expression."""
        self._ends = f"return {self._written(left)}"

    def gives_behind(
        self, targets: Sequence[str], kernel: ast.Call, name: str, left: ast.AST
    ) -> None:
        """Give it the kernel's call, whose results have names, and what is left of the expression,
        which reads one of these."""
        self._at = None
        given = ", ".join(self._operand(ast.unparse(each)) for each in kernel.args)
        called = self._written(kernel.func)
        made = f"{', '.join(map(self._renamed, targets))} = {called}({given})"
        self._at = self._number(self._parts[-1].statement)
        self._locals.add(name)
        self._own = {name}
        results = [self._written(left) if each == name else self._renamed(each) for each in targets]
        self._ends = f"{made}\nreturn {', '.join(results)}"

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """An attribute: of a `Sequential` that a name holds it is read in the function."""
        held = {text for c in self._file.spelled.values() for text, _ in c.containers}
        if isinstance(node.value, ast.Name) and node.value.id in held:
            return self.generic_visit(node)
        return super().visit_Attribute(node)

    def _statements(self) -> Iterator[str]:
        if len(self._parts) > 1:
            yield from super()._statements()
            return
        (part,) = self._parts
        self._at = self._number(part.statement)
        yield f"return {self._written(self._file.expressions[part.node])}"


def _unpacking(text: str, names: Sequence[str]) -> tuple[list[str], ast.Call] | None:
    """The names and the call of `a, b = kernel(...)`, where some names are among them; None for
    another text."""
    match ast.parse(text).body:
        case [ast.Assign([ast.Tuple(targets)], ast.Call(keywords=[]) as call)]:
            bound = [*map(ast.unparse, targets)]
            return (bound, call) if {*names} <= {*bound} else None
        case _:
            return None


def _storing(statement: ast.stmt, elements: Mapping[Span, tuple[ast.Name, ast.expr]]) -> ast.Assign:
    """`a, b = c, d`, which evaluates c and d before it binds a, of some elements of a statement."""
    names, values = ([*each] for each in zip(*elements.values(), strict=True))
    if len(names) == 1:
        return ast.Assign(names, values[0])
    target, value = ast.Tuple(names, ast.Store()), ast.Tuple(values, ast.Load())
    return ast.Assign([ast.copy_location(target, statement)], ast.copy_location(value, statement))


def _surely_stored(statements: Sequence[ast.stmt]) -> set[str] | None:
    """The names that statements bind, whatever their branches ask; None where what is behind them
    is never reached."""
    found = set[str]()
    for each in statements:
        if isinstance(each, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            return None
        if isinstance(each, ast.If):
            branches = [_surely_stored(branch) for branch in (each.body, each.orelse)]
            reached = [names for names in branches if names is not None]
            if not reached:
                return None
            found |= reached[0].intersection(*reached[1:])
        elif isinstance(each, ast.With):
            found |= {
                name for i in each.items if i.optional_vars for name in stored_in(i.optional_vars)
            }
            found |= _surely_stored(each.body) or set()
        elif not hasattr(each, "body"):
            found |= stored_in(each)
    return found


def _read_first(statements: Sequence[ast.stmt], bound: Collection[str] = ()) -> set[str]:
    """The names that statements may read before they bind them."""
    found, bound = set[str](), {*bound}
    for each in statements:
        if isinstance(each, ast.If):
            found |= names_in(each.test) - bound
            for branch in (each.body, each.orelse):
                found |= _read_first(branch, bound)
            bound |= _surely_stored([each]) or set()
        else:
            read = names_in(each) - stored_in(each)
            if isinstance(value := getattr(each, "value", None), ast.expr):
                read |= names_in(value)
            if isinstance(each, ast.AugAssign):
                read |= names_in(each.target)
            found |= read - bound
            bound |= stored_in(each)
    return found


def _bound_before(body: Sequence[ast.stmt], last: ast.stmt) -> set[str]:
    """The names that statements bind, whatever branches ask, before a statement among them or in
    their blocks is reached."""
    for number, each in enumerate(body):
        if each is last or span_of(each).holds(span_of(last)):
            found = _surely_stored(body[:number]) or set()
            if each is not last:
                if isinstance(each, (ast.For, ast.AsyncFor)):
                    found |= stored_in(each.target)
                for name in ("body", "orelse", "finalbody"):
                    found |= _bound_before(getattr(each, name, ()), last)
            return found
    return set()


def _may_leave(statement: ast.If) -> bool:
    """Whether what follows an `if` is not reached where one of its branches is taken."""
    return any(isinstance(node, (ast.Return, ast.Raise)) for node in ast.walk(statement))


def _in_a_loop(file: SourceFile, statement: ast.stmt) -> bool:
    return any(isinstance(each, LOOPS) for each in file.enclosing(statement))


def _asked_for(conditions: Iterable[str], qualname: str) -> set[str]:
    """Names of which conditions ask the class, or what a call of them runs, or which method of
    another class than that of a function by its name: one that inherits from it may have others."""
    found, own = set[str](), qualname.rpartition(".")[0]
    for node in (each for text in conditions for each in ast.walk(_expression(text))):
        match node:
            case ast.Call(ast.Name("type"), [ast.Name(name)]) | ast.Attribute(
                ast.Name(name), "forward"
            ):
                found.add(name)
            case ast.Compare(
                ast.Attribute(
                    ast.Attribute(ast.Attribute(ast.Name(name)), "__code__"), "co_qualname"
                ),
                comparators=[asked],
            ) if any(
                str(method.value).rpartition(".")[0] not in ("", own)
                for method in ast.walk(asked)
                if isinstance(method, ast.Constant)
            ):
                found.add(name)
            case _:
                pass
    return found


def _is_number(node: ast.AST) -> bool:
    """Whether a node computes with numbers alone, those of a tensor's sizes included."""
    match node:
        case ast.Call(ast.Attribute(ast.Name("math")) | ast.Attribute(attr="size" | "dim")):
            return True
        case _:
            return isinstance(node, ast.BinOp | ast.operator)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _named(name: str, node: ast.expr) -> ast.Name:
    """A name in place of an expression."""
    return ast.copy_location(ast.Name(name, getattr(node, "ctx", ast.Load())), node)


def _word(node: ast.expr, modules: Collection[str]) -> str:
    """A word for an expression: the name that it begins with, or the attribute of a module."""
    word = ""
    while True:
        if isinstance(node, ast.Name):
            return word if node.id in modules and word else node.id
        if isinstance(node, ast.Attribute):
            word, node = node.attr, node.value
        elif isinstance(node, ast.Call):
            node = node.func
        elif isinstance(node, ast.Subscript):
            node = node.value
        else:
            return word or "given"


def _over_lines(
    head: str, between: str, parts: Sequence[str], end: str, *, around: bool = False
) -> str:
    """Parts in one line, or where that is long each in a line of its own."""
    line = between.join(parts)
    line = f"{head}({line}){end}" if around else f"{head}{line}{end}"
    if len(line) + 4 <= _WIDTH:
        return line
    rows = [f"    {part}{between.rstrip()}" if around else f"    {part}" for part in parts]
    if not around:
        rows[1:] = [f"    {between.lstrip()}{part}" for part in parts[1:]]
    return "\n".join([f"{head}(", *rows, f"){end}"])
