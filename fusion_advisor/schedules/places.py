"""Runs of elements that share a place, such as the pixels of a channel.

A program that takes no more elements than a run has, in the order of memory, has elements of one
run or of two that follow each other. So no lane divides to find its place, and what lies along the
runs alone (a channel's weight) is loaded once for each of the two. Which of both the sizes allow is
known when the kernel is launched.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_advisor.schedules.layout import Access, Group, gaps, stepped_over

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
