"""The body of a kernel whose programs share rows: one body for each phase, and the exchanges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from fusion_advisor.region.exprs import Expr
from fusion_advisor.schedules.base import Step, words
from fusion_advisor.schedules.beyond import FILLS, Beyond, beyond
from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import Scope
from fusion_advisor.schedules.exchange import WAYS
from fusion_advisor.schedules.layout import Access, reach
from fusion_advisor.schedules.pieced_body import Ends, InPieces, Rest
from fusion_advisor.schedules.places import PLACES
from fusion_advisor.schedules.spelling import language_dtype

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
    left: dict[str, str] = field(default_factory=dict[str, str])
    """What earlier phases left in registers, by the name that it would have in memory."""
    fill: float = 0.0
    """What lanes behind the row's end are filled with."""
    loads: dict[int, str] = field(default_factory=dict[int, str])
    """What they loaded, as it lies in memory where that is narrow."""
    scalars: dict[str, str] = field(default_factory=dict[str, str])
    """What they loaded for all lanes, by its pointer."""
    both: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    """What they loaded for lanes at one place or the next, by the pointer to the first."""
    walks: int = 0
    """How often the part of the row was walked over."""
    lanes: str = ""
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

    def _program(self) -> list[str]:
        self.helpers["ticket"] = None
        parts = self._parts
        columns = self._lanes_of(self)
        if self.step.rest:
            columns += self._lanes_of(self.beside(_Second, self.step, self.names, self.scopes))
        return [
            f"program = {self.wide('ticket(workspace_ptr, STEP < 0)')}",
            f"row = program // {parts}",
            f"part = program % {parts}",
            *columns,
        ]

    def _lanes_of(self, piece: Body) -> list[str]:
        """The places of the lanes of one piece of the program's part."""
        start, ends = self._first_of_part, "end, end_mask"
        if piece is not self:
            start, ends = f"{start} + COLS", "_, _"
        if self.step.ends:
            return piece._around_vectors(start, ends)
        return piece._columns(f"{start} + ", " | WHOLE" if self.whole else "")

    @property
    def _parts(self) -> str:
        assert self.step.parts is not None
        return self.size((self.step.parts,), "parts")

    def _results(self) -> None:
        exprs = self.region.exprs
        apart = {total: exprs[exprs[term].args[0]] for total, term in self._large.items()}
        large = {t: (expr.args[0], expr.args[1]) for t, expr in apart.items() if expr.op == "sub"}
        results = frozenset(store.name for store in self.step.stores)
        lanes = ("COLS + REST" if self.step.rest else "COLS") if self.step.ends else ""
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
            self.scope.lines += body.lines()
            self.near |= body.near
            if phase.parts:
                self._load_ahead(phase, places, shared)
                self._exchange(phase, shared, before, first=first)
                before, first = before + words(phase), False
        while len(self.scopes) > 1:
            inside = self.scopes.pop()
            self.scope.lines += inside.indented()

    def _load_ahead(self, before: Step, places: dict[str, str], shared: _Shared) -> None:
        """What the phases after the last exchange load for all lanes, on its way while the program
        waits; launches that end with that exchange do without."""
        if before is not self.step.exchanges[-1]:
            return
        ahead = Scope()
        for phase in self.step.phases[self.step.phases.index(before) + 1 :]:
            body = self.beside(_Ahead, phase, self.names, [Scope(places=places)], shared=shared)
            ahead.lines += body.lines()
            self.near |= body.near
        if ahead.lines:
            number = len(self.step.exchanges) - 1
            self.scope.lines += [f"if STEP != {number}:", *ahead.indented()]

    def _phase(self, phase: Step, places: dict[str, str], shared: _Shared) -> _Phase:
        """What writes a phase."""
        kind = _Part if phase.parts else _Rest if phase.inner == self.step.inner else _Whole
        return self.beside(kind, phase, self.names, [Scope(places=places)], shared=shared)

    def _exchange(self, phase: Step, shared: _Shared, before: int, *, first: bool) -> None:
        """Leave the part's results, and go on with those of all parts, unless this is the last
        thing that the launch does."""
        number = self.step.exchanges.index(phase)
        self.helpers["publish"] = self.helpers["published"] = None
        total = sum(words(each) for each in self.step.exchanges)
        rank = f"row * {total} + {before}" if total > 1 else "row"
        pairs = [
            [store.name for store in phase.stores[2 * n : 2 * n + 2]] for n in range(words(phase))
        ]
        parts = self._parts
        line = f"words_{number}" if number else "words"
        start = f"({rank})" if total > 1 else rank
        self.scope.lines += [
            f"{line} = workspace_ptr + {HEAD} + {start}.to(tl.int64) * {parts}",
            f"if STEP <= {number}:",
        ]
        for n, pair in enumerate(pairs):
            given = [shared.left[name] for name in (pair[0], pair[-1])]
            where = f"{line} + part" if not n else f"{line} + {n} * {parts} + part"
            self.scope.lines.append(f"    publish({where}, {', '.join(given)}, STEP < 0)")
        self.scope.lines.append(f"if STEP != {number}:")
        self.scopes.append(Scope())
        if first:
            self.scope.lines += ["peer = tl.arange(0, PEERS)", f"peer_mask = peer < {parts}"]
        for n, pair in enumerate(pairs):
            for name in pair:
                shared.left[name] = self.names.claim(f"{self.tensors[name]}")
            found = [shared.left[name] for name in pair] + ["_"] * (2 - len(pair))
            where = f"{line} + peer" if not n else f"{line} + {n} * {parts} + peer"
            self.scope.lines.append(f"{', '.join(found)} = published({where}, peer_mask, STEP < 0)")


@dataclass
class _Phase(Body):
    """A phase: what goes through memory in a kernel of its own stays in registers here."""

    shared: _Shared = field(default_factory=lambda: _Shared(0, {}))
    joins: ClassVar[bool] = False
    """What one phase loaded, by tensor, serves the next."""
    number: ClassVar[str] = "part"
    """Which part of the row lanes work on."""

    def _program(self) -> list[str]:
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

    def _extent(self, expr: Expr) -> str:
        if expr.op != "taken" or not self.shared.lanes:
            return super()._extent(expr)
        self.helpers["taken_by"] = None
        cols = self._argument(tuple(expr.axes), "cols")
        taken = f"taken_by(row * {cols}, {cols}, {self.number}, {self.shared.lanes}, ENDS)"
        if self.number == "part":  # what a part without any would divide by
            taken = f"tl.maximum({taken}, 1)"
        return f"{taken}.to({language_dtype(expr.dtype)})"

    def _addressed_by(self, number: int) -> tuple[int, ...]:
        return () if self._kept(number) else super()._addressed_by(number)

    def _kept(self, number: int) -> str:
        """What an earlier phase loaded, or left, for a load of this one."""
        return self.shared.left.get(self._access[number].name) or self.shared.loads.get(number, "")

    def _load(self, number: int, access: Access) -> None:
        kept = self._kept(number)
        if kept:
            self.scope.texts[number] = kept
            return
        pointer = "" if self.region.depends[number] & self._inner else self._pointer(access)
        if pointer in self.shared.scalars:
            self.scope.texts[number] = self.shared.scalars[pointer]
            return
        super()._load(number, access)
        if pointer:
            self.shared.scalars[pointer] = self.text(number)
        if number < self.shared.known:
            self.shared.loads[number] = self.text(number)

    def _store(self, access: Access, text: str) -> None:
        if access.name in self.shared.results:
            super()._store(access, text)
        else:
            self.shared.left[access.name] = text


class _Ahead(_Phase):
    """Of a later phase, the loads that all lanes share and that wait for nothing."""

    def _results(self) -> None:
        for number in sorted(self._access, key=self._rank.__getitem__):
            access = self._access[number]
            own = number < self.shared.known and not self._kept(number)
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
            self.helpers["load_both"] = None
            line = f"{', '.join(names)} = load_both({first}, {following}, NEAR)"
            self.scope.lines.append(line)
            self.shared.both[first] = names


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
            shared.loads[number] = self.names.claim(self.tensors[access.name])
            self.scope.lines.append(f"{shared.loads[number]} = {self._read(access, 'float32')}")
        name = self.names.claim(f"{self.tensors[access.name]}_wide")
        way = shared.walks % WAYS
        text = f"{shared.loads[number]}.to(tl.float32)"
        if way:
            self.helpers[f"widened_{way}"] = None
            text = f"widened_{way}({shared.loads[number]}, STEP < 0)"
        self.scope.lines.append(f"{name} = {text}")
        self.scope.texts[number] = name

    def _read(self, access: Access, held: str) -> str:
        if not self._by_place(access):
            return super()._read(access, held)
        each, place = self._pointer_at(access, PLACES[0]), self._pointer_at(access, PLACES[1])
        if place not in self.shared.both:
            return super()._read(access, held)
        self.helpers["by_place"] = None
        found = ", ".join(self.shared.both[place])
        return f"by_place({each}, {found}, place == first, {self.mask(access)}, NEAR)"

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
        self.scope.lines += inside.block()
        self.scope.texts |= {
            number: text
            for number, text in inside.texts.items()
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

    def _inline(self, number: int, text: str) -> bool:
        return self.region.exprs[number].op != "taken" and super()._inline(number, text)

    def _filling(self) -> Beyond:
        return Beyond()  # words that are not there are 0

    def _store(self, access: Access, text: str) -> None:
        if access.name in self.shared.results:
            self.scope.lines.append(f"tl.store({self._pointer(access)}, {text}, mask=part == 0)")
        else:
            super()._store(access, text)
