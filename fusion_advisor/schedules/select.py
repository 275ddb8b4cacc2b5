"""Stage: the plans of a region. A plan says what the fused kernel reads, writes and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from math import log2

from fusion_advisor.region.exprs import INDEX, Expr
from fusion_advisor.region.region import Region
from fusion_advisor.rulebook.devices import LINE_BYTES, Device
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules import SCHEDULES, beside, finishing
from fusion_advisor.schedules.base import Plan, Refusal, Refused, Step, check_walks
from fusion_advisor.schedules.blocked import scanned_across, walked_once, walks_steadily
from fusion_advisor.schedules.layout import reach
from fusion_advisor.schedules.online import passes
from fusion_advisor.schedules.rows import Rows, rows_of_step


@dataclass(frozen=True)
class Planned:
    """The plans that serve a region, best first, and why the other schedules do not."""

    plans: tuple[Plan, ...]
    refusals: tuple[Refusal, ...]


def plan(region: Region, device: Device, rulebook: Rulebook, *, apart: bool = False) -> Planned:
    """Try every schedule on a region. With `apart`, results that no kernel makes together may have
    kernels of their own."""
    loads = (region.exprs[i].input for i in region.live if region.exprs[i].op == "load")
    if not set(loads) - region.random_state:
        return Planned((), (Refusal("no-schedule", "it reads no tensor that names the device"),))
    if not all(region.sizes.values()):
        return Planned((), (Refusal("no-schedule", "a dimension has no elements"),))
    accesses = len(list(region.all("load"))) + len(region.outputs)
    most = rulebook.gate("no-schedule").number("accesses").count
    if accesses > most:
        # Larger regions have more of them: few keep to themselves what they share with these.
        why = f"{accesses} loads and stores would compile for minutes; {most} at most"
        return Planned((), (Refusal("no-schedule", why, final=True),))
    taken = len(region.inputs) + len({region.exprs[n].literal for n in region.all("given")})
    most = rulebook.gate("no-schedule").number("arguments").count
    if taken > most:
        why = f"{taken} arguments; an operator of torch's takes {most} at most"
        return Planned((), (Refusal("no-schedule", why, final=True),))
    if _loses_a_sign(region):
        why = "ptxas 12.8 drops a sign where negated integers meet in a maximum or minimum"
        return Planned((), (Refusal("no-schedule", why),))
    plans, refusals = _tried(region, device, rulebook)
    if plans and plans[0].launches == 1:
        try:
            plans.insert(0, finishing.shared_first(region, device, rulebook, _best))
        except Refused as refused:
            refusals.append(refused.refusal)
    for several in (finishing, beside) if apart else (finishing,):
        if plans:
            break
        try:
            plans.append(several.plan(region, device, rulebook, _best))
        except Refused as refused:
            refusals.append(refused.refusal)
    return Planned(tuple(map(_seen_whole, plans)), tuple(refusals))


def _seen_whole(plan: Plan) -> Plan:
    """A plan whose kernels let nothing pass that a later one reads, which what they leave for each
    other is, too."""
    first, *later = plan.steps
    again = {load.tensor for step in later for load in step.loads}
    if any(load.tensor in again for load in first.loads):
        first = replace(first, passing=False)
    return replace(plan, steps=(first, *(replace(step, passing=False) for step in later)))


def _loses_a_sign(region: Region) -> bool:
    """A negation under an extreme of integers.

    ptxas 12.8, which Triton 3.6 brings, makes one instruction (VIMNMX3) of max(max(-a, -b), -c)
    for sm_90 and forgets the second sign; 12.9 and `-O0` are right. LLVM turns every spelling of a
    negation into the same, so no spelling avoids it.
    """
    for number in region.live:
        expr = region.exprs[number]
        extreme = expr.op in ("maximum", "minimum") or expr.monoid in ("max", "min")
        if extreme and _is_integer(expr) and any(
            _negates(region, region.exprs[part]) for part in reach(region, number)
        ):  # fmt: skip
            return True
    return False


def _is_integer(expr: Expr) -> bool:
    return expr.dtype.startswith(("int", "uint")) and expr.dtype != INDEX


def _negates(region: Region, expr: Expr) -> bool:
    """A negation of integers, as a difference to zero or a product with minus one, too."""
    literals = [region.exprs[part].literal for part in expr.args]
    same = (expr.op == "sub" and literals[0] == "0") or (expr.op == "mul" and "-1" in literals)
    return _is_integer(expr) and (expr.op == "neg" or same)


def _tried(region: Region, device: Device, rulebook: Rulebook) -> tuple[list[Plan], list[Refusal]]:
    plans: list[Plan] = []
    refusals: list[Refusal] = []
    for schedule in SCHEDULES:
        try:
            found = schedule.plan(region, device, rulebook)
            check_walks(found, rulebook)
            plans.append(found)
        except Refused as refused:
            refusals.append(refused.refusal)
    return _ranked(plans, device, rulebook), refusals


def _ranked(plans: list[Plan], device: Device, rulebook: Rulebook) -> list[Plan]:
    """Plans that fill the device first; of those that do, or do not, the ones that read little
    again and that move the fewest bytes, give or take a finishing step; of those the ones that scan
    no long rows at once, that hold none until its reductions have followed one another, that
    part none of which one walk would do, and the one whose schedule comes first."""
    if len(plans) < 2:
        return plans
    slack = rulebook.gate("parallel-pattern").number("finish_share").value
    numbers = rulebook.schedules.blocked

    def scans_long(step: Step) -> bool:
        """Does a kernel scan so many elements of a row at once that chunks would take less time?"""
        if not any(step.region.all("scan")):
            return False
        most = numbers.scan_elements.count
        if any(a.step(step.outer[-1].axes[-1]) == 1 for a in step.loads if step.outer):
            most = scanned_across(rows_of_step(step), numbers)
        return step.block > most

    costs = _costs(plans, device, rulebook)
    whole = [plan.finish_share <= slack for plan in plans]
    least = min(compress(costs, whole), default=min(costs))

    steady = any(map(_walks_steadily, plans))

    def rank(place: int) -> tuple[bool, ...]:
        plan, cost = plans[place], costs[place]
        long = any(map(scans_long, plan.steps))
        # more than idle threads cost
        much = long and scanned_across(rows_of_step(plan.busiest), numbers) == 1
        more = cost > least * (1 + slack)
        slow = any(_waits(step, rulebook) for step in plan.steps)
        parted = plan.launches > 1 and steady
        return much, _idles(plan.busiest, device), not whole[place], more, long, slow, parted

    return [plans[place] for place in sorted(range(len(plans)), key=rank)]


def _costs(plans: Sequence[Plan], device: Device, rulebook: Rulebook) -> list[float]:
    """HBM bytes of each plan. Where programs take more of memory than they use, or share its lines,
    what that and a launch take counts as bytes."""
    wasted = [sum(_wasted(step, device, rulebook) for step in plan.steps) for plan in plans]
    launch = device.launch_us * 1e-6 * device.bandwidth if any(wasted) else 0.0
    return [
        plan.moved + more + launch * plan.launches for plan, more in zip(plans, wasted, strict=True)
    ]


def _wasted(step: Step, device: Device, rulebook: Rulebook) -> float:
    """Bytes that take as long as what a kernel that reduces rows across memory asks for in vain."""
    if not step.region.reduced or not step.along:
        return 0.0
    numbers, laid = rulebook.schedules.blocked, rows_of_step(step)
    halved = numbers.halved_line.value * _halvings(laid, step, rulebook) * step.moved
    torn = numbers.torn_sector.value * laid.torn(device, step.rows)
    return halved + torn + laid.strewn(device)


def _halvings(laid: Rows, step: Step, rulebook: Rulebook) -> float:
    """How often a line of memory is halved among the programs that reduce rows across it. A row
    that has to be walked twice otherwise, or rescaled, is worth that if it is short."""
    parts = min(laid.coalesced(LINE_BYTES, stored=False), laid.count) / step.rows
    if parts <= 1 or laid.mixed:
        return 0.0
    short = step.length <= rulebook.schedules.blocked.worth_holding.count
    return 0.0 if short and not walked_once(laid) else log2(parts)


def _waits(step: Step, rulebook: Rulebook) -> bool:
    """Does a kernel hold a long row until its reductions have followed one another, and store
    nothing along it? Parts of rows wait less."""
    if step.chunked or step.part or step.length <= rulebook.schedules.row.waiting_elements.count:
        return False
    stored = any(store.walks & step.along for store in step.stores)
    found = passes(step.region, step.along)
    return not stored and bool(found and found[0].followers)


def _walks_steadily(plan: Plan) -> bool:
    """Does one kernel walk each row once, without what its programs would wait for? Parts of rows
    are as fast, and need a second launch."""
    step = plan.steps[0]
    return plan.launches == 1 and step.chunked and walks_steadily(rows_of_step(step), step.rows)


def _idles(step: Step, device: Device) -> bool:
    """Do the elements that a kernel holds at once leave threads of the device idle, for so long
    that it costs more than a launch? A thread that walks a row by itself asks for little at a
    time."""
    warps = device.multiprocessor.count.count * device.multiprocessor.warps.count
    threads = step.programs * step.warps * device.warp_size
    held = min(step.lanes, threads) if step.serial and not step.inner else step.lanes
    alone = step.moved / device.bandwidth * 1e6 * max(warps * device.warp_size / held - 1, 0)
    return alone > device.launch_us


def _best(region: Region, device: Device, rulebook: Rulebook) -> Plan:
    """The first plan of a part of a region; Refused when it has none."""
    plans, refusals = _tried(region, device, rulebook)
    if not plans:
        first = refusals[0]
        raise Refused(first.gate, first.why, final=first.final)
    return plans[0]
