"""Rows of two groups, such as the channels of a group norm and their pixels.

A program that takes a part of such a row, no longer than the inner group, has elements at one place
of the outer group or at two that follow each other. So no lane divides to find its place, and what
lies along the outer group alone (a channel's weight) is loaded once for each of the two. Which of
both a row's sizes allow is known when the kernel is launched.
"""

from __future__ import annotations

HELPERS: dict[str, str] = {
    "place_of": """\
@triton.jit
def place_of(col, first, following, size, NEAR: tl.constexpr):
    # Which run of `size` columns each lane is in: one of two, where a run is as long as all lanes.
    if NEAR:
        place = tl.where(col < (first + 1) * size, first, following)
    else:
        place = col // size
    return place
""",
    "load_by_place": """\
@triton.jit
def load_by_place(each_ptr, first_ptr, following_ptr, in_first, mask, NEAR: tl.constexpr):
    # What all lanes at one place share.
    if NEAR:
        value = tl.where(in_first, tl.load(first_ptr), tl.load(following_ptr))
    else:
        value = tl.load(each_ptr, mask=mask, other=0)
    return value
""",
}
"""The functions of an emitted file that find such places."""

PLACES = ("place", "first", "following")
"""The place of each lane along the outer group, and the two that there can be."""
