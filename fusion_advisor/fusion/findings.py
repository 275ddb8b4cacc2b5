"""Stage: groups and candidates as findings: merged, named, fingerprinted and ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import count

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion.components import DecidedSet, Grouping, group
from fusion_advisor.fusion.decide import Decision, deciding
from fusion_advisor.fusion.fingerprint import fingerprint
from fusion_advisor.fusion.idioms import name_of
from fusion_advisor.fusion.in_words import computation_name, describe_computation
from fusion_advisor.fusion.library_match import exact
from fusion_advisor.fusion.lower import boundary
from fusion_advisor.ir.faults import Faults
from fusion_advisor.rulebook.schema import Rulebook


@dataclass(frozen=True)
class Finding:
    """Accepted group or rejected candidate with all of its occurrences.

    `instances` are positions of launches and of the views between them; `name` is a Python
    identifier, unique among the groups: `computation`, the identifier of what it computes, with a
    number where groups before it have that; `framework` the PyTorch line that computes exactly the
    same, if there is one; `parent` the id of the finding that this one was cut from; `computes` the
    computation in words.
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
    computation: str = ""
    measured_us: float | None = None
    """Time of one instance's kernels in a profiler's trace, us; None where they are not in one."""

    @property
    def unfused_us(self) -> float:
        """Time of one instance as a call, us: as measured, else as predicted."""
        if self.measured_us is None:
            return self.decision.unfused_us
        return self.measured_us + self.decision.subject.device.times.call.value

    @property
    def saved_us(self) -> float:
        """Saving of one instance, us: its time less the predicted time of its kernels."""
        return self.unfused_us - self.decision.fused_us

    @property
    def saved_us_total(self) -> float:
        return self.saved_us * len(self.instances)

    @property
    def launches_saved(self) -> int:
        plan = self.decision.subject.plan
        return len(self.decision.subject.launches) - (plan.launches if plan else 1)


Identified = Grouping[Finding]
"""Groups and candidates, each ranked by the microseconds that they would save in total."""


@dataclass(kw_only=True)
class FusedGraph(Grouping[Finding]):
    """Result of fusing a graph: groups and candidates, data flow and partition."""

    flow: Dataflow
    grouping: Grouping[DecidedSet]


def fuse(
    flow: Dataflow,
    rulebook: Rulebook,
    faults: Faults | None = None,
    decided: Callable[[Iterable[int]], Decision] | None = None,
    worth: Callable[[Sequence[int]], bool] = lambda component: True,
) -> FusedGraph:
    """Partition, decide and name the launches of a graph. With `faults`, a region that fails is
    noted there; `decided` is the result of `deciding` for the same graph. Launches that could share
    kernels, but are not `worth` a search, are one kernel or none."""
    decided = decided or deciding(flow, rulebook, faults)
    grouping = group(flow, decided, rulebook, worth=worth)
    found = identify(flow, grouping, rulebook, faults)
    return FusedGraph(
        found.groups, found.candidates, found.gap, found.saveable_bytes,
        flow=flow, grouping=grouping,
    )  # fmt: skip


def identify(
    flow: Dataflow, grouping: Grouping[DecidedSet], rulebook: Rulebook, faults: Faults | None = None
) -> Identified:
    """Name all groups and candidates; equal computations become one finding. With `faults`, a set
    that cannot be named is `other`, and matches no PyTorch op."""

    def tried(name: Callable[[], str], found: DecidedSet, fallback: str) -> str:
        try:
            return name()
        except Exception as error:
            if faults is None:
                raise
            launches = found.decision.subject.launches
            faults.note(error, (flow.nodes[number].name for number in launches))
            return fallback

    def mark_of(found: DecidedSet) -> str:
        border = boundary(flow, found.instances[0])
        own = sha256(repr(border.members).encode()).hexdigest()
        return tried(partial(fingerprint, flow, border), found, own)

    def findings(letter: str, same: Mapping[str, list[DecidedSet]]) -> Iterator[Finding]:
        for rank, (mark, founds) in enumerate(same.items(), 1):
            first, subject = founds[0], founds[0].decision.subject
            pattern = tried(partial(name_of, subject, rulebook), first, "other")
            places = (place for found in founds for place in found.instances)
            yield Finding(
                id=f"{letter}{rank}",
                name="",
                fingerprint=mark,
                pattern=pattern,
                framework="",
                decision=first.decision,
                instances=tuple(boundary(flow, place).members for place in places),
                parent=ids.get(id(first.parent)),
                rank=rank,
                computes=tried(partial(describe_computation, subject), first, pattern),
            )

    merged = {"g": _merged(grouping.groups, mark_of), "c": _merged(grouping.candidates, mark_of)}
    ids = {
        id(found): f"{letter}{rank}"
        for letter, same in merged.items()
        for rank, founds in enumerate(same.values(), 1)
        for found in founds
    }
    groups, candidates = ([*findings(letter, same)] for letter, same in merged.items())
    firsts = [founds[0] for founds in merged["g"].values()]
    names = [
        tried(
            partial(computation_name, each.decision.subject), first, each.pattern.replace("-", "_")
        )
        for each, first in zip(groups, firsts, strict=True)
    ]
    taken = set[str]()
    named = [
        replace(
            each,
            computation=name,
            name=claimed(name, taken),
            framework=tried(partial(_framework, each.decision, each.pattern), first, ""),
        )
        for each, first, name in zip(groups, firsts, names, strict=True)
    ]
    return Identified(named, candidates, grouping.gap, grouping.saveable_bytes)


def numbered(name: str) -> Iterator[str]:
    """Yield a name and its numbered ones: `swiglu`, `swiglu_2`, `swiglu_3`."""
    yield name
    yield from (f"{name}_{number}" for number in count(2))


def claimed(name: str, taken: set[str]) -> str:
    """The first of a name and its numbered ones that is not taken; it is, then."""
    free = next(each for each in numbered(name) if each not in taken)
    taken.add(free)
    return free


def step_us(flow: Dataflow, groups: Iterable[Finding]) -> dict[str, float]:
    """Eager time of the step, us: of each launch by its name, and of the call itself under the
    empty name. Launches of a group find in the L2 what the launches before left there; elsewhere
    that is not counted."""
    costs = flow.annotated.costs
    times = {name: cost.time_us for name, cost in costs.items() if cost.launches}
    if not times:
        return {}
    call = flow.annotated.device.times.call.value
    for finding in groups:
        decision = finding.decision
        alone = sum(decision.subject.cost(i).time_us for i in decision.subject.launches)
        for name in (flow.nodes[i].name for place in finding.instances for i in place):
            if name in times:
                times[name] *= (decision.unfused_us - call) / alone
    return {"": call, **times}


def with_registers(found: Identified, registers: Mapping[str, tuple[int, ...]]) -> Identified:
    """Groups predicted anew with their kernels' registers per thread, by id, and ranked by the new
    prediction; the ids stay."""
    groups = [
        replace(group, decision=replace(group.decision, registers=registers.get(group.id, ())))
        for group in found.groups
    ]
    return replace(found, groups=_ranked(groups))


def with_measured(found: Identified, measured: Mapping[str, float]) -> Identified:
    """Groups and candidates with the measured time of an instance, by id, and ranked by it; the ids
    stay."""

    def timed(findings: Iterable[Finding]) -> list[Finding]:
        return _ranked([replace(one, measured_us=measured.get(one.id)) for one in findings])

    return replace(found, groups=timed(found.groups), candidates=timed(found.candidates))


def _ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Findings in the order of their total saving; equal ones as they were."""
    found = sorted(findings, key=lambda finding: (-finding.saved_us_total, finding.rank))
    return [replace(finding, rank=rank) for rank, finding in enumerate(found, 1)]


def _framework(decision: Decision, pattern: str) -> str:
    spelling = exact(decision.subject, pattern)
    return spelling.framework if spelling else ""


def _merged(
    founds: Iterable[DecidedSet], mark_of: Callable[[DecidedSet], str]
) -> dict[str, list[DecidedSet]]:
    """Merge sets of the same computation by fingerprint; the set that saves most time first."""
    found_by: dict[str, list[DecidedSet]] = {}
    for found in founds:
        found_by.setdefault(mark_of(found), []).append(found)

    def rank(same: tuple[str, list[DecidedSet]]) -> tuple[float, str]:
        mark, (first, *others) = same
        saved_us = first.decision.unfused_us - first.decision.fused_us
        return -saved_us * sum(len(each.instances) for each in (first, *others)), mark

    return dict(sorted(found_by.items(), key=rank))
