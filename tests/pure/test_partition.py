"""The exact search equals brute force, and the greedy one stays above its own lower bound."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_advisor.cost.dataflow import bits
from fusion_advisor.fusion.partition import (
    Component,
    Traffic,
    Verdict,
    compatible,
    connected,
    contracted,
    cycle,
    partition,
)

LAUNCH_US = 1.0


@st.composite
def problems(draw: st.DrawFn, most: int = 7) -> tuple[Component, frozenset[int]]:
    """A random component and the sets that its judge refuses.

    Some nodes are 'reductions' of one of two kinds; sets that mix the kinds have no plan.
    """
    count = draw(st.integers(2, most))
    above: list[int] = []
    direct: list[int] = []
    for i in range(count):
        parents = draw(st.integers(0, (1 << i) - 1)) if i else 0
        up = parents
        for p in bits(parents):
            up |= above[p]
        above.append(up)
        direct.append(parents)
    apart = [0] * count
    for i in range(count):
        for j in bits(above[i]):
            if draw(st.integers(0, 9)) == 0:
                apart[i] |= 1 << j
                apart[j] |= 1 << i
    near = [0] * count
    for i in range(count):
        for p in bits(direct[i]):
            if not apart[i] >> p & 1:
                near[i] |= 1 << p
                near[p] |= 1 << i
    size = [float(draw(st.integers(1, 8))) for _ in range(count)]
    traffic: list[Traffic] = []
    for i in range(count):
        reads = (*((p, size[p]) for p in bits(direct[i])), (count + i % 2, 3.0))
        readers = sum(1 << j for j in range(count) if direct[j] >> i & 1)
        outside = not readers or draw(st.booleans())
        traffic.append(Traffic(reads, ((i, size[i], readers, outside),)))
    alone = [
        LAUNCH_US + sum(t for _, t in tr.reads) + sum(t for _, t, _, _ in tr.writes)
        for tr in traffic
    ]
    kinds = [draw(st.integers(0, 3)) for _ in range(count)]
    hopeless = frozenset(
        mask for mask in range(1 << count) if {kinds[i] for i in bits(mask)} >= {0, 1}
    )
    return Component(above, apart, near, alone, traffic, LAUNCH_US), hopeless


def fused_us(component: Component, mask: int) -> float:
    """What a set costs as one kernel."""
    made = {t for i in bits(mask) for t, *_ in component.traffic[i].writes}
    read = {t: us for i in bits(mask) for t, us in component.traffic[i].reads if t not in made}
    written = sum(
        us
        for i in bits(mask)
        for _, us, readers, outside in component.traffic[i].writes
        if outside or readers & ~mask
    )
    return LAUNCH_US + sum(read.values()) + written


def judge_of(component: Component, hopeless: frozenset[int]):
    """Accepts what has a plan and saves a third of its time: a rule that is not monotone."""

    def judge(mask: int) -> Verdict:
        time = fused_us(component, mask)
        alone = sum(component.alone_us[i] for i in bits(mask))
        accepted = mask not in hopeless and alone >= 1.5 * time
        return Verdict(accepted, mask in hopeless, time)

    return judge


def partitions(items: list[int]) -> Iterator[list[int]]:
    """Every partition of some positions, as masks."""
    if not items:
        yield []
        return
    one = 1 << items[0]
    for rest in partitions(items[1:]):
        yield [one, *rest]
        for k, mask in enumerate(rest):
            yield [*rest[:k], mask | one, *rest[k + 1 :]]


def brute_force(component: Component, hopeless: frozenset[int]) -> float:
    judge = judge_of(component, hopeless)
    best = sum(component.alone_us)
    for cut in partitions(list(range(component.count))):
        several = [mask for mask in cut if mask & (mask - 1)]
        if not all(connected(component, m) and compatible(component, m) for m in several):
            continue
        verdicts = [judge(mask) for mask in several]
        if not all(v.accepted for v in verdicts) or cycle(component, several):
            continue
        alone = sum(component.alone_us[m.bit_length() - 1] for m in cut if not m & (m - 1))
        best = min(best, alone + sum(v.time_us for v in verdicts))
    return best


@settings(max_examples=300, deadline=None)
@given(problems())
def test_exact_equals_brute_force(problem: tuple[Component, frozenset[int]]) -> None:
    component, hopeless = problem
    found = partition(component, judge_of(component, hopeless), exact=20, most_sets=1 << 20)
    assert found.exact
    assert abs(found.time_us - brute_force(component, hopeless)) < 1e-6


@settings(max_examples=200, deadline=None)
@given(problems())
def test_sets_that_no_kernel_could_be_are_not_judged(
    problem: tuple[Component, frozenset[int]],
) -> None:
    component, hopeless = problem
    judge = judge_of(component, hopeless)

    def strict(mask: int) -> Verdict:
        assert compatible(component, mask)
        return judge(mask)

    partition(component, strict, exact=20, most_sets=1 << 20)


@settings(max_examples=300, deadline=None)
@given(problems(most=12), st.sampled_from([0, 3, 6, 20]), st.sampled_from([0, 4, 40]))
def test_a_bounded_search_is_legal_and_above_its_bound(
    problem: tuple[Component, frozenset[int]], exact: int, most_sets: int
) -> None:
    component, hopeless = problem
    judge = judge_of(component, hopeless)
    asked: list[int] = []

    def counted(mask: int) -> Verdict:
        asked.append(mask)
        return judge(mask)

    found = partition(component, counted, exact, most_sets)
    assert len(asked) == len(set(asked)) <= 2 * component.count * (most_sets + component.count)
    assert found.time_us >= found.bound_us - 1e-9
    assert found.time_us <= sum(component.alone_us) + 1e-9
    covered = 0
    for mask in found.sets:
        assert not mask & covered
        covered |= mask
    assert not cycle(component, found.sets)
    for mask in found.sets:
        assert judge(mask).accepted
        assert connected(component, mask)
        assert compatible(component, mask)


def in_a_row(count: int) -> Component:
    """Launches of which each reads what the one before it wrote."""
    return Component(
        above=[(1 << i) - 1 for i in range(count)],
        apart=[0] * count,
        near=[(1 << i >> 1) | (1 << i + 1 & (1 << count) - 1) for i in range(count)],
        alone_us=[3.0] * count,
        traffic=[Traffic(((i, 1.0),), ((i + 1, 1.0, 1 << i + 1, False),)) for i in range(count)],
        launch_us=LAUNCH_US,
    )


def test_what_is_too_much_together_is_cut_into_parts() -> None:
    """Of 24 launches in a row three share a kernel: neither all of them nor none do."""
    count = 24
    component = in_a_row(count)

    def judge(mask: int) -> Verdict:
        return Verdict(mask.bit_count() <= 3, False, 3.0)

    found = partition(component, judge, exact=20, most_sets=500)
    assert sum(mask.bit_count() for mask in found.sets) == count
    assert found.time_us == count / 3 * 3.0
    assert not found.exact


def test_a_search_that_is_not_exact_takes_the_offered_sets_that_save_more() -> None:
    """Of 24 launches in a row a kernel serves two, or exactly the first or the last twelve."""
    count = 24
    component = in_a_row(count)
    first, last = (1 << 12) - 1, (1 << 12) - 1 << 12

    def judge(mask: int) -> Verdict:
        return Verdict(mask.bit_count() == 2 or mask in (first, last), False, 3.0)

    assert partition(component, judge, exact=20, most_sets=50).time_us == count / 2 * 3.0
    found = partition(component, judge, 20, 50, [first, last, first << 1, 1, 0b101])
    assert found.sets == (first, last)
    assert found.time_us == 2 * 3.0
    assert not found.exact


def test_two_convex_sets_that_form_a_cycle_are_not_chosen() -> None:
    """a → d and c → b: {a, b} and {c, d} are each convex, together they wait for each other."""
    component = Component(
        above=[0, 0b100, 0, 0b1],
        apart=[0, 0, 0, 0],
        near=[0b10, 0b1, 0b1000, 0b100],
        alone_us=[1.0] * 4,
        traffic=[Traffic((), ())] * 4,
        launch_us=1.0,
    )
    assert compatible(component, 0b0011)
    assert compatible(component, 0b1100)
    assert cycle(component, [0b0011, 0b1100])


@settings(max_examples=200, deadline=None)
@given(problems(), st.lists(st.booleans(), min_size=7, max_size=7))
def test_what_is_cut_together_has_the_traffic_and_the_order_of_its_launches(
    problem: tuple[Component, frozenset[int]], joins: list[bool]
) -> None:
    component, _ = problem
    units: list[int] = []
    for i, joined in zip(range(component.count), joins, strict=False):
        if joined and units and compatible(component, units[-1] | 1 << i):
            units[-1] |= 1 << i
        else:
            units.append(1 << i)
    alone = [sum(component.alone_us[i] for i in bits(mask)) for mask in units]
    whole = contracted(component, units, alone)
    assert whole.count == len(units)
    for mask in range(1, 1 << len(units)):
        launches = sum(units[i] for i in bits(mask))
        assert fused_us(whole, mask) == fused_us(component, launches)
        assert compatible(component, launches) or not compatible(whole, mask)
    assert not any(above >> number for number, above in enumerate(whole.above))
