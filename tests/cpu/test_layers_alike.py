"""Searches that are cut short: a set that was judged in one layer is not judged again in the next,
and what is not worth it is not searched."""

from collections.abc import Iterable

import pytest
import torch

from fusion_advisor.cost.dataflow import Dataflow
from fusion_advisor.fusion import components
from fusion_advisor.fusion.components import DecidedSet, Grouping, group
from fusion_advisor.fusion.decide import Decision, decide
from tests.cpu.regions import RULES, flow_of


def layers(count: int) -> Dataflow:
    """Layers without a product between them, which no kernel holds whole: a softmax of rows, and
    one of columns."""

    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = x + x.softmax(-1) * weight
            x = x + x.softmax(0).tanh()
        return x

    return flow_of(forward, torch.empty(2048, 1024), torch.empty(1024))


def found_in(flow: Dataflow, *, worth: bool = True) -> tuple[Grouping[DecidedSet], int]:
    """What is found in a graph, and how many sets were decided for it."""
    decided: set[tuple[int, ...]] = set()

    def deciding(launches: Iterable[int]) -> Decision:
        chosen = tuple(sorted(launches))
        decided.add(chosen)
        return decide(flow, chosen, RULES)

    return group(flow, deciding, RULES, worth=lambda component: worth), len(decided)


def places(found: Iterable[DecidedSet]) -> list[tuple[int, ...]]:
    return sorted(place for each in found for place in each.instances)


def itself(flow: Dataflow, place: tuple[int, ...]) -> object:
    return place


def size(flow: Dataflow, place: tuple[int, ...]) -> object:
    return len(place)


@pytest.mark.deep
def test_the_same_set_in_another_layer_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = layers(3)
    found, few = found_in(flow)
    monkeypatch.setattr(components, "_surroundings", itself)
    each, many = found_in(flow)
    assert few < 0.7 * many, (few, many)
    assert len(found.groups) > 1
    assert all(one.decision.accepted for one in found.groups)
    assert places(found.groups) == places(each.groups)
    assert places(found.candidates) == places(each.candidates)


def test_a_verdict_that_does_not_hold_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the key too coarse, sets would be chosen that no kernel can be made of."""
    flow = layers(2)
    monkeypatch.setattr(components, "_surroundings", size)
    found, _ = found_in(flow)
    assert all(one.decision.accepted for one in found.groups)


def test_what_is_not_worth_a_search_is_one_kernel_or_none() -> None:
    flow = layers(1)
    launches = [number for number in range(len(flow.nodes)) if flow.launches(number)]
    found, many = found_in(flow)
    left, few = found_in(flow, worth=False)
    assert max(map(len, places(found.groups))) > 1
    assert {len(place) for place in places(left.groups)} == {1}  # what is faster by itself
    assert left.gap > 0
    assert few <= 1 + len(launches) < many

    def forward(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).softmax(-1)

    whole, few = found_in(flow_of(forward, torch.empty(2048, 1024)), worth=False)
    assert (places(whole.groups), few) == ([(1, 2)], 1)
