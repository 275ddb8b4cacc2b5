"""Rows that begin anywhere in memory, moved 16 bytes at a time.

Where rows are no multiple of 16 bytes long, most begin between two multiples, and Triton would move
one element at a time. A program that has its row, or its part of one, at once takes the row's whole
vectors, each in as many neighbouring lanes, and the few columns before the first and behind the
last in a small piece of their own, as long as two vectors. One that walks takes both in one tile:
first the ends, then the whole vectors. As many lanes as there are columns, rounded up to whole
vectors, hold all of them, wherever the row begins.
"""

from __future__ import annotations

from math import prod

from fusion_advisor.device import VECTOR_BYTES
from fusion_advisor.rulebook import Rulebook
from fusion_advisor.schedules.layout import Access
from fusion_advisor.schedules.rows import Rows

HELPERS: dict[str, str] = {
    "around_vectors": """\
@triton.jit
def around_vectors(first, cols, start, COLS: tl.constexpr, ENDS: tl.constexpr):
    # Of a row that begins at element `first`: the columns and places of its whole vectors, from
    # lane `start` of them on, and the columns around them, which whoever has the first lane takes.
    VECTOR: tl.constexpr = ENDS // 2
    head = tl.minimum(-first & (VECTOR - 1), cols).to(tl.int32)
    inside = tl.multiple_of((cols - head) & -VECTOR, VECTOR)
    lane = start + tl.arange(0, COLS)
    vectors = tl.multiple_of(first + head, VECTOR) + lane
    end = tl.arange(0, ENDS)
    end_mask = end < tl.where(start == 0, cols - inside, 0)
    return lane + head, vectors, lane < inside, tl.where(end < head, end, end + inside), end_mask
""",
    "in_vectors": """\
@triton.jit
def in_vectors(first, cols, lane, start, VECTOR: tl.constexpr):
    # Which column each lane has of a row that begins at element `first`, so that the row's whole
    # vectors lie in whole vectors of lanes: the columns before and behind them come first.
    head = tl.minimum(-first & (VECTOR - 1), cols).to(tl.int32)
    ends = head + ((cols - head) & (VECTOR - 1))
    before = tl.multiple_of((ends + VECTOR - 1) & -VECTOR, VECTOR)
    behind = tl.multiple_of(before + cols - ends, VECTOR)
    place = start + lane
    in_end = lane < tl.where(start == 0, ends, 0)
    in_whole = (place >= before) & (place < behind)
    end = tl.where(lane < head, lane, lane + cols - ends)
    shift = head - before
    col = tl.where(place < before, end, place + shift)
    offset = tl.multiple_of(first + shift, VECTOR) + place
    return col, offset, in_whole, in_end
""",
    "load_row": """\
@triton.jit
def load_row(ptr, vectors, in_whole, ends, in_end):
    # Whole vectors at once, what is in none one by one, and zero where there is nothing.
    whole = tl.load(ptr + vectors, mask=in_whole, other=0)
    return tl.load(ptr + ends, mask=in_end, other=whole)
""",
    "store_row": """\
@triton.jit
def store_row(ptr, vectors, in_whole, ends, in_end, value):
    # Whole vectors at once, what is in none one by one.
    tl.store(ptr + vectors, value, mask=in_whole)
    tl.store(ptr + ends, value, mask=in_end)
""",
}
"""The functions of an emitted file that work with such rows."""


def vector(laid: Rows, rulebook: Rulebook, *, apart: bool = False) -> int:
    """Elements of a vector of the narrowest tensor that lies in rows one behind the other, where
    those begin elsewhere than at whole vectors; else 0. What hangs on the order of lanes, or on
    which columns a part of a row has, keeps the order of memory, and so do wide elements with
    results along the row, which gain nothing unless the row's ends are a piece `apart`."""
    region = laid.region
    if region.random_state or any(region.all("scan")) or any(region.all("taken")):
        return 0
    width = between(laid)
    written = any(laid.axes & set(store.strides) for store in laid.stores)
    if not width or (written and not apart and width >= rulebook.schedules.row.single_bytes.count):
        return 0
    return VECTOR_BYTES // width


def between(laid: Rows) -> int:
    """Bytes of an element of the narrowest tensor that lies in rows one behind the other, where
    those begin between whole vectors; else 0."""
    widths = {access.tensor.itemsize for access in laid.everything if dense(laid, access)}
    narrow = min(widths, default=0)
    return narrow if laid.length * narrow % VECTOR_BYTES else 0


def dense(laid: Rows, access: Access) -> bool:
    """Does a tensor lie in rows, one behind the other without a gap?"""
    axes = (*laid.across, *(axis for group in laid.along for axis in group.axes))
    sizes = laid.region.sizes
    return (
        laid.count > 1
        and access.guard is None
        and not access.pulled
        and all(
            axis in access.walks and access.step(axis) == prod(sizes[a] for a in axes[place + 1 :])
            for place, axis in enumerate(axes)
        )
    )
