"""Cache of files from earlier runs, each named by a hash of everything that it was made from. The
files are the user's own; of a folder the least recently used files are removed.

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


def cache_folder() -> Path:
    """Folder of the entries: `FUSION_ADVISOR_CACHE`, else below the user's own cache."""
    given = os.environ.get("FUSION_ADVISOR_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "fusion-advisor"


def entry(folder: Path, request: Mapping[str, Any]) -> Path:
    """Path in a folder for a request."""
    versions = [platform.python_version(), *installed()]
    text = json.dumps({**request, "versions": versions, "package": _package()}, sort_keys=True)
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def read(file: Path) -> Any:
    """Read a file's content, which counts as a use. Raises OSError and ValueError where the file
    cannot be read, or its folder is another user's."""
    if hasattr(os, "getuid") and file.parent.stat().st_uid != os.getuid():
        raise PermissionError(f"{file.parent}: another user's")
    content = json.loads(file.read_text(encoding="utf-8"))
    os.utime(file)
    return content


def put(file: Path, content: Any, most: int) -> None:
    """Write a file, and remove the least recently used files of its folder beyond `most`; do
    nothing where the folder cannot be written into."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(file, json.dumps(content))
    except (OSError, UsageError):
        return
    for old in sorted(file.parent.glob("*.json"), key=_used)[:-most]:
        old.unlink(missing_ok=True)


@cache
def installed() -> tuple[str, ...]:
    """Names of every installed package with its version, as the folders of their records
    are called."""
    folders = (Path(entry or ".") for entry in sys.path)
    names = (file.name for folder in folders if folder.is_dir() for file in folder.iterdir())
    return tuple(sorted({name for name in names if name.endswith((".dist-info", ".egg-info"))}))


@cache
def _package() -> tuple[tuple[str, int, int], ...]:
    """Files of this package, by their sizes and times: a checkout changes between versions."""
    here = Path(__file__).parents[1]
    files = [(str(file.relative_to(here)), file.stat()) for file in sorted(here.rglob("*.py"))]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0  # another process took it away
