"""Addressed elements: the union of views, against the set of all addresses."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from fusion_advisor.ir import addressed
from fusion_advisor.ir.addressed import Dim, View, addressed_bytes, count_distinct, view
from fusion_advisor.ir.graph import Tensor

STEPS = st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 24, 48, -1, -4])
PLACES = st.one_of(
    st.builds(
        lambda first, count: range(first, first + count), st.integers(0, 3), st.integers(0, 6)
    ),
    st.frozensets(st.integers(0, 8), min_size=1, max_size=4),
)
VIEWS = st.lists(
    st.tuples(st.integers(0, 60), st.lists(st.tuples(PLACES, STEPS), max_size=3)),
    min_size=1,
    max_size=4,
)


def elements(start: int, along: list[Dim]) -> set[int]:
    """Every address of a view."""
    places = product(*(each for each, _ in along))
    steps = [step for _, step in along]
    return {start + sum(map(int.__mul__, at, steps)) for at in places}


@given(VIEWS)
def test_a_union_is_that_of_all_addresses(views: list[tuple[int, list[Dim]]]) -> None:
    seen = [view(start, along) for start, along in views]
    everything = set[int]().union(*(elements(start, along) for start, along in views))
    assert count_distinct(each for each in seen if each) == len(everything)


@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.tuples(
    st.integers(1, 5), st.sampled_from([0, 1, 2, 5, 10, 20, 60])), max_size=3)), min_size=2,
    max_size=4))  # fmt: skip
def test_bytes_are_those_of_the_union(given_: list[tuple[int, list[tuple[int, int]]]]) -> None:
    tensors = [
        Tensor(tuple(n for n, _ in dims), tuple(s for _, s in dims), "float32", 7, offset)
        for offset, dims in given_
    ]
    views = [
        (t.offset, [(range(n), s) for n, s in zip(t.shape, t.stride, strict=True)]) for t in tensors
    ]
    everything = set[int]().union(*(elements(*each) for each in views))
    if len(set(tensors)) > 1:
        assert addressed_bytes(tensors) == 4 * len(everything)


ROWS = Tensor((1 << 20, 1000), (4000, 1), "bfloat16", 3)
"""A part of each of a million rows."""


def test_large_tensors_take_no_time() -> None:
    beside = [replace(ROWS, offset=1000 * n) for n in range(4)]
    assert addressed_bytes(beside) == 2 * 4000 << 20
    assert addressed_bytes([ROWS, replace(ROWS, offset=500)]) == 2 * 1500 << 20
    assert addressed_bytes([ROWS, replace(ROWS, offset=4000)]) == 2 * 1000 * ((1 << 20) + 1)
    whole = Tensor((4000 << 20,), (1,), "bfloat16", 3)
    assert addressed_bytes([whole, *beside]) == whole.bytes
    every_second = Tensor((1 << 31,), (2,), "int8", 3)
    assert addressed_bytes([every_second, replace(every_second, offset=1)]) == 1 << 32


def test_other_storages_and_dtypes_count_apart() -> None:
    assert addressed_bytes([ROWS, ROWS]) == ROWS.bytes
    assert addressed_bytes([ROWS, replace(ROWS, storage=4)]) == 2 * ROWS.bytes
    assert addressed_bytes([ROWS, replace(ROWS, dtype="float16")]) == 2 * ROWS.bytes
    unknown = replace(ROWS, storage=-1)
    assert addressed_bytes([unknown, unknown]) == 2 * ROWS.bytes
    assert addressed_bytes([]) == 0


def test_too_many_to_tell_apart_are_the_largest_alone() -> None:
    """Steps that no other divides, over more places than are looked at."""
    long = 1 << 14
    one = Tensor((long, long), (3, 3 * long + 1), "int8", 3)
    other = Tensor((long, long - 1), (1, 2 * long + 1), "int8", 3)
    views = [each for t in (one, other) if (each := addressed.of_tensor(t))]
    assert count_distinct(views) is None
    assert addressed_bytes([one, other]) == one.bytes


def test_nothing_is_addressed_by_an_empty_view() -> None:
    assert view(3, [(range(0), 1)]) is None
    assert count_distinct([]) == 0
    assert count_distinct([View(3, ()), View(4, ()), View(3, ())]) == 2
