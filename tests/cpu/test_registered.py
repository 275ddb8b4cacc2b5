"""Emitted kernels as operators: in eager, under torch.compile and torch.export, with gradients and
in DDP, with kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.shipped.files import write_kernel

from .generated import kernel
from .spawned import facts_by

Facts = dict[str, Any]
OURS = r"fusion_advisor.mine_softmax_"
FIRST = Path(__file__).with_name("earlier") / "softmax.py"
"""Softmax as it was written for the runtime's first version."""
KERNELS = (
    "softmax", "residual_rms_norm", "mean_loss", "shared_softmax", "carried", "dropout_gelu",
    "hits",
)  # fmt: skip


def packages(folder: Path) -> None:
    """Kernels in `mine`, one of them in another folder, too; another of the same name in `other`;
    and those of the runtime's first two versions in `earlier` and `second`."""
    for name in KERNELS:
        write_kernel(folder / "mine" / f"{name}.py", kernel(name).text)
    softmax = kernel("softmax").text
    write_kernel(folder / "elsewhere" / "mine" / "softmax.py", softmax)
    halved = softmax.replace(
        "softmax_1 = share_of(e, sum_1)", "softmax_1 = share_of(e, sum_1) * 0.5"
    )
    assert halved != softmax
    write_kernel(folder / "other" / "softmax.py", halved)
    first = FIRST.read_text(encoding="utf-8")
    write_kernel(folder / "earlier" / "softmax.py", first)
    second = first.replace("def softmax(", "@host.registered(results=1)\ndef softmax(")
    write_kernel(folder / "second" / "softmax.py", second)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """What each scenario of `registered_kernels` saw, all in one process of their own."""
    folder = tmp_path_factory.mktemp("registered")
    packages(folder)
    return facts_by("registered_kernels.py", folder)


def facts_of(scenarios: dict[str, Facts], name: str) -> Facts:
    assert "raised" not in scenarios[name], scenarios[name]["raised"]
    return scenarios[name]


def test_eager_calls_no_operator(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "eager")
    assert facts["operator"].startswith(OURS)
    assert (facts["same"], facts["without"]) == (True, True)


def test_a_compiled_graph_has_the_operator_and_no_break(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "compiled")
    assert facts["fallbacks"] == {}
    for how, each in facts["each"].items():
        assert each["same"], how
        assert {len(graph) for graph in each["graphs"]} == {1}, how
        assert all(graph[0].startswith(OURS) for graph in each["graphs"]), how
    graphs = {how: len(each["graphs"]) for how, each in facts["each"].items()}
    assert {n for how, n in graphs.items() if how.endswith("True")} == {1}, "one for all sizes"


def test_fake_results_are_those_that_the_launcher_allocates(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "results")
    assert all(facts["each"].values()), facts["each"]
    assert facts["fallbacks"] == {}


def test_random_numbers_are_drawn_in_the_graph(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "drawn") == {"anew": True, "same": True, "named": True}


def test_it_is_an_operator_as_torch_asks(scenarios: dict[str, Facts]) -> None:
    assert facts_of(scenarios, "checked_by_torch") == {"said": ["SUCCESS"]}


@pytest.mark.parametrize("how", ["False False", "False True", "True False", "True True"])
def test_export_takes_it(scenarios: dict[str, Facts], how: str) -> None:
    facts = facts_of(scenarios, "exported")[how]
    assert (facts["same"], facts["fallen"], facts["gradient"]) == (True, False, True)
    (operator,) = facts["operators"]
    assert operator.startswith(OURS)


def test_no_gradient_is_lost(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "gradients")
    assert len(facts) == 6
    assert all(facts.values()), facts


def test_what_passes_no_gradient_takes_inputs_that_require_one(
    scenarios: dict[str, Facts],
) -> None:
    facts = facts_of(scenarios, "ungraded")
    assert len(facts["same"]) == 5
    assert (all(facts["same"]), facts["fallen"]) == (True, False)


def test_a_gradient_in_strict_mode_is_refused(scenarios: dict[str, Facts]) -> None:
    assert (
        facts_of(scenarios, "gradients_are_told")["said"]
        == ["softmax: args_0 requires a gradient"] * 2
    )


def test_ddp_takes_it(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "distributed")
    assert facts == {"same": [True, True], "fallen": False, "eager": True, "it": True}


def test_one_text_of_one_package_is_one_operator(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "names")
    assert (facts["one"], facts["apart"], facts["same"]) == (True, True, [True] * 3)


def test_packages_have_operators_of_their_own(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "names")
    assert facts["other"].startswith("fusion_advisor.other_softmax_")
    assert facts["halved"] == [True, True]


def test_a_file_of_the_first_version_runs_beside_this_runtime(scenarios: dict[str, Facts]) -> None:
    facts = facts_of(scenarios, "earlier")
    assert (facts["same"], facts["gradient"], facts["operator"]) == (True, True, False)
    assert facts["fallbacks"] == {"earlier.softmax.softmax": 1}
    assert (facts["second"], facts["registered"]) == (True, True)
