"""Triton's names of types, and how the lines of a generated file are broken and quoted."""

from __future__ import annotations

import re
from typing import Literal

from fusion_advisor.tile.text import BINDS

TRITON_DTYPES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "bool": "i1",
}
_LANGUAGE = {"bool": "int1", "float8_e4m3fn": "float8e4nv", "float8_e5m2": "float8e5"}


def language_dtype(dtype: str) -> str:
    """`tl`'s name of a dtype."""
    return f"tl.{_LANGUAGE.get(dtype, dtype)}"


def quoted(text: str) -> str:
    """Somebody's text as it can stand in a docstring: on one line, and unable to end it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def bare(text: str) -> str:
    """Without parentheses that enclose the whole."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    depth = 0
    for place, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if depth == 0 and place < len(text) - 1:
            return text
    return text[1:-1]


Parts = Literal["apart", "together", "filled"]
"""How parts between commas are broken: a line for each; one line for all where they fit on it, else
a line for each, both as formatters have it; or as many on a line as fit, which none would leave."""
WIDTH = 100
"""Columns of a generated file."""
AS_IT_IS = "  # fmt: skip"
"""End of a line that is filled, for formatters."""


def fitted(
    line: str, width: int = WIDTH, bracketed: bool = False, parts: Parts = "apart"
) -> list[str]:
    """A line of Python broken at its widest brackets until every part fits; a sum or a choice that
    would not even so gets brackets of its own. What is `bracketed` is broken at its operators."""
    margin = " " * (len(line) - len(line.lstrip()))
    if bracketed and len(line) > width and len(terms := _at_operators(line)) > 1:
        return [part for term in terms for part in fitted(margin + term, width, parts=parts)]
    opening, closing = _widest_brackets(line) if len(line) > width else (0, 0)
    if not closing:
        return [line]
    assigned = re.match(r"\s*\w+ \+?= ", line)
    if opening >= width and assigned:
        end = assigned.end()
        value = fitted(f"{margin}    {line[end:]}", width, True, parts)
        return [f"{line[:end]}(", *value, f"{margin})"]
    inside = line[opening + 1 : closing]
    inner = _widest_brackets(inside) if parts == "filled" else (0, 0)
    if 0 < inner[1] == len(inside) - 1 and len(_at_commas(inside)) == 1:  # `[f(` and `)]`
        opening, closing = opening + 1 + inner[0], opening + 1 + inner[1]
    inside, rest = line[opening + 1 : closing], line[closing:]
    broken = _broken(inside, f"{margin}    ", width, parts)
    return [line[: opening + 1], *broken, *fitted(margin + rest, width, parts=parts)]


def _broken(inside: str, margin: str, width: int, parts: Parts) -> list[str]:
    """Lines of what stands between brackets."""
    texts = _at_commas(inside)
    if parts != "apart" and len(texts) > 1 and len(margin + inside) <= width:
        return [margin + inside]
    comma = "," if len(texts) > 1 or inside.endswith(",") else ""
    found: list[str] = []
    filling = False
    for text in texts:
        lines = fitted(f"{margin}{text}{comma}", width, True, parts)
        if filling and len(lines) == 1 and len(f"{found[-1]} {text}{comma}") <= width:
            found[-1] += f" {text}{comma}"
        else:
            found += lines
            filling = parts == "filled" and len(lines) == 1
    return found


def _widest_brackets(line: str) -> tuple[int, int]:
    """Where the outermost pair with the most inside opens and closes; zeros without one."""
    best, stack = (0, 0), list[int]()
    for place, letter in enumerate(_without_strings(line)):
        if letter in "([":
            stack.append(place)
        elif letter in ")]" and stack:  # a line may begin with what closes an earlier one
            start = stack.pop()
            if not stack and place - start > max(best[1] - best[0], 1):
                best = start, place
    return best


def _without_strings(text: str) -> str:
    """A line as long, with nothing in its string literals that could be taken for code."""
    return re.sub(r"""(["'])(?:\\.|(?!\1).)*\1""", lambda found: "_" * len(found[0]), text)


def _at_operators(text: str) -> list[str]:
    """Terms of an expression, each with the operator before it, where it binds least closely."""
    depth, found = 0, list[tuple[int, int]]()
    for match in re.finditer(
        r"[(\[)\]]|(?<= )([=!<>]=|//|[-+*/%&|^<>])(?= )", _without_strings(text)
    ):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(match[0], 0)
        if match[1] and not depth:
            found.append((BINDS[match[1]], match.start()))
    places = [place for binds, place in found if binds == min(found)[0]]
    ends = zip([0, *places], [*places, len(text)], strict=True)
    return [text[start:end].strip() for start, end in ends]


def _at_commas(text: str) -> list[str]:
    parts, depth, start = list[str](), 0, 0
    for place, letter in enumerate(_without_strings(text)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
