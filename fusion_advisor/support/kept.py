"""Files of earlier runs, each named by a hash of all that it was made from. They are the user's
own, and of a folder's the least recently used go.

What stands in the name is what was asked, the versions of Python and of all that is installed, and
this package's own files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fusion_advisor.support.errors import UsageError
from fusion_advisor.support.files import write


def entry(folder: Path, asked: Mapping[str, Any]) -> Path:
    """The file in a folder for what was asked."""
    versions = [platform.python_version(), *installed()]
    text = json.dumps({**asked, "versions": versions, "package": _package()}, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def read(file: Path) -> Any:
    """What a file holds, which then counts as used. OSError and ValueError where it cannot be read,
    or its folder is another user's."""
    if hasattr(os, "getuid") and file.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{file.parent}: another user's")
    content = json.loads(file.read_text(encoding="utf-8"))
    os.utime(file)
    return content


def put(file: Path, content: Any, most: int) -> None:
    """Writes a file, and takes away those of its folder beyond so many; nothing where the folder
    cannot be written into."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(file, json.dumps(content))
    except (OSError, UsageError):
        return
    for old in sorted(file.parent.glob("*.json"), key=_used)[:-most]:
        old.unlink(missing_ok=True)


@cache
def installed() -> tuple[str, ...]:
    """Every installed package with its version, as the folders of their records are called."""
    folders = (Path(entry or ".") for entry in sys.path)
    names = (file.name for folder in folders if folder.is_dir() for file in folder.iterdir())
    return tuple(sorted({name for name in names if name.endswith((".dist-info", ".egg-info"))}))


@cache
def _package() -> tuple[tuple[str, int, int], ...]:
    """This package's files, by their sizes and times: a checkout changes between versions."""
    here = Path(__file__).parents[1]
    files = [(str(file.relative_to(here)), file.stat()) for file in sorted(here.rglob("*.py"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0  # another process took it away
