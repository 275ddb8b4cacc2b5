"""What is read beside the elements that are asked for (`dram__bytes_read`, H200, 2026-11-23)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor.sectors import read_with


def test_an_edge_of_less_than_a_sector_is_read() -> None:
    assert read_with(range(16), 19, 4) == 19
    assert read_with(range(60), 63, 4) == 63


def test_of_a_wide_gap_the_ends_are_read() -> None:
    assert read_with(range(32), 96, 4) == 32 + 7
    assert read_with([0, 1, 40, 41], 64, 4) == 4 + 7 + 7


def test_every_second_element_is_every_element() -> None:
    assert read_with(range(0, 64, 2), 64, 4) == 64
    assert read_with(range(0, 64, 8), 64, 4) == 64
    assert read_with(range(0, 64, 16), 64, 4) == 4 * 8


def test_nothing() -> None:
    assert read_with([], 8, 4) == 0


@given(st.sets(st.integers(0, 99), min_size=1), st.sampled_from([1, 2, 4, 8]))
def test_no_less_than_what_is_asked_for_and_no_more_than_the_row(
    places: set[int], itemsize: int
) -> None:
    assert len(places) <= read_with(places, 100, itemsize) <= 100
