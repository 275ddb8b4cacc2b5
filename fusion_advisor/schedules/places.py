"""Runs of elements that share a place, such as the pixels of a channel.

A program that takes no more elements than a run has, in the order of memory, has elements of one
run or of two that follow each other. So no lane divides to find its place, and what lies along the
runs alone (a channel's weight) is loaded once for each of the two. Which of both the sizes allow is
known when the kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.schedules.layout import Access, Group, gaps, stepped_over

HELPERS: dict[str, str] = {
    "wide": """\
@triton.jit
def wide(place, FAR: tl.constexpr):
    # What offsets are made from, in 64 bits where some of them are beyond 32.
    if FAR:
        place = place + tl.full((), 0, tl.int64)
    return place
""",
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
    "load_both": """\
@triton.jit
def load_both(first_ptr, following_ptr, NEAR: tl.constexpr):
    # What lanes at one place or the next share, before they ask for it.
    if NEAR:
        found = tl.load(first_ptr), tl.load(following_ptr)
    else:
        found = 0, 0
    return found
""",
    "by_place": """\
@triton.jit
def by_place(each_ptr, at_first, at_following, in_first, mask, NEAR: tl.constexpr):
    # What lanes share, of both that were loaded.
    if NEAR:
        value = tl.where(in_first, at_first, at_following)
    else:
        value = tl.load(each_ptr, mask=mask, other=0)
    return value
""",
    "rows_of_plane": """\
@triton.jit
def rows_of_plane(size, ROWS: tl.constexpr, PLANES: tl.constexpr, FAR: tl.constexpr):
    # The plane that a program has a tile of, and its rows there, of `size`.
    plane, tile = wide(tl.program_id(2), FAR), wide(tl.program_id(0), FAR)
    if not PLANES:  # more planes than a grid has lie one behind the other
        tiles = tl.cdiv(size, ROWS)
        plane, tile = tile // tiles, tile % tiles
    return plane, tile * ROWS + tl.arange(0, ROWS)[:, None]
""",
    "rows_of_tile": """\
@triton.jit
def rows_of_tile(tile, size, ROWS: tl.constexpr):
    # The plane that a tile is in, of those that lie one behind the other, and its rows of `size`.
    tiles = tl.cdiv(size, ROWS)
    return tile // tiles, tile % tiles * ROWS + tl.arange(0, ROWS)[:, None]
""",
}
"""The functions of an emitted file that find such places."""

MOST_PLANES = 65535
"""Along the third dimension of a CUDA grid."""

PLACES = ("place", "first", "following")
"""The place of each lane along the outer group, and the two that there can be."""


def in_runs(everything: Sequence[Access], groups: Sequence[Group], block: int) -> bool:
    """Does each tensor either lie as the groups follow each other, or along the last one alone, or
    have one element for a whole run of it, and are such runs as long as a program's block?"""
    if len(groups) < 2 or groups[-1].size < block:
        return False
    return all(
        not access.pulled and access.guard is None and _plain(access, groups)
        for access in everything
    )


def _plain(access: Access, groups: Sequence[Group]) -> bool:
    last, steps = groups[-1].name, gaps(access, groups)
    return last not in steps or steps == {last: ()} or in_order(access, groups)


def in_order(access: Access, groups: Sequence[Group]) -> bool:
    """Does a tensor lie dense over some groups, the last one innermost?"""
    return stepped_over(gaps(access, groups), groups) == ()
