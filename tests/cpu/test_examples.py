"""Each example as a user runs it, and what its text says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .test_cli import QUICK, ROOT, run

EXAMPLES = ROOT / "examples"


def report(model: str, *options: str) -> dict[str, Any]:
    done = run("analyze", model, "--device", "h200", "--json", "-", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def kernels(report: dict[str, Any]) -> tuple[int, int]:
    totals = report["totals"]
    return totals["kernels_unfused"], totals["kernels_fused"]


def fused(report: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Idiom, launches of an instance, and instances, of each accepted group."""
    launched = {node["name"] for node in report["nodes"] if node["bound"] != "free"}
    return sorted(
        (group["pattern"], len(launched & set(group["nodes"])), len(group["instances"]))
        for group in report["groups"]
    )


def deciding(report: dict[str, Any]) -> set[str]:
    """The first gate that each rejected candidate fails."""
    return {
        next(gate["name"] for gate in row["gates"] if gate["outcome"] != "holds")
        for row in report["candidates"]
    }


def test_every_example_is_tested() -> None:
    here = {str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    tested = {"softmax.py", "norm_silu.py", "mlp.py", "do_not_fuse.py", "transformer_block.py"}
    assert here == tested | {"llama_block.py", "llama3_8b.py", "llama_layer/config.json"}


def test_softmax_is_five_kernels_in_one_and_pytorch_has_it() -> None:
    found = report("examples/softmax.py", *QUICK)
    (group,) = found["groups"]
    assert (kernels(found), fused(found)) == ((5, 1), [("softmax", 5, 1)])
    assert group["traffic"]["ratio"] == pytest.approx(4.0007, abs=1e-4)
    assert group["action"]["code"] == "torch.nn.functional.softmax(x, dim=-1)"


def test_norm_and_silu_are_one_kernel_and_checked() -> None:
    found = report("examples/norm_silu.py")
    (group,) = found["groups"]
    assert (kernels(found), fused(found)) == ((4, 1), [("residual-norm", 4, 1)])
    assert group["traffic"]["ratio"] == pytest.approx(10 / 3, abs=1e-3)
    assert group["kernel"]["check"]["passed"]
    assert group["kernel"]["resources"]["spill_bytes"] == 0


def test_an_mlps_gelu_is_fused_between_its_products() -> None:
    found = report("examples/mlp.py")
    (group,) = found["groups"]
    assert (kernels(found), fused(found)) == ((12, 4), [("gelu-tanh", 9, 1)])
    assert group["route"] == "framework"
    assert group["kernel"]["check"]["passed"]
    assert deciding(found) == {"compute-bound"}


def test_nothing_is_fused_where_that_is_right() -> None:
    found = report("examples/do_not_fuse.py", *QUICK)
    assert not found["groups"]
    assert deciding(found) == {"compute-bound"}
    (ridge,) = {round(row["gates"][0]["limit"]) for row in found["candidates"]}
    assert ridge == 206
    assert {round(row["gates"][0]["measured"]) for row in found["candidates"]} == {1365}
    assert found["totals"]["predicted_speedup"] == 1
    reasons = {row["reason"].partition(":")[0] for row in found["ungrouped"]}
    assert reasons == {"compute-bound", "view"}


def test_blocks_of_a_transformer_are_cut_at_their_products() -> None:
    found = report("examples/transformer_block.py", *QUICK)
    assert kernels(found) == (49, 15)
    assert fused(found) == [("layer-norm", 11, 1), ("layer-norm", 13, 1), ("layer-norm", 13, 1)]
    assert deciding(found) == {"compute-bound"}
    stored = [
        gate["measured"]
        for group in found["groups"]
        for gate in group["gates"]
        if gate["name"] == "shared-intermediate"
    ]
    assert sorted(stored) == [0, 0, 1]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "layers"), [("llama_block.py", 2), ("llama3_8b.py", 32)])
def test_a_llama_has_the_same_groups_in_every_layer(model: str, layers: int) -> None:
    found = report(f"examples/{model}", *QUICK)
    assert kernels(found) == ((88, 28) if layers == 2 else (1258, 418))
    assert fused(found) == [
        ("pointwise-chain", 5, layers),
        ("pointwise-chain", 5, layers),
        ("residual-norm", 9, 1),
        ("residual-norm", 9, 2 * layers - 1),
        ("rms-norm", 9, 1),
        ("swiglu", 3, layers),
    ]
    assert deciding(found) == {"compute-bound"}


def test_a_llama_layer_is_analysed_from_its_configuration_alone() -> None:
    pytest.importorskip("transformers")
    model = "hf:examples/llama_layer/config.json"
    found = report(model, "--batch", "4", "--seq", "2048", *QUICK)
    assert [idiom for idiom, _, _ in fused(found)] == [
        *["pointwise-chain"] * 3, *["residual-norm"] * 2, "rms-norm", "swiglu",
    ]  # fmt: skip
    assert found["totals"]["saveable_bytes"] > 4e9
    assert "compute-bound" in deciding(found)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda file: file.name)
def test_every_example_says_what_it_shows(file: Path) -> None:
    assert file.read_text().startswith('"""')
