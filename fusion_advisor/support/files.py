"""Files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fusion_advisor.support.errors import UsageError


def require_folder(folder: Path) -> None:
    """Raise UsageError, before any work is done, when nothing can be written into a folder. A trial
    file is written there, or in the nearest folder that exists, and removed."""
    whole = folder.absolute()
    place = whole
    try:
        place = next(path for path in (whole, *whole.parents) if path.exists())
        if not place.is_dir():
            raise UsageError(f"{folder}: {place} is a file; give a folder")
        with tempfile.NamedTemporaryFile(dir=place, prefix=".fusion-advisor."):
            pass
    except OSError as error:
        raise UsageError(
            f"{folder}: {place} cannot be written into: {error.strerror}; give another folder"
        ) from error


def require_file(file: Path) -> None:
    """Raise UsageError, before any work is done, when a file cannot be written."""
    if file.is_dir():
        raise UsageError(f"{file}: a folder; give a file")
    require_folder(file.parent)


def missing(path: str) -> str:
    """Reason why there is no file at a path: a folder is there, or nothing."""
    return "a folder" if Path(path).is_dir() else "no such file"


def write(file: Path, text: str) -> None:
    """Replace `file` by `text`, its folders made as needed. Raises UsageError when that is
    refused."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.chmod(0o644)
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """Yield a folder that gets its name when the block ends, and is gone where the block raises."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield made
        made.chmod(0o755)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def tree_of(file: Path) -> Path:
    """Git working tree that a file is in, else its folder."""
    folder = file.resolve().parent
    return next((p for p in (folder, *folder.parents) if (p / ".git").exists()), folder)


def content_hash(file: Path) -> str:
    """SHA-256 of a file's content; empty for a file that cannot be read."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""
