"""Neighbouring configurations of a plan: the plans that the same schedule makes of a group under
slightly changed rules.

`[tuning.knobs]` in `rules/tuning.toml` names the numbers. So a neighbour is a plan like any other:
its schedule made it whole, every gate judges it, and a rules file that says the same makes it, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations_with_replacement, islice

from fusion_advisor.fusion.decide import Decision, judge
from fusion_advisor.fusion.gates import Subject
from fusion_advisor.rulebook.quantities import Number
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules.base import Plan, Step
from fusion_advisor.schedules.select import Planned, plan

Move = tuple[str, int]
"""Name of a knob, and the direction: 1 up, -1 down."""


def neighbours(decision: Decision, rulebook: Rulebook) -> list[Decision]:
    """Decisions on a group with each neighbouring plan in place of its own, the nearest first;
    plans that a gate refuses are left out. Raises ValueError for a group without a plan."""
    numbers = rulebook.tuning
    found = _found(decision.subject, rulebook, numbers.reach.count)
    return list(islice((each for each in found if each.accepted), numbers.tried.count))


def offered(decision: Decision, rulebook: Rulebook) -> list[Decision]:
    """Few decisions with another plan than the group's own: those of other schedules first, which
    differ in kind, then the nearest neighbours. Plans that a gate refuses are left out. Raises
    ValueError for a group without a plan."""
    planned = decision.subject.planned
    others = planned.plans[1:] if planned is not None else ()
    kinds = (judge(replace(decision.subject, planned=Planned((each,), ()))) for each in others)
    found = chain((each for each in kinds if each.accepted), neighbours(decision, rulebook))
    return list(islice(found, rulebook.tuning.offered.count))


def configuration(plan: Plan) -> str:
    """Describe how a plan differs from its neighbours: the tile and the warps of each kernel."""
    return "; ".join(map(_tile, plan.steps))


def _tile(step: Step) -> str:
    held = step.block + step.rest
    parts = [f"{step.rows} x {held} elements" if step.inner else f"{held} elements"]
    if step.part and step.part != held:
        parts.append(f"parts of {step.part}")
    if step.most:
        parts.append(f"{step.programs} programs")
    parts.append(f"{step.warps} warp{'s' * (step.warps > 1)}")
    if step.stages > 1:
        parts.append(f"{step.stages} stages")
    return f"{step.schedule}: {', '.join(parts)}"


def _found(subject: Subject, rulebook: Rulebook, reach: int) -> Iterator[Decision]:
    own = subject.plan
    if own is None:
        raise ValueError("a group without a plan has no neighbours")
    known = {configuration(own)}
    steps = _first_steps(own, subject, rulebook)
    for distance in range(1, reach + 1):
        for moves in combinations_with_replacement(steps, distance):
            times = Counter(moves)
            if any((knob, -way) in times for knob, way in times):
                continue
            moved = {move: steps[move] + count - 1 for move, count in times.items()}
            other = _planned(own, subject, _with(rulebook, moved))
            if other is not None and configuration(other) not in known:
                known.add(configuration(other))
                yield judge(replace(subject, planned=Planned((other,), ())))


def _first_steps(own: Plan, subject: Subject, rulebook: Rulebook) -> dict[Move, int]:
    """Steps that each knob needs, either way, until the plan changes; knobs that change nothing are
    left out. The knobs of the plan's own schedule come first."""
    used = (*own.schedule.split(" + "), *(step.schedule for step in own.steps))
    found: dict[Move, int] = {}
    for schedule in dict.fromkeys(used):
        for name, knob in rulebook.tuning.knobs.items():
            for way in (1, -1) if knob.schedule == schedule else ():
                for count in range(1, rulebook.tuning.first_step.count + 1):
                    other = _planned(own, subject, _with(rulebook, {(name, way): count}))
                    if other is None:
                        break
                    if configuration(other) != configuration(own):
                        found[name, way] = count
                        break
    return found


def _planned(own: Plan, subject: Subject, rulebook: Rulebook) -> Plan | None:
    """Plan of the same schedule under other rules; None where the schedule refuses."""
    plans = plan(own.region, subject.device, rulebook, apart=subject.apart).plans
    return next((each for each in plans if each.schedule == own.schedule), None)


def _with(rulebook: Rulebook, moved: Mapping[Move, int]) -> Rulebook:
    """Rules with some knobs moved by so many steps."""
    tables = dict(rulebook.schedules)
    for (name, way), count in moved.items():
        knob = rulebook.tuning.knobs[name]
        table = tables[knob.schedule]
        turned = {each: _turned(getattr(table, each), way * count) for each in knob.numbers}
        tables[knob.schedule] = table.model_copy(update=turned)
    schedules = rulebook.schedules.model_copy(update=tables)
    return rulebook.model_copy(update={"schedules": schedules})


def _turned(number: Number, steps: int) -> Number:
    """Number moved by so many steps, never below one."""
    value = number.value + steps if number.unit == "stages" else number.value * 2.0**steps
    return number.model_copy(update={"value": float(max(int(value), 1))})
