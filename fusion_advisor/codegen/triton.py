"""Triton of tile programs: the only module that spells what a kernel does in that language."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fusion_advisor.codegen.spelling import AS_IT_IS, WIDTH, bare, language_dtype
from fusion_advisor.region.primitives import MONOIDS, PRIMITIVES
from fusion_advisor.tile.program import (
    Across,
    Address,
    Barrier,
    Begin,
    Block,
    Broadcast,
    Cast,
    Combine,
    DeviceCall,
    Elementwise,
    For,
    Full,
    Lanes,
    Literal,
    Load,
    Name,
    ProgramId,
    Reduce,
    Scan,
    Statement,
    Store,
    Tile,
    TileFunction,
    Update,
    walk,
)
from fusion_advisor.tile.text import SIGNS, Text

_OWN = {("cdiv", ""): "tl.cdiv({0}, {1})", ("exp", "plain"): "tl.exp({0})"}
"""Primitives that only programs have, and other ways of some."""
_SIGNED = re.compile(r"\(\{0\} \S+ \{1\}\)")
_WHOLE = re.compile(r"(?<=[(,])\s*\{(\d)\}(?=[,)])")
"""Operands that are whole arguments of a call."""


class Triton(Text):
    """Spells programs as `@triton.jit` functions."""

    def function(self, function: TileFunction) -> str:
        """Text of a function, of one line a statement."""
        constants = [f"{constant}: tl.constexpr" for constant in function.constants]
        signature = ", ".join((*function.arguments, *constants))
        note = [f"# {line}" for line in function.note.splitlines()]
        content = "\n".join(f"    {line}" for line in [*note, *self.block(function.body)])
        head = f"def {function.name}({signature}):"
        head += AS_IT_IS if len(head) > WIDTH else ""
        return f"@triton.jit\n{head}\n{content}"

    def lines(self, statement: Statement) -> list[str]:
        match statement:
            case Update(name, Combine("sum", Name(left), right)) if left == name:
                return [f"{name} += {self.whole(right)}"]
            case Begin(name, value) | Update(name, value):
                return [f"{name} = {self.whole(value)}"]
            case Store(address, value, mask):
                held = f", mask={self.whole(mask)}" if mask else ""
                return [f"tl.store({self.listed((address, value))}{held})"]
            case Barrier():
                return ["tl.debug_barrier()"]
            case _:
                return super().lines(statement)

    def loop(self, loop: For) -> list[str]:
        match loop:
            case For(name, Literal("0"), Literal(count), Literal("1"), body, unrolled, 1):
                walk = f"tl.static_range({count})" if unrolled else f"range({count})"
            case For(name, start, stop, step, body, _, stages):
                bounds = [start, stop, *([] if step == Literal("1") else [step])]
                staged = f", num_stages={stages}" if stages > 1 else ""
                walk = f"tl.range({self.listed(bounds)}{staged})"
        return [f"for {name} in {walk}:", *self._inside(body)]

    def number(self, text: str) -> tuple[str, int]:
        if text in ("inf", "-inf", "nan"):
            return f'float("{text}")', 9
        return super().number(text)

    def other(self, value: Tile) -> str:
        match value:
            case Cast(value, dtype):
                return f"{self.within(value)}.to({language_dtype(dtype)})"
            case Lanes(count):
                return f"tl.arange(0, {self.whole(count)})"
            case ProgramId(axis, every):
                return f"tl.{'num_programs' if every else 'program_id'}({axis})"
            case Full(shape, value, dtype):
                return f"tl.full({self.shape(shape)}, {self.whole(value)}, {language_dtype(dtype)})"
            case Broadcast(value, shape):
                return f"tl.broadcast_to({self.whole(value)}, {self.shape(shape)})"
            case Load(address, mask, other, passing):
                held = f", mask={self.whole(mask)}" if mask else ""
                held += f", other={self.whole(other)}" if other else ""
                held += ', eviction_policy="evict_first"' if passing else ""
                return f"tl.load({self.whole(address)}{held})"
            case Reduce():
                return self._reduced(value)
            case Scan(monoid, value, axis, reverse):
                turned = ", reverse=True" if reverse else ""
                if monoid == "sum":
                    return f"tl.cumsum({self.whole(value)}, axis={axis}{turned})"
                helper = MONOIDS[monoid].helper
                return f"tl.associative_scan({self.whole(value)}, {axis}, {helper}{turned})"
            case Across() | DeviceCall() | Address():
                return super().other(value)
            case _:
                raise TypeError(f"{type(value).__name__} has no spelling in Triton")

    def spelled(self, value: Tile) -> tuple[str, int]:
        match value:
            case Elementwise(op, args, way):
                text = _template(op, way)
                if (op in SIGNS and _SIGNED.fullmatch(text)) or op in ("neg", "not"):
                    return super().spelled(Elementwise(op, args))
                return self._filled(text, args)
            case Combine("sum", left, right):
                return self.signed("+", left, right)
            case Combine(monoid, left, right):
                return f"{MONOIDS[monoid].helper}({self.listed((left, right))})", 9
            case Address(_, terms, shape):
                return self.address(value), 9 if shape or not terms else 6
            case _:
                return super().spelled(value)

    def address(self, address: Address) -> str:
        found = " + ".join(filter(None, [address.base, self.added(address.terms)]))
        return f"tl.broadcast_to({found}, {self.shape(address.shape)})" if address.shape else found

    def _filled(self, template: str, args: Sequence[Tile]) -> tuple[str, int]:
        """A template with its operands, without parentheses where they are whole arguments."""
        whole = {int(n) for n in _WHOLE.findall(template)}
        ready = [
            self.whole(value) if n in whole else self.within(value) for n, value in enumerate(args)
        ]
        binds = 7 if template.startswith("(") else 9
        return bare(template).format(*ready), binds

    def _reduced(self, reduction: Reduce) -> str:
        """A reduction along an axis."""
        axis, kept = reduction.axis, ", keep_dims=True" if reduction.kept else ""
        if reduction.monoid == "sum":
            return f"tl.sum({self.whole(reduction.value)}, axis={axis}{kept})"
        value, found = self.whole(reduction.value), ""
        if reduction.place:
            value, found = f"({value}, {self.whole(reduction.place)})", "[1]"
        return f"tl.reduce({value}, {axis}, {MONOIDS[reduction.monoid].helper}{kept}){found}"


def _template(op: str, way: str) -> str:
    """Triton of a primitive, with its operands as `{0}`, `{1}`, `{2}`."""
    if (op, way) in _OWN:
        return _OWN[op, way]
    primitive = PRIMITIVES[op]
    ways = {
        "": primitive.text,
        "precise": primitive.precise,
        "scalar": primitive.scalar,
        "double": primitive.double,
        "integer": primitive.integer,
        "apart": primitive.apart,
    }
    return ways[way] or primitive.text


def called(program: Block) -> Iterator[str]:
    """Device functions that a program calls, once for each call."""
    for node in walk(program):
        match node:
            case DeviceCall(function):
                yield function
            case Reduce(monoid) | Scan(monoid) | Combine(monoid) if monoid != "sum":
                yield MONOIDS[monoid].helper
            case Elementwise(op, _, way):
                function = _template(op, way).partition("(")[0]
                if function.isidentifier():
                    yield function
            case _:
                pass
