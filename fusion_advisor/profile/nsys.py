"""Reader of Nsight Systems' traces, as `nsys export --type sqlite` writes them.

Ops are there where the program ran under `torch.autograd.profiler.emit_nvtx`, whose ranges are
called `aten::mm, seq = 12, sizes = [[8, 16], [16, 4]]`; annotations of `torch.cuda.nvtx` are kept.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from fusion_advisor.profile.trace import (
    DeviceEvent,
    EventKind,
    HostOp,
    ProfilerTrace,
    RuntimeCall,
    Sizes,
)
from fusion_advisor.support.errors import UsageError

MAGIC = b"SQLite format 3\0"
"""First bytes of a SQLite file."""

_EVENTS: tuple[tuple[str, EventKind, str], ...] = (
    (
        "CUPTI_ACTIVITY_KIND_KERNEL",
        "kernel",
        "(SELECT value FROM StringIds WHERE id=demangledName)",
    ),
    ("CUPTI_ACTIVITY_KIND_MEMCPY", "copy", "'Memcpy'"),
    ("CUPTI_ACTIVITY_KIND_MEMSET", "set", "'Memset'"),
    ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "kernel", "'CUDA graph, its kernels not traced'"),
)
_CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
_RANGES = "NVTX_EVENTS"
_GPUS = "TARGET_INFO_GPU"
_SIZE = re.compile(r"\[(\d+(?:, ?\d+)*)\]")
_SEQUENCE = re.compile(r", seq = (\d+)")
_NS = 1e-3
"""Microseconds of a nanosecond."""


def read_nsys(file: Path) -> ProfilerTrace:
    """Read a SQLite export. Raises UsageError, one line, where it cannot be read."""
    trace = ProfilerTrace(str(file))
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as base:
            tables = {name for (name,) in base.execute("SELECT name FROM sqlite_master")}
            if _GPUS in tables:
                trace.devices = dict(base.execute(f"SELECT id, name FROM {_GPUS}"))
            for table, kind, name in _EVENTS:
                if table in tables:
                    trace.events += _events(base, table, kind, name)
            if _CALLS in tables:
                trace.calls = _calls(base)
            if _RANGES in tables:
                trace.ops = [*_ranges(base)]
    except sqlite3.Error as error:
        raise UsageError(
            f"--profile {file}: {error}; export it again: nsys export --type sqlite"
        ) from error
    return trace


def _events(
    base: sqlite3.Connection, table: str, kind: EventKind, name: str
) -> Iterator[DeviceEvent]:
    columns = f"{name}, start, end, deviceId, streamId, correlationId"
    for text, start, end, device, stream, correlation in base.execute(
        f"SELECT {columns} FROM {table}"
    ):
        us = (end - start) * _NS
        yield DeviceEvent(str(text), kind, start * _NS, us, device, stream, correlation)


def _calls(base: sqlite3.Connection) -> dict[int, RuntimeCall]:
    rows: Iterator[Any] = base.execute(
        "SELECT correlationId, (SELECT value FROM StringIds WHERE id=nameId), start, end, globalTid"
        f" FROM {_CALLS}"
    )
    return {
        number: RuntimeCall(str(name).partition("_v")[0], start * _NS, end * _NS, thread)
        for number, name, start, end, thread in rows
    }


def _ranges(base: sqlite3.Connection) -> Iterator[HostOp]:
    rows: Iterator[Any] = base.execute(
        "SELECT coalesce(text, (SELECT value FROM StringIds WHERE id=textId)), start, end,"
        f" globalTid FROM {_RANGES} WHERE end IS NOT NULL"
    )
    for text, start, end, thread in rows:
        label = str(text)
        number, sizes = _SEQUENCE.search(label), label.partition("sizes = ")[2]
        found: Sizes = tuple(tuple(map(int, each.split(","))) for each in _SIZE.findall(sizes))
        yield HostOp(
            label.partition(", ")[0], start * _NS, end * _NS, thread,
            sizes=found if sizes else None, sequence=int(number[1]) if number else -1,
        )  # fmt: skip
