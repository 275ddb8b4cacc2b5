"""Rewrites of a graph as records, each with the line of Python that a person would write instead of
what it replaces."""
# torch.fx carries Any.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import ast
import linecache
import math
from collections.abc import Iterator
from typing import Any

import torch

from fusion_advisor.dynamo.rewrites import Rewritten
from fusion_advisor.dynamo.rewrites.attention import Attention, attentions
from fusion_advisor.dynamo.rewrites.base import Taken
from fusion_advisor.ir.graph import Rewrite, Source

_NAME = "scaled_dot_product_attention"
_BY_NAMES = ast.parse(f"torch.nn.functional.{_NAME}(query, key, value)", mode="eval").body
_IN_ORDER = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def described(before: torch.fx.GraphModule, rewritten: Rewritten) -> Iterator[Rewrite]:
    """Record of each rewrite of a graph, one for each place: what a later rewrite says of a node
    that an earlier one made is part of the earlier one."""
    known = {node.name for node in before.graph.nodes}
    found = {each.node: each for each in attentions(rewritten.module.graph)}
    places: dict[torch.fx.Node, list[Taken]] = {}
    for taken in rewritten.taken:
        places.setdefault(taken.node, []).append(taken)
    for node, each in places.items():
        made = each if node.name in known else each[:1]
        attention = found.get(node)
        causal = attention is not None and attention.given.get("is_causal") is True
        reads = any(condition.reads for taken in each for condition in taken.conditions)
        line = ""
        if attention and not reads and not (node.name in known and _shortened(attention, known)):
            line = attention_line(attention, each[0].source)
        why = "; ".join(dict.fromkeys(taken.why for taken in each))
        for taken in made:
            yield Rewrite(taken.name, taken.source, _module(node), why, line, causal)


def _shortened(attention: Attention, known: set[str]) -> bool:
    """Whether a rewrite left out keys after the last query: the user's call has all of them."""
    key: torch.fx.Node = attention.given["key"]
    return key.name not in known


def _module(node: torch.fx.Node) -> str:
    """Path of the module that calls a node, from the module that Dynamo captured."""
    *_, (path, _) = (node.meta.get("nn_module_stack") or {"": ("", None)}).values()
    return path.removeprefix("L['self']").removeprefix(".")


def attention_line(attention: Attention, source: Source | None) -> str:
    """Call of attention as a rewritten graph has it: the user's own call at a line with other
    arguments; where there is none, as for attention by hand, a call with the operands by their
    names."""
    changed = dict(_changed(attention))
    call = _call_at(source) if source else None
    if call is None:
        assert isinstance(_BY_NAMES, ast.Call)
        call = _BY_NAMES
        if (scale := _scale(attention)) is not None:
            changed["scale"] = scale
    given = dict(zip(_IN_ORDER, call.args, strict=False))
    given |= {each.arg: each.value for each in call.keywords if each.arg}
    operands = [given.pop(name) for name in _IN_ORDER[:3] if name in given]
    given = {name: value for name, value in given.items() if name not in changed}
    given |= {name: value for name, value in changed.items() if value is not None}
    unpacked = [each for each in call.keywords if each.arg is None]
    keywords = [*(ast.keyword(name, value) for name, value in given.items()), *unpacked]
    return ast.unparse(ast.Call(call.func, operands, keywords))


def _changed(attention: Attention) -> list[tuple[str, ast.expr | None]]:
    """Arguments that say what a rewrite says; None for one that is left out."""
    given = attention.given
    flags = [name for name in ("is_causal", "enable_gqa") if given.get(name) is True]
    changed: list[tuple[str, ast.expr | None]] = [(name, ast.Constant(True)) for name in flags]
    return changed if attention.mask else [("attn_mask", None), *changed]


def _scale(attention: Attention) -> ast.expr | None:
    """Scale of attention by hand, None where it is the operator's own."""
    scale: Any = attention.given.get("scale")
    if isinstance(scale, torch.fx.Node):
        return ast.Name("scale")
    width: Any = attention.tensor("query").shape[-1]
    if scale is None or (isinstance(width, int) and math.isclose(scale, width**-0.5)):
        return None
    return ast.Constant(float(scale))


def _call_at(source: Source) -> ast.Call | None:
    """The one call of attention at a line whose operands stand in it; None for none or several."""
    text = "".join(linecache.getlines(source.file))
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None  # no Python, as a cell of a notebook with a magic command
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and node.lineno <= source.line <= (node.end_lineno or node.lineno)
        and ast.unparse(node.func).rpartition(".")[2] == _NAME
        and not any(isinstance(each, ast.Starred) for each in node.args)
    ]
    return found[0] if len(found) == 1 else None
