"""The body of a kernel whose programs share rows: one body for each phase, and the exchanges."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fusion_advisor.region.primitives import LONG
from fusion_advisor.schedules.base import Step, power_of_two, words
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import COLS, Scope
from fusion_advisor.schedules.exchange import WAYS
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import Access, reach, traced
from fusion_advisor.tile.program import (
    Address,
    Block,
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
    tile,
)

_ACROSS = ("reduce", "scan", "taken")
"""Operations whose result hangs on other lanes."""

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
    long: frozenset[int] = frozenset()
    """Values along the row that are made of what is loaded alone, in many instructions: they are
    kept, and all else is made anew for each walk."""
    results: frozenset[str] = frozenset()
    """What the kernel leaves in memory, results and what a later kernel finishes: all else that a
    phase gives stays in registers."""
    left: dict[str, Tile] = field(default_factory=dict[str, Tile])
    """What earlier phases left in registers, by the name that it would have in memory."""
    loads: dict[int, Tile] = field(default_factory=dict[int, Tile])
    """What they loaded, as it lies in memory where that is narrow."""
    worked: dict[int, Tile] = field(default_factory=dict[int, Tile])
    """Those of `long` that are made."""
    scalars: dict[Address, Tile] = field(default_factory=dict[Address, Tile])
    """What they loaded for all lanes, by its pointer."""
    walks: int = 0
    """How often the part of the row was walked over."""


class CooperativeBody(Body):
    """Phase after phase; what follows an exchange does not run in a launch that ends with it."""

    @property
    def note(self) -> str:
        return "One program has a part of a row, and takes what the others found from them."

    @property
    def constants(self) -> tuple[Constant, ...]:
        return (*super().constants, Constant("STEP", -1, "step"))

    @property
    def tile_constants(self) -> tuple[Constant, ...]:
        parts = self.step.parts
        assert parts is not None
        peers = Constant("PEERS", power_of_two(parts.size), "power_of_two", parts.axes)
        return Constant("COLS", self.step.block), peers

    def _program(self) -> list[Statement]:
        ticket = DeviceCall("ticket", (Name("workspace_ptr"), WAITS))
        return [
            Let(("program",), self.wide(ticket)),
            Let(("row",), Name("program") // self._parts),
            Let(("part",), Name("program") % self._parts),
            *self._columns(PART * COLS),
        ]

    @property
    def _parts(self) -> Tile:
        assert self.step.parts is not None
        return self.size((self.step.parts,), "parts")

    def _results(self) -> None:
        exprs = self.region.exprs
        apart = {total: exprs[exprs[term].args[0]] for total, term in self._large.items()}
        large = {t: (expr.args[0], expr.args[1]) for t, expr in apart.items() if expr.op == "sub"}
        results = frozenset(store.name for store in self.step.stores)
        shared = _Shared(len(exprs), large, self._long(), results)
        before, first = 0, True
        places: dict[str, str] = {"row": "row", "col": "col"}
        last = self._phase(self.step.phases[-1], places, shared)
        if isinstance(last, _Rest):
            self.scope.body += last.read_ahead(self.step.ahead)
        for phase in self.step.phases:
            self.scope.body += self._phase(phase, places, shared).statements()
            if phase.parts:
                self._exchange(phase, shared, before, first=first)
                before, first = before + words(phase), False
        while len(self.scopes) > 1:
            inside = self.scopes.pop()
            *before, exchanged = self.scope.body
            assert isinstance(exchanged, If), "a launch ends behind an exchange, or goes on"
            self.scope.body = [*before, replace(exchanged, body=inside.block())]

    def _long(self) -> frozenset[int]:
        """What is long to make from what is loaded; of values that are made from each other, those
        that something else reads."""
        region = self.region
        loaded = {
            number
            for number in region.live
            if region.depends[number] & self._inner
            and not any(region.exprs[n].op in _ACROSS for n in {number, *reach(region, number)})
        }
        outside = [n for n in region.live if n not in loaded]
        read = {arg for n in outside for arg in region.exprs[n].args}
        read |= {output.value for output in region.outputs}
        found = set[int]()
        for number in sorted(loaded & read):
            made = traced([number], lambda n: region.exprs[n].args if n not in found else None)
            if any(region.exprs[n].op in LONG for n in made.passed):
                found.add(number)
        return frozenset(found)

    def _phase(self, phase: Step, places: dict[str, str], shared: _Shared) -> _Phase:
        """What writes a phase."""
        kind = _Part if phase.parts else _Rest if phase.inner == self.step.inner else _Whole
        worked = {} if kind is _Whole else dict(shared.worked)
        scope = Scope(places=places, values=worked)
        return self.beside(kind, phase, self.names, [scope], shared=shared)

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
    """What one phase loaded, by tensor, serves the next."""

    def _program(self) -> list[Statement]:
        return []

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


class _Along(_Phase):
    """A phase along the row.

    What has 16 bits in memory is kept so, and widened anew for each walk over it: while programs
    wait, their parts of the row take half the registers, and twice as many programs are resident.
    What takes many instructions to make is kept as it is.
    """

    def _load(self, number: int, access: Access) -> None:
        if not self._narrow(number, access):
            super()._load(number, access)
            return
        shared = self.shared
        self._keep(number, access)
        kept, way = shared.loads[number], shared.walks % WAYS
        name = self.names.claim(f"{self.tensors[access.name]}_wide")
        wide = DeviceCall(f"widened_{way}", (kept, WAITS)) if way else Cast(kept, "float32")
        self.scope.values[number] = self.scope.let(name, wide)

    def _keep(self, number: int, access: Access) -> None:
        """Load what is kept as it lies in memory, unless a phase has."""
        if number not in self.shared.loads:
            name = self.names.claim(self.tensors[access.name])
            self.shared.loads[number] = self.scope.let(name, self._read(access, "float32"))

    def _narrow(self, number: int, access: Access) -> bool:
        along = bool(self.region.depends[number] & self._inner) and number < self.shared.known
        wide = self.region.exprs[number].dtype == "float32"
        return along and wide and access.tensor.dtype == "bfloat16"

    def _walk(self, wanted: Iterable[int]) -> None:
        """Values of the row as a whole; what they are made from along the row is forgotten, but for
        what is long to make."""
        self.scopes.append(Scope())
        for number in sorted(self.shared.long & self._missing(wanted)):
            self._emit([number])
            if not isinstance(self.value(number), Name):
                self._assign(number, self.value(number))
            self.shared.worked[number] = self.value(number)
        self._emit(wanted)
        inside = self.scopes.pop()
        self.scope.body += inside.block()
        self.scope.values |= {
            number: value
            for number, value in inside.values.items()
            if not self.region.depends[number] & self._inner or number in self.shared.worked
        }
        self.shared.walks += 1


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

    def read_ahead(self, numbers: Collection[int]) -> Block:
        """Load what lies along the row before the phases that come first."""
        self.prepare()
        for number, access in self._access.items():
            if number in numbers and self._narrow(number, access):
                self._keep(number, access)
            elif number in numbers:
                self._load(number, access)
        return self.scope.block()


class _Whole(_Phase):
    """What the parts of all programs that share the row make together: a lane has one of them."""

    lane: ClassVar[str] = "peer"
    lanes: ClassVar[str] = "PEERS"
    length: ClassVar[str] = "parts"

    def _inline(self, number: int, value: Tile) -> bool:
        return self.region.exprs[number].op != "taken" and super()._inline(number, value)

    def _store(self, access: Access, value: Tile) -> None:
        if access.name in self.shared.results:
            self.scope.body.append(Store(self._pointer(access), value, PART.equals(0)))
        else:
            super()._store(access, value)
