"""Rows that begin anywhere in memory, moved 16 bytes at a time.

Where rows are no multiple of 16 bytes long, most begin between two multiples, and Triton would move
one element at a time. A program that has its row, or its part of one, at once takes the row's whole
vectors, each in as many neighbouring lanes, and the few columns before the first and behind the
last in a small piece of their own, as long as two vectors. One that walks takes both in one tile:
first the ends, then the whole vectors. As many lanes as there are columns, rounded up to whole
vectors, hold all of them, wherever the row begins.

What all rows share, a weight say, then lies otherwise for each of them. So a first launch copies it
as often as a vector has elements, each copy one element on: of one copy or another every row's
lanes take whole vectors, too. Where the device lets it, what reads the copies begins while they are
made, and waits for them no sooner than it reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from fusion_advisor.rulebook.devices import VECTOR_BYTES
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules.layout import Access
from fusion_advisor.schedules.rows import Rows

COPIED = 1024
"""Elements that one program copies of what all rows share."""


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


def copied(laid: Rows, rulebook: Rulebook) -> frozenset[str]:
    """Inputs that all rows share and that lie along them, where there is enough to do that copying
    them for the rows is worth a launch."""
    tensors = {access.name: access.tensor.bytes for access in laid.everything}
    if sum(tensors.values()) < rulebook.schedules.row.copied_bytes.count:
        return frozenset()
    along = tuple(axis for group in laid.along for axis in group.axes)
    return frozenset(
        load.name
        for load in laid.loads
        if load.name.startswith("in")
        and not set(load.strides) & set(laid.across)
        and follows(load, along, laid.region.sizes)
    )


def copies_of(name: str, vector: int) -> str:
    """The name of a tensor's copies for vectors of so many elements."""
    return f"{name} by {vector}"


def copied_elements(cols: int, vector: int) -> int:
    """Elements of all copies of a row: each copy leaves out one more."""
    return sum(max(cols - skipped, 0) for skipped in range(vector))


def taken_elements(rows: int, cols: int, vector: int) -> int:
    """Distinct elements that rows take of what they share: of its copies and, for their ends, of
    itself."""
    heads = {min(-row * cols % vector, cols) for row in range(min(rows, vector))}
    whole = {head: (cols - head) // vector * vector for head in heads}
    before, behind = max(heads), min(head + inside for head, inside in whole.items())
    return sum(whole.values()) + min(before + cols - behind, cols)


def dense(laid: Rows, access: Access) -> bool:
    """Does a tensor lie in rows, one behind the other without a gap?"""
    axes = (*laid.across, *(axis for group in laid.along for axis in group.axes))
    return laid.count > 1 and follows(access, axes, laid.region.sizes)


def follows(access: Access, axes: Sequence[int], sizes: Mapping[int, int]) -> bool:
    """Does a tensor lie along some axes, outermost first, without a gap?"""
    if access.guard is not None or access.pulled:
        return False
    return all(
        axis in access.walks and access.step(axis) == prod(sizes[a] for a in axes[place + 1 :])
        for place, axis in enumerate(axes)
    )
