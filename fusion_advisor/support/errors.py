"""Errors that a user can cause, each one line: what, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class AdvisorError(Exception):
    """Base of all errors; a fault of the tool unless a subclass says otherwise. `exit_code` is the
    CLI's."""

    exit_code = 4


class UsageError(AdvisorError):
    """Wrong option, rule, device or configuration file."""

    exit_code = 2


class CaptureError(AdvisorError):
    """Capture of the model failed; the message names its file and line."""

    exit_code = 3


class PatchError(AdvisorError):
    """Patch that would change the model's results: it is not written."""


def one_of(option: str, value: Any, *known: str) -> Any:
    """Value of an option with a fixed choice. Raises UsageError for any other."""
    if value not in known:
        raise UsageError(f"{option} {value!r}: expected {' or '.join(known)}")
    return value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest a known name that is close to `name`, as a question that ends with a space;
    else empty."""
    close = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(close)}? " if close else ""
