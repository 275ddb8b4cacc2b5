"""Emitted kernels under Inductor: launched by it, or called as operators where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_advisor.shipped.files import write_kernel

from .generated import kernel
from .regions import emit, group_of
from .spawned import facts_by

Facts = dict[str, Any]
NUMBERED = """
import torch
import triton
import triton.language as tl

from . import fused_runtime as host


@triton.jit
def numbered_kernel(x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr, FAR: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    tl.store(out_ptr + index, tl.load(x_ptr + index, mask=mask) * factor, mask=mask)


def reference(x, factor):
    return torch.ops.aten.mul.Tensor(x, factor)


@host.launcher(reference, results=1)
def numbered(x, factor: float):
    n0, n1 = host.ranked(x.shape, 2)
    host.takes("x", x, torch.float32, (n0, n1), (n1, 1))
    out = host.empty((n0, n1), (n1, 1), torch.float32, x)
    far = host.beyond_int32((out, x))
    steps = [host.launch(
        numbered_kernel, (host.cdiv(n0 * n1, 256),), (x, out), (n0 * n1, float(factor)),
        BLOCK=256, FAR=far, num_warps=4,
    )]
    return (out,), steps
"""


def scaled_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 0.3, -1)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Facts]:
    """What each scenario of `lowered_kernels` saw, all in one process of their own."""
    folder = tmp_path_factory.mktemp("lowered")
    texts = {
        name.replace(" + ", "_"): kernel(name).text
        for name in ("softmax", "split", "carried", "blocked", "row + row")
    }
    texts["another"] = texts["softmax"].replace("def softmax(", "def another(")
    scaled = emit(*group_of(scaled_softmax, torch.empty(64, 300), name="scaled")).text
    assert "libdevice.mul_rn(" in scaled
    for name, text in {**texts, "scaled": scaled, "numbered": NUMBERED}.items():
        write_kernel(folder / "mine" / f"{name}.py", text)
    return facts_by("lowered_kernels.py", folder, TRITON_INTERPRET="0")


def seen(scenarios: dict[str, Facts], name: str) -> Facts:
    facts = scenarios[name]
    assert "raised" not in facts, facts["raised"]
    return facts


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("one_launch", 1),
        ("rounds_twice", 1),
        ("two_launches", 2),
        ("results_of_rows", 2),
        ("several_results", 2),
    ],
)
def test_inductor_launches_a_kernel_itself(
    scenarios: dict[str, Facts], name: str, count: int
) -> None:
    facts = seen(scenarios, name)
    assert (len(facts["launched"]), facts["called"]) == (count, False)


@pytest.mark.parametrize("name", ["free_sizes", "with_assembly", "beyond_32_bits", "unknown_torch"])
def test_inductor_calls_the_operator_where_it_cannot(
    scenarios: dict[str, Facts], name: str
) -> None:
    facts = seen(scenarios, name)
    assert (facts["launched"], facts["called"]) == ([], True)


def test_a_number_is_a_constant_as_inductor_has_it_in_64_bits(scenarios: dict[str, Facts]) -> None:
    facts = seen(scenarios, "a_number")
    (signature,) = [each for each in facts["signatures"] if "factor" in each]
    assert (facts["launched"], facts["called"]) == (["numbered_kernel_0"], False)
    assert "'factor': 'constexpr'" in signature
    assert "'count': 'i32'" in signature
