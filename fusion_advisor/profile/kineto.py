"""Reader of Kineto's traces, as `torch.profiler` exports them: a stream, one event at a time."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from fusion_advisor.profile.trace import (
    DeviceEvent,
    EventKind,
    HostOp,
    ProfilerTrace,
    RuntimeCall,
    Sizes,
)
from fusion_advisor.support.errors import UsageError

_CHUNK = 1 << 22
"""Characters that are read at a time."""

_LONGEST = 1 << 24
"""Characters beyond a syntax error after which it is no value that only has not ended yet."""

_WORD = 8
"""Characters that hold a number or name of JSON that has only begun."""

_EVENTS: dict[str, EventKind] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "memcpy": "copy",
    "gpu_memset": "set",
    "memset": "set",
}
_CALLS = ("cuda_runtime", "cuda_driver", "runtime", "driver")
_OPS = ("cpu_op", "operator", "user_annotation")

_OWN_FRAME = re.compile(
    r"(?!.*(?:site-packages|dist-packages|lib/python|/torch/))(.+\.py)\(\d+\): "
)
"""Python functions of the user's own files."""


def read_kineto(file: Path) -> ProfilerTrace:
    """Read a `.json` or `.json.gz` trace. Raises UsageError, one line, for a file that is cut off
    or is no trace."""
    trace = ProfilerTrace(str(file))
    names: dict[str, str] = {}
    sizes: dict[Sizes, Sizes] = {}
    with _text(file) as text:
        for key, value in _Stream(file, text).items():
            try:
                if key == "deviceProperties":
                    for row in cast("list[dict[str, Any]]", value):
                        trace.devices[int(row.get("id", 0))] = str(row.get("name", ""))
                elif key == "traceEvents":
                    _add(trace, cast("dict[str, Any]", value), names, sizes)
            except (AttributeError, TypeError, ValueError) as error:  # of other types than Kineto's
                raise _no_trace(file) from error
    return trace


def _no_trace(file: Path) -> UsageError:
    return UsageError(
        f"--profile {file}: no trace; expected what torch.profiler's export_chrome_trace writes"
    )


def _add(
    trace: ProfilerTrace, event: Mapping[str, Any], names: dict[str, str], sizes: dict[Sizes, Sizes]
) -> None:
    """Add an event to the trace; equal names and sizes are kept once."""
    if event.get("ph") != "X":
        return
    kind = str(event.get("cat", "")).lower()
    name = str(event.get("name", ""))
    name = names.setdefault(name, name)
    start, us = float(event.get("ts", 0)), float(event.get("dur", 0))
    args: Mapping[str, Any] = event.get("args") or {}
    thread = event.get("tid")
    if kind in _EVENTS:
        trace.events.append(
            DeviceEvent(
                name, _EVENTS[kind], start, us, int(args.get("device", 0)),
                args.get("stream", thread), _id(args, "correlation"), _external(args),
            )
        )  # fmt: skip
    elif kind in _CALLS:
        call = RuntimeCall(name, start, start + us, thread)
        number = _id(args, "correlation")
        trace.calls[number if number >= 0 else -1 - len(trace.calls)] = call
    elif kind in _OPS:
        dims = args.get("Input Dims", args.get("Input dims"))
        shape = None if dims is None else tuple(_sizes(dims))
        trace.ops.append(
            HostOp(
                name, start, start + us, thread, _external(args),
                None if shape is None else sizes.setdefault(shape, shape),
                _id(args, "Sequence number"),
            )
        )  # fmt: skip
    elif kind == "python_function" and _OWN_FRAME.match(name):
        trace.frames.append(HostOp(name, start, start + us, thread))


def _id(args: Mapping[str, Any], key: str) -> int:
    value = args.get(key, -1)
    return int(value) if isinstance(value, (int, float)) else -1


def _external(args: Mapping[str, Any]) -> int:
    return _id(args, "External id" if "External id" in args else "external id")


def _sizes(dims: object) -> Iterator[tuple[int, ...]]:
    """Sizes of tensors among an op's arguments, lists of tensors flattened."""
    if not isinstance(dims, list) or not dims:
        return
    parts = cast("list[object]", dims)
    if all(isinstance(part, int) for part in parts):
        yield tuple(cast("list[int]", parts))
        return
    for part in parts:
        yield from _sizes(part)


# -- the stream ------------------------------------------------------------------------------------


@contextmanager
def _text(file: Path) -> Generator[io.TextIOBase]:
    """Text of a file, unpacked where it is packed by gzip."""
    try:
        with file.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            content = gzip.GzipFile(fileobj=raw) if packed else raw
            with io.TextIOWrapper(cast("Any", content), encoding="utf-8", errors="replace") as text:
                yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise cut_off(file) from error
    except OSError as error:
        raise UsageError(f"--profile {file}: {error.strerror}; expected a trace") from error


def cut_off(file: Path) -> UsageError:
    """Error for a trace that ends too early."""
    return UsageError(
        f"--profile {file}: is cut off; let the profiled program end, or record the trace again"
    )


_GAP = re.compile(r"[\s,]*")


class _Stream:
    """JSON object of a trace, of which some characters are in memory at a time."""

    def __init__(self, file: Path, text: io.TextIOBase) -> None:
        self._file, self._text = file, text
        self._decoder = json.JSONDecoder(strict=False)
        self._window, self._at, self._ended = "", 0, False

    def items(self) -> Iterator[tuple[str, object]]:
        """Yield keys and values of the object; of a list `traceEvents` each event by itself."""
        opened = self._next()
        if opened == "[":  # Chrome's other form: the list alone
            yield from (("traceEvents", event) for event in self._list())
            return
        if opened != "{":
            raise _no_trace(self._file)
        self._at += 1
        while self._next() != "}":
            key = str(self._value())
            if self._next() != ":":
                raise self._wrong("a colon is missing")
            self._at += 1
            if key == "traceEvents" and self._next() == "[":
                yield from ((key, event) for event in self._list())
            else:
                self._next()
                yield key, self._value()

    def _list(self) -> Iterator[object]:
        self._at += 1
        while self._next() != "]":
            yield self._value()
        self._at += 1

    def _next(self) -> str:
        """Next character that is neither blank nor a comma. Raises UsageError at the end."""
        while True:
            found = _GAP.match(self._window, self._at)
            self._at = found.end() if found else self._at
            if self._at < len(self._window):
                return self._window[self._at]
            if not self._more():
                raise cut_off(self._file)

    def _value(self) -> object:
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
            except json.JSONDecodeError as error:
                if len(self._window) - error.pos > _LONGEST:
                    raise self._wrong(error.msg) from error
                if self._more():
                    continue
                inside = error.msg.startswith("Unterminated")
                if inside or len(self._window) - error.pos < _WORD:
                    raise cut_off(self._file) from error
                raise self._wrong(error.msg) from error
            if end == len(self._window) and not self._ended and self._more():
                continue  # a number may go on
            self._at = end
            return value

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        read = self._text.read(max(_CHUNK, len(self._window) - self._at))
        self._window, self._at = self._window[self._at :] + read, 0
        self._ended = not read
        return bool(read)

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"--profile {self._file}: no JSON that can be read: {what}")
