"""Emitted kernels that Inductor launches: bitwise what their launchers give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from fusion_advisor.shipped.load import load_module

from ..cpu.generated import FUNCTIONS, SCHEDULES, kernel
from ..cpu.test_lowered import NUMBERED


def together(made: Any) -> tuple[torch.Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def compiled_as_launched(launcher: Any, given: list[Any]) -> str:
    """Inductor's code for a launcher's operator, whose results are those of the launcher."""

    def called(*given: Any) -> Any:
        return launcher.operator(*given)

    torch._dynamo.reset()
    compiled = torch.compile(called, dynamic=False)
    with torch.no_grad():
        wanted = together(launcher(*given))
        first, codes = run_and_get_code(compiled, *given)
        second = compiled(*given)
    for found in first, second:
        for one, other in zip(together(found), wanted, strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(bits(one), bits(other))
    return "\n".join(codes)


@pytest.mark.parametrize("name", [*FUNCTIONS, *SCHEDULES])
def test_inductor_gives_what_the_launcher_gives(name: str, tmp_path: Path) -> None:
    made = kernel(name)
    module = load_module(made.text, tmp_path)
    given = [*module.host.drawn(module.SMALL, "cuda", 1)]
    assert made.entry in compiled_as_launched(getattr(module, made.entry), given)


def test_a_number_is_computed_with_in_32_bits(tmp_path: Path) -> None:
    module = load_module(NUMBERED, tmp_path)
    given = [torch.randn(64, 100, device="cuda"), 0.1]
    text = compiled_as_launched(module.numbered, given)
    assert "factor: tl.constexpr" in text
    assert "numbered_kernel_0.run(" in text
