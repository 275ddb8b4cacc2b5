"""How a generated file spells names, types, numbers and lines."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from fusion_advisor.region.random import NAMES, STATE

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
_RESERVED = frozenset({*keyword.kwlist, *dir(builtins)}) | frozenset(
    [
        "row",
        "col",
        "index",
        "mask",
        "row_mask",
        "col_mask",
        "rest",
        "rest_mask",
        "rows",
        "cols",
        "count",
        "part",
        "parts",
        "chunk",
        "start",
        "elements",
        "ROWS",
        "COLS",
        "REST",
        "PART",
        "BLOCK",
        "tl",
        "torch",
        "triton",
        "libdevice",
        "os",
        "warnings",
        "reference",
        "serves",
        "cdiv",
        "fall_back",
        "launch",
        "launched",
        "power_of_two",
        "divisor",
        "APART",
        "BEGUN",
        "beginning",
        "DIVISOR",
        "first_piece",
        "second_piece",
        "fallbacks",
        "problem",
        "in_planes",
        "PLANES",
        "beyond_int32",
        "far",
        "FAR",
        "wide",
        "ranked",
        "layout",
        "plan",
        "plans",
        "plan_of",
        "do_again",
        "remember",
        *(NAMES - set(STATE)),
        "program",
        "peer",
        "peer_mask",
        "words",
        "workspace",
        "step",
        "steps",
        "resident",
        "ticket",
        "publish",
        "published",
        "STEP",
        "PEERS",
        "WHOLE",
        "lane",
        "vectors",
        "in_whole",
        "in_end",
        "in_vectors",
        "around_vectors",
        "end",
        "end_mask",
        "ENDS",
        "rest_vectors",
        "shared",
        "rest_shared",
        "in_copy",
        "copies_kernel",
        "copies_made",
        "copies",
        "taken_by",
        "early",
        "overlapping",
        "EARLY",
        "load_row",
        "store_row",
        "first",
        "following",
        "place",
        "place_of",
        "rows_of_plane",
        "rows_of_tile",
        "tile",
        "parts",
        "load_by_place",
        "load_both",
        "by_place",
    ]
)
"""What a generated name must not hide."""


def language_dtype(dtype: str) -> str:
    """`tl`'s name of a dtype."""
    return f"tl.{_LANGUAGE.get(dtype, dtype)}"


@dataclass
class Names:
    """Names that are unique within one file."""

    used: set[str] = field(default_factory=lambda: set(_RESERVED))

    def claim(self, wish: str) -> str:
        name = re.sub(r"\W", "_", wish).strip("_") or "value"
        name = f"v{name}" if name[0].isdigit() else name
        candidate, number = name, 1
        while candidate in self.used:
            candidate, number = f"{name}_{number}", number + 1
        self.used.add(candidate)
        return candidate


def filled(template: str, operands: Sequence[str]) -> str:
    """The operands in their places, without parentheses where they are whole arguments."""
    whole = {int(n) for n in re.findall(r"(?<=[(,])\s*\{(\d)\}(?=[,)])", template)}
    ready = [bare(text) if n in whole else text for n, text in enumerate(operands)]
    return template.format(*ready)


def quoted(text: str) -> str:
    """Somebody's text as it can stand in a docstring: on one line, and unable to end it."""
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain)


def literal(text: str) -> str:
    if text in ("inf", "-inf", "nan"):
        return f'float("{text}")'
    return text


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


def as_operand(text: str) -> str:
    return text if re.fullmatch(r"[\w.]+(\(.*\))?|\(.*\)", text) else f"({text})"


def fitted(line: str, width: int = 100) -> list[str]:
    """A line of Python broken at its widest brackets until every part fits."""
    opening, closing = _widest_brackets(line) if len(line) > width else (0, 0)
    if not closing:
        return [line]
    margin = " " * (len(line) - len(line.lstrip()))
    inside, rest = line[opening + 1 : closing], line[closing:]
    parts = _at_commas(inside)
    comma = "," if len(parts) > 1 or inside.endswith(",") else ""
    found = [line[: opening + 1]]
    for part in parts:
        found += fitted(f"{margin}    {part}{comma}", width)
    return [*found, *fitted(margin + rest, width)]


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


def _at_commas(text: str) -> list[str]:
    parts, depth, start = list[str](), 0, 0
    for place, letter in enumerate(_without_strings(text)):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(letter, 0)
        if letter == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts
