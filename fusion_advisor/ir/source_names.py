"""Names that the user's source gives to the tensors of a graph. Free of torch.

A statement of the source makes a run of nodes. What the run leaves for others is called by the
statement's targets, what a module's call inside of it makes by the module's attribute, and what a
helper function returns by the function. A node without a source, or whose file cannot be read, has
no name here.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fusion_advisor.ir.graph import Node, Ref

_MODULES_OWN = ("forward", "__call__")
"""Functions whose result is called by the module."""
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr)
"""Statements that make nodes and hold no other statement."""
_OPERATIONS = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Compare, ast.Subscript)


@dataclass(frozen=True, slots=True)
class _Statement:
    """Statement that holds no other: names for what it computes ("" where a target has none), the
    function that it is in, the attributes that it calls, and the number of its operations."""

    line: int
    targets: tuple[str, ...]
    function: str
    calls: frozenset[str]
    operations: int

    def owner(self, module: str) -> tuple[str, str]:
        """Module that the statement runs in, and the attribute of it whose call `module` is part
        of: "" for a node that the statement makes itself."""
        path = module.split(".")
        for place in range(len(path) - 1, -1, -1):
            if path[place] in self.calls:
                return ".".join(path[:place]), path[place]
        return module, ""


def source_names(
    nodes: Sequence[Node], readers: Mapping[Ref, Sequence[int]], returned: Collection[Ref]
) -> dict[Ref, str]:
    """Name in the user's source of each tensor that has one. `readers` are the positions of the
    nodes that read a tensor, views among them; `returned` are the graph's results."""
    names: dict[Ref, str] = {}

    def lives_on(number: int, inside: set[int]) -> bool:
        refs = [Ref(nodes[number].name, n) for n in range(len(nodes[number].outputs))]
        return any(ref in returned or not inside.issuperset(readers.get(ref, ())) for ref in refs)

    for statement, owner, members in _executions(nodes):
        inside, targets = set(members), statement.targets
        last = {statement.owner(nodes[number].module): number for number in members}
        names |= {Ref(nodes[number].name): called for (_, called), number in last.items() if called}
        left = [nodes[number] for number in members if lives_on(number, inside)]
        refs = [Ref(node.name) for node in left]
        outputs = [Ref(node.name, n) for node in left[-1:] for n, t in enumerate(node.outputs) if t]
        if len(targets) == 1:
            refs = refs[-1:]
        elif len(outputs) == len(targets):
            refs = outputs
        found = zip(refs, targets, strict=True) if len(refs) == len(targets) else ()
        for ref, target in found:
            name = owner.rpartition(".")[2] if target in _MODULES_OWN else target
            if name.strip("_") and not name.isdigit():
                names[ref] = name
        for number in reversed(members):  # q.view(…).transpose(…): all of it is q
            made, after = Ref(nodes[number].name), [*readers.get(Ref(nodes[number].name), ())]
            if made in returned or len(after) != 1 or after[0] not in inside:
                continue
            view = nodes[after[0]]
            both = [t.storage for t in (*nodes[number].outputs[:1], *view.outputs) if t]
            if len(both) == 2 and both[0] == both[1] != -1 and Ref(view.name) in names:
                names[made] = names[Ref(view.name)]
    return names


def _executions(nodes: Sequence[Node]) -> Iterator[tuple[_Statement, str, list[int]]]:
    """Statements, each with the module that it runs in and the nodes, by position, that one
    execution of it made. It is executed anew where another one of its function was executed since,
    or it runs in another module, or, in a loop of one statement, where its ops begin again."""
    files = {node.source.file for node in nodes if node.source}
    lines = {file: _statements(file) for file in files}
    found: list[tuple[_Statement, str, list[int]]] = []
    latest: dict[tuple[str, str], tuple[_Statement, str, list[int]]] = {}
    for number, node in enumerate(nodes):
        if node.kind != "call" or node.source is None:
            continue
        statement = lines[node.source.file].get(node.source.line)
        if statement is None:
            continue
        owner, _ = statement.owner(node.module)
        place = node.source.file, statement.function
        if place not in latest or latest[place][:2] != (statement, owner):
            latest[place] = statement, owner, []
            found.append(latest[place])
        latest[place][2].append(number)
    for statement, owner, members in found:
        ops, whole = [nodes[number].op for number in members], len(members)
        sizes = range(max(statement.operations, 1), whole)
        repeats = (n for n in sizes if whole % n == 0 and ops[n:] == ops[:-n])
        size = next(repeats, whole)
        for start in range(0, whole, size):
            yield statement, owner, members[start : start + size]


def _statements(file: str) -> dict[int, _Statement]:
    """Statement of each line of a file; {} for a file that cannot be read, or that is named from a
    folder, as in reports and recordings: it may be any file here."""
    if not os.path.isabs(file):
        return {}
    linecache.checkcache(file)
    return _parsed("".join(linecache.getlines(file)))


@lru_cache(maxsize=64)
def _parsed(text: str) -> dict[int, _Statement]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    found: dict[int, _Statement] = {}
    for place in ast.walk(tree):  # a function comes after the one that it is defined in
        function = place.name if isinstance(place, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        for node in ast.walk(place) if function else ():
            if not isinstance(node, _SIMPLE):
                continue
            inner = [*ast.walk(node)]
            calls = (each.func for each in inner if isinstance(each, ast.Call))
            later = any(isinstance(each, ast.Lambda) for each in inner)  # its body is no value here
            made = _Statement(
                node.lineno,
                () if later else tuple(_targets(node, function)),
                function,
                frozenset(call.attr for call in calls if isinstance(call, ast.Attribute)),
                sum(isinstance(each, _OPERATIONS) for each in inner),
            )
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            found |= dict.fromkeys(lines, made)
    return found


def _targets(statement: ast.stmt, function: str) -> Iterator[str]:
    """Names for what a statement computes, in order: its targets, or of one value that it returns
    the function; "" for a target without a name."""
    if isinstance(statement, ast.Return) and not isinstance(statement.value, ast.Tuple):
        yield function
    targets = statement.targets[:1] if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AugAssign | ast.AnnAssign):
        targets = [statement.target]
    for target in targets:
        for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
            path = re.match(r"\*?([\w.]*)", ast.unparse(each))
            yield path[1].rpartition(".")[2] if path else ""
