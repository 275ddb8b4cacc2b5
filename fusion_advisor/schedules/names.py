"""Names of a generated file: what they must not hide, and that each is its own."""

from __future__ import annotations

import builtins
import keyword
import re
from dataclasses import dataclass, field

from fusion_advisor.region.random import NAMES, STATE

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
