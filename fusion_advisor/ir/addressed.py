"""Elements that tensors address in a storage; several views together count each element once.

A view is a start and, for each dimension, places with a step between them. The elements of several
views are counted dimension by dimension, from the widest step at which every view can be cut. Each
view has some places along that step. Places that the same views cover have the same inner elements:
these are counted once, and multiplied by the number of such places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod

from fusion_advisor.ir.graph import Tensor

Places = range | frozenset[int]
"""Indices along one dimension: a range of neighbours, or any set."""
Dim = tuple[Places, int]
"""Places along one dimension, and the step in elements from one place to the next."""

_MOST = 1 << 26
"""Limit on the places of one dimension that are distinguished one by one."""


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a storage: from `start` on, so many steps along each dimension."""

    start: int
    along: tuple[Dim, ...]

    @property
    def span(self) -> int:
        """Distance in elements from the first element to the last."""
        return sum(_last(places) * step for places, step in self.along)


def view(start: int, along: Iterable[Dim]) -> View | None:
    """Build a view whose places start at 0 and whose steps are positive, the smallest step first;
    dimensions that continue each other are merged. None where the view has no elements."""
    dims: list[tuple[int, Places]] = []
    for places, step in along:
        if not places:
            return None
        least, most = _first(places), _last(places)
        start += min(least * step, most * step)
        if len(places) == most - least + 1:
            places = range(len(places))
        elif step < 0:
            places = frozenset(most - place for place in places)
        else:
            places = frozenset(place - least for place in places)
        step = abs(step)
        if step and len(places) > 1:
            dims.append((step, places))
    dims.sort(key=lambda dim: dim[0])
    joined: list[Dim] = []
    for step, places in dims:
        if joined and isinstance(places, range):
            inner, each = joined[-1]
            if isinstance(inner, range) and len(inner) * each == step:
                joined[-1] = range(len(inner) * len(places)), each
                continue
        joined.append((places, step))
    return View(start, tuple(joined))


def _first(places: Places) -> int:
    return places[0] if isinstance(places, range) else min(places)


def _last(places: Places) -> int:
    return places[-1] if isinstance(places, range) else max(places)


def of_tensor(tensor: Tensor) -> View | None:
    """View of the storage that a tensor addresses; None where the tensor is empty."""
    sizes = zip(tensor.shape, tensor.stride, strict=True)
    return view(tensor.offset, ((range(size), step) for size, step in sizes))


def addressed_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that some tensors address, each byte once. Where one storage has too many elements to
    distinguish, those of its largest tensor alone; tensors of two dtypes count separately."""
    total = 0
    for of_one in by_storage(tensors):
        if len(of_one) == 1:
            total += of_one[0].bytes
            continue
        found = count_distinct(seen for tensor in of_one if (seen := of_tensor(tensor)))
        size = of_one[0].itemsize
        total += max(t.bytes for t in of_one) if found is None else found * size
    return total


def by_storage(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the memory and dtype that they share, each tensor once; a tensor of unknown
    storage is a group alone."""
    found: dict[object, list[Tensor]] = {}
    for number, tensor in enumerate(tensors):
        known = tensor.storage >= 0
        held = found.setdefault((tensor.storage, tensor.dtype) if known else (None, number), [])
        if tensor not in held:
            held.append(tensor)
    return list(found.values())


def count_distinct(views: Iterable[View]) -> int | None:
    """Number of distinct elements that some views of one storage address together; None where there
    are too many to distinguish."""
    wanted = list(dict.fromkeys(views))
    if len(wanted) == 1 and (alone := _alone(wanted[0])) is not None:
        return alone
    if not any(each.along for each in wanted):
        return len(wanted)
    first = min(each.start for each in wanted)
    steps = {step for each in wanted for _, step in each.along}
    unit = gcd(*steps, *(each.start - first for each in wanted))
    wanted = [
        View((each.start - first) // unit, tuple((p, step // unit) for p, step in each.along))
        for each in wanted
    ]
    for step in sorted({1, *(step // unit for step in steps)}, reverse=True):
        cut = [_cut(each, step) for each in wanted]
        found = None if None in cut else _of_levels([each for each in cut if each])
        if found is not None:
            return found
    return None


def _alone(one: View) -> int | None:
    """Number of elements of one view; None where its dimensions overlap."""
    span = 0
    for places, step in one.along:
        if step <= span:
            return None
        span += _last(places) * step
    return prod(len(places) for places, _ in one.along)


@dataclass(frozen=True, slots=True)
class _Cut:
    """View as places a fixed step apart, and the inner view at each of them."""

    outer: tuple[Dim, ...]
    first: int
    inner: View

    @property
    def interval(self) -> range | None:
        """Places as a range where they are neighbours; else None."""
        if not self.outer:
            return range(self.first, self.first + 1)
        ((places, step), *others) = self.outer
        if others or step != 1 or not isinstance(places, range):
            return None
        return range(self.first, self.first + len(places))

    @property
    def last(self) -> int:
        return self.first + sum(_last(places) * step for places, step in self.outer)

    @property
    def bits(self) -> int:
        """Places as a bit set."""
        found = 1
        for places, step in self.outer:
            if isinstance(places, range):
                found = _repeated(found, len(places), step)
            elif found == 1:
                marks = bytearray(_last(places) * step // 8 + 1)
                for place in places:
                    marks[place * step // 8] |= 1 << place * step % 8
                found = int.from_bytes(marks, "little")
            else:
                once, found = found, 0
                for place in places:
                    found |= once << place * step
        return found << self.first


def _repeated(bits: int, count: int, step: int) -> int:
    """Repeat a bit set `count` times, each copy shifted by one more step."""
    reached = 1
    while reached < count:
        more = min(reached, count - reached)
        bits |= bits << more * step
        reached += more
    return bits


def _cut(one: View, step: int) -> _Cut | None:
    """Cut a view at a step: into places that are multiples of the step apart, and an inner view
    that does not reach the next place. None where the view cannot be cut so."""
    first, start = divmod(one.start, step)
    outer = [(places, each // step) for places, each in one.along if each >= step]
    inner = [(places, each) for places, each in one.along if each < step]
    if any(each % step for _, each in one.along if each >= step):
        return None
    if inner and isinstance(inner[-1][0], range):  # a run that goes on through several places
        places, each = inner[-1]
        times, rest = divmod(len(places) * each, step)
        if times > 1 and not rest and not start and not step % each:
            inner[-1] = range(step // each), each
            outer.insert(0, (range(times), 1))
    within = View(start, tuple(inner))
    return _Cut(tuple(outer), first, within) if start + within.span < step else None


def _of_levels(cut: Sequence[_Cut]) -> int | None:
    """Number of distinct elements of views that are cut at one step; None where there are too many
    places."""
    parts: list[tuple[int, frozenset[View]]] = []
    spans = [each.interval for each in cut]
    if None not in spans:
        held = [(span, each.inner) for span, each in zip(spans, cut, strict=True) if span]
        ends = sorted({end for span, _ in held for end in (span.start, span.stop)})
        for start, stop in pairwise(ends):
            here = frozenset(inner for span, inner in held if start in span)
            parts.append((stop - start, here))
    elif max(each.last for each in cut) < _MOST:
        parts = [(bits.bit_count(), here) for bits, here in _told_apart(cut)]
    else:
        return None
    total, known = 0, dict[frozenset[View], int | None]()
    for count, here in parts:
        if here not in known:
            known[here] = count_distinct(here) if here else 0
        each = known[here]
        if each is None:
            return None
        total += count * each
    return total


def _told_apart(cut: Sequence[_Cut]) -> list[tuple[int, frozenset[View]]]:
    """Places as bit sets, grouped by the inner views that cover them."""
    found: list[tuple[int, frozenset[View]]] = []
    for each in cut:
        mine, parts = each.bits, list[tuple[int, frozenset[View]]]()
        for bits, here in found:
            both = bits & mine
            mine ^= both
            if both:
                parts.append((both, here | {each.inner}))
            if bits != both:
                parts.append((bits ^ both, here))
        if mine:
            parts.append((mine, frozenset({each.inner})))
        found = parts
    return found
