"""Offsets beyond 32 bits, on a GPU that has the memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusion_advisor.shipped.load import load_module

from ..cpu.generated import swiglu
from ..cpu.regions import kernel_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [32768, 65536])
def test_halves_of_a_large_tensor(
    rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured where 32 bits do, a kernel serves 3.8e9 elements, too."""
    if not torch.cuda.is_available() or torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of a GPU's memory")
    monkeypatch.setenv("FUSION_ADVISOR_STRICT", "1")
    captured = torch.empty(32768, 57344, dtype=torch.bfloat16, device="meta")
    module = load_module(kernel_of(swiglu, captured).text, tmp_path)
    halves = torch.randn(rows, 57344, dtype=torch.bfloat16, device="cuda").chunk(2, -1)
    torch.testing.assert_close(module.k(*halves), swiglu(torch.cat(halves, -1)))
