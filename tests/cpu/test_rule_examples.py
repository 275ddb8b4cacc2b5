"""Each gate's and idiom's examples in `rules/`, through the real pipeline."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_module, parse_input
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.fusion.findings import Identified, fuse
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.schema import Example, Gate, Pattern

from .regions import Of

RULES = load_rulebook()
GATES, IDIOMS = list(RULES.gates.values()), list(RULES.patterns.values())


def analysed(example: Example) -> Identified:
    """What is found in an example, on the H200."""
    namespace: dict[str, Callable[..., object]] = {}
    exec(example.code, {"torch": torch, "F": functional}, namespace)
    specs = [parse_input(f"{name}={tensor}") for name, tensor in example.inputs.items()]
    inputs = tuple(
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta") for spec in specs
    )
    with torch.no_grad():
        graph = capture_module(Of(namespace["forward"]), inputs)
    flow = dataflow(graph, RULES.device("h200"))
    return fuse(flow, RULES)


def reading(decision: Decision, gate: Gate) -> float | None:
    return next(result.measured for result in decision.gates if result.code == gate.code)


def near(measured: float | None) -> object:
    return measured if measured is None else pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_the_one_group_of_a_gates_example_is_accepted(gate: Gate) -> None:
    (finding,) = analysed(gate.holds).groups
    assert reading(finding.decision, gate) == near(gate.holds.measured)


@pytest.mark.parametrize("gate", [g for g in GATES if g.fails], ids=lambda gate: gate.name)
def test_a_gates_counterexample_is_rejected_by_it(gate: Gate) -> None:
    assert gate.fails
    decided = {
        finding.decision.deciding.name: finding.decision
        for finding in reversed(analysed(gate.fails).candidates)
        if finding.decision.deciding
    }
    assert gate.name in decided
    assert reading(decided[gate.name], gate) == near(gate.fails.measured)


def names(example: Example) -> set[str]:
    found = analysed(example)
    return {finding.pattern for finding in (*found.groups, *found.candidates)}


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_an_idioms_example_is_called_by_its_name(idiom: Pattern) -> None:
    assert idiom.name in names(idiom.example)


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_what_is_nearly_an_idiom_is_called_otherwise(idiom: Pattern) -> None:
    found = names(idiom.nearly)
    assert idiom.nearly.instead in found
    assert idiom.name not in found


def test_what_does_not_fit_on_chip_is_refused_before_the_gate_and_planned_otherwise() -> None:
    example = RULES.gate("on-chip").holds
    wide = example.model_copy(update={"inputs": {"x": "64x65536:float32"}})
    (finding,) = analysed(wide).groups
    planned = finding.decision.subject.planned
    assert planned
    refused = [refusal for refusal in planned.refusals if refusal.gate == "on-chip"]
    assert "262144 B" in refused[0].why
    assert planned.plans[0].schedule == "cooperative"


def test_no_device_has_room_for_a_tile_that_spills() -> None:
    gate, share = RULES.gate("register-spill"), RULES.gate("on-chip").number("smem_fraction")
    for device in RULES.devices.values():
        threads = gate.number("max_warps").count * device.warp_size
        registers = device.multiprocessor.registers_per_thread.count
        assert device.smem_budget_bytes(share.value) < 4 * threads * registers
    assert "1 044 480 B" in (gate.never_fails or "")
    assert 4 * 1024 * 255 == 1_044_480
