"""Calls of `nn.Sequential` spelled out, so that a part of what one runs can be replaced.

`self.block(x)` becomes `self.block[1](self.block[0](x))` in the text that edits are made in, on the
same lines; what no edit has touched is folded again afterwards. A call is spelled out where each of
its runs went through the same number of modules, and where the class that holds the `Sequential`
says that number.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from fusion_advisor.ir.source_trace import (
    SEQUENTIAL,
    Chosen,
    Evaluation,
    Moment,
    Span,
    Trail,
)
from fusion_advisor.sourcepatch.editing.constructors import Constructors
from fusion_advisor.sourcepatch.editing.sources import (
    SourceFile,
    SpelledCall,
    held_path,
    span_of,
)

_MOST = 60
"""Modules of a call that is spelled out, at most: Python's parser nests two hundred parentheses."""

Turns = tuple[int, ...]
"""Number of a module in a `Sequential`, and in those within it."""
_Placed = tuple[str, Span]
"""Call in a file."""


@dataclass(frozen=True)
class Chain:
    """Modules that a `Sequential` runs, by the subscripts and attributes under which it holds them;
    each with its own chain where it is a `Sequential`, too."""

    links: tuple[tuple[str, Chain | None], ...]

    def ends(self, callee: str, turns: Turns = ()) -> Iterator[tuple[Turns, str]]:
        """Yield the modules that are called one after another, by their turns."""
        for number, (link, within) in enumerate(self.links):
            if within is None:
                yield (*turns, number), callee + link
            else:
                yield from within.ends(callee + link, (*turns, number))

    def chains(self, callee: str) -> Iterator[tuple[str, list[str]]]:
        """Yield each chain's own text with those of its modules, the inner ones first."""
        for link, within in self.links:
            if within is not None:
                yield from within.chains(callee + link)
        yield callee, [callee + link for link, _ in self.links]


class _Runs:
    """Runs of `Sequential.forward` in a trail."""

    def __init__(self, trail: Trail) -> None:
        self._calls = trail.activations
        self._turn = dict[int, int]()
        self._inside = dict[int, Turns]()
        """Turns of the runs around each call that one led to, as the call began."""
        self._words = dict[int, list[tuple[str, str]]]()
        self.at: list[tuple[int, Span, Turns]] = []
        """The place of each step: a call of the user's, where in it, and the turns from there."""
        for step in trail.steps:
            number = step.activation
            if number not in self._inside:
                self._inside[number] = self._turns(self._calls[number].caller)
            if isinstance(step, Moment) and self.is_one(number):
                self._turn[number] = self._turn.get(number, -1) + 1
                names = step.names.get("self", ""), step.names.get("module", "")
                self._words.setdefault(number, []).append(names)
            match step:
                case Evaluation(place=place) | Chosen(branch=place):
                    pass
                case Moment():
                    place = Span(0, 0, 0, 0)
            self.at.append(self._outside(number, place, self._turns(number)))

    def is_one(self, number: int | None) -> bool:
        """Whether a call is a run of `Sequential.forward`."""
        return number is not None and self._calls[number].function == SEQUENTIAL

    def caller(self, number: int) -> tuple[int | None, Span | None, Turns]:
        """The user's call that led to a call, where in it, and the turns from there."""
        call = self._calls[number]
        if call.caller is None or call.place is None:
            return call.caller, call.place, ()
        return self._outside(call.caller, call.place, self._inside.get(number, ()))

    def _turns(self, number: int | None) -> Turns:
        found: Turns = ()
        while number is not None and self.is_one(number):
            found = (self._turn.get(number, 0), *found)
            number = self._calls[number].caller
        return found

    def _outside(self, number: int, place: Span, turns: Turns) -> tuple[int, Span, Turns]:
        while self.is_one(number):
            call = self._calls[number]
            assert call.caller is not None  # else it is not followed
            assert call.place is not None
            number, place = call.caller, call.place
        return number, place, turns

    @cached_property
    def chains(self) -> dict[str, set[Chain | None]]:
        """Chains that ran, by the path of the `Sequential`; None for one that no text spells."""
        found: dict[str, set[Chain | None]] = {}
        for number, words in self._words.items():
            found.setdefault(words[0][0][1:], set()).add(self._chain(number))
        return found

    def placed(self) -> Iterator[tuple[int, Span, Chain | None]]:
        """Yield the user's calls of a `Sequential`, with their places and chains."""
        for number in self._words:
            call = self._calls[number]
            if call.caller is not None and call.place and not self.is_one(call.caller):
                yield call.caller, call.place, self._chain(number)

    def _chain(self, number: int) -> Chain | None:
        within = {
            self._inside[n][-1]: self._chain(n)
            for n in self._words
            if self._calls[n].caller == number
        }
        links = list[tuple[str, Chain | None]]()
        for turn, (owner, module) in enumerate(self._words[number]):
            path = module.removeprefix(owner if owner == ":" else f"{owner}.")
            if not module or path == module or "." in path:
                return None
            links.append((f"[{path}]" if path.isdigit() else f".{path}", within.get(turn)))
        return Chain(tuple(links))


@dataclass
class _Shifts:
    """Texts inserted into a file's lines, by line and column; those that stand behind an
    expression, and those before one."""

    before: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    behind: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])

    def spell(self, call: ast.Call, callee: str, texts: Sequence[str]) -> None:
        """Insert what spells a call out."""
        first, *more = texts
        start, named = span_of(call), span_of(call.func)
        opened = "".join(f"{text}(" for text in reversed(more))
        self.before[start.line, start.column] = opened
        self.behind[named.end_line, named.end_column] = first.removeprefix(callee)
        end = start.end_line, start.end_column
        self.behind[end] = self.behind.get(end, "") + ")" * len(more)

    def of(self, span: Span) -> Span:
        """A stretch of the file as it was, in the new one; what is inserted at its ends is in."""
        start, end = (span.line, span.column), (span.end_line, span.end_column)
        more = sum(len(text) for at, text in self._on(span.line) if at < start[1])
        last = sum(len(text) for at, text in self._on(span.end_line) if at < end[1])
        more += len(self.behind.get(start, ""))
        last += len(self.behind.get(end, ""))
        return Span(span.line, span.column + more, span.end_line, span.end_column + last)

    def _on(self, line: int) -> Iterator[tuple[int, str]]:
        for texts in (self.behind, self.before):
            yield from ((column, text) for (at, column), text in texts.items() if at == line)

    def put_into(self, text: str) -> str:
        """A text with these inserted."""
        lines = text.encode().splitlines(keepends=True)
        every = [
            (at, n, t) for n, b in enumerate((self.before, self.behind)) for at, t in b.items()
        ]
        for (line, column), _, more in sorted(every, reverse=True):
            old = lines[line - 1]
            lines[line - 1] = old[:column] + more.encode() + old[column:]
        return b"".join(lines).decode()


@dataclass(frozen=True)
class SpelledOut:
    """Files in which calls are spelled out, and the places there of what a trail has recorded."""

    files: dict[str, SourceFile] = field(default_factory=dict[str, SourceFile])
    """Files that were read, by their paths."""
    ends: dict[_Placed, dict[Turns, Span]] = field(default_factory=dict[_Placed, dict[Turns, Span]])
    """Calls of the modules in a call as it was written, by their turns; `()` for the whole."""
    shifts: dict[str, _Shifts] = field(default_factory=dict[str, _Shifts])

    def read(self, path: str) -> SourceFile:
        """A file, read once."""
        if path not in self.files:
            self.files[path] = SourceFile.read(path)
        return self.files[path]

    def trail(self, trail: Trail) -> Trail:
        """A trail without the runs of `Sequential.forward`, its places those of these files."""
        runs, calls = _Runs(trail), trail.activations

        def place(number: int, span: Span, turns: Turns) -> Span:
            file = calls[number].file
            ends = self.ends.get((file, span), {})
            for depth in range(len(turns), -1, -1):
                if turns[:depth] in ends:
                    return ends[turns[:depth]]
            return self.shifts[file].of(span) if file in self.shifts else span

        activations = list(calls)
        for number, call in enumerate(calls):
            caller, span, turns = runs.caller(number)
            if caller is not None and span is not None:
                span = place(caller, span, turns)
                activations[number] = replace(call, caller=caller, place=span)
        steps = [
            step if isinstance(step, Moment) else type(step)(number, place(number, span, turns))
            for step, (number, span, turns) in zip(trail.steps, runs.at, strict=True)
        ]
        return replace(trail, activations=tuple(activations), steps=tuple(steps))


def spelled_out(trails: Sequence[Trail], editable: Callable[[str, int], bool]) -> SpelledOut:
    """The calls of `nn.Sequential` of a model, spelled out where every run of the model went the
    same way through them. `editable` says which functions may change, by a file and a line."""
    result = SpelledOut()
    every = [(trail, _Runs(trail), Constructors(trail, result.read)) for trail in trails]
    found = dict[_Placed, set[Chain | None]]()
    for trail, runs, _ in every:
        for number, span, chain in runs.placed():
            found.setdefault((trail.activations[number].file, span), set()).add(chain)
    calls = list[tuple[_Placed, ast.Call, Chain]]()
    for (path, span), chains in found.items():
        chain = next(iter(chains))
        if len(chains) > 1 or chain is None or not editable(path, span.line):
            continue
        file = result.read(path)
        call = _call_at(file, span, chain)
        if call and all(_always(*run, file, call, chain) for run in every):
            calls.append(((path, span), call, chain))
    for (path, _), call, chain in calls:
        callee = ast.unparse(call.func)
        texts = [text for _, text in chain.ends(callee)]
        result.shifts.setdefault(path, _Shifts()).spell(call, callee, texts)
    for path, shifts in result.shifts.items():
        before = result.files[path].text
        result.files[path] = SourceFile.of(path, shifts.put_into(before))
        result.files[path].before = before
    for at, call, chain in calls:
        path, span = at
        ends = result.ends[at] = _ends(result.files[path], result.shifts[path].of(span), chain)
        links = (place for turns, place in ends.items() if turns)
        chains = ((text, tuple(more)) for text, more in chain.chains(ast.unparse(call.func)))
        result.files[path].spelled[ends[()]] = SpelledCall(tuple(links), tuple(chains))
    return result


def folded(file: SourceFile, text: str) -> str:
    """A text made of a file's, with calls as they were written where all of a chain is left."""
    for callee, links in dict.fromkeys(
        c for each in file.spelled.values() for c in each.containers
    ):
        text = folded_call(text, callee, links)
    return text


def folded_call(text: str, callee: str, links: Sequence[str]) -> str:
    """A text with the calls of one `Sequential` as they were written."""
    while (shorter := _folded(text, callee, links)) != text:
        text = shorter
    return text


def _folded(text: str, callee: str, links: Sequence[str]) -> str:
    """A text with one chain folded."""
    file = SourceFile.of("", text)
    for node in ast.walk(file.tree):
        inner = node
        for link in reversed(links[1:]):
            inner = _argument(inner) if _calls(inner, link) else None
        if isinstance(node, ast.Call) and isinstance(inner, ast.Call) and _calls(inner, links[0]):
            given = file.source(inner).removeprefix(file.source(inner.func))
            return file.replaced(node, callee + given)
    return text


def _calls(node: ast.AST | None, text: str) -> bool:
    """Whether a node is a call of a module."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == text


def _argument(node: ast.AST | None) -> ast.expr | None:
    """The one argument of a call; None for other nodes."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        return None if isinstance(node.args[0], ast.Starred) else node.args[0]
    return None


def _call_at(file: SourceFile, span: Span, chain: Chain) -> ast.Call | None:
    """A call that may be spelled out: with one argument, of what a path of names leads to, and in a
    statement of a function that does not spell it out itself."""
    call = file.expressions.get(span)
    if not isinstance(call, ast.Call) or _argument(call) is None or not _is_held(call.func):
        return None
    callee = ast.unparse(call.func)
    chained = dict(chain.chains(callee))
    alone = file.outside_comprehensions(call) is call and file.enclosing(call)
    spelled = any(_folded(file.text, *each) != file.text for each in chained.items())
    return call if alone and not spelled and 1 < len([*chain.ends("")]) <= _MOST else None


def _is_held(node: ast.expr) -> bool:
    """Whether a path of attributes and numbers leads from a name to a module."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Subscript) and not ast.unparse(node.slice).isdigit():
            return False
        node = node.value
    return isinstance(node, ast.Name)


def _always(
    trail: Trail,
    runs: _Runs,
    constructors: Constructors,
    file: SourceFile,
    call: ast.Call,
    chain: Chain,
) -> bool:
    """Whether a call runs this chain whenever its statement runs, and the classes of the modules
    say how long the chain is."""
    statement = file.enclosing(call)[-1]
    lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    paths = {
        held_path(call.func, step.names)
        for step in trail.steps
        if isinstance(step, Moment)
        and step.line in lines
        and trail.activations[step.activation].file == file.path
    }
    return all(
        path is not None
        and runs.chains.get(path) == {chain}
        and _is_settled(constructors, path, chain)
        for path in paths
    )


def _is_settled(constructors: Constructors, path: str, chain: Chain) -> bool:
    """Whether the source says how many modules a chain has, and each within it."""
    if constructors.length(path) != len(chain.links):
        return False
    return all(
        within is None or _is_settled(constructors, f"{path}.{link.strip('[.]')}", within)
        for link, within in chain.links
    )


def _ends(file: SourceFile, span: Span, chain: Chain) -> dict[Turns, Span]:
    """The calls of the modules in a call that is spelled out, by their turns."""
    found: dict[Turns, Span] = {(): span}
    at = file.expressions[span]
    for turns, _ in reversed([*chain.ends("")]):
        assert isinstance(at, ast.Call)
        found[turns], at = span_of(at), at.args[0]
    return found
