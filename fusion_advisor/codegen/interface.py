"""What an emitted file serves: of what tensors, and what it computes of them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from fusion_advisor.codegen.emit import reference_of, written
from fusion_advisor.codegen.host_launcher import launcher
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped.files import HOST

_COPY = "torch.ops.aten.clone.default"
_ASKING = ("ranked", "held_to", "takes", "empty")
"""Calls of a launcher that read its tensors, ask of them, or make results."""


@dataclass(frozen=True)
class Interface:
    """What an emitted file asks of its tensors, with the results that it makes, and the launches
    that it stands for, whatever its values are called and however its tiles are cut. Of two files
    with the same interface each serves the tensors of the other."""

    asks: str
    reference: str
    computes: str
    """The reference without the copies of tensors that lie otherwise: the same values."""


def interface(decision: Decision, rulebook: Rulebook) -> Interface:
    """Interface of the file of a set of launches. Raises ValueError for a set without a plan."""
    flow = decision.subject.flow
    file = written(flow, decision, "kernel", rulebook)
    tree = ast.parse(f"{launcher(file)}\n\n\n{reference_of(file, flow)}\n")
    asks, reference = (n for n in tree.body if isinstance(n, ast.FunctionDef))
    scratch = {name for name, _ in file.stores} - {*file.output_names}
    asks.body = [*_asking(asks, scratch)]
    plain = _Uncopied().visit(copy.deepcopy(reference))
    return Interface(*(ast.unparse(_Unnamed().visit(each)) for each in (asks, reference, plain)))


def _asking(function: ast.FunctionDef, scratch: set[str]) -> Iterator[ast.stmt]:
    """Yield the statements of a launcher that say what it serves; what its kernels leave for each
    other is in `scratch`."""
    for statement in function.body:
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            yield ast.Return(statement.value.elts[0])  # the results; launches follow
        called = {n.attr for n in ast.walk(statement) if isinstance(n, ast.Attribute)}
        stored = {
            n.id
            for n in ast.walk(statement)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        }
        if called & {*_ASKING} and not stored & scratch:
            yield statement


class _Uncopied(ast.NodeTransformer):
    """What was copied in place of the copies."""

    def __init__(self) -> None:
        self._copied: dict[str, ast.expr] = {}

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        value, target = self.visit(node.value), node.targets[0]
        copies = isinstance(value, ast.Call) and ast.unparse(value.func) == _COPY
        if isinstance(value, ast.Call) and copies and isinstance(target, ast.Name):
            self._copied[target.id] = value.args[0]
            return None
        node.value = value
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self._copied.get(node.id, node))


class _Unnamed(ast.NodeTransformer):
    """Numbers in place of names and words, in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self._numbers.setdefault(name, f"v{len(self._numbers)}")

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.arg = self._number(node.arg)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A call; the runtime's are given the name of the tensor that they ask, as a word."""
        given = node.args[0] if node.args else None
        if ast.unparse(node.func).startswith(f"{HOST}.") and isinstance(given, ast.Constant):
            node.args[0] = ast.Name(str(given.value))
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id not in ("torch", HOST):
            node.id = self._number(node.id)
        return node
