"""The text of emitted kernels, held to golden files; `--regen` rewrites them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .generated import FUNCTIONS, kernel


@pytest.mark.parametrize("name", FUNCTIONS)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.py", kernel(name).text)
