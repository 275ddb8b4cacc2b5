"""Faults of a kernel in one line, and which of them its process does not survive."""

from __future__ import annotations


class KernelFault(Exception):
    """Fault of a kernel in one line: what is wrong, and where."""


OUT_OF_MEMORY = "out of memory"
"""Text of `cause` for every way in which a device, its libraries or the host run out of memory."""


def cause(error: BaseException) -> str:
    """Innermost cause of an error in one line: the interpreter wraps exceptions by their repr."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or "no message"
    short = isinstance(error, MemoryError) or "out of memory" in text or "ALLOC_FAILED" in text
    return OUT_OF_MEMORY if short else f"{type(error).__name__}: {text[:300]}"


def needs_restart(failure: str) -> bool:
    """Whether a failure leaves a process that should start anew: a CUDA context does not survive a
    bad address, and the data that filled the memory may still be held."""
    return any(sign in failure for sign in ("CUDA error", "illegal memory", OUT_OF_MEMORY))
