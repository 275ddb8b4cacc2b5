"""What a gate or an idiom asks, why, its limits and their sources, in words."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from fusion_advisor.errors import UsageError
from fusion_advisor.rulebook import AdviceKind, Gate, Pattern, Rulebook

_WIDTH = 98


Rule = Gate | Pattern | AdviceKind
"""What has an explanation."""


def rules(rulebook: Rulebook) -> list[Rule]:
    """All of them: gates, idioms, advice."""
    return [*rulebook.gates.values(), *rulebook.patterns.values(), *rulebook.advice.values()]


def entry(rulebook: Rulebook, name: str) -> Rule:
    """A gate by its code or name, an idiom or a kind of advice by its name. UsageError names what
    is known."""
    asked = name.strip().lower()
    if asked in rulebook.patterns:
        return rulebook.pattern(name)
    if asked in rulebook.advice:
        return rulebook.advice_kind(name)
    try:
        return rulebook.gate(name)
    except UsageError as error:
        idioms, advice = ", ".join(rulebook.patterns), ", ".join(rulebook.advice)
        raise UsageError(f"{error}; idioms: {idioms}; advice: {advice}") from error


def explanation(rulebook: Rulebook, rule: Rule) -> str:
    """Some lines of at most 98 characters; the first names the rule."""
    if isinstance(rule, Gate):
        return "\n".join(_gate(rule))
    return "\n".join(_pattern(rulebook, rule) if isinstance(rule, Pattern) else _advice(rule))


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


def _advice(kind: AdviceKind) -> Iterator[str]:
    yield f"{kind.name}: {kind.what}"
    yield from _wrapped(kind.why)
    yield from _wrapped(f"saves: {kind.saves}")
    for name, number in kind.limits.items():
        yield from _wrapped(f"{name} = {number} ({number.source})")
    yield from _wrapped(f"instead: {kind.fix}")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
