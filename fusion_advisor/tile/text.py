"""Text of a tile program, for people and for golden tests; printers of languages extend it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    ProgramId,
    Reduce,
    Scan,
    Settled,
    Statement,
    Store,
    Tile,
    TileFunction,
    Unary,
    Update,
)

SIGNS = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
"""Primitives that have a sign between two operands."""

BINDS = {
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">="), 1),
    "|": 2, "^": 3, "&": 4, "<<": 5, ">>": 5, "+": 6, "-": 6, "*": 7, "/": 7, "//": 7, "%": 7,
}  # fmt: skip
"""How closely a sign binds its operands, as in Python."""
_UNARY, _ATOM = 8, 9


class Text:
    """Spells programs; a printer of a language overrides what it spells otherwise."""

    def function(self, function: TileFunction) -> str:
        """Text of a function."""
        given = ", ".join(function.arguments) + "; " + ", ".join(function.constants)
        note = [f"    # {line}" for line in function.note.splitlines()]
        return "\n".join([f"{function.name}({given}):", *note, *self._inside(function.body)])

    def block(self, statements: Block) -> list[str]:
        """Lines of some statements."""
        return [line for statement in statements for line in self.lines(statement)]

    def lines(self, statement: Statement) -> list[str]:
        """Lines of one statement."""
        match statement:
            case Let(names, value):
                return [f"{', '.join(names)} = {self.whole(value)}"]
            case Multiple(name, divisor, note):
                return [f"{name} = {name} // {divisor} * {divisor}  # {note}"]
            case Settled(name, constant, note):
                return [f"{name} = {constant} if {constant} else {name}  # {note}"]
            case Begin(name, value):
                return [f"{name} := {self.whole(value)}"]
            case Update(name, value):
                return [f"{name} <- {self.whole(value)}"]
            case Store(address, value, mask):
                held = f" where {self.whole(mask)}" if mask else ""
                return [f"store {self.whole(address)} = {self.whole(value)}{held}"]
            case Do(call):
                return [self.whole(call)]
            case Barrier():
                return ["barrier"]
            case For():
                return self.loop(statement)
            case If(condition, body, otherwise):
                return self.branch("if", condition, body, otherwise)
            case _:
                raise TypeError(f"{type(statement).__name__} is no statement")

    def loop(self, loop: For) -> list[str]:
        """Lines of a loop."""
        bounds = self.listed((loop.start, loop.stop, loop.step))
        how = ", unrolled" if loop.unrolled else ""
        how += f", {loop.stages} stages" if loop.stages > 1 else ""
        return [f"for {loop.name} in {bounds}{how}:", *self._inside(loop.body)]

    def branch(self, word: str, condition: Tile, body: Block, otherwise: Block) -> list[str]:
        """Lines of a branch."""
        found = [f"{word} {self.whole(condition)}:", *self._inside(body)]
        match otherwise:
            case ():
                return found
            case (If(other, inner, rest),):
                return [*found, *self.branch("elif", other, inner, rest)]
            case _:
                return [*found, "else:", *self._inside(otherwise)]

    def _inside(self, body: Block) -> list[str]:
        return [f"    {line}" for line in self.block(body)]

    # -- values --------------------------------------------------------------------------------

    def whole(self, value: Tile) -> str:
        """Text of a value that stands alone, or between commas."""
        return self.spelled(value)[0]

    def listed(self, values: Iterable[Tile]) -> str:
        """Text of some values between commas."""
        return ", ".join(map(self.whole, values))

    def within(self, value: Tile, binds: int = _ATOM) -> str:
        """Text of an operand of what binds so closely."""
        text, own = self.spelled(value)
        return text if own >= binds else f"({text})"

    def spelled(self, value: Tile) -> tuple[str, int]:
        """Text of a value, and how closely its outermost sign binds."""
        match value:
            case Name(text):
                return text, _ATOM
            case Literal(text):
                return self.number(text)
            case Binary(sign, left, right):
                return self.signed(sign, left, right)
            case Unary(sign, operand):
                return f"{sign}{self.within(operand, _UNARY)}", _UNARY
            case Elementwise(op, (left, right), "" | "integer" | "double") if op in SIGNS:
                return self.signed(SIGNS[op], left, right)
            case Elementwise("neg" | "not" as op, (operand,)):
                return self.spelled(Unary("-" if op == "neg" else "~", operand))
            case _:
                return self.other(value), _ATOM

    def signed(self, sign: str, left: Tile, right: Tile) -> tuple[str, int]:
        """Text of a sign between two operands; comparisons are not chained."""
        binds = BINDS[sign]
        before = self.within(left, binds + (binds == 1))
        return f"{before} {sign} {self.within(right, binds + 1)}", binds

    def number(self, text: str) -> tuple[str, int]:
        """Text of a constant."""
        return text, _UNARY if text.startswith("-") else _ATOM

    def other(self, value: Tile) -> str:
        """Text of a value that has no sign of its own."""
        match value:
            case Elementwise(op, args, way):
                return f"{op}{'.' if way else ''}{way}({self.listed(args)})"
            case DeviceCall(function, args):
                return f"{function}({self.listed(args)})"
            case Cast(value, dtype):
                return f"{dtype}({self.whole(value)})"
            case Lanes(count):
                return f"lanes({self.whole(count)})"
            case ProgramId(axis, every):
                return f"{'programs' if every else 'program'}({axis})"
            case Across(value, axis):
                return f"{self.within(value)}{'[None, :]' if axis == 0 else '[:, None]'}"
            case Full(shape, value, dtype):
                return f"{dtype}({self.whole(value)} in {self.shape(shape)})"
            case Broadcast(value, shape):
                return f"spread({self.whole(value)}, {self.shape(shape)})"
            case Address():
                return self.address(value)
            case Load(address, mask, other, passing):
                held = f" where {self.whole(mask)}" if mask else ""
                held += f" else {self.whole(other)}" if other else ""
                return f"load({self.whole(address)}{held}{', passing' if passing else ''})"
            case Reduce(monoid, value, axis, kept, place):
                what = self.listed([value, *([place] if place else [])])
                along = "all" if axis is None else f"axis {axis}"
                return f"{monoid}({what} over {along}{', kept' if kept else ''})"
            case Scan(monoid, value, axis, reverse):
                back = ", backwards" if reverse else ""
                return f"scan({monoid}, {self.whole(value)} over axis {axis}{back})"
            case Combine(monoid, left, right):
                return f"{monoid}({self.listed((left, right))})"
            case _:
                raise TypeError(f"{type(value).__name__} is no value")

    def address(self, address: Address) -> str:
        """Text of where elements are."""
        shape = f" in {self.shape(address.shape)}" if address.shape else ""
        return f"{address.base}[{self.added(address.terms)}{shape}]"

    def added(self, terms: Iterable[Tile]) -> str:
        """Text of some terms, added one after the other."""
        return " + ".join(self.within(term, BINDS["+"] + 1) for term in terms)

    def shape(self, shape: Sequence[Tile]) -> str:
        """Text of the extents of a tile."""
        return f"[{self.listed(shape)}]" if shape else "()"


def shown(value: Tile) -> str:
    """Text of one value."""
    return Text().whole(value)
