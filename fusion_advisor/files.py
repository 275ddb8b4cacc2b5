"""Files that are whole or not there: written beside, then renamed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from fusion_advisor.errors import UsageError


def write(file: Path, text: str) -> None:
    """Replace `file` by `text`, its folders made as needed. UsageError when that is refused."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
    beside = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        beside.chmod(0o644)
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from error
