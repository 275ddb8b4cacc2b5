"""Sizes and strides in expressions, and questions for them that raise for no tensor.

`x.size(2)` raises where `x` has two dimensions: whether it has three is asked first.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator


def size(node: ast.AST) -> tuple[ast.expr | None, int | None]:
    """The tensor and the dimension of `x.shape[1]` or `x.size(1)`."""
    match node:
        case ast.Subscript(value, index):
            return shape_of(value), _integer(index)
        case ast.Call(ast.Attribute(value, "size"), [index], []):
            return value, _integer(index)
        case _:
            return None, None


def shape_of(node: ast.expr) -> ast.expr | None:
    """The tensor of `x.shape` or `x.size()`."""
    match node:
        case ast.Call(ast.Attribute(value, "size"), [], []) | ast.Attribute(value, "shape"):
            return value
        case _:
            return None


def rank_first(conditions: Iterable[str]) -> Iterator[str]:
    """Yield conditions of which any decides, each behind those that tensors have too few dimensions
    for it."""
    conditions, known = [*conditions], dict[str, int]()
    every = [_dimensions(text) for text in conditions]
    most = {of: max(each.get(of, 0) for each in every) for each in every for of in each}
    for text, asked in zip(conditions, every, strict=True):
        for tensor in asked:
            if known.get(tensor, 0) < most[tensor]:
                yield f"{tensor}.dim() < {most[tensor]}"
                known[tensor] = most[tensor]
        match ast.parse(text, mode="eval").body:
            case ast.Compare(
                ast.Call(ast.Attribute(of, "dim"), [], []), [ast.NotEq()], [ast.Constant(int(rank))]
            ):
                known[ast.unparse(of)] = rank
            case _:
                pass
        yield text


def with_ranks(case: str) -> str:
    """A condition that is false where a tensor has too few dimensions for it."""
    asked = [f"{of}.dim() >= {count}" for of, count in _dimensions(case, whole=True).items()]
    joined = isinstance(ast.parse(case, mode="eval").body, ast.BoolOp) and " or " in case
    return " and ".join([*asked, f"({case})" if asked and joined else case])


def _dimensions(text: str, *, whole: bool = False) -> dict[str, int]:
    """How many dimensions tensors have to have for an expression. Unless for the `whole`, what it
    asks only where something else holds is its own matter."""
    found, todo = dict[str, int](), list[ast.AST]([ast.parse(text, mode="eval").body])
    while todo:
        node = todo.pop()
        tensor, dim = size(node)
        match node:
            case ast.Call(ast.Attribute(value, "stride"), [index], []):
                tensor, dim = value, _integer(index)
            case ast.IfExp(test) if not whole:
                todo.append(test)
                continue
            case ast.BoolOp(_, [first, *_]) if not whole:
                todo.append(first)
                continue
            case _:
                pass
        if tensor is not None and dim is not None:
            of = ast.unparse(tensor)
            found[of] = max(found.get(of, 0), dim + 1 if dim >= 0 else -dim)
        todo += ast.iter_child_nodes(node)
    return found


def _integer(node: ast.expr) -> int | None:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) is int else None
