"""Every error that a user can cause, each one line: what, where, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AdvisorError(Exception):
    """A fault of ours unless a subclass says otherwise. `exit_code` is the CLI's."""

    exit_code = 4


class UsageError(AdvisorError):
    """A wrong option, rule, device or configuration file."""

    exit_code = 2


class CaptureError(AdvisorError):
    """The model could not be captured; the message names its file and line."""

    exit_code = 3


class PatchError(AdvisorError):
    """A patch that would change what the model computes: it is not written."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that ends with a space, for a name that is nearly a known one; else empty."""
    close = difflib.get_close_matches(name, list(known), n=2)
    return f"did you mean {' or '.join(close)}? " if close else ""
