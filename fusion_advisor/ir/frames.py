"""Which line of the user's own source a stack trace is about. Free of torch."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from functools import lru_cache
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
    """The line of `stack` (frames as Python prints them, outermost first) that the user wrote.

    The innermost frame outside site-packages; else, for a model from an installed library, the
    innermost one outside torch; None when there is neither.
    """
    return choose([(file, int(line)) for file, line in _FRAME.findall(stack)])


def source_of_traceback(error: BaseException) -> Source | None:
    """The user's line that raised `error`; a syntax error names its own."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Source(error.filename, error.lineno)
    return choose(_traceback_frames(error.__traceback__))


def source_of_frame(frame: FrameType | None) -> Source | None:
    """The user's line among the callers of `frame`, without building a traceback."""
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
    """Whether a file is the user's or of a library other than torch."""
    return _readable(file) and (is_user(file) or _is_library(file))


def _called_from_here(frame: FrameType | None) -> bool:
    """Whether this package is further out: a frame beyond it is the caller, not the model."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            return True
        frame = frame.f_back
    return False


def choose_from_dump(printed: str) -> Source | None:
    """The user's line in the last dump that faulthandler printed (innermost frame first)."""
    dump = printed[printed.rfind("(most recent call first)") :]
    return choose([(file, int(line)) for file, line in reversed(_FRAME.findall(dump))])


def choose(frames: list[tuple[str, int]]) -> Source | None:
    """The user's frame among `frames`, outermost first; callers of this package do not count."""
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


@lru_cache(maxsize=4096)
def is_user(file: str) -> bool:
    """Whether a file is the user's own: of no installed package."""
    return "site-packages" not in file and "dist-packages" not in file and not _is_stdlib(file)


@lru_cache(maxsize=4096)
def named(file: str, folder: str) -> str:
    """A source file as reports name it, alike on every machine: one of an installed package from
    where packages lie, one below `folder` from there, any other by its whole path."""
    file, folder = file.replace(os.sep, "/"), folder.replace(os.sep, "/")
    _, installed, inside = file.rpartition("-packages/")
    return inside if installed else file.removeprefix(f"{folder}/")


def _is_library(file: str) -> bool:
    packages = file.replace(os.sep, "/").rsplit("-packages", 1)[-1]
    return not _INFRASTRUCTURE.match(packages) and not _is_stdlib(file)


def _is_stdlib(file: str) -> bool:
    return file.startswith(_STDLIB) and f"-packages{os.sep}" not in file
