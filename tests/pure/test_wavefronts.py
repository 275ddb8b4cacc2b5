"""Wavefronts of one request of 32 lanes, as the hardware counted them (H200, 2026-11-23;
`benchmarks/results/l1.md`)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor.perfmodel.bank_conflicts import wavefronts_of

LANES = range(32)


@pytest.mark.parametrize(
    ("apart", "counted"),
    [
        (0, 1), (4, 1), (8, 2), (12, 1), (16, 4), (20, 2), (24, 3), (32, 8), (36, 3), (48, 6),
        (64, 16), (68, 5), (96, 12), (124, 8), (128, 32), (132, 8), (136, 9), (256, 32), (260, 8),
    ],
)  # fmt: skip
def test_lanes_evenly_apart(apart: int, counted: int) -> None:
    assert wavefronts_of(tuple(apart * lane for lane in LANES), 4) == counted


@pytest.mark.parametrize(
    ("apart", "counted"), [(16, 4), (32, 8), (64, 16), (80, 8), (128, 32), (528, 8)]
)
def test_vectors_of_16_bytes_go_a_quarter_of_a_warp_at_a_time(apart: int, counted: int) -> None:
    assert wavefronts_of(tuple(apart * lane for lane in LANES), 16) == counted


def test_halves_of_a_word_are_one_word() -> None:
    assert wavefronts_of(tuple(2 * lane for lane in LANES), 2) == 1
    assert wavefronts_of(tuple(126 * lane for lane in LANES), 2) == 16


def test_lanes_that_ask_for_nothing_take_nothing() -> None:
    every = [128 * lane for lane in LANES]
    asked = (place if lane < 8 else None for lane, place in enumerate(every))
    assert wavefronts_of(tuple(asked), 4) == 8
    assert wavefronts_of((None,) * 32, 4) == 1


@given(st.lists(st.integers(0, 1 << 30), min_size=32, max_size=32))
def test_at_least_a_fourth_of_the_lines_and_at_most_a_lane_at_a_time(words: list[int]) -> None:
    found = wavefronts_of(tuple(4 * word for word in words), 4)
    lines = len({word // 32 for word in words})
    assert lines / 4 <= found <= len({*words})


@given(st.permutations([4 * 37 * lane for lane in LANES]))
def test_which_lane_asks_does_not_matter(addresses: list[int]) -> None:
    assert wavefronts_of(tuple(addresses), 4) == wavefronts_of(tuple(sorted(addresses)), 4)
