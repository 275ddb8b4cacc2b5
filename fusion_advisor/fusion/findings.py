"""Stage: the groups and candidates as findings: merged, named, fingerprinted and ranked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.components import Found, Grouping, group
from fusion_advisor.fusion.decide import Decision, deciding
from fusion_advisor.fusion.fingerprint import fingerprint
from fusion_advisor.fusion.idioms import name_of
from fusion_advisor.fusion.in_words import computed
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.fusion.lower import boundary
from fusion_advisor.ir.faults import Faults
from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class Finding:
    """An accepted group or a rejected candidate with all of its occurrences.

    `instances` are positions of launches and of the views between them; `name` is a Python
    identifier, unique among the groups; `framework` the PyTorch line that computes exactly the
    same, if there is one; `parent` the id of the finding that this one was cut from; `computes`
    what it computes, in words.
    """

    id: str
    name: str
    fingerprint: str
    pattern: str
    framework: str
    decision: Decision
    instances: tuple[tuple[int, ...], ...]
    parent: str | None = None
    rank: int = 0
    computes: str = ""

    @property
    def saved_us(self) -> float:
        """Of one instance."""
        return self.decision.unfused_us - self.decision.fused_us

    @property
    def saved_us_total(self) -> float:
        return self.saved_us * len(self.instances)

    @property
    def launches_saved(self) -> int:
        plan = self.decision.subject.plan
        return len(self.decision.subject.launches) - (plan.launches if plan else 1)


@dataclass(frozen=True)
class Identified:
    """Groups and candidates, each ranked by the microseconds that they would save in all."""

    groups: tuple[Finding, ...]
    candidates: tuple[Finding, ...]


@dataclass(frozen=True)
class Fusion(Identified):
    """What a graph comes to: its groups and candidates, the data flow and the partition."""

    flow: Dataflow
    grouping: Grouping


def fuse(
    flow: Dataflow,
    rulebook: Rulebook,
    faults: Faults | None = None,
    decided: Callable[[Iterable[int]], Decision] | None = None,
) -> Fusion:
    """Partition, decide and name the launches of a graph. Given `faults`, a region that fails is
    noted there; `decided` has what `deciding` gave for the same graph."""
    decided = decided or deciding(flow, rulebook, faults)
    grouping = group(flow, decided, rulebook)
    found = identify(flow, grouping, rulebook, faults)
    return Fusion(found.groups, found.candidates, flow, grouping)


def identify(
    flow: Dataflow, grouping: Grouping, rulebook: Rulebook, faults: Faults | None = None
) -> Identified:
    """Name everything that was found; equal computations become one finding. Given `faults`, what
    cannot be named is `other`, and no PyTorch op."""

    def tried(name: Callable[[], str], found: Found, instead: str) -> str:
        try:
            return name()
        except Exception as error:
            if faults is None:
                raise
            launches = found.decision.subject.launches
            faults.note(error, (flow.nodes[number].name for number in launches))
            return instead

    def mark_of(found: Found) -> str:
        border = boundary(flow, found.instances[0])
        own = sha256(repr(border.members).encode()).hexdigest()
        return tried(partial(fingerprint, flow, border), found, own)

    def pattern_of(same: _Same) -> str:
        name = partial(name_of, same.decision.subject, rulebook)
        return tried(name, same.founds[0], "other")

    groups, candidates = _merged(grouping.groups, mark_of), _merged(grouping.candidates, mark_of)
    ids = {
        id(found): f"{letter}{rank}"
        for letter, ranked in (("g", groups), ("c", candidates))
        for rank, same in enumerate(ranked, 1)
        for found in same.founds
    }
    patterns = [pattern_of(same) for same in groups]
    shared = Counter(patterns)
    named = [
        _identifier(pattern, same.fingerprint if shared[pattern] > 1 else "")
        for pattern, same in zip(patterns, groups, strict=True)
    ]
    patterns += [pattern_of(same) for same in candidates]
    findings = [
        Finding(
            id=ids[id(same.founds[0])],
            name=name,
            fingerprint=same.fingerprint,
            pattern=pattern,
            framework=(
                tried(partial(_framework, same.decision, pattern), same.founds[0], "")
                if name
                else ""
            ),
            decision=same.decision,
            instances=same.instances(flow),
            parent=ids.get(id(same.founds[0].parent)),
            rank=int(ids[id(same.founds[0])][1:]),
            computes=tried(partial(computed, same.decision.subject), same.founds[0], pattern),
        )
        for same, pattern, name in zip(
            (*groups, *candidates), patterns, (*named, *[""] * len(candidates)), strict=True
        )
    ]
    return Identified(tuple(findings[: len(groups)]), tuple(findings[len(groups) :]))


def with_registers(found: Identified, registers: Mapping[str, tuple[int, ...]]) -> Identified:
    """The groups, predicted with the registers of their kernels' threads, by id, and ranked by
    that; their ids stay."""
    groups = [
        replace(group, decision=replace(group.decision, registers=registers.get(group.id, ())))
        for group in found.groups
    ]
    groups.sort(key=lambda group: (-group.saved_us_total, group.rank))
    ranked = (replace(group, rank=rank) for rank, group in enumerate(groups, 1))
    return replace(found, groups=tuple(ranked))


def _framework(decision: Decision, pattern: str) -> str:
    spelling = exact(decision.subject, pattern)
    return spelling.framework if spelling else ""


@dataclass(frozen=True)
class _Same:
    """What the search found at several places although it is one computation."""

    fingerprint: str
    founds: list[Found]

    @property
    def decision(self) -> Decision:
        return self.founds[0].decision

    @property
    def saved_us(self) -> float:
        saved = self.decision.unfused_us - self.decision.fused_us
        return saved * sum(len(found.instances) for found in self.founds)

    def instances(self, flow: Dataflow) -> tuple[tuple[int, ...], ...]:
        places = (place for found in self.founds for place in found.instances)
        return tuple(boundary(flow, place).members for place in places)


def _merged(founds: Iterable[Found], mark_of: Callable[[Found], str]) -> list[_Same]:
    """By fingerprint, the most time saved first."""
    found_by: dict[str, _Same] = {}
    for found in founds:
        mark = mark_of(found)
        found_by.setdefault(mark, _Same(mark, [])).founds.append(found)
    return sorted(found_by.values(), key=lambda same: (-same.saved_us, same.fingerprint))


def _identifier(pattern: str, mark: str) -> str:
    base = pattern.replace("-", "_")
    return f"{base}_{mark[:6]}" if mark else base
