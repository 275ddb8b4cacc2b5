"""Comments in a model's source that ask to leave a finding alone.

    y = torch.exp(x) / s  # fusion-advisor: ignore[FA401] runs once, while the cache is filled

One holds for the logical line that it stands on, alone on a line for the next, at the head of a
`def` or `class` for all of that.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_COMMENT = re.compile(r"#\s*fusion-advisor:\s*ignore\b(.*)")
_ASKED = re.compile(r"\s*\[([\w\s,-]*)\](.*)")
_FORM = "write `# fusion-advisor: ignore[CODE] reason`"
_BETWEEN = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT)
"""Tokens that begin no logical line."""


@dataclass(frozen=True, slots=True)
class Ignore:
    """A code named by a comment at `line` of `file`, and the lines that the comment holds for;
    `fault` is the reason where it holds for none."""

    file: str
    line: int
    code: str
    reason: str
    lines: range
    fault: str = ""


def ignores(file: Path, name: str) -> list[Ignore]:
    """The comments of a source file, which reports call `name`; [] for a file that is no Python."""
    try:
        text = file.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError):
        return []
    definitions = dict(_definitions(tree))
    return [
        ignore
        for comment, said, first, last in _comments(text)
        for ignore in _read(name, comment, said, definitions.get(first, range(first, last + 1)))
    ]


def _comments(text: str) -> Iterator[tuple[int, str, int, int]]:
    """Each comment of this tool: its line, the text behind `ignore`, and the first and last line of
    its logical line."""
    first: int | None = None
    found: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT and (match := _COMMENT.match(token.string)):
            found.append((line, match[1]))
        if first is None and token.type not in _BETWEEN:
            first = line
        if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER) and first is not None:
            yield from ((at, said, first, line) for at, said in found)
            first, found = None, []


def _definitions(tree: ast.Module) -> Iterator[tuple[int, range]]:
    """The lines of each function and class, by the line of its name and of each decorator."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            heads = [*(decorator.lineno for decorator in node.decorator_list), node.lineno]
            lines = range(min(heads), (node.end_lineno or node.lineno) + 1)
            yield from ((head, lines) for head in heads)


def _read(name: str, line: int, said: str, lines: range) -> Iterator[Ignore]:
    asked = _ASKED.match(said)
    codes = [code for part in asked[1].split(",") if (code := part.strip())] if asked else []
    reason = asked[2].strip() if asked else ""
    if not codes:
        yield Ignore(name, line, "", reason, lines, f"names no code: {_FORM}")
    fault = "" if reason else f"gives no reason: {_FORM}"
    yield from (Ignore(name, line, code, reason, lines, fault) for code in codes)
