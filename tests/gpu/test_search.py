"""A search on the GPU that is here."""

from __future__ import annotations

import pytest
import torch

from fusion_advisor.codegen.emit import attempt, emit
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.measure.config_space import configuration
from fusion_advisor.measure.search import SearchResult, local_searcher
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.verify.driver import provers, verify

from ..cpu.regions import RULES, decided, flow_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _on_an_h200() -> None:
    if not torch.cuda.is_available() or "H200" not in torch.cuda.get_device_name(0):
        pytest.skip("needs an H200: kernels are judged for one")


def gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))


def found(rules: Rulebook) -> tuple[Decision, Kernel, SearchResult]:
    """A search over GELU of 128 MiB under these rules."""
    decision = decided(flow_of(gelu, torch.empty(8192, 8192, dtype=torch.bfloat16)), rules)
    flow = decision.subject.flow
    kernel = emit(flow, decision, "gelu", rules, full_size=True)

    def emitted(each: Decision) -> Kernel | str:
        return attempt(flow, each, "gelu", rules, full_size=True)

    with (
        local_searcher(None, rules) as searcher,
        provers(90, rules.verify, check=True, compile=True, where="gpu") as children,
    ):
        made = searcher(decision, kernel, emitted, lambda each: verify([each], children)[0])
    return decision, kernel, made


def test_a_poor_configuration_is_found_out() -> None:
    """Of 64 elements for 4 warps most threads have none."""
    block = RULES.schedules.flat.block.model_copy(update={"value": 64.0})
    flat = RULES.schedules.flat.model_copy(update={"block": block})
    schedules = RULES.schedules.model_copy(update={"flat": flat})
    decision, kernel, made = found(RULES.model_copy(update={"schedules": schedules}))
    assert made.failure == ""
    assert made.kernel.text != kernel.text
    assert made.proof is not None
    check, compiled = made.proof
    assert check is not None
    assert (check.passed, check.where) == (True, f"cuda:{torch.cuda.get_device_name()}")
    assert compiled is not None
    assert compiled.failure is None
    own = decision.subject.plan
    assert own is not None
    assert f"the rules' own, {configuration(own)}" in made.summary


def test_a_good_configuration_is_timed_or_beaten() -> None:
    _, kernel, made = found(RULES)
    assert made.failure == ""
    assert f"on {torch.cuda.get_device_name()}, torch {torch.__version__}" in made.summary
    assert (made.kernel.text == kernel.text) == ("no other that is right is faster" in made.summary)
