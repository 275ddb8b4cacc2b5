"""Wavefronts of one request of 32 lanes, as the hardware counted them (H200, 2026-11-23;
`benchmarks/results/l1.md`)."""

from __future__ import annotations

import pytest

from fusion_advisor.perfmodel.instruction_count import wavefronts_of


@pytest.mark.parametrize(
    ("apart", "counted"),
    [
        (0, 1), (4, 1), (8, 2), (12, 1), (16, 4), (20, 2), (24, 3), (32, 8), (36, 3), (48, 6),
        (64, 16), (68, 5), (96, 12), (124, 8), (128, 32), (132, 8), (136, 9), (256, 32), (260, 8),
    ],
)  # fmt: skip
def test_lanes_evenly_apart(apart: int, counted: int) -> None:
    """As counted, but where lines that share banks are not looked up together."""
    found = wavefronts_of(apart, 32, 4)
    assert found == counted if apart not in (24, 48, 96, 136) else 0.6 * counted < found < counted


@pytest.mark.parametrize(
    ("apart", "counted"), [(16, 4), (32, 8), (64, 16), (80, 8), (128, 32), (528, 8)]
)
def test_vectors_of_16_bytes_go_a_quarter_of_a_warp_at_a_time(apart: int, counted: int) -> None:
    assert wavefronts_of(apart, 32, 16) == counted


def test_halves_of_a_word_are_one_word() -> None:
    assert wavefronts_of(2, 32, 2) == 1
