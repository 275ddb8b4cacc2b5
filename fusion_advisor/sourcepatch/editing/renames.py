"""Renaming of global names in functions."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fusion_advisor.sourcepatch.editing.sources import SourceFile, span_of

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def renamed(text: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """The text of a file in which some functions, by qualified name, use other global names. No
    renamed name is bound in its function."""
    file = SourceFile.of("", text)
    lines = text.encode().splitlines(keepends=True)
    found = {
        span_of(name): new
        for function in ast.walk(file.tree)
        if isinstance(function, _FUNCTIONS)
        for old, new in names.get(file.qualname(function), {}).items()
        for statement in function.body
        for name in ast.walk(statement)
        if isinstance(name, ast.Name) and name.id == old
    }
    for span in sorted(found, reverse=True):
        line = lines[span.line - 1]
        lines[span.line - 1] = line[: span.column] + found[span].encode() + line[span.end_column :]
    return b"".join(lines).decode()
