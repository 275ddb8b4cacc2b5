"""What ncu counted of kernels, launch by launch, as its raw page has it (`--csv --page raw`)."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

HEADER = '"ID"'


def rows(file: Path) -> Iterator[dict[str, str]]:
    """Of every launch; the row of units, which has no number, is none. What the program itself
    printed stands before them."""
    text = file.read_text()
    start = text.find(HEADER)
    if start < 0:
        raise SystemExit(f"{file}: no counters; give what ncu wrote with --csv --page raw")
    yield from (row for row in csv.DictReader(io.StringIO(text[start:])) if row["ID"])


def number(row: dict[str, str], metric: str) -> float:
    if metric not in row:
        raise SystemExit(f"no counter {metric!r}; let ncu count it, with --metrics")
    return float(row[metric].replace(",", ""))


def case(row: dict[str, str]) -> str:
    """The name of the range in which a kernel was launched, `case:NAME`; empty outside of any."""
    mark = next((value for key, value in row.items() if key.startswith("thread Domain:Push")), "")
    return mark.partition("case:")[2].partition(":none")[0]
