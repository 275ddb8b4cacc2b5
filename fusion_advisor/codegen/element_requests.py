"""Elements that the loads and stores of a kernel request, counted at every request.

The count follows from the lanes: an element that lies along rows and columns is requested once at
each position, one that all rows share once by each program, and all of that as often as the row is
walked. Lanes that a guard masks are counted as requesting, and so are both of two loads of which a
lane needs one; so the count is an upper bound, and exact for loads without a guard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from fusion_advisor.schedules.base import Step
from fusion_advisor.schedules.layout import Access, Group, spanned
from fusion_advisor.schedules.reducing import walks
from fusion_advisor.schedules.row_walks import RowWalk, row_walks


@dataclass(frozen=True)
class ElementRequests:
    """Requests of one kernel at certain sizes of the axes."""

    step: Step
    sizes: Mapping[int, int]

    def by(self, loads: Sequence[Access]) -> int:
        """Elements that one launch requests by some of the step's loads."""
        return sum(map(self._load, loads))

    def about(self, launch: int) -> int:
        """Elements that moments of parts of a row are taken about: one for each program, unless an
        earlier exchange ends the launch."""
        step, found = self.step, set[str]()
        own = {*step.region.all("load")}
        ends = [*step.exchanges, step.phases[-1]] if step.phases else []
        for phase in step.phases[: step.phases.index(ends[launch]) + 1] if ends else ():
            pairs = zip(phase.region.all("load"), phase.loads, strict=True)
            found |= {a.name for n, a in pairs if n not in own and a.name.startswith("in")}
        return len(found) * self._rows * self.parts

    def read_back(self) -> dict[int, int]:
        """Elements that one launch requests of each stored value that it reads back."""
        step = self.step
        times = Counter(value for walk in self._walks for value in walk.back)
        pairs = zip(step.region.outputs, step.stores, strict=True)
        stores = {output.value: store for output, store in pairs}
        return {value: count * self._store(stores[value]) for value, count in times.items()}

    def left(self, stores: Sequence[Access]) -> int:
        """Elements that one launch stores."""
        return sum(map(self._store, stores))

    @cached_property
    def _walks(self) -> tuple[RowWalk, ...]:
        """Walks over a row in chunks; none where it is held whole."""
        return row_walks(self.step.region, self.step.along) if self.step.chunked else ()

    def _places(self, groups: Sequence[Group]) -> int:
        return prod(self.sizes[axis] for axis in spanned(groups))

    @property
    def _rows(self) -> int:
        return self._places(self.step.outer)

    @property
    def _tiles(self) -> int:
        """Tiles, of rows or of elements."""
        return self.step.tiles.at(self.sizes)

    @property
    def parts(self) -> int:
        """Programs that share a row."""
        return self.step.beside.at(self.sizes)

    def _load(self, load: Access) -> int:
        axes = self._axes(load)
        return self._lanes(axes) * self._serially(axes) * self._times(load)

    def _axes(self, load: Access) -> frozenset[int]:
        """The axes that the address of a load depends on."""
        axes, depends = load.walks | {*load.strides}, self.step.region.depends
        for index in (*load.pulled.values(), *(() if load.guard is None else (load.guard,))):
            axes |= depends[index]
        return axes

    def _lanes(self, axes: frozenset[int]) -> int:
        """Lanes that request what lies along some axes."""
        step = self.step
        across = bool(axes & {*spanned(step.outer)})
        if not step.inner:
            return self._rows if across else self._tiles
        along = bool(axes & step.along)
        if along and across:
            return self._rows * self._places(step.inner)
        if along:  # each program loads it once, unless where it lies hangs on the row
            return step.walkers.at(self.sizes) * self._places(step.inner)
        return self._rows * self.parts if across else self._tiles * self.parts

    def _serially(self, axes: frozenset[int]) -> int:
        """Positions that a lane walks."""
        return prod(self.sizes[axis] for axis in axes & self.step.serial)

    def _times(self, load: Access) -> int:
        """Walks that need a load."""
        step, region = self.step, self.step.region
        numbers = {n for n, a in zip(region.all("load"), step.loads, strict=True) if a is load}
        again = walks(region, step.serial)
        times = max((again.get(number, 1) for number in numbers), default=1)
        return times * max(sum(bool(numbers & walk.made) for walk in self._walks), 1)

    def _store(self, store: Access) -> int:
        """Elements stored: each once; a value that all programs of a row hold is stored by
        each program."""
        elements = prod(self.sizes[axis] for dim in store.dims for axis in dim)
        alike = self.step.phases and not {*store.strides} & (
            self.step.along | {*(self.step.parts.axes if self.step.parts else ())}
        )
        return elements * (self.parts if alike else 1)
