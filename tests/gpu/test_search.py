"""A search on the GPU that is here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fusion_advisor.codegen.emit import attempt, emit
from fusion_advisor.codegen.tuned_numbers import launched, tuning_path, tuning_text
from fusion_advisor.fusion.decide import Decision
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.measure.config_space import configuration
from fusion_advisor.measure.search import SearchResult, local_searcher
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped.files import write_kernel
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
    assert (made.gpu, made.us < made.own_us) == (torch.cuda.get_device_name(), True)
    own_numbers = launched(kernel.text)[1]
    assert made.numbers.keys() == own_numbers.keys()
    assert made.numbers != own_numbers
    own = decision.subject.plan
    assert own is not None
    assert f"the rules' own, {configuration(own)}" in made.summary


def test_a_good_configuration_is_timed_or_beaten() -> None:
    _, kernel, made = found(RULES)
    assert made.failure == ""
    assert f"on {torch.cuda.get_device_name()}, torch {torch.__version__}" in made.summary
    assert (made.kernel is kernel) != bool(made.numbers)
    assert bool(made.numbers) != ("no other that is right is faster" in made.summary)


def test_a_launch_takes_what_was_found(tmp_path: Path) -> None:
    """The same results, from a tile of another size."""
    _, kernel, _ = found(RULES)
    write_kernel(tmp_path / "gelu.py", kernel.text)
    path = tmp_path / tuning_path(torch.cuda.get_device_name())
    path.parent.mkdir()
    numbers = {"gelu_kernel": {"BLOCK": 512, "num_warps": 2}}
    path.write_text(tuning_text({(tmp_path / "gelu.py").read_text(): (numbers, "by hand")}))
    x = torch.randn(1000, 1001, device="cuda", dtype=torch.bfloat16)
    script = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from importlib import import_module\n"
        "gelu = import_module(sys.argv[2] + '.gelu')\n"
        "x = torch.load(sys.argv[1] + '/x.pt')\n"
        "torch.save(gelu.gelu(x), sys.argv[1] + '/y.pt')\n"
        "print([key[-4:] for key in gelu.host.launched])\n"
    )
    torch.save(x, tmp_path.parent / "x.pt")
    asked = [sys.executable, "-c", script, str(tmp_path.parent), tmp_path.name]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    assert "512" in done.stdout
    made, exact = torch.load(tmp_path.parent / "y.pt"), gelu(x.double())
    torch.testing.assert_close(made, exact.bfloat16(), rtol=1.6e-2, atol=1e-3)
