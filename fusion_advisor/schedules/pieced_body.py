"""The body of a kernel that holds a row in two pieces.

Tiles are powers of two: a row of 12288 elements in one of 16384 leaves a quarter of the lanes, and
of the registers, to nothing; in pieces of 8192 and 4096 it leaves none.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from fusion_advisor.schedules.body import Body
from fusion_advisor.schedules.coordinates import COLS, Scope
from fusion_advisor.schedules.launch import Constant
from fusion_advisor.schedules.layout import Group, spanned
from fusion_advisor.schedules.names import Names
from fusion_advisor.tile.program import Statement, Tile


@dataclass
class LaterNames(Names):
    """Names of what a later piece has."""

    suffix: str = ""

    def claim(self, wish: str) -> str:
        return super().claim(f"{wish}_{self.suffix}")


class Rest(Body):
    """What a row has beyond the first piece."""

    lane: ClassVar[str] = "rest"
    lanes: ClassVar[str] = "REST"

    def _place_name_of(self, group: Group) -> str:
        return f"{group.name}_{self.lane}"


class PiecedBody(Body):
    """Every value that lies along the row is made for one piece after the other; reductions of both
    are combined."""

    @property
    def note(self) -> str:
        return "One program holds one whole row in pieces on chip."

    @property
    def tile_constants(self) -> tuple[Constant, ...]:
        step, inner = self.step, spanned(self.step.inner)
        first = Constant("COLS", step.block, "first_piece", inner)
        return first, Constant("REST", step.rest, "second_piece", inner)

    def _program(self) -> list[Statement]:
        names = LaterNames(self.names.used, Rest.lane)
        self._rest = self.beside(Rest, self.step, names, self.scopes)
        self._rest.prepare()
        first, rest = self._columns(None), self._rest._columns(COLS)
        row = self._row(self._number) if self.step.outer else []
        return [*row, first[0], *rest]

    @property
    def _within_row(self) -> Tile | None:
        return None  # no row is shorter than the first piece

    def _emit(self, wanted: Iterable[int]) -> None:
        whole = self.scope
        self._own = {
            body.lane: Scope(places={body.lane: body.lane}, head=whole.head, body=whole.body)
            for body in self._pieces
        }
        for number in sorted(self._missing(wanted), key=self._rank.__getitem__):
            if self.region.depends[number] & self._inner:
                self._make_along(number)
            elif self.region.exprs[number].op == "reduce":
                self._assign(number, self._of_both(number))
            else:
                self._make(number)

    def _results(self) -> None:
        region = self.region
        self._emit([output.value for output in region.outputs])
        for output, access in zip(region.outputs, self.step.stores, strict=True):
            if not self._inner & access.walks:
                self._store(access, self.value(output.value))
                continue
            for body in self._pieces:
                with self._piece(body):
                    body._store(access, body.value(output.value))

    @property
    def _pieces(self) -> tuple[Body, Body]:
        return self, self._rest

    def _make_along(self, number: int) -> None:
        """A value that lies along the row, in both pieces."""
        for body in self._pieces:
            with self._piece(body):
                if not body.known(number):
                    body._make(number)

    @contextmanager
    def _piece(self, body: Body) -> Generator[None]:
        """What a body makes is known to its own piece alone."""
        body.scopes.append(self._own[body.lane])
        yield
        body.scopes.pop()

    def _of_both(self, number: int) -> Tile:
        """A reduction along the row."""
        expr, found = self.region.exprs[number], list[Tile]()
        for body in self._pieces:
            with self._piece(body):
                operand = body._operand(number)
            found.append(body._reduce(expr, operand))
        return self._combined(expr, *found)
