"""Explanations of gates, idioms, advice and the criterion: question, limits, sources, and examples
of either side, as text for a terminal and as a page of Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusion_advisor.rulebook.quantities import Number
from fusion_advisor.rulebook.schema import (
    AdviceKind,
    CriterionRules,
    Example,
    Gate,
    Judged,
    Pattern,
    RewriteKind,
    Rulebook,
)
from fusion_advisor.support.errors import UsageError, did_you_mean

_WIDTH = 98
_OPENING = """\
Written by `fusion-advisor explain --all --format md`. A group is fused if every gate holds; idioms
are names for what is often seen; advice is on what is not a fusion; the criterion says how far from
float64 a result may be. In the examples `F` is `torch.nn.functional`, and figures are an H200's.\
"""


Rule = Gate | Pattern | AdviceKind | CriterionRules
"""A rule that has an explanation."""


@dataclass(frozen=True)
class _Entry:
    """A rule in words: its name, its question or definition, the reason, its facts, and captioned
    examples."""

    title: str
    lead: str
    why: str
    facts: tuple[str, ...]
    examples: tuple[tuple[str, Example], ...] = ()


def rules(rulebook: Rulebook) -> list[Rule]:
    """Every rule that has an explanation: gates, idioms, advice, rewrites, the criterion."""
    return [rule for section in _sections(rulebook).values() for rule in section]


def _sections(rulebook: Rulebook) -> dict[str, list[Rule]]:
    """The rules of each kind, by its title."""
    return {
        "Gates": [*rulebook.gates.values()],
        "Idioms": [*rulebook.patterns.values()],
        "Advice": [*rulebook.advice.values()],
        "Rewrites": [*rulebook.rewrites.values()],
        "The criterion": [rulebook.verify.criterion],
    }


def entry(rulebook: Rulebook, name: str) -> Rule:
    """A gate by its code or name; an idiom, a kind of advice, a rewrite or the criterion by name.
    UsageError names what is known."""
    asked = name.strip().lower().replace("_", "-")
    every = {rule.name: rule for rule in rules(rulebook)}
    every |= {gate.code.lower(): gate for gate in rulebook.gates.values()}
    if asked not in every:
        hint, known = did_you_mean(asked, every), ", ".join(every)
        raise UsageError(f"unknown rule {name!r}: {hint}known: {known}")
    return every[asked]


def explanation(rulebook: Rulebook, rule: Rule) -> str:
    """Lines of at most 98 characters but for code; the first names the rule."""
    said = _entry(rulebook, rule)
    lines = [f"{said.title}: {said.lead}", *_wrapped(said.why)]
    for fact in said.facts:
        lines += _wrapped(fact)
    for caption, example in said.examples:
        lines += ["", *_wrapped(caption), textwrap.indent(_source(example), "      ")]
    return "\n".join(lines)


def page(rulebook: Rulebook) -> str:
    """All rules as Markdown."""
    lines = ["# What the gates, idioms, advice and rewrites ask", "", _OPENING, ""]
    for title, rules in _sections(rulebook).items():
        lines += [f"## {title}", ""]
        for rule in rules:
            lines += _section(_entry(rulebook, rule))
    return "\n".join(lines)


def _section(said: _Entry) -> Iterator[str]:
    """Lines of Markdown."""
    for paragraph in (f"### {said.title}", said.lead, said.why):
        if paragraph:
            yield from (paragraph, "")
    yield from (f"- {fact}" for fact in said.facts)
    for caption, example in said.examples:
        yield from ("", f"{caption[0].upper()}{caption[1:]}:", "")
        yield from ("```python", _source(example), "```")
    yield ""


def _source(example: Example) -> str:
    """The code, under a comment with its inputs as `--input` takes them."""
    inputs = " ".join(f"{name}={tensor}" for name, tensor in example.inputs.items())
    told = textwrap.fill(inputs, _WIDTH - 8, initial_indent="# ", subsequent_indent="# ")
    return f"{told}\n{example.code.strip()}"


def _entry(rulebook: Rulebook, rule: Rule) -> _Entry:
    if isinstance(rule, Gate):
        return _gate(rule)
    if isinstance(rule, CriterionRules):
        return _criterion(rule)
    return _pattern(rulebook, rule) if isinstance(rule, Pattern) else _advice(rule)


def _gate(gate: Gate) -> _Entry:
    facts = [f"holds if measured {gate.comparison} {gate.limit}, in {gate.unit}"]
    facts += _numbers(gate.limits)
    facts.append(f"otherwise: {gate.fix}")
    if gate.never_fails:
        facts.append(f"never fails: {gate.never_fails}")
    sides = (("holds", gate.holds), ("fails", gate.fails))
    examples = tuple((_caption(gate, how, side), side) for how, side in sides if side)
    return _Entry(f"{gate.code} {gate.name}", gate.question, gate.why, tuple(facts), examples)


def _caption(gate: Gate, how: str, example: Judged) -> str:
    measured = example.measured
    outcome = "unknown" if measured is None else f"{how}, at {measured:g} {gate.unit}"
    return f"{outcome}: {example.why}" if example.why else outcome


def _pattern(rulebook: Rulebook, pattern: Pattern) -> _Entry:
    codes = (f"{rulebook.gate(name).code} {name}" for name in pattern.gates)
    facts = [f"judged by {', '.join(codes)}"]
    if pattern.claimed:
        upper = f" to {pattern.claimed_up_to}" if pattern.claimed_up_to else ""
        facts.append(f"claimed {pattern.claimed}{upper} ({pattern.claimed.source})")
    if pattern.framework:
        facts.append(f"PyTorch has it: {pattern.framework}")
    nearly = pattern.nearly
    examples = (
        ("such as", pattern.example),
        (f"nearly, but {nearly.instead}: {nearly.why}", nearly),
    )
    return _Entry(pattern.name, pattern.what, "", tuple(facts), examples)


def _advice(kind: AdviceKind) -> _Entry:
    facts = [f"saves: {kind.saves}", *_numbers(kind.limits), f"instead: {kind.fix}"]
    if isinstance(kind, RewriteKind):
        facts.append(f"proof: {kind.proof}")
    return _Entry(kind.name, kind.what, kind.why, tuple(facts))


def _criterion(rule: CriterionRules) -> _Entry:
    limits = {key: value for key, value in vars(rule).items() if isinstance(value, Number)}
    facts = (f"a result holds if {rule.holds}", f"integers and booleans: {rule.whole}")
    return _Entry(rule.name, rule.question, rule.reason, (*facts, *_numbers(limits)))


def _numbers(limits: Mapping[str, Number]) -> Iterator[str]:
    return (f"{name} = {number} ({number.source})" for name, number in limits.items())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
