"""Tile program: what one kernel does, between a schedule and the text of a language.

A program works on tiles, blocks of elements that its lanes hold. Values are expression trees over
named values; statements stand in order, each name begins once. Sizes, strides and the constants of
the tile are arguments, so that one program serves every size that its launcher lets through.

Records are frozen and hashable: equal programs are equal records. None knows torch or Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import reduce


class Tile:
    """Value of a program: a tile, or one number. Operators build the arithmetic of indices; an int
    beside a tile is a number."""

    def __add__(self, other: Tile | int) -> Tile:
        return Binary("+", self, tile(other))

    def __sub__(self, other: Tile | int) -> Tile:
        return Binary("-", self, tile(other))

    def __mul__(self, other: Tile | int) -> Tile:
        return Binary("*", self, tile(other))

    def __truediv__(self, other: Tile | int) -> Tile:
        return Binary("/", self, tile(other))

    def __floordiv__(self, other: Tile | int) -> Tile:
        return Binary("//", self, tile(other))

    def __mod__(self, other: Tile | int) -> Tile:
        return Binary("%", self, tile(other))

    def __lt__(self, other: Tile | int) -> Tile:
        return Binary("<", self, tile(other))

    def __le__(self, other: Tile | int) -> Tile:
        return Binary("<=", self, tile(other))

    def __and__(self, other: Tile) -> Tile:
        return Binary("&", self, other)

    def __or__(self, other: Tile) -> Tile:
        return Binary("|", self, other)

    def equals(self, other: Tile | int) -> Tile:
        """Comparison in each lane; `==` compares records."""
        return Binary("==", self, tile(other))

    def differs(self, other: Tile | int) -> Tile:
        """Opposite of `equals`."""
        return Binary("!=", self, tile(other))


@dataclass(frozen=True, slots=True)
class Name(Tile):
    """Value that a statement has named, or an argument."""

    id: str


@dataclass(frozen=True, slots=True)
class Literal(Tile):
    """Constant in decimal, or `inf`, `-inf`, `nan`, `True`, `False`."""

    text: str


@dataclass(frozen=True, slots=True)
class Binary(Tile):
    """Two operands and one of `+ - * / // % < <= > >= == != & | ^`, in the dtype that both have;
    integers divide towards zero."""

    sign: str
    left: Tile
    right: Tile


@dataclass(frozen=True, slots=True)
class Unary(Tile):
    """`-` or `~` (of a bool: not)."""

    sign: str
    operand: Tile


@dataclass(frozen=True, slots=True)
class Elementwise(Tile):
    """Primitive of the region form (`region/primitives`), element by element.

    `way` is how it is computed: "" where results have 16 bits or fewer, `precise` as good as the
    math library's in float32, `scalar` the same once a row, `double` in float64, `integer`;
    `apart` is rounded before it is added to anything.
    """

    op: str
    args: tuple[Tile, ...]
    way: str = ""


@dataclass(frozen=True, slots=True)
class DeviceCall(Tile):
    """Device function that is shipped beside the kernels, of operands; it has several results where
    several names are bound to it."""

    function: str
    args: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Cast(Tile):
    """Elements in another dtype, rounded to the nearest, ties to even."""

    value: Tile
    dtype: str


@dataclass(frozen=True, slots=True)
class Lanes(Tile):
    """0, 1, 2, ... up to a constant that is a power of two."""

    count: Tile


@dataclass(frozen=True, slots=True)
class ProgramId(Tile):
    """Number of this program along a dimension of the grid; with `all`, how many there are."""

    axis: int
    all: bool = False


@dataclass(frozen=True, slots=True)
class Across(Tile):
    """Tile of one dimension as a column (`axis` 1 is new) or as a row (`axis` 0 is new) of two."""

    value: Tile
    axis: int


Shape = tuple[Tile, ...]
"""Extents of a tile; () is one number."""


@dataclass(frozen=True, slots=True)
class Full(Tile):
    """One number in every element."""

    shape: Shape
    value: Tile
    dtype: str


@dataclass(frozen=True, slots=True)
class Broadcast(Tile):
    """Value repeated up to a shape."""

    value: Tile
    shape: Shape


@dataclass(frozen=True, slots=True)
class Address(Tile):
    """Elements of a tensor: `base` is its argument or a named address, `terms` are added one after
    the other, in elements."""

    base: str
    terms: tuple[Tile, ...] = ()
    shape: Shape = ()
    """Shape that one address is repeated to; () as it is."""


@dataclass(frozen=True, slots=True)
class Load(Tile):
    """Elements of a tensor; `other` where `mask` is false. Those that are `passing` are read once:
    caches give up their lines before others."""

    address: Tile
    mask: Tile | None = None
    other: Tile | None = None
    passing: bool = False


@dataclass(frozen=True, slots=True)
class Reduce(Tile):
    """Elements combined by a monoid of the region form along an axis, or along all (None), which
    goes unless `kept`. `place` numbers the elements of an arg-max or arg-min, which it gives."""

    monoid: str
    value: Tile
    axis: int | None
    kept: bool = False
    place: Tile | None = None


@dataclass(frozen=True, slots=True)
class Scan(Tile):
    """Each element combined with all before it along an axis, or with all behind it."""

    monoid: str
    value: Tile
    axis: int
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Combine(Tile):
    """Two partial results of a monoid as one."""

    monoid: str
    left: Tile
    right: Tile


class Statement:
    """Step of a program."""


Block = tuple[Statement, ...]


@dataclass(frozen=True, slots=True)
class Let(Statement):
    """Name for a value, or names for the results of a call; "_" drops one."""

    names: tuple[str, ...]
    value: Tile


@dataclass(frozen=True, slots=True)
class Multiple(Statement):
    """Argument that is a multiple of a constant, which a compiler is to see. `note` says why."""

    name: str
    divisor: str
    note: str


@dataclass(frozen=True, slots=True)
class Settled(Statement):
    """Argument that a constant gives instead, where that is not 0. `note` says why."""

    name: str
    constant: str
    note: str


@dataclass(frozen=True, slots=True)
class Begin(Statement):
    """Variable with its first value, that a loop updates."""

    name: str
    value: Tile


@dataclass(frozen=True, slots=True)
class Update(Statement):
    """Next value of a variable."""

    name: str
    value: Tile


@dataclass(frozen=True, slots=True)
class Store(Statement):
    """Elements written to a tensor where `mask` holds; None: in every lane."""

    address: Tile
    value: Tile
    mask: Tile | None = None


@dataclass(frozen=True, slots=True)
class Do(Statement):
    """Device function that is called for its effect."""

    call: DeviceCall


@dataclass(frozen=True, slots=True)
class Barrier(Statement):
    """Point that no lane of a program passes before all lanes have stored what they store above."""


@dataclass(frozen=True, slots=True)
class For(Statement):
    """Loop of a variable from `start` to before `stop`. `unrolled` loops are written out; of a loop
    with `stages` one less than that many tiles are on their way ahead."""

    name: str
    start: Tile
    stop: Tile
    step: Tile
    body: Block
    unrolled: bool = False
    stages: int = 1


@dataclass(frozen=True, slots=True)
class If(Statement):
    """Branch that all lanes of a program take together."""

    condition: Tile
    body: Block
    otherwise: Block = ()


@dataclass(frozen=True, slots=True)
class TileFunction:
    """Function of a tile program: a kernel, or what kernels call as a device function."""

    name: str
    arguments: tuple[str, ...]
    constants: tuple[str, ...]
    """Arguments of which each value is compiled anew; they follow the others."""
    body: Block
    note: str = ""
    """Words for the work of one program."""

    @property
    def names(self) -> tuple[str, ...]:
        """All arguments."""
        return (*self.arguments, *self.constants)


Node = Tile | Statement


def tile(value: Tile | int) -> Tile:
    """Number for an int."""
    return Literal(str(value)) if isinstance(value, int) else value


def where(condition: Tile, this: Tile, other: Tile) -> Tile:
    """One of two values in each lane."""
    return Elementwise("where", (condition, this, other))


def least(one: Tile, other: Tile | int) -> Tile:
    """Smaller of two integers."""
    return Elementwise("minimum", (one, tile(other)), "integer")


def most(one: Tile, other: Tile | int) -> Tile:
    """Larger of two integers, or of two floats that are no NaN."""
    return Elementwise("maximum", (one, tile(other)), "integer")


def quotient(one: Tile, other: Tile) -> Tile:
    """Quotient of integers, rounded up."""
    return Elementwise("cdiv", (one, other))


def summed(terms: Iterable[Tile]) -> Tile:
    """Sum from left to right; 0 of none."""
    found = [*terms]
    return reduce(Tile.__add__, found) if found else Literal("0")


def product(factors: Iterable[Tile]) -> Tile:
    """Product from left to right; 1 of none."""
    found = [*factors]
    return reduce(Tile.__mul__, found) if found else Literal("1")


def parts(node: Node) -> Iterator[Node]:
    """Nodes that a node is made of, in the order of its fields."""
    for field in fields(node):  # pyright: ignore[reportArgumentType] every class here is a record
        yield from _nodes(getattr(node, field.name))


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, (Tile, Statement)):
        yield value
    elif isinstance(value, tuple):
        for each in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _nodes(each)  # pyright: ignore[reportUnknownArgumentType]


def walk(nodes: Iterable[Node]) -> Iterator[Node]:
    """Some nodes and all that they are made of, each before its parts."""
    for node in nodes:
        yield node
        yield from walk(parts(node))
