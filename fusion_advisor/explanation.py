"""What a gate or an idiom asks, why, its limits and their sources, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fusion_advisor.errors import UsageError
from fusion_advisor.rulebook import Gate, Pattern, Rulebook

_WIDTH = 98


def entry(rulebook: Rulebook, name: str) -> Gate | Pattern:
    """A gate by its code or name, or an idiom by its name. UsageError names what is known."""
    if name.strip().lower() in rulebook.patterns:
        return rulebook.pattern(name)
    try:
        return rulebook.gate(name)
    except UsageError as error:
        raise UsageError(f"{error}; idioms: {', '.join(rulebook.patterns)}") from error


def explanation(rulebook: Rulebook, rule: Gate | Pattern) -> str:
    """Some lines of at most 98 characters; the first names the rule."""
    lines = _gate(rule) if isinstance(rule, Gate) else _pattern(rulebook, rule)
    return "\n".join(lines)


def _gate(gate: Gate) -> Iterator[str]:
    yield f"{gate.code} {gate.name}: {gate.question}"
    yield from _wrapped(gate.why)
    yield f"  holds if measured {gate.comparison} {gate.limit}, in {gate.unit}"
    for name, number in gate.limits.items():
        yield from _wrapped(f"{name} = {number} ({number.source})")
    yield from _wrapped(f"otherwise: {gate.fix}")


def _pattern(rulebook: Rulebook, pattern: Pattern) -> Iterator[str]:
    yield f"{pattern.name}: {pattern.what}"
    codes = ", ".join(f"{rulebook.gate(name).code} {name}" for name in pattern.gates)
    yield from _wrapped(f"judged by {codes}")
    if pattern.claimed:
        upper = f" to {pattern.claimed_up_to}" if pattern.claimed_up_to else ""
        yield from _wrapped(f"claimed {pattern.claimed}{upper} ({pattern.claimed.source})")
    if pattern.framework:
        yield f"  PyTorch has it: {pattern.framework}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
