"""The body of a kernel whose programs share rows: one body for each phase, and the exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fusion_advisor.region.exprs import Expr
from fusion_advisor.schedules.base import Step, words
from fusion_advisor.schedules.beyond import FILLS, Beyond, beyond
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import COLS, REST, Scope
from fusion_advisor.schedules.exchange import WAYS
from fusion_advisor.schedules.layout import Access, reach
from fusion_advisor.schedules.pieced_body import Ends, InPieces, Rest
from fusion_advisor.schedules.places import PLACES
from fusion_advisor.tile.program import (
    Address,
    Cast,
    DeviceCall,
    Do,
    If,
    Lanes,
    Let,
    Name,
    Statement,
    Store,
    Tile,
    most,
    tile,
)

STEP, PART, PEER = map(Name, ("STEP", "part", "peer"))
WAITS = STEP < 0
"""Does the launch hold all phases, so that programs wait for each other?"""

HEAD = 16
"""Words of the workspace before the first that is exchanged: the ticket has 128 bytes, a line of
the cache, for itself."""


@dataclass
class _Shared:
    """What the phases of one kernel know of each other."""

    known: int
    """Expressions below this number are those of the whole region in every phase."""
    large: Mapping[int, tuple[int, int]]
    """Of those, sums that are not less than one: of exp(value - maximum), each with these two."""
    results: frozenset[str] = frozenset()
    """What the kernel leaves in memory, results and what a later kernel finishes: all else that a
    phase gives stays in registers."""
    left: dict[str, Tile] = field(default_factory=dict[str, Tile])
    """What earlier phases left in registers, by the name that it would have in memory."""
    fill: float = 0.0
    """What lanes behind the row's end are filled with."""
    loads: dict[int, Tile] = field(default_factory=dict[int, Tile])
    """What they loaded, as it lies in memory where that is narrow."""
    scalars: dict[Address, Tile] = field(default_factory=dict[Address, Tile])
    """What they loaded for all lanes, by its pointer."""
    both: dict[Address, tuple[Tile, Tile]] = field(default_factory=dict[Address, tuple[Tile, Tile]])
    """What they loaded for lanes at one place or the next, by the pointer to the first."""
    walks: int = 0
    """How often the part of the row was walked over."""
    lanes: Tile | None = None
    """Of a whole part, where rows begin anywhere and parts have as many of whole vectors."""


class CooperativeBody(Body):
    """Phase after phase; what follows an exchange does not run in a launch that ends with it."""

    def prepare(self) -> None:
        super().prepare()
        partial = [phase for phase in self.step.phases if phase.inner == self.step.inner]
        self._fill = _beyond(partial[0], self._inner).fill
        found = [_beyond(phase, self._inner, (self._fill,)) for phase in partial]
        masked = any(
            set(phase.region.all("reduce")) - each.neutral
            for phase, each in zip(partial, found, strict=True)
        )
        self.whole = masked and not self.step.ends

    def _program(self) -> list[Statement]:
        parts = self._parts
        columns = self._lanes_of(self)
        if self.step.rest:
            columns += self._lanes_of(self.beside(_Second, self.step, self.names, self.scopes))
        ticket = DeviceCall("ticket", (Name("workspace_ptr"), WAITS))
        return [
            Let(("program",), self.wide(ticket)),
            Let(("row",), Name("program") // parts),
            Let(("part",), Name("program") % parts),
            *columns,
        ]

    def _lanes_of(self, piece: Body) -> list[Statement]:
        """The places of the lanes of one piece of the program's part."""
        start, ends = self._first_of_part, ("end", "end_mask")
        if piece is not self:
            start, ends = start + COLS, ("_", "_")
        if self.step.ends:
            return piece._around_vectors(start, ends)
        return piece._columns(start, always=self.whole)

    @property
    def _parts(self) -> Tile:
        assert self.step.parts is not None
        return self.size((self.step.parts,), "parts")

    def _results(self) -> None:
        exprs = self.region.exprs
        apart = {total: exprs[exprs[term].args[0]] for total, term in self._large.items()}
        large = {t: (expr.args[0], expr.args[1]) for t, expr in apart.items() if expr.op == "sub"}
        results = frozenset(store.name for store in self.step.stores)
        lanes = COLS + REST if self.step.rest else COLS
        lanes = lanes if self.step.ends else None
        shared = _Shared(len(exprs), large, results, fill=self._fill, lanes=lanes)
        second, ends = replace(shared, loads={}), replace(shared, loads={})
        before, first = 0, True
        places: dict[str, str] = {"row": "row", "col": "col"}
        for phase in self.step.phases:
            body = self._phase(phase, places, shared)
            if isinstance(body, _Along):
                others = [body.other(_Second, shared=second)] if self.step.rest else []
                others += [body.other(_Ends, shared=ends)] if self.step.ends else []
                body.others = tuple(others)
            self.scope.body += body.statements()
            self.near |= body.near
            if phase.parts:
                self._load_ahead(phase, places, shared)
                self._exchange(phase, shared, before, first=first)
                before, first = before + words(phase), False
        while len(self.scopes) > 1:
            inside = self.scopes.pop()
            *before, exchanged = self.scope.body
            assert isinstance(exchanged, If), "a launch ends behind an exchange, or goes on"
            self.scope.body = [*before, replace(exchanged, body=inside.block())]

    def _load_ahead(self, before: Step, places: dict[str, str], shared: _Shared) -> None:
        """What the phases after the last exchange load for all lanes, on its way while the program
        waits; launches that end with that exchange do without."""
        if before is not self.step.exchanges[-1]:
            return
        ahead = Scope()
        for phase in self.step.phases[self.step.phases.index(before) + 1 :]:
            body = self.beside(_Ahead, phase, self.names, [Scope(places=places)], shared=shared)
            body.statements()
            (made,) = body.scopes
            self.scope.body += made.head  # places, which later phases know, too
            ahead.body += made.body
            self.near |= body.near
        if ahead.body:
            number = len(self.step.exchanges) - 1
            self.scope.body.append(If(STEP.differs(number), ahead.block()))

    def _phase(self, phase: Step, places: dict[str, str], shared: _Shared) -> _Phase:
        """What writes a phase."""
        kind = _Part if phase.parts else _Rest if phase.inner == self.step.inner else _Whole
        return self.beside(kind, phase, self.names, [Scope(places=places)], shared=shared)

    def _exchange(self, phase: Step, shared: _Shared, before: int, *, first: bool) -> None:
        """Leave the part's results, and go on with those of all parts, unless this is the last
        thing that the launch does."""
        number = self.step.exchanges.index(phase)
        total = sum(words(each) for each in self.step.exchanges)
        rank = Name("row") * total + before if total > 1 else Name("row")
        pairs = [
            [store.name for store in phase.stores[2 * n : 2 * n + 2]] for n in range(words(phase))
        ]
        parts = self._parts
        line = f"words_{number}" if number else "words"
        start = Cast(rank, "int64") * parts
        self.scope.let(line, Address("workspace_ptr", (tile(HEAD), start)))

        def word(n: int, place: Tile) -> Address:
            return Address(line, (tile(n) * parts, place) if n else (place,))

        given = [tuple(shared.left[name] for name in (pair[0], pair[-1])) for pair in pairs]
        left = (
            Do(DeviceCall("publish", (word(n, PART), *two, WAITS))) for n, two in enumerate(given)
        )
        self.scope.body.append(If(number >= STEP, tuple(left)))
        self.scope.body.append(If(STEP.differs(number), ()))  # whose body is what follows
        self.scopes.append(Scope())
        if first:
            self.scope.let("peer", Lanes(Name("PEERS")))
            self.scope.let("peer_mask", parts > PEER)
        for n, pair in enumerate(pairs):
            found = [self.names.claim(self.tensors[name]) for name in pair]
            for name, text in zip(pair, found, strict=True):
                shared.left[name] = Name(text)
            found += ["_"] * (2 - len(pair))
            call = DeviceCall("published", (word(n, PEER), Name("peer_mask"), WAITS))
            self.scope.body.append(Let(tuple(found), call))


@dataclass
class _Phase(Body):
    """A phase: what goes through memory in a kernel of its own stays in registers here."""

    shared: _Shared = field(default_factory=lambda: _Shared(0, {}))
    joins: ClassVar[bool] = False
    """What one phase loaded, by tensor, serves the next."""
    number: ClassVar[str] = "part"
    """Which part of the row lanes work on."""

    def _program(self) -> list[Statement]:
        return []

    def _filling(self) -> Beyond:
        return _beyond(self.step, self._inner, (self.shared.fill,))

    def _at_least_one(self, sums: Mapping[int, int]) -> Mapping[int, int]:
        left = {
            int(access.name.rpartition("_")[2]): number
            for number, access in self._access.items()
            if access.name.startswith("ws_row")
        }
        found = dict(sums)
        for total, (value, peak) in self.shared.large.items():
            if total in left:
                apart = ("sub", (value, left.get(peak, -1)))
                terms = (n for n in self.region.all("exp") if self._made_as(n) == apart)
                found[left[total]] = next(terms, -1)
        return found

    def _made_as(self, power: int) -> tuple[str, tuple[int, ...]]:
        """What a power's exponent is."""
        expr = self.region.exprs[self.region.exprs[power].args[0]]
        return expr.op, expr.args

    def _of_row(self, number: int) -> bool:
        return False  # a slow one is a call, and what is kept of the row has to make room for it

    def _extent(self, expr: Expr) -> Tile:
        if expr.op != "taken" or self.shared.lanes is None:
            return super()._extent(expr)
        cols = self._argument(tuple(expr.axes), "cols")
        given = (Name("row") * cols, cols, Name(self.number), self.shared.lanes, Name("ENDS"))
        taken: Tile = DeviceCall("taken_by", given)
        if self.number == "part":  # what a part without any would divide by
            taken = most(taken, 1)
        return Cast(taken, expr.dtype)

    def _addressed_by(self, number: int) -> tuple[int, ...]:
        kept = self._kept(number) is not None
        return () if kept else super()._addressed_by(number)

    def _kept(self, number: int) -> Tile | None:
        """What an earlier phase loaded, or left, for a load of this one; None without."""
        left = self.shared.left.get(self._access[number].name)
        return self.shared.loads.get(number) if left is None else left

    def _load(self, number: int, access: Access) -> None:
        kept = self._kept(number)
        if kept is not None:
            self.scope.values[number] = kept
            return
        along = self.region.depends[number] & self._inner
        pointer = None if along else self._pointer(access)
        if pointer in self.shared.scalars:
            self.scope.values[number] = self.shared.scalars[pointer]
            return
        super()._load(number, access)
        if pointer is not None:
            self.shared.scalars[pointer] = self.value(number)
        if number < self.shared.known:
            self.shared.loads[number] = self.value(number)

    def _store(self, access: Access, value: Tile) -> None:
        if access.name in self.shared.results:
            super()._store(access, value)
        else:
            self.shared.left[access.name] = value


class _Ahead(_Phase):
    """Of a later phase, the loads that all lanes share and that wait for nothing."""

    def _results(self) -> None:
        for number in sorted(self._access, key=self._rank.__getitem__):
            access = self._access[number]
            own = number < self.shared.known and self._kept(number) is None
            if not own or access.guard is not None or access.pulled:
                continue
            if self._by_place(access):
                self._load_both(access)
            elif not self.region.depends[number] & self._inner:
                self._load(number, access)

    def _load_both(self, access: Access) -> None:
        """What lanes at one place or the next are given."""
        first, following = (self._pointer_at(access, place) for place in PLACES[1:])
        if first not in self.shared.both:
            name = self.tensors[access.name]
            names = self.names.claim(f"{name}_first"), self.names.claim(f"{name}_following")
            call = DeviceCall("load_both", (first, following, Name("NEAR")))
            self.scope.body.append(Let(names, call))
            self.shared.both[first] = Name(names[0]), Name(names[1])


class _Kept(_Phase):
    """A piece of a phase along the row.

    What has 16 bits in memory is kept so, and widened anew for each walk over it: while programs
    wait, their parts of the row take half the registers, and twice as many programs are resident.
    """

    def _load(self, number: int, access: Access) -> None:
        if not self._narrow(number, access):
            super()._load(number, access)
            return
        shared = self.shared
        if number not in shared.loads:
            if access.name in self.step.copied:
                self._await_copies()
            name = self.names.claim(self.tensors[access.name])
            shared.loads[number] = self.scope.let(name, self._read(access, "float32"))
        kept, way = shared.loads[number], shared.walks % WAYS
        name = self.names.claim(f"{self.tensors[access.name]}_wide")
        wide = DeviceCall(f"widened_{way}", (kept, WAITS)) if way else Cast(kept, "float32")
        self.scope.values[number] = self.scope.let(name, wide)

    def _read(self, access: Access, held: str) -> Tile:
        if not self._by_place(access):
            return super()._read(access, held)
        each, place, _ = self._of_places(access)
        if place not in self.shared.both:
            return super()._read(access, held)
        given = (*self.shared.both[place], *self._chosen(self.mask(access)))
        return DeviceCall("by_place", (each, *given))

    def _narrow(self, number: int, access: Access) -> bool:
        along = bool(self.region.depends[number] & self._inner) and number < self.shared.known
        wide = self.region.exprs[number].dtype == "float32"
        return along and wide and access.tensor.dtype == "bfloat16"


class _Along(InPieces, _Kept):
    """A phase along the row."""

    def _alike(self) -> Iterable[tuple[Body, ...]]:
        """Both pieces of a part have as many lanes."""
        together = 2 if self.step.rest else 1
        yield tuple(self._pieces[:together])
        yield from ((body,) for body in self._pieces[together:])

    def _walk(self, wanted: Iterable[int]) -> None:
        """Values of the row as a whole; what they are made from along the row is forgotten."""
        self.scopes.append(Scope())
        self._emit(wanted)
        inside = self.scopes.pop()
        self.scope.body += inside.block()
        self.scope.values |= {
            number: value
            for number, value in inside.values.items()
            if not self.region.depends[number] & self._inner
        }
        for body in (self, *self.others):
            if isinstance(body, _Phase):
                body.shared.walks += 1


class _Second(Rest, _Kept):
    """The second piece of a part of a row, in a phase along it."""


class _Ends(Ends, _Phase):
    """What lies around the whole vectors of a row, in a phase along it."""


def _beyond(phase: Step, inner: frozenset[int], fills: Iterable[float] = FILLS) -> Beyond:
    """What lanes behind a row's end hold in a phase."""
    accesses = dict(zip(phase.region.all("load"), phase.loads, strict=True))
    return beyond(phase.region, accesses, inner, fills)


class _Part(_Along):
    """What the program's own part gives: reduction after reduction, those that need no other one
    first."""

    def _results(self) -> None:
        depth: dict[int, int] = {}
        for number in sorted(self.region.all("reduce")):
            needed = reach(self.region, number) & depth.keys()
            depth[number] = max((depth[n] + 1 for n in needed), default=0)
        for level in sorted(set(depth.values())):
            self._walk([number for number, at in depth.items() if at == level])
        super()._results()


class _Rest(_Along):
    """The results along the row."""


class _Whole(_Phase):
    """What the parts of all programs that share the row make together: a lane has one of them."""

    lane: ClassVar[str] = "peer"
    lanes: ClassVar[str] = "PEERS"
    length: ClassVar[str] = "parts"
    number: ClassVar[str] = "peer"

    def _inline(self, number: int, value: Tile) -> bool:
        return self.region.exprs[number].op != "taken" and super()._inline(number, value)

    def _filling(self) -> Beyond:
        return Beyond()  # words that are not there are 0

    def _store(self, access: Access, value: Tile) -> None:
        if access.name in self.shared.results:
            self.scope.body.append(Store(self._pointer(access), value, PART.equals(0)))
        else:
            super()._store(access, value)
