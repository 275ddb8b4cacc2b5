"""Names of a generated file: what they must not hide, and that each is its own."""

from __future__ import annotations

import builtins
import keyword
import re
from dataclasses import dataclass, field

from fusion_advisor.shipped.files import DEVICE, HOST, RUNTIME, functions

_RESERVED = frozenset({HOST, *keyword.kwlist, *dir(builtins)}) | frozenset(
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
        "reference",
        "DIVISOR",
        "ROWS_DIVISOR",
        "problem",
        "far",
        "FAR",
        "layout",
        "plan",
        "program",
        "peer",
        "peer_mask",
        "words",
        "workspace",
        "step",
        "steps",
        "STEP",
        "PEERS",
        "PROGRAMS",
        "lane",
        "vectors",
        "in_whole",
        "in_end",
        "end",
        "end_mask",
        "rest_vectors",
        "shared",
        "rest_shared",
        "early",
        "first",
        "following",
        "place",
        "tile",
        "parts",
    ]
)
"""What a generated name must not hide, besides the functions of the shipped files."""


@dataclass
class Names:
    """Names that are unique within one file."""

    used: set[str] = field(
        default_factory=lambda: {*_RESERVED, *functions(RUNTIME), *functions(DEVICE)}
    )

    def claim(self, wish: str) -> str:
        name = re.sub(r"\W", "_", wish, flags=re.ASCII).strip("_") or "value"
        name = f"v{name}" if name[0].isdigit() else name
        candidate, number = name, 1
        while candidate in self.used:
            candidate, number = f"{name}_{number}", number + 1
        self.used.add(candidate)
        return candidate
