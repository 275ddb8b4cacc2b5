"""Faults of ours that cost one region its analysis, and not the model its report."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fusion_advisor.support.errors import AdvisorError


@dataclass(frozen=True)
class Fault:
    """Why a region was not analysed, and the nodes that it has; none where it is no region's."""

    why: str
    nodes: tuple[str, ...]


class Faults:
    """Collects the faults of one analysis, equal ones once, with the smallest region that has
    each. `strict`: a fault is raised instead."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._found: dict[str, Fault] = {}

    def note(self, error: Exception, nodes: Iterable[str] = ()) -> str:
        """Keeps an exception as the reason of a region, and returns that. Raises a user's error,
        and any where it is strict."""
        if self._strict or isinstance(error, AdvisorError):
            raise error
        fault = Fault(described(error), tuple(nodes))
        known = self._found.setdefault(fault.why, fault)
        if len(fault.nodes) < len(known.nodes):
            self._found[fault.why] = fault
        return fault.why

    @property
    def found(self) -> tuple[Fault, ...]:
        """In the order in which they came."""
        return tuple(self._found.values())


def described(error: BaseException) -> str:
    """Where in this package an exception was raised, and what it says, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a fault of fusion-advisor at {Path(last.filename).name}:{last.lineno}: {said}"
