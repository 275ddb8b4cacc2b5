"""Rules that every tile program keeps, checked before it is spelled.

- A name is an argument or begins once on each path, before it is used.
- Variables are begun before they are updated, and nothing else is.
- Where the address of a load or a store differs from lane to lane, its mask does, too: along every
  constant that lanes count to, but those of which each lane has an element.
- What a reduction combines along such lanes is neutral in those that have no element.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fusion_advisor.region.primitives import LIMITS, MONOIDS
from fusion_advisor.tile.program import (
    Across,
    Address,
    Barrier,
    Begin,
    Binary,
    Block,
    Broadcast,
    Cast,
    Combine,
    DeviceCall,
    Do,
    Elementwise,
    For,
    Full,
    If,
    Lanes,
    Let,
    Literal,
    Load,
    Multiple,
    Name,
    Node,
    Reduce,
    Settled,
    Statement,
    Store,
    Tile,
    TileFunction,
    Update,
    parts,
    walk,
)

_UNIFORM = {"rows_of_plane": (0,), "rows_of_tile": (0,)}
"""Results of device functions that are one number for all lanes, by their place."""
_FIRST = "ROWS"
"""Constant that lanes along the first of a tile's two dimensions count to."""
_COUNTS = frozenset(("ROWS", "COLS", "REST", "ENDS", "PEERS", "BLOCK"))
"""Constants that lanes count to, wherever a device function takes them."""


_NEUTRAL = {
    name: {monoid.neutral, *(monoid.neutral_of(dtype) for dtype in LIMITS)}
    for name, monoid in MONOIDS.items()
}
"""Each monoid's neutral element as it is written, in any dtype."""


class Malformed(ValueError):
    """A tile program breaks a rule; the text says which, and where."""


_Lanes = frozenset[str]
"""Constants that the lanes count to along which a value differs."""


@dataclass
class _Known:
    """Names that are known at a place, with the lanes along which each differs."""

    names: dict[str, _Lanes]
    variables: set[str] = field(default_factory=set[str])
    begun: set[str] = field(default_factory=set[str])
    """Every name that began anywhere."""
    under: dict[Tile, dict[str, _Lanes]] = field(default_factory=dict[Tile, dict[str, _Lanes]])
    """Names that began where a condition held, which is the same wherever it is asked."""


def verify(function: TileFunction, whole: Collection[str] = ()) -> None:
    """Raises Malformed where a function breaks a rule. `whole` are the constants of which each lane
    has an element."""
    known = _Known(dict.fromkeys(function.names, frozenset[str]()))
    try:
        _Verifier(frozenset(function.names), frozenset(whole)).block(function.body, known)
    except Malformed as fault:
        raise Malformed(f"{function.name}: {fault}") from fault


@dataclass
class _Verifier:
    arguments: frozenset[str]
    whole: frozenset[str]
    spreads: dict[str, _Lanes] = field(default_factory=dict[str, _Lanes])
    """Lanes along which each name differs, wherever it began."""
    given: dict[str, list[Tile | None]] = field(default_factory=dict[str, "list[Tile | None]"])
    """Values that each name has been given so far; None for one result of several."""

    def block(self, block: Block, known: _Known) -> None:
        for statement in block:
            self.statement(statement, known)

    def statement(self, statement: Statement, known: _Known) -> None:
        match statement:
            case Let(names, value):
                spread = self.value(value, known)
                uniform = _UNIFORM.get(value.function, ()) if isinstance(value, DeviceCall) else ()
                for place, name in enumerate(names):
                    self.begin(name, frozenset() if place in uniform else spread, known)
                    self.given.setdefault(name, []).append(value if len(names) == 1 else None)
            case Multiple(name, divisor) | Settled(name, divisor):
                self.use(name, known)
                self.use(divisor, known)
                if name not in self.arguments:
                    raise Malformed(f"{name}: told to the compiler, and is no argument")
            case Begin(name, value):
                self.begin(name, self.value(value, known), known)
                self.given.setdefault(name, []).append(value)
                known.variables.add(name)
            case Update(name, value):
                if name not in known.variables:
                    raise Malformed(f"{name}: updated, and was not begun")
                known.names[name] |= self.value(value, known)
                self.spreads[name] = known.names[name] | self.spreads[name]
                self.given[name].append(value)
            case Store(address, value, mask):
                self.value(value, known)
                self.guarded("store", address, mask, known)
            case Do(call):
                self.value(call, known)
            case Barrier():
                pass
            case For(name, start, stop, step, body):
                for bound in (start, stop, step):
                    if self.value(bound, known):
                        raise Malformed(f"{name}: bounds of a loop differ from lane to lane")
                inside = self.inner(known)
                self.begin(name, frozenset(), inside)
                self.block(body, inside)
            case If(condition, body, otherwise):
                if self.value(condition, known):
                    raise Malformed("a branch hangs on what differs from lane to lane")
                self.branches(condition, body, otherwise, known)
            case _:
                raise Malformed(f"{type(statement).__name__} is no statement")

    def branches(self, condition: Tile, body: Block, otherwise: Block, known: _Known) -> None:
        """Both sides of a branch; what both begin is known behind it, and what one begins where the
        condition, if it hangs on arguments alone, is asked again."""
        sides: list[_Known] = []
        fixed = self.arguments.issuperset(_names([condition]))
        for side in (body, otherwise):
            inside = self.inner(known)
            if side is body and fixed:
                inside.names |= known.under.get(condition, {})
            self.block(side, inside)
            sides.append(inside)
        if fixed:
            known.under[condition] = sides[0].names
        one, other = (side.names for side in sides)
        for name in one.keys() & other.keys() - known.names.keys():
            known.names[name] = one[name] | other[name]
        known.begun |= sides[0].begun | sides[1].begun

    @staticmethod
    def inner(known: _Known) -> _Known:
        return _Known(dict(known.names), known.variables, set(known.begun), dict(known.under))

    def begin(self, name: str, spread: _Lanes, known: _Known) -> None:
        if name == "_":
            return
        if name in known.begun or name in self.arguments:
            raise Malformed(f"{name}: begins twice")
        known.begun.add(name)
        known.names[name] = spread
        self.spreads[name] = spread | self.spreads.get(name, frozenset())

    def use(self, name: str, known: _Known) -> _Lanes:
        if name not in known.names:
            raise Malformed(f"{name}: used before it begins")
        return known.names[name]

    def value(self, value: Tile, known: _Known) -> _Lanes:
        """Lanes along which a value differs; what it is made of is checked."""
        match value:
            case Name(name):
                return self.use(name, known)
            case Lanes(count):
                self.value(count, known)
                return frozenset(_names([count]))
            case Load(address, mask):
                self.guarded("load", address, mask, known)
            case Address(base):
                self.use(base, known)
            case _:
                pass
        found = frozenset[str]()
        for part in parts(value):
            assert isinstance(part, Tile)
            found |= self.value(part, known)
        if isinstance(value, Reduce):
            left = self.left(value, found)
            self.filled(value, found - left - self.whole)
            return left
        return found | self.counted(value) if isinstance(value, DeviceCall) else found

    def filled(self, reduction: Reduce, open_: _Lanes) -> None:
        """Demand neutral elements of a reduction along open lanes, where these have no element."""
        if open_ and not self.neutral(reduction.value, reduction.monoid, open_, frozenset()):
            along = ", ".join(sorted(open_))
            raise Malformed(f"{reduction.monoid} along {along}: not neutral where lanes are empty")

    def neutral(self, value: Tile | None, monoid: str, open_: _Lanes, seen: frozenset[str]) -> bool:
        """Whether a value is seen to be a monoid's neutral element where open lanes have no
        element. A variable, once among those `seen`, is what it has been given otherwise."""

        def neutral(*values: Tile | None) -> bool:
            return all(self.neutral(each, monoid, open_, seen) for each in values)

        match value:
            case Literal(text):
                return text in _NEUTRAL[monoid]
            case Name(name):
                given = self.given.get(name, (None,))
                return name in seen or all(
                    self.neutral(each, monoid, open_, seen | {name}) for each in given
                )
            case Elementwise("where", (condition, this, other)):
                return neutral(other) and (self.spread(condition) >= open_ or neutral(this))
            case Load(_, mask, other):
                return mask is not None and self.spread(mask) >= open_ and neutral(other)
            case Full(_, inside) | Broadcast(inside) | Across(inside) | Cast(inside):
                return neutral(inside)
            case Combine(_, one, two) | Binary("+", one, two):
                return neutral(one, two)
            case Binary("*", one, two) if monoid == "sum":
                return neutral(one) or neutral(two)
            case Binary("-", one, two) if monoid == "sum":
                return self.stands_in(two, one, open_)
            case Elementwise("cdiv", (Binary("-", _, lanes), every)) if monoid == "sum":
                counted = lanes.value if isinstance(lanes, Across) else lanes
                return counted == Lanes(every)  # how many elements a lane has
            case _:
                return False

    def stands_in(self, one: Tile, value: Tile, open_: _Lanes) -> bool:
        """Whether a value is another one where open lanes have no element."""
        if isinstance(value, Name):
            given = self.given.get(value.id, [None])
            return all(each is not None and self.stands_in(one, each, open_) for each in given)
        match value:
            case Elementwise("where", (condition, _, other)):
                return other == one and self.spread(condition) >= open_
            case _:
                return False

    def spread(self, value: Tile) -> _Lanes:
        """Constants that lanes count to along which a value differs."""
        counted = _names(node for node in walk([value]) if isinstance(node, Lanes))
        return frozenset(counted).union(*(self.spreads.get(n, ()) for n in _names([value])))

    @staticmethod
    def left(reduction: Reduce, lanes: _Lanes) -> _Lanes:
        """Constants along which a reduction's result differs, of those of what it combines."""
        if reduction.axis == 1:
            return lanes & {_FIRST}
        return lanes - {_FIRST} if reduction.axis == 0 and _FIRST in lanes else frozenset()

    @staticmethod
    def counted(call: DeviceCall) -> _Lanes:
        """Constants that lanes of a device function's results count to: those that it is given."""
        return frozenset(name for name in _names(call.args) if name in _COUNTS)

    def guarded(self, what: str, address: Tile, mask: Tile | None, known: _Known) -> None:
        """Lanes that have no element must be masked."""
        asked = self.value(address, known) - self.whole
        held = frozenset[str]() if mask is None else self.value(mask, known)
        if open_ := sorted(asked - held):
            where = address.base if isinstance(address, Address) else "an address"
            raise Malformed(f"{what} of {where}: no mask along {', '.join(open_)}")


def _names(nodes: Iterable[Node]) -> list[str]:
    return [node.id for node in walk(nodes) if isinstance(node, Name)]
