"""Every error that a user can cause, each one line: what, where, what to do."""

from __future__ import annotations


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
