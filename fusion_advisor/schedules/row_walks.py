"""Walks over a row that does not fit on chip: what each finds, stores, and reads back.

A result along the row that needs no more than a walk loads anyway is stored there, and later walks
read it in place of what it is made from: the sum of two tensors, say, of which one lies across the
rows, in front of a norm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fusion_advisor.region.region import Region
from fusion_advisor.schedules.layout import Access, accesses, traced
from fusion_advisor.schedules.online import Pass, passes

_READ_BACK = ("float16", "bfloat16", "float32", "float64")
"""Types of results that are read back: a value that was rounded to one is what eager goes on with.
"""


@dataclass(frozen=True)
class RowWalk:
    """One walk over a row: the reductions that it finds, None for results alone; the values that it
    stores along the row, those that it reads back, and all that it makes, what it reads back
    aside."""

    found: Pass | None
    stored: tuple[int, ...]
    back: frozenset[int]
    made: frozenset[int]


def row_walks(region: Region, inner: frozenset[int]) -> tuple[RowWalk, ...]:
    """The walks over a row: one for each pass of reductions, and one for the results along the row
    that no earlier one could store."""
    loads, stores = accesses(region)
    sizes = {
        number: load.tensor.itemsize
        for number, load in zip(region.all("load"), loads, strict=True)
        if region.depends[number] & inner and region.depends[number] - inner
    }
    left = {
        output.value: store
        for output, store in zip(region.outputs, stores, strict=True)
        if region.depends[output.value] & inner
    }
    known, there, walks = set[int](), dict[int, Access](), list[RowWalk]()
    for one in passes(region, inner):
        back = _read_back(region, one.found, known, sizes, _near(there, inner))
        made = _made(region, one.found, known | back)
        early = _early(region, left, known, made, sizes)
        there |= {value: left.pop(value) for value in early}
        made |= _made(region, early, known)
        walks.append(RowWalk(one, tuple(early), frozenset(back), frozenset(made)))
        known |= one.found
    if left:
        back = _read_back(region, left, known, sizes, _near(there, inner))
        made = _made(region, left, known | back)
        walks.append(RowWalk(None, tuple(left), frozenset(back), frozenset(made)))
    return tuple(walks)


def _read_back(
    region: Region,
    wanted: Collection[int],
    known: set[int],
    sizes: Mapping[int, int],
    there: Mapping[int, int],
) -> set[int]:
    """Of the results that are `there`, with the bytes of an element of each, those whose bytes are
    no more than those of the loads, `sizes`, that they stand for."""
    back, made = set[int](), _made(region, wanted, known)
    for value in sorted(there.keys() & made, key=lambda n: -len(_made(region, [n], known))):
        fewer = _made(region, wanted, known | back | {value})
        if sum(sizes[n] for n in made - fewer if n in sizes) >= there[value]:
            back, made = back | {value}, fewer
    return back


def _early(
    region: Region,
    left: Iterable[int],
    known: set[int],
    made: set[int],
    sizes: Mapping[int, int],
) -> list[int]:
    """Of the results that are `left`, those that need no more than a walk loads which makes some
    values. A scan is carried through one walk, which stores all."""
    if any(region.all("scan")):
        return []
    cones = {value: _made(region, [value], known) for value in left}
    return [
        value
        for value, cone in cones.items()
        if cone & sizes.keys() <= made and not _waits(region, cone)
    ]


def _made(region: Region, wanted: Iterable[int], known: set[int]) -> set[int]:
    """What some values are made from, themselves included, not looking behind what is known."""

    def further(number: int) -> Iterable[int]:
        return (arg for arg in region.exprs[number].args if arg not in known)

    return traced([number for number in wanted if number not in known], further).passed


def _waits(region: Region, made: set[int]) -> bool:
    """Does any of some values need the whole row?"""
    return any(region.exprs[number].op in ("reduce", "scan") for number in made)


def _near(stores: Mapping[int, Access], inner: frozenset[int]) -> dict[int, int]:
    """Results that lie along the rows, in a type that they are read back in, by their bytes."""
    return {
        value: store.tensor.itemsize
        for value, store in stores.items()
        if store.tensor.dtype in _READ_BACK
        and any(abs(step) == 1 and axis in inner for axis, step in store.strides.items())
    }
