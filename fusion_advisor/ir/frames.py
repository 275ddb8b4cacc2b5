"""Finds the line of the user's own source that a stack trace belongs to. Free of torch."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType, TracebackType

from fusion_advisor.ir.graph import Source

_FRAME = re.compile(r'^\s*File "(.+?)", line (\d+)', re.MULTILINE)
_STDLIB = tuple(
    {
        sysconfig.get_path("stdlib") + os.sep,
        f"{Path(sysconfig.get_path('stdlib')).resolve()}{os.sep}",
    }
)
_OURS = str(Path(__file__).parents[1]) + os.sep
_INFRASTRUCTURE = re.compile(r"/(torch|triton|torchgen|functorch)/")


@lru_cache(maxsize=65536)
def source_of(stack: str) -> Source | None:
    """Line that the user wrote in `stack` (frames as Python prints them, outermost first). The
    innermost frame outside site-packages; for a model of an installed library the innermost frame
    outside torch; None when there is neither."""
    return choose([(file, int(line)) for file, line in _FRAME.findall(stack)])


def source_of_traceback(error: BaseException) -> Source | None:
    """Line of the user that raised `error`; for a syntax error the line that the error names."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Source(error.filename, error.lineno)
    return choose(_traceback_frames(error.__traceback__))


def source_of_frame(frame: FrameType | None) -> Source | None:
    """Line of the user among the callers of `frame`, found without building a traceback."""
    frames: list[tuple[str, int]] = []
    while frame is not None:
        file = frame.f_code.co_filename
        if has_source(file):
            if is_user(file):
                return Source(file, frame.f_lineno) if _called_from_here(frame) else None
            frames.append((file, frame.f_lineno))
        frame = frame.f_back
    return Source(*frames[0]) if frames else None


@lru_cache(maxsize=4096)
def has_source(file: str) -> bool:
    """Whether a file is the user's or belongs to a library other than torch."""
    return _readable(file) and (is_user(file) or _is_library(file))


def _called_from_here(frame: FrameType | None) -> bool:
    """Whether this package is further out on the stack: frames outside it are the caller,
    not the model."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def choose_from_dump(printed: str) -> Source | None:
    """Line of the user in the last dump that faulthandler printed (innermost frame first)."""
    dump = printed[printed.rfind("(most recent call first)") :]
    return choose([(file, int(line)) for file, line in reversed(_FRAME.findall(dump))])


def choose(frames: list[tuple[str, int]]) -> Source | None:
    """Pick the user's frame among `frames`, outermost first; callers of this package do not
    count."""
    ours = next((index for index, (file, _) in enumerate(frames) if file.startswith(_OURS)), -1)
    inner = [frame for frame in frames[ours + 1 :] if _readable(frame[0])]
    for accept in (is_user, _is_library):
        for file, line in reversed(inner):
            if accept(file):
                return Source(file, line)
    return None


def _traceback_frames(trace: TracebackType | None) -> list[tuple[str, int]]:
    return [(f.filename, f.lineno or 0) for f in traceback.extract_tb(trace)]


def _readable(file: str) -> bool:
    return not file.startswith(("<", _OURS))


@cache
def is_user(file: str) -> bool:
    """Whether a file is the user's own, and of no installed package."""
    return "site-packages" not in file and "dist-packages" not in file and not _is_stdlib(file)


@lru_cache(maxsize=4096)
def portable_path(file: str, folder: str) -> str:
    """Name a source file for reports, the same on every machine: relative to site-packages for an
    installed package, relative to `folder` for a file below it, else the whole path."""
    file, folder = file.replace(os.sep, "/"), folder.replace(os.sep, "/")
    _, installed, inside = file.rpartition("-packages/")
    return inside if installed else file.removeprefix(f"{folder}/")


def _is_library(file: str) -> bool:
    packages = file.replace(os.sep, "/").rsplit("-packages", 1)[-1]
    return not _INFRASTRUCTURE.match(packages) and not _is_stdlib(file)


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and f"-packages{os.sep}" not in file
