"""Walks over a row that does not fit on chip: what each finds, stores, and reads back.

A result along the row that needs no more than a walk loads anyway is stored there, and later walks
read it in place of what it is made from: the sum of two tensors, say, of which one lies across the
rows, in front of a norm.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    sizes = {n: a.tensor.itemsize for n, a in zip(region.all("load"), loads, strict=True)}
    results = {
        output.value: store
        for output, store in zip(region.outputs, stores, strict=True)
        if region.depends[output.value] & inner
    }
    known, left, walks = set[int](), dict(results), list[RowWalk]()

    def loaded(made: Iterable[int]) -> set[int]:
        own = (n for n in made if n in sizes and region.depends[n] - inner)
        return {n for n in own if region.depends[n] & inner}

    def walk(found: Pass | None, wanted: Iterable[int]) -> None:
        wanted, back = tuple(wanted), set[int]()
        stored = results.keys() - left.keys()
        made = _made(region, wanted, known)
        for value in sorted(stored & made, key=lambda n: -len(_made(region, [n], known))):
            fewer = _made(region, wanted, known | back | {value})
            saved = sum(sizes[n] for n in loaded(made) - loaded(fewer))
            if _reads_well(results[value], inner) and saved >= results[value].tensor.itemsize:
                back, made = back | {value}, fewer
        early = list(left) if found is None else []
        if found is not None and not any(region.all("scan")):
            for value in left:
                needed = _made(region, [value], known)
                if loaded(needed) <= loaded(made) and not _waits(region, needed):
                    early.append(value)
                    made |= needed
        for value in early:
            del left[value]
        walks.append(RowWalk(found, tuple(early), frozenset(back), frozenset(made)))

    for one in passes(region, inner):
        walk(one, one.found)
        known |= one.found
    if left:
        walk(None, list(left))
    return tuple(walks)


def _made(region: Region, wanted: Iterable[int], known: set[int]) -> set[int]:
    """What some values are made from, themselves included, not looking behind what is known."""

    def further(number: int) -> Iterable[int]:
        return (arg for arg in region.exprs[number].args if arg not in known)

    return traced([number for number in wanted if number not in known], further).passed


def _waits(region: Region, made: set[int]) -> bool:
    """Does any of some values need the whole row?"""
    return any(region.exprs[number].op in ("reduce", "scan") for number in made)


def _reads_well(store: Access, inner: frozenset[int]) -> bool:
    """Does a result lie along the rows, in a type that it is read back in?"""
    near = any(abs(step) == 1 and axis in inner for axis, step in store.strides.items())
    return near and store.tensor.dtype in _READ_BACK
