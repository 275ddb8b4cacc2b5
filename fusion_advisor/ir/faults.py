"""Faults of the analyzer itself: each costs one region its analysis, and the model keeps
its report."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.support.errors import AdvisorError


@dataclass(frozen=True)
class Fault:
    """Reason why a region was not analysed, and the region's nodes; no nodes where the fault
    belongs to no region."""

    why: str
    nodes: tuple[str, ...]


class Faults:
    """Collects the faults of one analysis: equal faults once, with the smallest region that shows
    them. With `strict` a fault is raised instead."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._found: dict[str, Fault] = {}

    def note(self, error: Exception, nodes: Iterable[str] = ()) -> str:
        """Record an exception as the fault of a region, and return its description. Raises an
        AdvisorError again (the user's to mend), and with `strict` every exception."""
        if self._strict or isinstance(error, AdvisorError):
            raise error
        fault = Fault(described(error), tuple(nodes))
        known = self._found.setdefault(fault.why, fault)
        if len(fault.nodes) < len(known.nodes):
            self._found[fault.why] = fault
        return fault.why

    @property
    def found(self) -> tuple[Fault, ...]:
        """Faults in the order in which they were noted."""
        return tuple(self._found.values())


def described(error: BaseException) -> str:
    """Describe an exception in one line: the place in this package that raised it, and its
    message."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a fault of fusion-advisor at {Path(last.filename).name}:{last.lineno}: {message}"
